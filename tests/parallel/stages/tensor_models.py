"""Tiny backbones whose every layer is shared by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from staged_models import part_backbones
from thread_devices import ThreadDevices, thread_devices

from benchmarks.pipeline.in_process import LocalStages
from weft.model.backbone import Backbone
from weft.model.divided import divide
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.parallel.stages.load_stages import find_parts
from weft.parallel.stages.staged import StagedExecutor
from weft.spec import BackboneSpec


class ThreadStages:
    """Stages whose layers are shared: each thread has a part of all of them, which take turns in it."""

    def __init__(self, columns: Sequence[Sequence[Backbone]], teams: list[list[ThreadDevices]]) -> None:
        """`columns`: the parts of each thread; `teams`: of each stage those who share it."""
        self.replica_sizes = [len(teams)]
        self.columns = [LocalStages(parts) for parts in columns]
        self._teams = teams
        self._threads = ThreadPoolExecutor(len(columns))

    def call_all(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.call_each(what, dict.fromkeys(range(self.replica_sizes[0]), given))

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Asks all threads at once, and hears the first."""
        running = [self._threads.submit(self._asked, column, what, given) for column in self.columns]
        errors = [error for one in running if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return running[0].result()

    def _asked(self, column: LocalStages, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        try:
            return column.call_each(what, given)
        except Exception:
            if what in ("run", "evaluate", "answer"):
                self._leave(self._teams)
            raise

    def _leave(self, teams: list[list[ThreadDevices]]) -> None:
        for team in teams:
            team[0].leave()

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


def tensor_executor(
    name: str, count: int, sizes: tuple[int, ...], kernels: str = "reference", **options: Any
) -> StagedExecutor:
    """A tiny random model in this process, every layer of which is shared by so many threads.

    `sizes`: layers of each stage.
    """
    columns = [part_backbones(name, sizes, **options) for _ in range(count)]
    teams = [thread_devices(count) for _ in sizes]
    for index, parts in enumerate(columns):
        for part, team in zip(parts, teams, strict=True):
            divide(part, team[index])
            part.use_kernels(kernels)
    return _executor(columns, teams)


def loaded_executor(spec: BackboneSpec, count: int) -> StagedExecutor:
    """A model that is read from its files, every layer of which is shared by so many threads."""
    team = thread_devices(count)
    (part,) = find_parts(resolve(spec), 1, count)
    return _executor([[load_backbone(spec, part, devices=devices)] for devices in team], [team])


def _executor(columns: Sequence[Sequence[Backbone]], teams: list[list[ThreadDevices]]) -> StagedExecutor:
    return StagedExecutor(ThreadStages(columns, teams), columns[0][0].tokenizer)
