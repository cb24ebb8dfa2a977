"""Tiny random backbones whose every layer is shared by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from staged_models import part_backbones
from thread_devices import ThreadDevices, thread_devices

from weft.backbone.tensor_parallel import divide
from weft.execute.stages.stage_group import LocalStages
from weft.execute.stages.staged import StagedExecutor


class ThreadStages:
    """Stages whose layers are shared: each thread has a part of all of them, which take turns in it."""

    def __init__(self, name: str, count: int, sizes: tuple[int, ...], **options: Any) -> None:
        """`count`: threads that share every layer; `sizes`: layers of each stage."""
        self.replica_sizes = [len(sizes)]
        columns = [part_backbones(name, sizes, **options) for _ in range(count)]
        teams = [thread_devices(count) for _ in sizes]
        for index, parts in enumerate(columns):
            for part, team in zip(parts, teams, strict=True):
                divide(part, team[index])
        self.columns = [LocalStages(parts) for parts in columns]
        self._teams = teams
        self._threads = ThreadPoolExecutor(count)

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.ask_each(what, dict.fromkeys(range(self.replica_sizes[0]), given))

    def ask_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Asks all threads at once, and hears the first."""
        running = [self._threads.submit(self._asked, column, what, given) for column in self.columns]
        errors = [error for one in running if (error := one.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return running[0].result()

    def _asked(self, column: LocalStages, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        try:
            return column.ask_each(what, given)
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


def tensor_executor(name: str, count: int, sizes: tuple[int, ...], **options: Any) -> StagedExecutor:
    """A tiny random model in this process, every layer of which is shared by so many threads."""
    stages = ThreadStages(name, count, sizes, **options)
    return StagedExecutor(stages, stages.columns[0].stages[0].backbone.tokenizer)
