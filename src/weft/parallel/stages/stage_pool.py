"""Stages as processes of this machine, which end together, whatever happens to one of them.

The command may then start others, where jobs continue from their checkpoints. Replicas that share no job are separate
ranks (`parallel/replicas/`), and if one is lost, the others continue.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from weft.engine.execute.protocol import ReplicaFaultError, StagedWork
from weft.errors import JobError, WeftError
from weft.model.model_part import ModelPart
from weft.parallel.stages.interpreter import StageOutcome
from weft.parallel.stages.routes import Due, due_at
from weft.parallel.stages.stage import stage_positions
from weft.parallel.stages.stage_devices import choose_backend, process_variables
from weft.parallel.stages.stage_messages import JOIN, StageAlive, StageAnswer, StageMemoryError, StageOrder, hear, tell
from weft.plan.layout import copies, rings, stage_names
from weft.plan.pipeline.append import Lists
from weft.processes import ChildProcess
from weft.spec import BackboneSpec
from weft.store.run_lock import ScratchFolder

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


class StageLostError(JobError, ReplicaFaultError):
    """A stage is gone, and with it all replicas: what jobs have not saved is lost."""


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
        self._word = "replicas" if len(owners) > 1 else "shards" if len(replicas) > 1 else "stages"
        parts, shared = [part for own in replicas for part in own], rings(self.replica_sizes, shards)
        self._orders = [
            StageOrder(place, backbone, part, len(parts), own, tensor, shared, choose_backend(gpus), memory_limit)
            for place, part in zip(stage_positions(self.replica_sizes), parts, strict=True)
            for own in range(tensor)
        ]
        self._silent_s = silent_s
        self._folder = ScratchFolder("stages")
        self._asking = threading.Lock()
        """Jobs are submitted by any thread, also while a program runs; a stage answers one question at a time."""
        self._lost: StageLostError | None = None
        self._num_asked = 0
        self._answers: dict[tuple[int, int], StageAnswer] = {}
        """What has been heard and not been asked for, by stage and number of the question."""
        self.processes: list[ChildProcess] = []
        self._connections: list[Connection] = []
        self._last_seen_s = [0.0] * len(self._orders)
        try:
            self._load()
            self.ask(JOIN, str(self._folder.path / "store"))
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.call_each(what, dict.fromkeys(range(sum(self.replica_sizes)), given))

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """The same of some stages, with another thing given to each."""
        with self._asking:
            return self._asked(what, given)

    def _asked(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        # Processes that share a stage hold the same of a job, and answer the same.
        each = 1 if what in READ else self._num_tensor
        asked = [stage * self._num_tensor + place for stage in given for place in range(each)]
        number = self._send_each(what, given, asked)
        found = self._gather(asked, number, is_together=what in TOGETHER)
        return [found[index] for index in asked[::each]]

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        """Tells every stage of a program that goes on; its number."""
        given = {stage: (work, own, due_at(due, stage)) for stage, own in enumerate(lists)}
        with self._asking:
            return self._send_each("append", given, range(len(self.processes)))

    def go_on(self, lists: Lists, due: Due) -> None:
        """Tells every stage the rest."""
        given = {stage: (own, due_at(due, stage)) for stage, own in enumerate(lists)}
        with self._asking:
            self._send_each("go_on", given, range(len(self.processes)))

    def outcomes(self, number: int) -> list[StageOutcome]:
        """Waits for what every stage tells of a program."""
        asked = range(len(self.processes))
        with self._asking:
            found = self._gather(asked, number, is_together=True)
        return [found[index] for index in asked[:: self._num_tensor]]

    def close(self) -> None:
        """Ends them and removes what they left behind."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + END_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill()
        self._folder.close()

    def _load(self) -> None:
        """Starts all processes, and waits until they have loaded their layers."""
        for order in self._orders:
            self._start(order)
        for process in self.processes:
            process.wait_begun()
        self._gather(range(len(self.processes)), LOADED, is_together=True)

    def _start(self, order: StageOrder) -> None:
        mine, its = Pipe()
        variables = process_variables(self._gpus[order.process] if self._gpus else None)
        index, log = order.process, self._log(order.process)
        process = ChildProcess(PROGRAM, connections=[its], variables=variables, name=f"weft-stage-{index}", log=log)
        self.processes.append(process)
        self._connections.append(mine)
        self._last_seen_s[index] = time.monotonic() + JOIN_S - self._silent_s
        tell(mine, order)

    def _send_each(self, what: str, given: Mapping[int, tuple[Any, ...]], asked: Sequence[int]) -> int:
        """Asks processes of stages; the number of the question."""
        if self._lost is not None:
            raise self._lost
        self._num_asked += 1
        for index in asked:
            try:
                tell(self._connections[index], (self._num_asked, what, given[index // self._num_tensor]))
            except OSError:
                self._lose(index)
        return self._num_asked

    def _gather(self, asked: Sequence[int], number: int, *, is_together: bool) -> dict[int, Any]:
        """Waits for an answer of every process that was asked; raises what one raised."""
        answers = self._answers
        while missing := [index for index in asked if (index, number) not in answers]:
            waiting = {self._connections[index]: index for index in missing}
            for connection in wait(list(waiting), timeout=1.0):
                index = waiting[connection]  # type: ignore[index]
                told = self._hear(index)
                if isinstance(told, StageAnswer):
                    answers[index, told.number] = told
                    # Of another question only what stages do together is still to be answered.
                    if told.error is not None and (is_together or told.number != number):
                        self._fail(index, told.error)
            self._end_silent(missing)
        found = [answers.pop((index, number)) for index in asked]
        errors = [told.error for told in found if told.error is not None]
        if errors:
            raise errors[0]
        return {index: told.found for index, told in zip(asked, found, strict=True)}

    def _fail(self, index: int, error: Exception) -> NoReturn:
        """Ends all stages because one cannot go on, or another because of which it cannot."""
        if isinstance(error, WeftError):
            self._kill()
            raise error.at(self._name(index)) if isinstance(error, StageMemoryError) else error
        until = time.monotonic() + BLAME_S
        while time.monotonic() < until:
            for other, process in enumerate(self.processes):
                if process.poll() is not None:
                    self._lose(other)
            time.sleep(0.01)
        self._lose(index, f"failed ({error})")

    def _hear(self, index: int) -> StageAnswer | StageAlive:
        """What a stage tells."""
        self._last_seen_s[index] = time.monotonic()
        try:
            told: StageAnswer | StageAlive = hear(self._connections[index])
        except (EOFError, OSError):
            self._lose(index)
        return told

    def _end_silent(self, waiting: Sequence[int]) -> None:
        for index in waiting:
            if time.monotonic() - self._last_seen_s[index] > self._silent_s:
                self._lose(index, f"gave no sign of life for {self._silent_s:g} s")

    def _lose(self, index: int, how: str | None = None) -> NoReturn:
        """Ends all stages, because one is gone."""
        if how is None:
            with suppress(subprocess.TimeoutExpired):
                self.processes[index].wait(END_S)
            code = self.processes[index].poll()
            how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended{self._last_words(index)}"
        self._kill()
        hint = "Every job goes on from its last checkpoint with --resume."
        self._lost = StageLostError(f"{how}, so all {self._word} were ended.", where=self._name(index), hint=hint)
        raise self._lost

    def _name(self, index: int) -> str:
        stage, place = divmod(index, self._num_tensor)
        return self._names[stage] if self._num_tensor == 1 else f"{self._names[stage]}, device {place}"

    def _kill(self) -> None:
        for process in self.processes:
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
