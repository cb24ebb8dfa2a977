"""Layouts: the replicas of a run, and the devices of each.

A replica is one whole copy of the backbone. Parts joined by commas divide it (`tensor:2,stages:2` is four devices);
`spread:N` makes N of it; unlike replicas are joined by a plus (`stages:1+stages:2`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from weft.errors import ConfigError, PlanError, closest
from weft.processes import MOST_PROCESSES, read_count
from weft.settings import describe

SPREAD = "spread"
AUTO = "auto"


class DispatchRule(StrEnum):
    """Rules to divide the samples of a step over unlike replicas. No result depends on the rule."""

    BALANCED = "balanced"
    """All replicas end at about the same time."""
    LENGTH = "length"
    """Every sample goes where its length needs the fewest device-seconds, whatever the load."""
    EVEN = "even"
    """Every replica gets the same number of samples of each length that it holds."""


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """How one replica is divided over devices; their number is the product."""

    tensor: int = 1
    shards: int = 1
    """Number of devices that share the frozen weights and gather them layer by layer."""
    stages: int = 1
    """Number of parts that the layers are divided into."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.shards, self.stages) < 1:
            raise PlanError(f"{self.tensor} × {self.shards} × {self.stages} devices are no layout; each at least 1.")

    @property
    def num_devices(self) -> int:
        return self.tensor * self.shards * self.stages

    @property
    def parts(self) -> dict[str, int]:
        return {field.name: number for field in fields(self) if (number := getattr(self, field.name)) > 1}

    def __str__(self) -> str:
        return ",".join(f"{kind}:{number}" for kind, number in self.parts.items()) or "stages:1"


KINDS = (*(field.name for field in fields(ReplicaLayout)), SPREAD)


@dataclass(frozen=True, slots=True)
class Layout:
    replicas: tuple[ReplicaLayout, ...] = (ReplicaLayout(),)

    @property
    def num_devices(self) -> int:
        return sum(replica.num_devices for replica in self.replicas)

    @property
    def is_one_device(self) -> bool:
        return self.num_devices == 1

    @property
    def apart(self) -> tuple[Layout, ...]:
        return tuple(Layout((replica,)) for replica in self.replicas)

    @property
    def replica_sizes(self) -> tuple[int, ...]:
        """Stages of each microbatch stream: of each replica, or of each of its shards."""
        return tuple(replica.stages for replica in self.replicas for _ in range(replica.shards))

    @property
    def shards(self) -> tuple[int, ...]:
        return tuple(replica.shards for replica in self.replicas)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Devices that share every layer, of each replica."""
        return tuple(replica.tensor for replica in self.replicas)

    @property
    def stage_names(self) -> list[str]:
        return stage_names(self.replica_sizes, self.shards)

    def __str__(self) -> str:
        return "+".join(_printed(own, sum(1 for _ in like)) for own, like in itertools.groupby(self.replicas))


def copies(num_replicas: int, shards: Sequence[int]) -> tuple[range, ...]:
    """The replicas that share each copy of the frozen weights. `shards`: how many share each; empty: none do."""
    ends = [*itertools.accumulate(shards or (1,) * num_replicas)]
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


def rings(replica_sizes: Sequence[int], shards: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Stages that share the frozen weights of the same layers."""
    first = [0, *itertools.accumulate(replica_sizes)]
    return tuple(
        tuple(first[replica] + stage for replica in own)
        for own in copies(len(replica_sizes), shards)
        if len(own) > 1
        for stage in range(replica_sizes[own.start])
    )


def stage_names(replica_sizes: Sequence[int], shards: Sequence[int] = ()) -> list[str]:
    found, owners = [], copies(len(replica_sizes), shards)
    for number, own in enumerate(owners):
        for shard, replica in enumerate(own):
            words = [f"replica {number}"] * (len(owners) > 1) + [f"shard {shard}"] * (len(own) > 1)
            for stage in range(replica_sizes[replica]):
                last = [f"stage {stage}"] if replica_sizes[replica] > 1 or not words else []
                found.append(", ".join([*words, *last]))
    return found


def parse_layout(text: str, *, where: str | None = None, or_auto: bool = False) -> Layout:
    """The layout in a text; a ConfigError that lists what is accepted if it is none. `or_auto`: the error names `auto`
    as well, which the caller has handled."""
    replicas: list[ReplicaLayout] = []
    num_devices = 0
    for own in text.split("+"):
        numbers: dict[str, int] = {}
        for part in own.split(","):
            kind, _, number = part.partition(":")
            if kind not in KINDS or kind in numbers or not _is_count(number):
                raise _refusal(text, part, numbers, where, or_auto=or_auto)
            numbers[kind] = read_count(number) or MOST_PROCESSES + 1
        num_devices += math.prod(numbers.values())
        if num_devices > MOST_PROCESSES:
            raise ConfigError(f"got {describe(text)}; a layout has at most {MOST_PROCESSES:,} devices.", where=where)
        count = numbers.pop(SPREAD, 1)
        replicas += [ReplicaLayout(**numbers)] * count
    return Layout(tuple(replicas))


def _is_count(number: str) -> bool:
    return number.isascii() and number.isdecimal() and number.strip("0") != ""


def _refusal(text: str, part: str, known: dict[str, int], where: str | None, *, or_auto: bool) -> ConfigError:
    """The error for a part of a text that follows the `known` ones of its replica."""
    kind, _, number = part.partition(":")
    meant = kind if kind in KINDS else closest(kind, list(KINDS))
    hint = f"Give {kind} once for a replica." if kind in known else None
    if hint is None and meant is not None:
        hint = f"Did you mean {meant}:{number if _is_count(number) else 2}?"
    elif hint is None and or_auto and closest(text, [AUTO]):
        hint = f"Did you mean {AUTO}?"
    wrong = f"{kind} is given twice for a replica" if kind in known else f"{part!r} is no part of a layout"
    named = "" if part == text else f", in which {wrong}"
    accepted = ", ".join(f"{kind}:N" for kind in KINDS)
    return ConfigError(
        f"got {text!r}{named}; accepted are {accepted}, joined by commas (tensor:2,stages:2), and unlike replicas "
        f"joined by a plus (stages:1+stages:2){f', or {AUTO}' * or_auto}.",
        where=where,
        hint=hint,
    )


def _printed(replica: ReplicaLayout, count: int) -> str:
    if count == 1:
        return str(replica)
    return ",".join([f"{SPREAD}:{count}", *(f"{kind}:{number}" for kind, number in replica.parts.items())])
