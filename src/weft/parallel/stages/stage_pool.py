"""Stages as processes, of this machine or joined from others, which end together, whatever happens to one of them.

The command may then start others, where jobs continue from their checkpoints. Replicas that share no job are separate
ranks (`parallel/replicas/`), and if one is lost, the others continue.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

from weft.engine.execute.protocol import ReplicaFaultError
from weft.errors import JobError, WeftError
from weft.model.model_part import ModelPart
from weft.parallel.stages.shares import join_team
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
from weft.parallel.stages.transport import Teams, choose_backend, process_variables
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
"""Seconds that a stage may take to its first sign of life: it imports libraries, perhaps over a network."""
TOGETHER = ("run", "evaluate", "answer", "read_prompts", "time_link", JOIN)
"""Calls in which stages wait for each other: if one fails, none can finish."""
LOADED = 0
"""Number of the answer that a stage sends once its layers are loaded."""
READ = ("modules", "adapter_of")
"""Calls that change nothing and may return much: only the first of the processes that share a stage gets them."""
JOINED = "tensors"
"""Call that each process of a stage answers with its part."""
END_S = 5.0
BLAME_S = 1.0
"""Seconds to notice that a stage failed because another one is gone."""


class StageLostError(JobError, ReplicaFaultError):
    """A stage is gone, and with it all replicas: steps since the last checkpoints are lost."""


class StageHandle(Protocol):
    @property
    def connection(self) -> Connection: ...

    def wait_begun(self) -> None:
        """Waits until the process runs; OSError if it cannot be started."""
        ...

    def dismiss(self) -> None:
        """Leaves the process to end by itself."""
        ...

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end of the process; TimeoutExpired after `timeout` seconds."""
        ...

    def kill(self) -> None: ...

    def ending(self) -> str:
        """Describes for the user how the process has ended."""
        ...


class StageHosts(Protocol):
    def start(self, number: int) -> Sequence[StageHandle]: ...

    @property
    def backend(self) -> str:
        """Backend of torch.distributed for the processes that were started."""
        ...

    def open_store(self) -> str | int:
        """Opens a new store in which processes find each other: a file, or a port of this machine."""
        ...

    def close(self) -> None: ...


class LocalStage(ChildProcess):
    def __init__(self, index: int, log: Path, gpu: str | None) -> None:
        self.connection, its = Pipe()
        self._log = log
        name, variables = f"weft-stage-{index}", process_variables(gpu)
        super().__init__(PROGRAM, connections=[its], variables=variables, name=name, log=log)

    def dismiss(self) -> None:
        self.connection.close()

    def kill(self) -> None:
        if self.poll() is None:
            super().kill()
        self.wait()

    def ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.wait(END_S)
        code, words = self.poll(), last_line(self._log)
        if code is not None and code < 0:
            return f"was ended by signal {-code}"
        return f"ended ({words})" if words else "ended"


class LocalHosts:
    """Processes of this machine."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self.backend = choose_backend(gpus)
        self._folder = ScratchFolder("stages")

    def start(self, number: int) -> list[LocalStage]:
        folder = self._folder.path
        gpus: Sequence[str | None] = self._gpus or [None] * number
        return [LocalStage(index, folder / f"stage-{index}.log", gpus[index]) for index in range(number)]

    def open_store(self) -> str:
        return str(self._folder.path / "store")

    def close(self) -> None:
        self._folder.close()


class StageProcesses:
    def __init__(
        self,
        backbone: BackboneSpec,
        *replicas: Sequence[ModelPart],
        shards: Sequence[int] = (),
        tensor: Sequence[int] = (),
        gpus: Sequence[str] = (),
        memory_limit: float | str | None = None,
        silent_s: float = SILENT_S,
        hosts: StageHosts | None = None,
    ) -> None:
        """Starts them and waits until all have loaded their layers; raises their errors.

        `replicas`: parts of the stages of each; `shards`: numbers of consecutive replicas that share one copy of the
        frozen weights; `tensor`: processes that share every layer of each replica, empty: none do; `gpus`: of each
        process, empty on a CPU; `memory_limit`: of each GPU; `hosts`: where the processes are, by default on this
        machine with these GPUs.
        """
        self._hosts = hosts or LocalHosts(gpus)
        self.replica_sizes = [len(parts) for parts in replicas]
        self._names = stage_names(self.replica_sizes, shards)
        owners = copies(len(replicas), shards)
        self._word = "replicas" if len(owners) > 1 else "shards" if len(replicas) > 1 else "stages"
        parts, shared = [part for own in replicas for part in own], rings(self.replica_sizes, shards)
        teams = Teams(
            tuple(degree for own, degree in zip(replicas, tensor or (1,) * len(replicas), strict=True) for _ in own)
        )
        self._teams = teams
        self._silent_s = silent_s
        self._sending = threading.Lock()
        """Held while a call is sent: any thread may submit jobs, and all stages get the calls in the same order."""
        self._changed = threading.Condition()
        self._is_receiving = False
        """True while a thread receives answers for all that wait. So a short call does not wait for a long one."""
        self._together = {LOADED}
        """Calls and programs that cannot end if a stage fails."""
        self._lost: StageLostError | None = None
        self._num_calls = 0
        self._answers: dict[tuple[int, int], StageAnswer] = {}
        self.processes = self._hosts.start(sum(teams.sizes))
        self._connections = [process.connection for process in self.processes]
        self._last_seen_s = [time.monotonic() + JOIN_S - silent_s] * len(self.processes)
        try:
            backend = self._hosts.backend
            self._load(
                StageOrder(position, backbone, part, teams, own, shared, backend, memory_limit)
                for position, part in zip(stage_positions(self.replica_sizes), parts, strict=True)
                for own in range(teams.sizes[position.device])
            )
            self.call_all(JOIN, self._hosts.open_store())
        except BaseException:
            self.close()
            raise

    def call_all(self, what: str, *given: Any) -> list[Any]:
        return self.call_each(what, dict.fromkeys(range(sum(self.replica_sizes)), given))

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        # Processes that share a stage hold the same parts of a job, and answer the same.
        teams = [self._teams.processes(stage)[: 1 if what in READ else None] for stage in given]
        indices = [index for own in teams for index in own]
        number = self._send_each(what, given, indices)
        found = self._gather(indices, number)
        if what == JOINED:
            return [join_team([found[index] for index in own]) for own in teams]
        return [found[own.start] for own in teams]

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        given = {stage: (work, own, due_at(due, stage)) for stage, own in enumerate(lists)}
        return self._send_each("append", given, range(len(self.processes)))

    def go_on(self, lists: Lists, due: Due) -> None:
        given = {stage: (own, due_at(due, stage)) for stage, own in enumerate(lists)}
        self._send_each("go_on", given, range(len(self.processes)))

    def outcomes(self, number: int) -> list[StageOutcome]:
        found = self._gather(range(len(self.processes)), number)
        return [found[self._teams.processes(stage).start] for stage, _ in enumerate(self._teams.sizes)]

    def check(self) -> None:
        with self._changed:
            self._refuse_lost()
            if self._is_receiving:
                return
            self._is_receiving = True
        self._receive_some(range(len(self.processes)), timeout_s=0.0)

    def close(self) -> None:
        for process in self.processes:
            process.dismiss()
        until = time.monotonic() + END_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill()
        self._hosts.close()

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _load(self, orders: Iterable[StageOrder]) -> None:
        for order, connection in zip(orders, self._connections, strict=True):
            with suppress(OSError):  # its end is noticed below
                send_message(connection, order)
        for process in self.processes:
            process.wait_begun()
        self._gather(range(len(self.processes)), LOADED)

    def _send_each(self, what: str, given: Mapping[int, tuple[Any, ...]], indices: Sequence[int]) -> int:
        with self._sending:
            self._refuse_lost()
            self._num_calls += 1
            if what in TOGETHER or what == "append":
                self._together.add(self._num_calls)
            for index in indices:
                try:
                    send_message(self._connections[index], (self._num_calls, what, given[self._teams.stage_of(index)]))
                except OSError:
                    self._lose(index)
            return self._num_calls

    def _gather(self, indices: Sequence[int], number: int) -> dict[int, Any]:
        """Waits for the answer of every process; raises the first error."""
        while True:
            with self._changed:
                missing = [index for index in indices if (index, number) not in self._answers]
                if not missing:
                    break
                self._refuse_lost()
                if self._is_receiving:
                    self._changed.wait()
                    continue
                self._is_receiving = True
            self._receive_some(missing, timeout_s=1.0)
        found = [self._answers.pop((index, number)) for index in indices]
        self._together.discard(number)
        errors = [answer.error for answer in found if answer.error is not None]
        if errors:
            raise errors[0]
        return {index: answer.found for index, answer in zip(indices, found, strict=True)}

    def _receive_some(self, missing: Sequence[int], timeout_s: float) -> None:
        waiting = {connection: index for index, connection in enumerate(self._connections)}
        try:
            for connection in wait(list(waiting), timeout_s):
                index = waiting[connection]  # type: ignore[index]
                answer = self._receive(index)
                if isinstance(answer, StageAnswer):
                    self._answers[index, answer.number] = answer
                    if answer.error is not None and answer.number in self._together:
                        self._fail(index, answer.error)
            self._end_silent(missing)
        finally:
            with self._changed:
                self._is_receiving = False
                self._changed.notify_all()

    def _fail(self, index: int, error: Exception) -> NoReturn:
        """Ends all stages because one failed, or because of the lost stage that made it fail."""
        if isinstance(error, WeftError):
            self._kill()
            raise error.at(self._name(index)) if isinstance(error, StageMemoryError) else error
        until = time.monotonic() + BLAME_S
        while time.monotonic() < until:
            for connection in wait(self._connections, timeout=0.01):
                # Raises for one whose process is gone; nothing else matters any more.
                self._receive(self._connections.index(connection))  # type: ignore[arg-type]
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
        how = how or self.processes[index].ending()
        self._kill()
        hint = "Every job goes on from its last checkpoint with --resume."
        self._lost = StageLostError(f"{how}, so all {self._word} were ended.", where=self._name(index), hint=hint)
        raise self._lost

    def _name(self, index: int) -> str:
        stage = self._teams.stage_of(index)
        own = self._teams.processes(stage)
        return self._names[stage] if len(own) == 1 else f"{self._names[stage]}, device {index - own.start}"

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
