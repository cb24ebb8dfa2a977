"""What one H200 was measured to need for whole steps (benchmarks/h200.json), beside what each step was."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.steps.regimes import FOUR, MIXED32, SWEEP16, SWEEP32, TINY4, TINY16, Workload, packed_samples
from weft.plan.cost.shape import SHAPES, ModelShape

FIGURES = json.loads((Path(__file__).parents[3] / "benchmarks" / "h200.json").read_text())


@dataclass(frozen=True)
class H200Run:
    """One measured step."""

    model: str
    key: str
    workload: Workload
    quantize: str = "none"
    is_frozen: bool = False

    @property
    def name(self) -> str:
        return self.key if self.model == "llama-3.1-8b" else f"{self.model}.{self.key}"

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_config(SHAPES[self.model].config().to_dict(), self.model)

    @property
    def ranks(self) -> tuple[int, ...]:
        return () if self.is_frozen else self.workload.ranks

    @property
    def lengths(self) -> list[int]:
        return [sample.length for job in packed_samples(self.workload, 100) for sample in job]

    @property
    def seconds(self) -> float:
        return self.workload.capacity / float(FIGURES[f"{self.name}_rows_s"])


RUNS = (
    H200Run("llama-3.1-8b", "weft_frozen_4_of_512to1024", FOUR, is_frozen=True),
    H200Run("llama-3.1-8b", "weft_4_of_512to1024", FOUR),
    H200Run("llama-3.1-8b", "weft_16_of_512", SWEEP16),
    H200Run("llama-3.1-8b", "weft_32_of_256", SWEEP32),
    H200Run("llama-3.1-8b", "weft_32_mixed_of_256", MIXED32),
    H200Run("tinyllama-1.1b", "weft_16_of_256", TINY16),
    H200Run("tinyllama-1.1b", "weft_4_of_512", TINY4),
)
FP8_RUNS = (
    H200Run("llama-3.1-8b", "weft_fp8_4_of_512to1024", FOUR, "fp8"),
    H200Run("llama-3.1-8b", "weft_fp8_16_of_512", SWEEP16, "fp8"),
)
