"""LobRA: replicas of unlike layouts, and which samples each of them gets.

Timings of 7B on 16 A100-40G come from the paper's own tables (3 and 11), those of 70B on 64 A800-80G from the hardware
table; see `benchmarks/deploy/published.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from benchmarks.deploy.parts import measure_plans
from benchmarks.deploy.published import SIX, figure_4, published_jobs, replicas_7b, replicas_70b
from benchmarks.deploy.saving import Comparison, measure_7b, measure_savings
from benchmarks.figures import Kind
from benchmarks.reproduce.experiments import Experiment, Paper, Row, Source, Values
from weft.plan.deploy import DeployProblem, plan_deployment
from weft.plan.deploy.buckets import choose_buckets
from weft.plan.deploy.dispatch import dispatch, dispatch_by_length
from weft.plan.deploy.fleet import Fleet
from weft.plan.deploy.kinds import without_dominated
from weft.plan.simulate.deploy_forecast import mean_step_s

NUM_STEPS = 20
TABLE_2_7B: Mapping[tuple[int, int], int] = {(1, 1): 6, (2, 1): 1, (8, 1): 1}
TABLE_2_70B: Mapping[tuple[int, int], int] = {(2, 4): 4, (4, 2): 1, (8, 1): 1, (16, 1): 1}
FIGURE_4_PLAN = (4, 2, 0, 1)


def example() -> Values:
    """The example of Figure 4, by the rates of Table 3."""
    problem = figure_4()
    found = plan_deployment(problem)
    published = Fleet(problem.models(FIGURE_4_PLAN), problem.buckets)
    return {
        "figure4_step_s": found.step_s,
        "figure4_same_plan": float(found.counts == FIGURE_4_PLAN),
        "figure4_by_length_s": dispatch_by_length(published).step_s,
    }


def table_2() -> Values:
    """The paper's replicas in the model that ours are planned with: seconds of a step over those of ours."""
    seven = Comparison(published_jobs(SIX), replicas_7b(), 16, NUM_STEPS)
    seventy = Comparison(published_jobs(), replicas_70b(64), 64, NUM_STEPS)
    by_length, balanced, bucketing = seven.on(TABLE_2_7B).ablation()
    return {
        "table2_7b": _step_s(seven.on(TABLE_2_7B)) / _step_s(seven),
        "table2_70b": _step_s(seventy.on(TABLE_2_70B)) / _step_s(seventy),
        "figure8_published_length": by_length,
        "figure8_published_balanced": balanced,
        "figure8_published_bucketing": bucketing,
    }


def _step_s(compared: Comparison) -> float:
    return mean_step_s(compared.planned, compared.batches)


def two_stages() -> Values:
    """Planning replicas once and dispatching every batch, against planning replicas for every batch by itself."""
    compared = Comparison(published_jobs(SIX), replicas_7b(), 16, NUM_STEPS)
    ratios, plan_s, dispatch_s = [], [], []
    for lengths in compared.batches:
        begun = time.process_time()
        buckets = choose_buckets(lengths)
        decomposed = dispatch(Fleet(compared.planned, buckets)).step_s
        dispatch_s.append(time.process_time() - begun)
        begun = time.process_time()
        kinds = tuple(without_dominated(compared.kinds, buckets))
        ratios.append(decomposed / plan_deployment(DeployProblem(kinds, {"gpus": 16}, buckets)).step_s)
        plan_s.append(time.process_time() - begun)
    return {
        "figure10_worst": max(ratios),
        "figure10_mean": float(np.mean(ratios)),
        "figure10_plan_s": float(np.median(plan_s)),
        "figure10_dispatch_s": float(np.median(dispatch_s)),
    }


def bucket_counts() -> Values:
    """Seconds of a step and padding by the number of buckets."""
    compared = Comparison(published_jobs(SIX), replicas_7b(), 16, NUM_STEPS)
    seconds, padding = {}, {}
    for number in (4, 12, 16, 32):
        batches = [choose_buckets(lengths, number) for lengths in compared.batches]
        seconds[number] = sum(dispatch(Fleet(compared.planned, buckets)).step_s for buckets in batches)
        padded = sum(b * c for own in batches for b, c in zip(own.bounds, own.counts, strict=True))
        padding[number] = padded / sum(sum(own.tokens) for own in batches) - 1
    return {
        "figure12_step_16": seconds[16] / seconds[4],
        "figure12_step_32_over_12": seconds[32] / seconds[12],
        "figure12_padding_4": padding[4],
        "figure12_padding_16": padding[16],
    }


_REPLICAS = "the paper's plan has more devices for short samples than Weft's, which leaves them to 4 of 16 GPUs."
LOBRA = Paper(
    "lobra",
    "LobRA",
    (
        Experiment(
            "figure-4",
            "four tasks on 16 GPUs",
            example,
            (
                Row("a step of the best plan", "figure4_step_s", Kind.SECONDS, 14.83, tolerance=0.001),
                Row("the same plan as the paper's (1: yes)", "figure4_same_plan", Kind.SHARE, 1.0, tolerance=0.0),
                Row("the plan's slowest replica, dispatched by length", "figure4_by_length_s", Kind.SECONDS, 19.64),
            ),
        ),
        Experiment(
            "table-2",
            "the paper's replicas, priced in the same model",
            table_2,
            (
                Row("7B: a step over that of Weft's plan", "table2_7b", Kind.TIME_RATIO),
                Row("70B: a step over that of Weft's plan", "table2_70b", Kind.TIME_RATIO),
                Row("figure 8 on these replicas: by length", "figure8_published_length", Kind.SHARE, 0.1894),
                Row("balanced", "figure8_published_balanced", Kind.SHARE, 0.3665),
                Row("and buckets chosen per step", "figure8_published_bucketing", Kind.SHARE, 0.4503),
            ),
        ),
        Experiment(
            "figure-7",
            "GPU-seconds saved over alike replicas, 70B",
            measure_savings,
            (
                Row("padded, as the paper trains", "gpu_seconds_saving", Kind.SHARE, 0.6067, Source.FITTED),
                Row("packed", "gpu_seconds_saving_packed", Kind.SHARE, None, Source.FITTED),
                Row("packed, with the memory of Weft's step", "gpu_seconds_saving_packed_weft", Kind.SHARE),
                Row(
                    "table 6: one task after another, unlike over alike",
                    "sequential_saving",
                    Kind.SHARE,
                    0.3529,
                    Source.FITTED,
                    note="the paper's is the sum of its table's columns.",
                ),
            ),
        ),
        Experiment(
            "figure-8",
            "what each part saves, 7B, on Weft's replicas",
            measure_7b,
            (
                Row("by length", "saving_7b_length", Kind.SHARE, 0.1894, note=_REPLICAS),
                Row("balanced", "saving_7b_balanced", Kind.SHARE, 0.3665),
                Row("and buckets chosen per step", "saving_7b_bucketing", Kind.SHARE, 0.4503),
            ),
        ),
        Experiment(
            "figure-10",
            "dispatch on planned replicas over a plan for every step, 7B",
            two_stages,
            (
                Row("the worst of 20 steps", "figure10_worst", Kind.TIME_RATIO, 1.15),
                Row("the mean", "figure10_mean", Kind.TIME_RATIO),
                Row("a plan, processor seconds", "figure10_plan_s", Kind.SECONDS, None, Source.MEASURED),
                Row("a dispatch, processor seconds", "figure10_dispatch_s", Kind.SECONDS, None, Source.MEASURED),
            ),
        ),
        Experiment(
            "figure-12",
            "the number of buckets, 7B",
            bucket_counts,
            (
                Row("a step with 16 buckets over 4", "figure12_step_16", Kind.TIME_RATIO),
                Row("with 32 over 12: stable", "figure12_step_32_over_12", Kind.TIME_RATIO, 1.0, tolerance=0.05),
                Row("padding with 4 buckets", "figure12_padding_4", Kind.WASTE),
                Row("padding with 16 buckets", "figure12_padding_16", Kind.WASTE),
            ),
        ),
        Experiment(
            "table-5",
            "planning, 70B",
            measure_plans,
            (
                Row("64 GPUs", "plan64_s", Kind.SECONDS, 148.81, Source.MEASURED),
                Row("256 GPUs", "plan256_s", Kind.SECONDS, 428.08, Source.MEASURED),
                Row("1,024 GPUs", "plan1024_s", Kind.SECONDS, None, Source.MEASURED),
            ),
        ),
    ),
    "figures 9 and 10 executed on devices (`weft train --dispatch` compares the rules and prints predicted and "
    "measured seconds), figure 11, tables 9 and 10, and the fit of appendix D on a GPU.",
)
