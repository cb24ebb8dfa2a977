"""When several groups of jobs (MuxTune's hybrid tasks) are faster than one, and what decides it, measured.

Jobs in groups of their own meet in no microbatch, so fewer adapters are in each. By MuxTune's equation 3 that pays by
the time of adapters beyond that of their rows. In Weft that is one price: what a further job adds to a microbatch.

job_share_cpu    that, as a part of a microbatch's time: 512 tokens of one job and of eight, rank 8, embedded model;
                 medians of processor time, in turn
job_share_h200   the same by the fit of `benchmarks/h200_profile.json`: 8,192 tokens, Llama-3.1-8B, fused kernels
groups_of_12_at  in how many of 12 settings (2 and 4 stages; 4 jobs of batch 8, 8 of batch 4 and of batch 16; XSum's
                 lengths and the mixture) the planner takes several groups, if the share is so many hundredths of a
                 percent, simulated
groups_gain_at   the largest time saved there
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.pipeline.four_jobs import CAPACITY, FIXED_TOKENS, MIXES, PAIR_TOKENS, LengthMix, queues
from weft.engine.execute.profile import ProfileCase, _pack
from weft.model.load import load_backbone
from weft.plan.cost.fit import MicrobatchLoad
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.profile import load_profile
from weft.plan.cost.types import LinearCost
from weft.plan.planner import PipelineChoice
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.types import JobQueue, Limits
from weft.spec import AdapterSpec, BackboneSpec

STAGES, JOBS, GROUPED_MIXES = (2, 4), ((4, 8), (8, 4), (8, 16)), (MIXES[0], MIXES[-1])
SHARES = (1, 30, 100, 300)
"""Hundredths of a percent."""
COST = LinearCost(fixed_s=FIXED_TOKENS, pair_s=PAIR_TOKENS)
ROWS, LENGTH, MANY, TURNS = 512, 64, 8, 24


def measure_groups() -> dict[str, float]:
    """What groups save, by the price of a further job."""
    found = {}
    for share in SHARES:
        settings = itertools.product(STAGES, JOBS, GROUPED_MIXES)
        choices = [choose(mix, size, batch, stages, share / 1e4) for stages, (size, batch), mix in settings]
        several = [choice for choice in choices if len(choice.groups) > 1]
        found[f"groups_of_12_at_{share}"] = float(len(several))
        found[f"groups_gain_at_{share}"] = max((1 - c.seconds / c.one_group_s for c in several), default=0.0)
    return found


def choose(mix: LengthMix, num_jobs: int, batch: int, num_stages: int, share: float) -> PipelineChoice:
    """The choice where a job adds this share of a full microbatch's time to every pass."""
    planner = FastestPipeline(num_stages, COST, AdapterTimes(share * CAPACITY, 0.0))
    return planner.choose(jobs_of(mix, num_jobs, batch), Limits(CAPACITY))


def jobs_of(mix: LengthMix, num_jobs: int, batch: int, num_batches: int = 8) -> list[JobQueue]:
    found = []
    for seed in range(num_jobs // len(mix.jobs)):
        found += [
            replace(queue, job=f"{queue.job}_{seed}")
            for queue in queues(mix, len(mix.jobs) * batch * num_batches, batch, seed)
        ]
    return found


def measure_job_share() -> dict[str, float]:
    """What a further job adds to a microbatch, measured here, and on an H200 before."""
    return {"job_share_cpu": _cpu_share(), "job_share_h200": _h200_share()}


def _cpu_share(turns: int = TURNS) -> float:
    backbone = load_backbone(BackboneSpec("tiny", device="cpu"))
    row_tile = backbone.path.row_tile(ROWS)
    slots = [backbone.attach(backbone.new_adapter(AdapterSpec(r=8), seed)) for seed in range(1 + MANY)]
    batches = {}
    for own in (slots[:1], slots[1:]):
        case = ProfileCase(((8, (LENGTH,) * (ROWS // LENGTH // len(own))),) * len(own), held_out=False)
        batches[len(own)] = _pack(backbone, case, own, row_tile)
    seconds: dict[int, list[float]] = {num_jobs: [] for num_jobs in batches}
    for turn in range(1 + turns):
        for num_jobs, batch in batches.items():
            began = time.process_time()
            backbone.forward_backward(batch, row_tile)
            seconds[num_jobs] += [time.process_time() - began] if turn else []
    return (statistics.median(seconds[MANY]) / statistics.median(seconds[1]) - 1) / (MANY - 1)


def _h200_share() -> float:
    profile = load_profile(Path(__file__).parents[1] / "h200_profile.json")
    return profile.seconds(_load(2)) / profile.seconds(_load(1)) - 1


def _load(num_jobs: int) -> MicrobatchLoad:
    lengths: Sequence[int] = (512,) * (CAPACITY // 512 // num_jobs)
    return MicrobatchLoad.of([(16, lengths)] * num_jobs, 0)
