"""MuxTune: tasks fused into hybrids, microbatches side by side, a cluster's week. The copy of the paper that the
figures were read from lacks most of its numbers; what has none is compared with its baselines here."""

from __future__ import annotations

from benchmarks.deploy.parts import measure_fuse
from benchmarks.figures import Kind
from benchmarks.pipeline.interleaved import measure_interleaved
from benchmarks.planning.cluster import measure_replay
from benchmarks.reproduce.experiments import Experiment, Paper, Row, Source

MUXTUNE = Paper(
    "muxtune",
    "MuxTune",
    (
        Experiment(
            "figure-19a",
            "two tasks side by side under tensor parallelism",
            measure_interleaved,
            (
                Row("two H100: Weft's order over one after the other", "interleave_nvlink", Kind.SPEEDUP),
                Row("the order of the paper's algorithm 1", "interleave_muxtune_nvlink", Kind.SPEEDUP),
                Row("two L40S: Weft's order", "interleave_pcie", Kind.SPEEDUP),
                Row("the order of the paper's algorithm 1", "interleave_muxtune_pcie", Kind.SPEEDUP),
            ),
        ),
        Experiment(
            "figure-21b",
            "a week of 128 GPUs",
            measure_replay,
            (
                Row("tokens/s over PEFT one by one", "replay_weft_over_peft", Kind.SPEEDUP),
                Row("over PEFT on a host twice as fast", "replay_weft_over_peft_fast", Kind.SPEEDUP),
                Row("over batches padded to the longest (SL-PEFT, mLoRA)", "replay_weft_over_mlora", Kind.SPEEDUP),
                Row("over batches padded per task", "replay_weft_over_lobra", Kind.SPEEDUP),
            ),
        ),
        Experiment(
            "fusion",
            "planning the fusion of 64 tasks",
            measure_fuse,
            (Row("processor seconds", "htask64_s", Kind.SECONDS, None, Source.MEASURED),),
        ),
    ),
    "figures 9, 16 to 18 and 20, which need GPUs; `tests/plan/fuse` compares fusion with all possible ones.",
)
