"""Stages as processes of this machine: those of a replica end together, whatever happens to one of them.

Where there are other replicas, these go on: they run what they have begun to its end, and one that is started anew
joins them. A single replica ends as a whole, and so do those that share one copy of the frozen weights.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from weft.engine.execute.protocol import ReplicaFaultError, ReplicaLostError, StagedWork
from weft.errors import JobError, WeftError
from weft.model.model_part import ModelPart
from weft.parallel.stages.interpreter import StageOutcome
from weft.parallel.stages.routes import Due, due_at
from weft.parallel.stages.stage import stage_places
from weft.parallel.stages.stage_devices import choose_backend, process_variables
from weft.parallel.stages.stage_messages import JOIN, StageAlive, StageAnswer, StageMemoryError, StageOrder, hear, tell
from weft.plan.layout import copies, rings, stage_names
from weft.plan.pipeline.append import Lists
from weft.processes import ChildProcess
from weft.spec import BackboneSpec
from weft.store.scratch import ScratchFolder

PROGRAM = "weft.parallel.stages.stage_process"
SILENT_S = 30.0
"""A stage that gives no sign of life for so long is taken for hung, and its replica is ended."""
JOIN_S = 300.0
"""The same before its first one: it imports libraries, perhaps over a network."""
TOGETHER = ("run", "evaluate", "answer", JOIN)
"""What stages do by waiting for each other: where one cannot go on, none can."""
LOADED = 0
"""The number of the answer that a stage gives without being asked: its layers are loaded."""
READ = ("tensors", "modules", "adapter_of")
"""What changes nothing and may be large: of processes that share a stage only the first is asked."""
END_S = 5.0
"""Seconds a stage has to end by itself."""
BLAME_S = 1.0
"""A stage that fails may do so because another is gone; seconds in which that shows."""
RESTARTS = 3
"""How often a replica is started anew beside others."""


class StageLostError(JobError, ReplicaFaultError):
    """A stage is gone, and with it all replicas: what jobs have not saved is lost."""


class StageReplicaLostError(StageLostError, ReplicaLostError):
    """A stage is gone, and with it one replica of several."""


class StageProcesses:
    """All stages of one or more replicas, each in a process of its own."""

    def __init__(
        self,
        backbone: BackboneSpec,
        *replicas: Sequence[ModelPart],
        shards: Sequence[int] = (),
        tensor: int = 1,
        gpus: Sequence[str] = (),
        memory_limit: float | str | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        """Starts them and waits until all have loaded their layers; raises what keeps one from it.

        `replicas`: of each, the parts of its stages; `shards`: how many of them, one behind the other, share each copy
        of the frozen weights, empty: none do;
        `tensor`: processes that share the layers of each stage; `gpus`: that of each process, none on a CPU;
        `memory_limit`: what each may take of its GPU.
        """
        self._num_tensor = tensor
        self._gpus = gpus
        self.replica_sizes = [len(parts) for parts in replicas]
        self._names = stage_names(self.replica_sizes, shards)
        owners = copies(len(replicas), shards)
        self._copy_of = {replica: copy for copy, own in enumerate(owners) for replica in own}
        self._num_copies = len(owners)
        self._word = "replicas" if len(owners) > 1 else "shards" if len(replicas) > 1 else "stages"
        parts, shared = [part for own in replicas for part in own], rings(self.replica_sizes, shards)
        self._orders = [
            StageOrder(place, backbone, part, len(parts), own, tensor, shared, choose_backend(gpus), memory_limit)
            for place, part in zip(stage_places(self.replica_sizes), parts, strict=True)
            for own in range(tensor)
        ]
        self._silent_s = silent_s
        self._folder = ScratchFolder("stages")
        self._asking = threading.Lock()
        """Jobs are submitted by any thread, also while a program runs; a stage answers one question at a time."""
        self._lost: StageLostError | None = None
        self._gone: dict[int, StageReplicaLostError] = {}
        """Copies of the backbone that have been ended and not been started anew, by number."""
        self._stands_alone = True
        """No replica goes on without the others: before they begin, while they meet, and where they never do."""
        self._restarts = Counter[int]()
        self._num_meetings = 0
        self._num_asked = 0
        self._answers: dict[tuple[int, int], StageAnswer] = {}
        """What has been heard and not been asked for, by stage and number of the question."""
        self.processes: list[ChildProcess] = []
        self._connections: list[Connection] = []
        self._heard_s = [0.0] * len(self._orders)
        try:
            self._load(range(len(self._orders)))
            self._meet()
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.ask_each(what, dict.fromkeys(range(sum(self.replica_sizes)), given))

    def ask_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """The same of some stages, with another thing given to each."""
        with self._asking:
            return self._asked(what, given)

    def _asked(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        if what == "run":
            self._begin_programs()
        # Processes that share a stage hold the same of a job, and answer the same.
        each = 1 if what in READ else self._num_tensor
        asked = [stage * self._num_tensor + place for stage in given for place in range(each)]
        number = self._tell_each(what, given, asked)
        found = self._gather(asked, number, is_together=what in TOGETHER)
        self._refuse_gone(found, asked, given, each)
        return [found[index] for index in asked[::each]]

    def _refuse_gone(self, found: Mapping[int, Any], asked: Sequence[int], stages: Iterable[int], each: int) -> None:
        """Raises why a replica is gone, with what the stages of the others have answered."""
        for error in self._gone.values():
            error.answers = {
                stage: found[asked[place]]
                for place, stage in zip(range(0, len(asked), each), stages, strict=True)
                if all(index in found for index in asked[place : place + each])
            }
            raise error

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        """Tells every stage of a program that goes on; its number."""
        given = {stage: (work, own, due_at(due, stage)) for stage, own in enumerate(lists)}
        with self._asking:
            self._begin_programs()
            return self._tell_living("append", given, range(len(self.processes)))

    def go_on(self, lists: Lists, due: Due) -> None:
        """Tells every stage the rest."""
        given = {stage: (own, due_at(due, stage)) for stage, own in enumerate(lists)}
        with self._asking:
            self._tell_living("go_on", given, range(len(self.processes)))

    def outcomes(self, number: int) -> list[StageOutcome]:
        """Waits for what every stage tells of a program."""
        asked = range(len(self.processes))
        with self._asking:
            found = self._gather(asked, number, is_together=True)
            self._refuse_gone(found, asked, range(sum(self.replica_sizes)), self._num_tensor)
        return [found[index] for index in asked[:: self._num_tensor]]

    def _begin_programs(self) -> None:
        """From now on jobs come further than their files say, and it is worth keeping what is left of a loss."""
        # On GPUs nobody hears that the other side is gone: NCCL waits for it.
        self._stands_alone = self._num_copies == 1 or bool(self._gpus)

    def recover(self) -> list[int]:
        """Starts the replicas anew that are gone, and says which; all others keep their weights and their jobs.

        StageLostError if that has been done too often, or if a stage is lost while all meet.
        """
        anew: set[int] = set()
        while self._gone:
            starting = [index for index in range(len(self._orders)) if self._copy(index) in self._gone]
            anew |= {replica for replica, copy in self._copy_of.items() if copy in self._gone}
            self._restarts.update(self._gone.keys())
            self._gone = {}
            self._load(starting)
            self._notice_ended()
        self._meet()
        return sorted(anew)

    def close(self) -> None:
        """Ends them and removes what they left behind."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + END_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill(range(len(self.processes)))
        self._folder.close()

    def _load(self, indices: Sequence[int]) -> None:
        """Starts processes, and waits until they have loaded their layers."""
        for index in indices:
            self._start(self._orders[index])
        for index in indices:
            self.processes[index].wait_begun()
        self._gather(indices, LOADED, is_together=True)

    def _start(self, order: StageOrder) -> None:
        mine, its = Pipe()
        variables = process_variables(self._gpus[order.process] if self._gpus else None)
        index, log = order.process, self._log(order.process)
        log.unlink(missing_ok=True)
        process = ChildProcess(PROGRAM, connections=[its], variables=variables, name=f"weft-stage-{index}", log=log)
        if index < len(self.processes):
            self._connections[index].close()
        self.processes[index : index + 1] = [process]
        self._connections[index : index + 1] = [mine]
        self._heard_s[index] = time.monotonic() + JOIN_S - self._silent_s
        self._answers = {key: told for key, told in self._answers.items() if key[0] != index}
        tell(mine, order)

    def _meet(self) -> None:
        """Lets all stages find each other. One that is lost meanwhile leaves the others waiting, so all end then."""
        before, self._stands_alone = self._stands_alone, True
        self._num_meetings += 1
        self.ask(JOIN, str(self._folder.path / f"store-{self._num_meetings}"))
        self._stands_alone = before

    def _tell_each(self, what: str, given: Mapping[int, tuple[Any, ...]], asked: Sequence[int]) -> int:
        """Asks processes of stages; the number of the question."""
        for error in self._gone.values() if self._lost is None else ():
            raise error
        return self._tell_living(what, given, asked)

    def _tell_living(self, what: str, given: Mapping[int, tuple[Any, ...]], asked: Sequence[int]) -> int:
        """The same of those whose replica goes on."""
        if self._lost is not None:
            raise self._lost
        self._num_asked += 1
        for index in asked:
            try:
                if not self._is_gone(index):
                    tell(self._connections[index], (self._num_asked, what, given[index // self._num_tensor]))
            except OSError:
                self._lose(index)
        return self._num_asked

    def _gather(self, asked: Sequence[int], number: int, *, is_together: bool) -> dict[int, Any]:
        """Waits for an answer of every stage that was asked and whose replica goes on; raises what one raised."""
        answers = self._answers
        while missing := [index for index in asked if (index, number) not in answers and not self._is_gone(index)]:
            waiting = {self._connections[index]: index for index in missing}
            for connection in wait(list(waiting), timeout=1.0):
                index = waiting[connection]  # type: ignore[index]
                told = None if self._is_gone(index) else self._hear(index)
                if isinstance(told, StageAnswer):
                    answers[index, told.number] = told
                    # Of another question only what stages do together is still to be answered.
                    if told.error is not None and (is_together or told.number != number):
                        self._fail(index, told.error)
            self._end_silent(missing)
        found = {index: answers.pop((index, number)) for index in asked if (index, number) in answers}
        errors = [told.error for told in found.values() if told.error is not None]
        if errors and not self._gone:
            raise errors[0]
        return {index: told.found for index, told in found.items() if told.error is None and not self._is_gone(index)}

    def _fail(self, index: int, error: Exception) -> None:
        """Ends the replica of a stage that cannot go on, or of the one because of which it cannot."""
        if isinstance(error, WeftError):
            self._kill(range(len(self.processes)))
            raise error.at(self._name(index)) if isinstance(error, StageMemoryError) else error
        until = time.monotonic() + BLAME_S
        while not self._gone and time.monotonic() < until:
            self._notice_ended()
            time.sleep(0.01)
        if not self._gone:
            self._lose(index, f"failed ({error})")

    def _hear(self, index: int) -> StageAnswer | StageAlive | None:
        """What a stage tells; None if it is gone."""
        self._heard_s[index] = time.monotonic()
        try:
            told: StageAnswer | StageAlive = hear(self._connections[index])
        except (EOFError, OSError):
            self._lose(index)
            return None
        return told

    def _notice_ended(self) -> None:
        for index, process in enumerate(self.processes):
            if process.poll() is not None and not self._is_gone(index):
                self._lose(index)

    def _end_silent(self, waiting: Sequence[int]) -> None:
        for index in waiting:
            is_silent = time.monotonic() - self._heard_s[index] > self._silent_s
            if is_silent and not self._is_gone(index):
                self._lose(index, f"gave no sign of life for {self._silent_s:g} s")

    def _lose(self, index: int, how: str | None = None) -> None:
        """Ends the replica of a stage that is gone; where none can go on without it, StageLostError after all end."""
        if how is None:
            with suppress(subprocess.TimeoutExpired):
                self.processes[index].wait(END_S)
            code = self.processes[index].poll()
            how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended{self._last_words(index)}"
        copy, name = self._copy(index), self._name(index)
        is_last = len(self._gone) + 1 == self._num_copies
        if self._stands_alone or is_last or self._restarts[copy] >= RESTARTS:
            self._kill(range(len(self.processes)))
            hint = "Every job goes on from its last checkpoint with --resume."
            self._lost = StageLostError(f"{how}, so all {self._word} were ended.", where=name, hint=hint)
            raise self._lost
        with_it = [other for other in range(len(self.processes)) if self._copy(other) == copy]
        self._kill(with_it)
        told = f"{how}." if len(with_it) == 1 else f"{how}, so its replica was ended."
        self._gone[copy] = StageReplicaLostError(told, where=name)

    def _is_gone(self, index: int) -> bool:
        return self._copy(index) in self._gone

    def _copy(self, index: int) -> int:
        """The copy of the backbone that a process has a part of."""
        return self._copy_of[self._orders[index].place.replica]

    def _name(self, index: int) -> str:
        stage, place = divmod(index, self._num_tensor)
        return self._names[stage] if self._num_tensor == 1 else f"{self._names[stage]}, device {place}"

    def _kill(self, indices: Iterable[int]) -> None:
        for process in [self.processes[index] for index in indices]:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _log(self, index: int) -> Path:
        return self._folder.path / f"stage-{index}.log"

    def _last_words(self, index: int) -> str:
        """The last line that a stage printed."""
        with suppress(OSError):
            lines = [line for line in self._log(index).read_text(errors="replace").splitlines() if line.strip()]
            return f" ({lines[-1].strip()})" if lines else ""
        return ""
