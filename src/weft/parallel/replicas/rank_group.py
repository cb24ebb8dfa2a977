"""The ranks of one controller: which there are, what they hold, who is silent, and who takes a dead one's place."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

from weft.engine.execute.protocol import ReplicaFaultError
from weft.engine.recorder import environment_difference
from weft.errors import ConfigError, JobError
from weft.parallel.replicas.connections import RankEnded, Ranks
from weft.parallel.replicas.messages import Command, RankFailed, RankIdle, RankReady, Report
from weft.parallel.replicas.records import RankRecord
from weft.plan.layout import Layout

SILENT_S = 30.0
"""Seconds without a sign of life after which a rank is ended and replaced."""
JOIN_S = 300.0
"""Seconds that a rank may take to join: it imports libraries, perhaps over a network, or a user has to start it."""
MAX_RESTARTS = 3
"""Largest number of restarts of a rank without a checkpoint in between."""
LOOK_S = 0.5
"""Seconds between two checks for silent ranks."""
AnswerT = TypeVar("AnswerT", bound=Report)


class ReplicasLostError(JobError, ReplicaFaultError):
    """All ranks are gone, and none can be started; every job continues from its last checkpoint."""


class RankGroup:
    def __init__(self, ranks: Ranks, number: int, *, silent_s: float = SILENT_S) -> None:
        """Starts the ranks; `await_all` waits until they are loaded. A rank silent for `silent_s` is ended."""
        self.last_end = ""
        self.notes: tuple[str, ...] = ()
        self._pool = ranks
        self._silent_s = silent_s
        self._looked_s = time.monotonic()
        self._first: RankReady | None = None
        """Report of the first loaded rank; all others must equal it."""
        self._layouts: dict[int, Layout] = {}
        self._ranks = {index: RankRecord(ranks.start(index)) for index in range(number)}

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[RankRecord]:
        return iter(self._ranks.values())

    def __getitem__(self, index: int) -> RankRecord:
        return self._ranks[index]

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, RankRecord) and self._ranks.get(rank.index) is rank

    @property
    def first(self) -> RankReady:
        assert self._first is not None, "none is loaded yet"
        return self._first

    @property
    def layout(self) -> Layout:
        return Layout(tuple(replica for _, own in sorted(self._layouts.items()) for replica in own.replicas))

    @property
    def first_bands(self) -> dict[int, int]:
        sizes = [(index, len(own.stage_names)) for index, own in sorted(self._layouts.items())]
        ends = itertools.accumulate(size for _, size in sizes)
        return {index: end - size for (index, size), end in zip(sizes, ends, strict=True)}

    @property
    def loaded(self) -> list[RankRecord]:
        return [rank for rank in self if rank.ready is not None]

    @property
    def is_drained(self) -> bool:
        return self._pool.inbox.empty()

    def close(self) -> None:
        for rank in self:
            if rank.ready is None:
                # It has nothing to save, and receives no commands before it is loaded.
                self._pool.kill(rank.process)
        self._pool.close()

    def abandon(self) -> None:
        """Ends all ranks at once; nothing is saved."""
        for rank in self:
            self._pool.kill(rank.process)
        self.close()

    def await_all(self) -> None:
        """Waits until all replicas are loaded; raises an error that a new attempt would not avoid. A rank that was lost
        meanwhile is not waited for if there are others: its machine may be gone for good."""
        while not self.loaded or any(rank.ready is None and not rank.num_restarts for rank in self):
            received = self.next_report()
            if received is None:
                continue
            rank, report = received
            if isinstance(report, RankFailed):
                raise report.error
            if isinstance(report, RankEnded):
                if report.is_accident and rank.failure is None and rank.num_restarts < MAX_RESTARTS:
                    self.replace(rank, report.how, is_wanted=True)
                    continue
                raise JobError(f"{rank.failure or report.how}.", where=f"replica {rank.index}")

    def send(self, rank: RankRecord, command: Command) -> None:
        """Sends a command; a rank that is still loading gets all it needs once it is ready."""
        if rank.ready is not None:
            rank.is_idle = False
            rank.process.send(command)

    def next_report(self) -> tuple[RankRecord, Report] | None:
        """The next report, if it comes soon; silent ranks are ended meanwhile. Reports of a replaced rank are dropped.
        After `RankEnded` the rank stays until it is replaced."""
        self._end_silent()
        try:
            process, report = self._pool.inbox.get(timeout=LOOK_S)
        except queue.Empty:
            return None
        rank = self._ranks.get(process.index)
        if rank is None or rank.process is not process:
            return None
        match report:
            case RankReady():
                return rank, self._note_ready(rank, report)
            case RankIdle(num_applied):
                rank.is_idle = num_applied == process.num_sent
            case RankFailed(error):
                rank.failure = f"failed: {str(error).rstrip('.')}"
        return rank, report

    def least_loaded(self, loads: Collection[int | None]) -> RankRecord | None:
        """The loaded rank that occurs least often in `loads`; None while none is loaded."""
        if not self:
            raise self.none_left()
        counts = list(loads)
        return min(self.loaded, key=lambda rank: (counts.count(rank.index), rank.index), default=None)

    def give_up(self, rank: RankRecord, why: str) -> None:
        rank.is_ending, rank.failure = True, why
        self._pool.kill(rank.process)

    def replace(self, rank: RankRecord, how: str, *, is_wanted: bool) -> None:
        """Starts another process for a rank that is gone, if `is_wanted` and it has not ended too often. A rank that no
        process has joined for long is only waited for again while others are there to train."""
        self.last_end = how
        never_came = rank.is_ending and rank.process.connection is None
        may_come = not never_came or bool(self.loaded)
        if is_wanted and may_come and rank.num_restarts < MAX_RESTARTS:
            self._ranks[rank.index] = RankRecord(self._pool.start(rank.index), num_restarts=rank.num_restarts + 1)
        else:
            del self._ranks[rank.index]

    def none_left(self) -> ReplicasLostError:
        hint = "Every job goes on from its last checkpoint with --resume."
        return ReplicasLostError(f"no replica is left: the last one {self.last_end}.", hint=hint)

    def _note_ready(self, rank: RankRecord, ready: RankReady) -> Report:
        """Adds a loaded rank, or ends it if it would give other bits than the others."""
        self._first = self._first or ready
        difference = difference_between(self._first, ready, rank.index)
        if difference is not None:
            self.give_up(rank, f"failed: {str(difference).rstrip('.')}")
            return RankFailed(difference)
        rank.ready, self._layouts[rank.index] = ready, ready.facts.layout
        self.notes = tuple(dict.fromkeys([*self.notes, *ready.notes]))
        return ready

    def _end_silent(self) -> None:
        """Ends ranks without a sign of life: those that are stopped or hang, or whose machine is gone."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        # After a long time without a check, this process itself stood still.
        has_slept = now_s - self._looked_s > max(self._silent_s / 2, 3 * LOOK_S)
        self._looked_s = now_s
        for rank in self:
            limit_s = self._silent_s if rank.process.connection is not None else JOIN_S
            if has_slept:
                rank.process.last_seen_s = now_s
            elif now_s - rank.process.last_seen_s > limit_s and not rank.is_ending:
                self.give_up(rank, f"gave no sign of life for {limit_s:g} s and was ended")


def difference_between(first: RankReady, ready: RankReady, index: int) -> ConfigError | None:
    """Error if results would depend on which of two replicas trains a job; else None."""
    where = f"replica {index}"
    if None not in (ready.weights, first.weights) and ready.weights != first.weights:
        found = f"has other weights of {first.facts.base_model} than replica 0"
        return ConfigError(f"{found}; all machines need the same files.", where=where)
    here, there = first.facts, ready.facts
    difference = environment_difference(here.environment, there.environment, here.base_model, "replica 0", where)
    if difference is not None:
        return difference
    if ready.capacity != first.capacity:
        found = f"has memory for a capacity of {ready.capacity:,} tokens, another one for {first.capacity:,}"
        least = min(ready.capacity, first.capacity)
        return ConfigError(f"{found}; results depend on it. Set capacity: {least}.", where=where)
    return None
