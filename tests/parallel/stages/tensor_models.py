"""Tiny backbones whose every layer is shared by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
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
from weft.parallel.stages.shares import join_team
from weft.parallel.stages.stage_pool import JOINED
from weft.parallel.stages.staged import StagedExecutor
from weft.spec import BackboneSpec


class ThreadStages:
    """Stages whose layers are shared: each thread has a part of all of them, which take turns in it."""

    def __init__(self, columns: Sequence[Sequence[Sequence[Backbone]]], teams: list[list[ThreadDevices]]) -> None:
        """`columns`: of each thread, the parts of every replica; `teams`: of each stage those who share it."""
        self.columns = [LocalStages(*replicas) for replicas in columns]
        self.replica_sizes = self.columns[0].replica_sizes
        self._teams = teams
        self._threads = ThreadPoolExecutor(len(columns))

    def call_all(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.call_each(what, dict.fromkeys(range(sum(self.replica_sizes)), given))

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Calls all threads at once, and returns what processes would."""
        found = self._on_all(lambda column: self._call(column, what, given))
        return [join_team(parts) for parts in zip(*found, strict=True)] if what == JOINED else found[0]

    def append(self, *given: Any) -> int:
        """As one process would; a thread that fails ends the wait of the others."""
        return self._on_all(lambda column: self._left_by(lambda: column.append(*given)))[0]

    def go_on(self, *given: Any) -> None:
        """The same."""
        self._on_all(lambda column: self._left_by(lambda: column.go_on(*given)))

    def outcomes(self, number: int) -> list[Any]:
        """Those of the first thread."""
        return self._on_all(lambda column: column.outcomes(number))[0]

    def _on_all(self, run: Callable[[LocalStages], Any]) -> list[Any]:
        running = [self._threads.submit(run, column) for column in self.columns]
        errors = [error for one in running if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [one.result() for one in running]

    def _call(self, column: LocalStages, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        if what in ("run", "evaluate", "answer"):
            return self._left_by(lambda: column.call_each(what, given))
        return column.call_each(what, given)

    def _left_by(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except Exception:
            for team in self._teams:
                team[0].leave()
            raise

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


def tensor_executor(
    name: str, count: int, *replicas: tuple[int, ...], kernels: str = "reference", **options: Any
) -> StagedExecutor:
    """Tiny random replicas in this process, every layer of which is shared by so many threads.

    `replicas`: layers of each stage.
    """
    columns = [[part_backbones(name, sizes, **options) for sizes in replicas] for _ in range(count)]
    teams = [thread_devices(count) for sizes in replicas for _ in sizes]
    for index, own in enumerate(columns):
        for part, team in zip((part for parts in own for part in parts), teams, strict=True):
            divide(part, team[index])
            part.use_kernels(kernels)
    return _executor(columns, teams)


def loaded_executor(spec: BackboneSpec, count: int) -> StagedExecutor:
    """A model that is read from its files, every layer of which is shared by so many threads."""
    team = thread_devices(count)
    (part,) = find_parts(resolve(spec), 1, count)
    return _executor([[[load_backbone(spec, part, devices=devices)]] for devices in team], [team])


def _executor(columns: Sequence[Sequence[Sequence[Backbone]]], teams: list[list[ThreadDevices]]) -> StagedExecutor:
    return StagedExecutor(ThreadStages(columns, teams), columns[0][0][0].tokenizer)
