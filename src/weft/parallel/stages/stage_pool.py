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

from weft.engine.execute.protocol import ReplicaFaultError
from weft.errors import JobError, WeftError
from weft.model.model_part import ModelPart
from weft.parallel.stages.stage import stage_positions
from weft.parallel.stages.stage_process import (
    JOIN,
    StageAlive,
    StageAnswer,
    StageMemoryError,
    StageOrder,
    receive_message,
    send_message,
)
from weft.parallel.stages.transport import choose_backend, process_variables
from weft.parallel.stages.work import Due, StagedWork, StageOutcome, due_at
from weft.plan.layout import copies, rings, stage_names
from weft.plan.pipeline.append import Lists
from weft.processes import ChildProcess, last_line
from weft.spec import BackboneSpec
from weft.store.owner import ScratchFolder

PROGRAM = "weft.parallel.stages.stage_process"
SILENT_S = 30.0
"""Seconds without a sign of life after which a stage is considered hung and its replica ended."""
JOIN_S = 300.0
"""The same before its first one: it imports libraries, perhaps over a network."""
TOGETHER = ("run", "evaluate", "answer", JOIN)
"""Calls in which stages wait for each other: if one fails, none can finish."""
LOADED = 0
"""Number of the answer that a stage sends once its layers are loaded."""
READ = ("tensors", "modules", "adapter_of")
"""Calls that change nothing and may return much: of processes that share a stage only the first gets them."""
END_S = 5.0
BLAME_S = 1.0
"""Seconds to notice that a stage failed because another one is gone."""


class StageLostError(JobError, ReplicaFaultError):
    """A stage is gone, and with it all replicas: steps since the last checkpoints are lost."""


class StageProcesses:
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
        """Starts them and waits until all have loaded their layers; raises their errors.

        `replicas`: parts of the stages of each; `shards`: numbers of consecutive replicas that share one copy of the
        frozen weights; `tensor`: processes that share the layers of each stage; `gpus`: of each process, empty on a
        CPU; `memory_limit`: of each GPU.
        """
        self._num_tensor = tensor
        self._gpus = gpus
        self.replica_sizes = [len(parts) for parts in replicas]
        self._names = stage_names(self.replica_sizes, shards)
        owners = copies(len(replicas), shards)
        self._word = "replicas" if len(owners) > 1 else "shards" if len(replicas) > 1 else "stages"
        parts, shared = [part for own in replicas for part in own], rings(self.replica_sizes, shards)
        self._orders = [
            StageOrder(position, backbone, part, len(parts), own, tensor, shared, choose_backend(gpus), memory_limit)
            for position, part in zip(stage_positions(self.replica_sizes), parts, strict=True)
            for own in range(tensor)
        ]
        self._silent_s = silent_s
        self._folder = ScratchFolder("stages")
        self._lock = threading.Lock()
        """Held during a call: any thread may submit jobs, and a stage answers one call at a time."""
        self._lost: StageLostError | None = None
        self._num_calls = 0
        self._answers: dict[tuple[int, int], StageAnswer] = {}
        self.processes: list[ChildProcess] = []
        self._connections: list[Connection] = []
        self._last_seen_s = [0.0] * len(self._orders)
        try:
            self._load()
            self.call_all(JOIN, str(self._folder.path / "store"))
        except BaseException:
            self.close()
            raise

    def call_all(self, what: str, *given: Any) -> list[Any]:
        return self.call_each(what, dict.fromkeys(range(sum(self.replica_sizes)), given))

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        with self._lock:
            return self._call(what, given)

    def _call(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        # Processes that share a stage hold the same parts of a job, and answer the same.
        each = 1 if what in READ else self._num_tensor
        indices = [stage * self._num_tensor + device for stage in given for device in range(each)]
        number = self._send_each(what, given, indices)
        found = self._gather(indices, number, is_together=what in TOGETHER)
        return [found[index] for index in indices[::each]]

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        given = {stage: (work, own, due_at(due, stage)) for stage, own in enumerate(lists)}
        with self._lock:
            return self._send_each("append", given, range(len(self.processes)))

    def go_on(self, lists: Lists, due: Due) -> None:
        given = {stage: (own, due_at(due, stage)) for stage, own in enumerate(lists)}
        with self._lock:
            self._send_each("go_on", given, range(len(self.processes)))

    def outcomes(self, number: int) -> list[StageOutcome]:
        indices = range(len(self.processes))
        with self._lock:
            found = self._gather(indices, number, is_together=True)
        return [found[index] for index in indices[:: self._num_tensor]]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + END_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill()
        self._folder.close()

    def _load(self) -> None:
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
        send_message(mine, order)

    def _send_each(self, what: str, given: Mapping[int, tuple[Any, ...]], indices: Sequence[int]) -> int:
        if self._lost is not None:
            raise self._lost
        self._num_calls += 1
        for index in indices:
            try:
                send_message(self._connections[index], (self._num_calls, what, given[index // self._num_tensor]))
            except OSError:
                self._lose(index)
        return self._num_calls

    def _gather(self, indices: Sequence[int], number: int, *, is_together: bool) -> dict[int, Any]:
        """Waits for the answer of every process; raises the first error."""
        answers = self._answers
        while missing := [index for index in indices if (index, number) not in answers]:
            waiting = {self._connections[index]: index for index in missing}
            for connection in wait(list(waiting), timeout=1.0):
                index = waiting[connection]  # type: ignore[index]
                answer = self._receive(index)
                if isinstance(answer, StageAnswer):
                    answers[index, answer.number] = answer
                    # Other calls that are still open are those that stages run together.
                    if answer.error is not None and (is_together or answer.number != number):
                        self._fail(index, answer.error)
            self._end_silent(missing)
        found = [answers.pop((index, number)) for index in indices]
        errors = [answer.error for answer in found if answer.error is not None]
        if errors:
            raise errors[0]
        return {index: answer.found for index, answer in zip(indices, found, strict=True)}

    def _fail(self, index: int, error: Exception) -> NoReturn:
        """Ends all stages because one failed, or because of the lost stage that made it fail."""
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

    def _receive(self, index: int) -> StageAnswer | StageAlive:
        self._last_seen_s[index] = time.monotonic()
        try:
            answer: StageAnswer | StageAlive = receive_message(self._connections[index])
        except (EOFError, OSError):
            self._lose(index)
        return answer

    def _end_silent(self, waiting: Sequence[int]) -> None:
        for index in waiting:
            if time.monotonic() - self._last_seen_s[index] > self._silent_s:
                self._lose(index, f"gave no sign of life for {self._silent_s:g} s")

    def _lose(self, index: int, how: str | None = None) -> NoReturn:
        if how is None:
            with suppress(subprocess.TimeoutExpired):
                self.processes[index].wait(END_S)
            code = self.processes[index].poll()
            words = last_line(self._log(index))
            how = "ended" if not words else f"ended ({words})"
            if code is not None and code < 0:
                how = f"was ended by signal {-code}"
        self._kill()
        hint = "Every job goes on from its last checkpoint with --resume."
        self._lost = StageLostError(f"{how}, so all {self._word} were ended.", where=self._name(index), hint=hint)
        raise self._lost

    def _name(self, index: int) -> str:
        stage, device = divmod(index, self._num_tensor)
        return self._names[stage] if self._num_tensor == 1 else f"{self._names[stage]}, device {device}"

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _log(self, index: int) -> Path:
        return self._folder.path / f"stage-{index}.log"
