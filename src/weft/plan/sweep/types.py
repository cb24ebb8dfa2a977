"""A sweep's plan is data: packs of configurations that train together, each on its GPUs from a start to an end.

`violations` checks any of them; it is written without looking at any planner.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.errors import PlanError
from weft.plan.cost.shape import ALL_LINEAR, chosen_linears
from weft.wording import counted, size


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a planner knows of one configuration; learning rate, alpha and seed change no time."""

    name: str
    rank: int
    batch_size: int
    """Samples of one optimizer step."""
    num_steps: int
    """Optimizer steps of the whole training."""
    sample_tokens: int
    """Mean length of its samples."""
    longest_tokens: int = 0
    """Longest of them; 0: all are as long as the mean."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    forward_tokens: int = 0
    """Run forward alone: by all of its evaluations together, and by its reference."""

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
        """Trained in all."""
        return self.batch_size * self.num_steps

    @property
    def num_tokens(self) -> int:
        """Trained in all."""
        return self.num_samples * self.sample_tokens

    @property
    def most_tokens(self) -> int:
        """Of one sample; a microbatch must hold it."""
        return max(self.sample_tokens, self.longest_tokens)


@dataclass(frozen=True, slots=True)
class Pack:
    """Configurations that train together on one copy of the backbone."""

    configurations: tuple[str, ...]
    gpus: tuple[int, ...]
    """Their tensor-parallel group; as many as the pack's parallel degree."""
    start_s: float
    end_s: float
    capacity: int
    """Rows of a microbatch."""
    recompute: str
    gpu_bytes: int
    """On each of its GPUs, everything included."""

    @property
    def seconds(self) -> float:
        """How long it trains."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class SweepPlan:
    """All packs, how long they take together, and how far from the best possible that is at most."""

    model: str
    device: str
    num_gpus: int
    device_bytes: int
    """Of one GPU that may be used."""
    packs: tuple[Pack, ...]
    """By start, then by their first GPU."""
    num_tokens: int
    lower_bound_s: float
    """No schedule of these configurations, under the same model of time and memory, ends sooner."""
    one_by_one_s: float | None
    """The same with PEFT, every configuration alone on as many GPUs as cost least in all; None: it does not fit, or
    nothing is known of that device."""

    @property
    def makespan_s(self) -> float:
        """When the last pack ends."""
        return max(pack.end_s for pack in self.packs)

    @property
    def approximation_ratio(self) -> float:
        """The makespan over the lower bound: 1.05 is at most 5 % longer than the best."""
        return self.makespan_s / self.lower_bound_s

    @property
    def speedup(self) -> float | None:
        """Over one by one."""
        return None if self.one_by_one_s is None else self.one_by_one_s / self.makespan_s

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return asdict(self) | {
            "makespan_s": self.makespan_s,
            "approximation_ratio": self.approximation_ratio,
            "speedup": self.speedup,
        }

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> SweepPlan:
        """The plan that `to_json` described."""
        derived = ("makespan_s", "approximation_ratio", "speedup")
        values = {name: value for name, value in tree.items() if name not in derived}
        packs = tuple(
            Pack(**{**pack, "configurations": tuple(pack["configurations"]), "gpus": tuple(pack["gpus"])})
            for pack in values.pop("packs")
        )
        return SweepPlan(packs=packs, **values)

    def __str__(self) -> str:
        """The plan as people read it: a line per pack, then the sums."""
        rows = [("pack", "gpus", "start", "end", "capacity", "recompute", "memory", "configurations")]
        for number, pack in enumerate(self.packs, start=1):
            names = ", ".join(pack.configurations[:4])
            more = len(pack.configurations) - 4
            rows.append(
                (
                    str(number),
                    _span(pack.gpus),
                    duration(pack.start_s),
                    duration(pack.end_s),
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
        """What it comes to, in a few lines."""
        count = sum(len(pack.configurations) for pack in self.packs)
        gpus = f"{self.num_gpus} x {self.device}"
        lines = [
            f"{counted(count, 'configuration')}, {self.num_tokens:,} tokens, in "
            f"{counted(len(self.packs), 'pack')} on {gpus}: about {duration(self.makespan_s)} (a model's estimate, all "
            "trained to their end)",
            f"at least {duration(self.lower_bound_s)} for any plan: this one is within "
            f"{self.approximation_ratio - 1:.1%} of the best",
        ]
        if self.one_by_one_s is not None and self.speedup is not None:
            lines.append(f"one by one with PEFT about {duration(self.one_by_one_s)}: {self.speedup:.1f}x")
        return lines


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    if 0 < seconds < 0.1:
        return f"{seconds * 1e3:,.3g} ms"
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def _span(gpus: tuple[int, ...]) -> str:
    is_run = len(gpus) > 2 and gpus == tuple(range(gpus[0], gpus[-1] + 1))
    return f"{gpus[0]}-{gpus[-1]}" if is_run else ",".join(map(str, gpus))


def violations(plan: SweepPlan, configurations: Sequence[Configuration]) -> list[str]:
    """What is wrong with a plan for these configurations; empty if it may run.

    Checked: every configuration in exactly one pack; GPUs that exist, in one pack at a time; memory; microbatches that
    hold the longest sample; no makespan below the lower bound.
    """
    found = []
    placed = Counter(name for pack in plan.packs for name in pack.configurations)
    wanted = {c.name: c for c in configurations}
    for name in sorted(placed.keys() | wanted.keys()):
        if name not in wanted:
            found.append(f"{name} is in a pack and not in the sweep.")
        elif placed[name] != 1:
            found.append(f"{name} is in {placed[name]} packs; it belongs in one.")
    for number, pack in enumerate(plan.packs, start=1):
        if not pack.configurations or not pack.end_s > pack.start_s >= 0:
            found.append(f"pack {number} is empty or ends before it starts.")
        if len(set(pack.gpus)) != len(pack.gpus) or not set(pack.gpus) <= set(range(plan.num_gpus)) or not pack.gpus:
            found.append(f"pack {number} has the GPUs {pack.gpus}; there are 0 to {plan.num_gpus - 1}.")
        if pack.gpu_bytes > plan.device_bytes:
            found.append(f"pack {number} needs {pack.gpu_bytes:,} bytes of {plan.device_bytes:,}.")
        longest = max((wanted[name].most_tokens for name in pack.configurations if name in wanted), default=0)
        if longest > pack.capacity:
            found.append(f"pack {number} has microbatches of {pack.capacity} rows and a sample of {longest} tokens.")
    found += _overlaps(plan)
    if plan.packs and plan.makespan_s < plan.lower_bound_s * (1 - 1e-9):
        found.append(f"the makespan {plan.makespan_s:g} s is below the lower bound {plan.lower_bound_s:g} s.")
    return found


def _overlaps(plan: SweepPlan) -> list[str]:
    found = []
    for gpu in range(plan.num_gpus):
        mine = sorted((p for p in plan.packs if gpu in p.gpus), key=lambda p: (p.start_s, p.end_s))
        for before, after in itertools.pairwise(mine):
            if after.start_s < before.end_s * (1 - 1e-12):
                found.append(
                    f"GPU {gpu} is in two packs at once: one until {before.end_s:g} s, one from {after.start_s:g} s."
                )
    return found
