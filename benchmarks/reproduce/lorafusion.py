"""LoRAFusion: fused kernels, and jobs packed so that a pipeline never waits."""

from __future__ import annotations

from benchmarks.figures import Kind
from benchmarks.pipeline.four_jobs import measure_executed
from benchmarks.pipeline.seventy import measure_seventy
from benchmarks.planning.parts import measure_pack
from benchmarks.planning.pipeline import measure_pipeline
from benchmarks.reproduce.experiments import Experiment, Paper, Row, Source

LORAFUSION = Paper(
    "lorafusion",
    "LoRAFusion",
    (
        Experiment(
            "figure-20",
            "idle time of four stages, four jobs",
            measure_pipeline,
            (
                Row("1F1B, one job after another", "bubble_1f1b", Kind.WASTE, 0.4879, Source.FITTED),
                Row("mLoRA", "bubble_mlora", Kind.WASTE, 0.3411, Source.FITTED),
                Row(
                    "LoRAFusion's planner",
                    "bubble_lorafusion",
                    Kind.WASTE,
                    0.1109,
                    Source.FITTED,
                    0.2,
                    note="of eight settings the one nearest to the figure was taken; the tolerance is a fifth.",
                ),
                Row("Weft, samples reordered within a global batch", "bubble_het4", Kind.WASTE, 0.1109),
                Row("Weft, every job in its own order", "bubble_het4_in_order", Kind.WASTE, 0.1109),
            ),
        ),
        Experiment(
            "figure-20-executed",
            "the same with the programs that `weft train` runs, one appended to the other",
            measure_executed,
            (
                Row("Weft", "bubble_het4_exec", Kind.WASTE, 0.1109),
                Row("with an evaluation after every second global batch", "bubble_het4_exec_evals_2", Kind.WASTE),
            ),
        ),
        Experiment(
            "figure-14",
            "70B on four H100",
            measure_seventy,
            (
                Row("over 1F1B", "sim70b_vs_1f1b", Kind.SPEEDUP, 1.96),
                Row("over mLoRA's pipeline", "sim70b_vs_mlora", Kind.SPEEDUP, 1.46),
                Row(
                    "over 1F1B with torch LoRA",
                    "sim70b_vs_1f1b_torch",
                    Kind.SPEEDUP,
                    1.96,
                    note="NVLink is assumed; peers have equal stages, Weft divides layers by counting the output head.",
                ),
            ),
        ),
        Experiment(
            "figure-21",
            "packing 25,600 samples of four jobs",
            measure_pack,
            (
                Row("seconds", "pack_s_25600", Kind.SECONDS, None, Source.MEASURED),
                Row("microbatches over the lower bound", "pack_over_lower_bound", Kind.WASTE),
            ),
        ),
    ),
    "figures 3, 4, 17 to 19 and 22, which need a GPU (`kernels` measures linears beside torch's LoRA), 15; the "
    "ablation of merging and of the MILP.",
)
