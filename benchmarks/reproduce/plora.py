"""PLoRA: packs of configurations on a pool of GPUs."""

from __future__ import annotations

from benchmarks.figures import Kind
from benchmarks.reproduce.experiments import Experiment, Paper, Row, Source
from benchmarks.sweeps.parts import measure_sweep_plan
from benchmarks.sweeps.train import measure_sweep_together

PLORA = Paper(
    "plora",
    "PLoRA",
    (
        Experiment(
            "figure-4",
            "120 configurations on eight A100-40G, over one configuration a GPU at a time",
            measure_sweep_plan,
            (
                *(
                    Row(f"Qwen2.5-{size.upper()}, samples of 1,024 tokens", f"sim_makespan_{size}", Kind.SPEEDUP, paper)
                    for size, paper in (("3b", 7.08), ("7b", 6.52), ("14b", 6.51), ("32b", 6.33))
                ),
                *(
                    Row(f"Qwen2.5-{size.upper()}, like GSM8K", f"sim_makespan_{size}_gsm8k", Kind.SPEEDUP, paper)
                    for size, paper in (("3b", 7.08), ("7b", 6.52), ("14b", 6.51), ("32b", 6.33))
                ),
                *(
                    Row(f"Qwen2.5-{size.upper()}, like RTE", f"sim_makespan_{size}_rte", Kind.SPEEDUP, paper)
                    for size, paper in (("3b", 7.08), ("7b", 6.52), ("14b", 6.51), ("32b", 6.33))
                ),
                Row("Weft's plan over the lower bound, worst", "approximation_ratio", Kind.TIME_RATIO),
                Row("the paper's planner over it, worst", "published_ratio", Kind.TIME_RATIO),
                Row("the bound that the paper proves for its plan, worst", "published_tail_bound", Kind.TIME_RATIO),
                Row(
                    "a plan",
                    "plan120_s",
                    Kind.SECONDS,
                    None,
                    Source.MEASURED,
                    note="the gain depends on how well one configuration fills a GPU, so on the length of samples, "
                    "which the paper does not state; one by one is PEFT as measured on an H200.",
                ),
            ),
        ),
        Experiment(
            "executed",
            "16 configurations of batch 1 on a CPU, the embedded model",
            measure_sweep_together,
            (
                Row("together over one by one", "cpu16", Kind.SPEEDUP, None, Source.MEASURED),
                Row("over one process for each", "cpu16_processes", Kind.SPEEDUP, None, Source.MEASURED),
                Row("largest difference of a value", "cpu16_largest_difference", Kind.ERROR, None, Source.MEASURED),
            ),
        ),
    ),
    "figures 5 and 6, tables 6 (quality), 7 and 8, QLoRA, which need a GPU (`step --regime sweep32…`, `kernels`); a "
    "sweep executed over two ranks, plan against measured, is in the report of every sweep.",
)
