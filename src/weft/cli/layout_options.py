"""The options that divide one replica into stages: how many, and how they share the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from weft.errors import ConfigError, closest
from weft.plan.layout import parse_layout
from weft.plan.pipeline.build import Schedule

if TYPE_CHECKING:
    from weft.execute.stages.load_stages import StageLayout
    from weft.spec import RunSpec

Layout = Annotated[
    str | None,
    typer.Option(metavar="stages:N", help="Divide the layers of one backbone into N stages, each in its own process."),
]
SCHEDULES = tuple(schedule for schedule in Schedule if schedule is not Schedule.INTERLEAVED)
PipelineSchedule = Annotated[
    str | None,
    typer.Option("--schedule", metavar="NAME", help=f"With --layout: auto (default), {', '.join(SCHEDULES)}."),
]
AUTO = "auto"
"""Of schedules: of a few ways to pack and order microbatches, the one that is fastest in the simulator."""


@dataclass(frozen=True)
class LayoutOptions:
    """What was said about stages on the command line."""

    layout: str | None = None
    schedule: str | None = None

    @property
    def flags(self) -> list[str]:
        """The same, as it was said."""
        given = {"--layout": self.layout, "--schedule": self.schedule}
        return [part for name, value in given.items() if value is not None for part in (name, value)]

    @property
    def stages(self) -> StageLayout | None:
        """Of the replica; None for one that is not divided."""
        if self._num_stages < 2:
            return None
        from weft.execute.stages.load_stages import StageLayout

        return StageLayout(self._num_stages, self._schedule)

    def check(self, spec: RunSpec, replica_flags: Sequence[str]) -> None:
        """ConfigError or ModelError for what cannot be, before any weight is read; `replica_flags`: said as well."""
        num_stages, _ = self._num_stages, self._schedule
        if self.layout is not None and replica_flags:
            raise ConfigError(f"divides one replica; leave {replica_flags[0]} out, or --layout.", where="--layout")
        if self.schedule is not None and self.layout is None:
            raise ConfigError("is for stages; give --layout stages:N too.", where="--schedule")
        if num_stages > 1:
            from weft.execute.stages.load_stages import check_layout

            check_layout(spec, num_stages)

    @property
    def _num_stages(self) -> int:
        if self.layout is None:
            return 1
        if self.layout == AUTO:
            raise ConfigError("no layout is chosen by itself yet; say one, such as stages:2.", where="--layout")
        layout = parse_layout(self.layout, where="--layout")
        missing = {kind for replica in layout.replicas for kind in replica.parts} - {"stages"}
        if missing or len(layout.replicas) > 1:
            found = min(missing, default="more than one replica")
            raise ConfigError(f"got {self.layout!r}; {found} cannot be trained yet, only stages:N.", where="--layout")
        return layout.replicas[0].stages

    @property
    def _schedule(self) -> Schedule | None:
        if self.schedule in (None, AUTO):
            return None
        if self.schedule not in SCHEDULES:
            guess = closest(self.schedule, [AUTO, *SCHEDULES])
            found = f"got {self.schedule!r}; accepted are {', '.join((AUTO, *SCHEDULES))}."
            raise ConfigError(found, where="--schedule", hint=f"Did you mean {guess}?" if guess else None)
        return Schedule(self.schedule)
