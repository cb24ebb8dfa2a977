"""How a run lies over devices: its replicas, and over how many devices each of them.

A replica is one whole copy of the backbone. Parts joined by commas say how it is divided (`tensor:2,stages:2` is four
devices); `spread:N` makes N of it; unlike replicas are joined by a plus (`stages:1+stages:2`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

from weft.errors import ConfigError, PlanError, closest

SPREAD = "spread"
AUTO = "auto"
"""What is said for a layout that is to be chosen."""


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Over how many devices one replica lies; its devices are the product."""

    tensor: int = 1
    """Devices that share every product of a layer."""
    shards: int = 1
    """Devices that share the frozen weights, and gather them layer by layer."""
    stages: int = 1
    """Runs of layers, one behind the other."""

    def __post_init__(self) -> None:
        if min(self.tensor, self.shards, self.stages) < 1:
            raise PlanError(f"{self.tensor} × {self.shards} × {self.stages} devices are no layout; each at least 1.")

    @property
    def num_devices(self) -> int:
        """Devices of the replica."""
        return self.tensor * self.shards * self.stages

    @property
    def parts(self) -> dict[str, int]:
        """The kinds by which it is divided, with their numbers."""
        return {field.name: number for field in fields(self) if (number := getattr(self, field.name)) > 1}

    def __str__(self) -> str:
        return ",".join(f"{kind}:{number}" for kind, number in self.parts.items()) or "stages:1"


KINDS = (*(field.name for field in fields(ReplicaLayout)), SPREAD)
"""What the parts of a layout may be."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The replicas of a run, under one engine."""

    replicas: tuple[ReplicaLayout, ...] = (ReplicaLayout(),)

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return sum(replica.num_devices for replica in self.replicas)

    @property
    def is_one_device(self) -> bool:
        """Whether nothing is divided or spread."""
        return self.num_devices == 1

    @property
    def stage_names(self) -> list[str]:
        """What its stages are called, one replica behind the other."""
        shards = self.replicas[0].shards if len(self.replicas) == 1 else 1
        sizes = (1,) * shards if shards > 1 else [replica.stages for replica in self.replicas]
        return stage_names(sizes, are_shards=shards > 1)

    def __str__(self) -> str:
        return "+".join(_printed(own, sum(1 for _ in like)) for own, like in itertools.groupby(self.replicas))


def stage_names(replica_sizes: Sequence[int], *, are_shards: bool = False) -> list[str]:
    """What the stages are called of replicas with so many each, one replica behind the other.

    `are_shards`: they are devices that share the frozen weights of one.
    """
    if len(replica_sizes) == 1:
        return [f"stage {index}" for index in range(replica_sizes[0])]
    word = "shard" if are_shards else "replica"
    return [
        f"{word} {replica}" + (f", stage {index}" if size > 1 else "")
        for replica, size in enumerate(replica_sizes)
        for index in range(size)
    ]


def parse_layout(text: str, *, where: str | None = None, or_auto: bool = False) -> Layout:
    """The layout that a text says; a ConfigError that says what is accepted where it says none.

    `or_auto`: whoever asks takes `auto` as well, which has been looked for already.
    """
    replicas: list[ReplicaLayout] = []
    for own in text.split("+"):
        numbers: dict[str, int] = {}
        for part in own.split(","):
            kind, _, number = part.partition(":")
            if kind not in KINDS or kind in numbers or not _is_count(number):
                raise _refusal(text, part, numbers, where, or_auto=or_auto)
            numbers[kind] = int(number)
        count = numbers.pop(SPREAD, 1)
        replicas += [ReplicaLayout(**numbers)] * count
    return Layout(tuple(replicas))


def _is_count(number: str) -> bool:
    return number.isascii() and number.isdecimal() and int(number) > 0


def _refusal(text: str, part: str, known: dict[str, int], where: str | None, *, or_auto: bool) -> ConfigError:
    """What is said about a part of a text, which follows `known` ones of its replica."""
    kind, _, number = part.partition(":")
    meant = kind if kind in KINDS else closest(kind, list(KINDS))
    hint = f"Say {kind} once for a replica." if kind in known else None
    if hint is None and meant is not None:
        hint = f"Did you mean {meant}:{number if _is_count(number) else 2}?"
    elif hint is None and or_auto and closest(text, [AUTO]):
        hint = f"Did you mean {AUTO}?"
    wrong = f"{kind} is said twice of a replica" if kind in known else f"{part!r} is no part of a layout"
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
