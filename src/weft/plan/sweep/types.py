"""A sweep's plan as data: packs of configurations that train together, each on its GPUs from a start to an end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from weft.errors import PlanError, counted, rough_time, size
from weft.plan.cost.shape import ALL_LINEAR, chosen_linears


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration, as the planner needs it; learning rate, alpha and seed do not affect time."""

    name: str
    rank: int
    batch_size: int
    num_steps: int
    sample_tokens: int
    longest_tokens: int = 0
    """Longest sample; 0: all have the mean length."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    num_parameters: int | None = None
    """Parameters of its adapter; None: those of a LoRA of this rank on the targets."""
    forward_tokens: int = 0
    """Tokens run forward only, by all of its evaluations and its reference passes."""

    def __post_init__(self) -> None:
        for field in ("rank", "batch_size", "num_steps", "sample_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise PlanError(f"{field} is {value}; it must be at least 1.", where=self.name)
        if 0 < self.longest_tokens < self.sample_tokens:
            raise PlanError(
                f"longest_tokens is {self.longest_tokens}, below the mean of {self.sample_tokens}.", where=self.name
            )
        chosen_linears(self.targets)

    @property
    def num_samples(self) -> int:
        return self.batch_size * self.num_steps

    @property
    def num_tokens(self) -> int:
        return self.num_samples * self.sample_tokens

    @property
    def most_tokens(self) -> int:
        return max(self.sample_tokens, self.longest_tokens)


@dataclass(frozen=True, slots=True)
class Pack:
    configurations: tuple[str, ...]
    gpus: tuple[int, ...]
    start_s: float
    end_s: float
    capacity: int
    recompute: str
    gpu_bytes: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class SweepPlan:
    model: str
    device: str
    num_gpus: int
    device_bytes: int
    packs: tuple[Pack, ...]
    """Packs by start, then by their first GPU."""
    num_tokens: int
    lower_bound_s: float
    one_by_one_s: float | None

    @property
    def makespan_s(self) -> float:
        return max(pack.end_s for pack in self.packs)

    @property
    def approximation_ratio(self) -> float:
        return self.makespan_s / self.lower_bound_s

    @property
    def speedup(self) -> float | None:
        return None if self.one_by_one_s is None else self.one_by_one_s / self.makespan_s

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "makespan_s": self.makespan_s,
            "approximation_ratio": self.approximation_ratio,
            "speedup": self.speedup,
        }

    def __str__(self) -> str:
        rows = [("pack", "gpus", "start", "end", "capacity", "recompute", "memory", "configurations")]
        for number, pack in enumerate(self.packs, start=1):
            names = ", ".join(pack.configurations[:4])
            more = len(pack.configurations) - 4
            rows.append(
                (
                    str(number),
                    _span(pack.gpus),
                    rough_time(pack.start_s),
                    rough_time(pack.end_s),
                    f"{pack.capacity:,}",
                    pack.recompute,
                    size(pack.gpu_bytes),
                    f"{len(pack.configurations)}: {names}{f' and {more} more' if more > 0 else ''}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(7)]
        lines = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[7]]) for row in rows]
        return "\n".join([*lines, *self.summary])

    @property
    def summary(self) -> list[str]:
        count = sum(len(pack.configurations) for pack in self.packs)
        gpus = f"{self.num_gpus} x {self.device}"
        lines = [
            f"{counted(count, 'configuration')}, {self.num_tokens:,} tokens, in "
            f"{counted(len(self.packs), 'pack')} on {gpus}: about {rough_time(self.makespan_s)} (a model's estimate, "
            "all trained to their end)",
            f"at least {rough_time(self.lower_bound_s)} for any plan: this one is within "
            f"{self.approximation_ratio - 1:.1%} of the best",
        ]
        if self.one_by_one_s is not None and self.speedup is not None:
            lines.append(f"one by one with PEFT about {rough_time(self.one_by_one_s)}: {self.speedup:.1f}x")
        return lines


def _span(gpus: tuple[int, ...]) -> str:
    is_run = len(gpus) > 2 and gpus == tuple(range(gpus[0], gpus[-1] + 1))
    return f"{gpus[0]}-{gpus[-1]}" if is_run else ",".join(map(str, gpus))
