"""Stages as processes of this machine: they end together, whatever happens to one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from weft.backbone.model_part import ModelPart
from weft.errors import JobError, WeftError
from weft.execute.protocol import ReplicaFaultError
from weft.execute.stages.stage import stage_places
from weft.execute.stages.stage_devices import choose_backend
from weft.execute.stages.stage_messages import StageAlive, StageAnswer, StageOrder, hear, tell
from weft.gpu_choice import VISIBLE
from weft.spec import BackboneSpec

SILENT_S = 30.0
"""A stage that gives no sign of life for so long is taken for hung, and all are ended."""
JOIN_S = 300.0
"""The same before its first one: it imports libraries, perhaps over a network."""
TOGETHER = ("run", "evaluate")
"""What stages do by waiting for each other: where one cannot go on, none can."""
READ = ("tensors", "modules", "adapter_of")
"""What changes nothing and may be large: of processes that share a stage only the first is asked."""
END_S = 5.0
"""Seconds a stage has to end by itself."""


class StageLostError(JobError, ReplicaFaultError):
    """A stage is gone, and with it the replica: what its jobs have not saved is lost."""


class StageProcesses:
    """All stages of one or more replicas, each in a process of its own."""

    def __init__(
        self,
        backbone: BackboneSpec,
        *replicas: Sequence[ModelPart],
        are_shards: bool = False,
        tensor: int = 1,
        gpus: Sequence[str] = (),
        silent_s: float = SILENT_S,
    ) -> None:
        """Starts them and waits until all have loaded their layers; raises what keeps one from it.

        `replicas`: of each, the parts of its stages; `are_shards`: they share the frozen weights of one;
        `tensor`: processes that share the layers of each stage; `gpus`: that of each process, none on a CPU.
        """
        self._num_tensor = tensor
        self._gpus = gpus
        self.replica_sizes = [len(parts) for parts in replicas]
        parts = [part for own in replicas for part in own]
        self._silent_s = silent_s
        self._folder = tempfile.TemporaryDirectory(prefix="weft-stages-")
        self._lost: StageLostError | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._heard_s = [time.monotonic() + JOIN_S - silent_s] * len(parts) * tensor
        store, backend = f"{self._folder.name}/store", choose_backend(gpus)
        try:
            for place, part in zip(stage_places(self.replica_sizes), parts, strict=True):
                for own in range(tensor):
                    self._start(StageOrder(place, backbone, part, len(parts), own, tensor, store, are_shards, backend))
            self._gather(range(len(self.processes)), is_together=True)
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.ask_each(what, dict.fromkeys(range(sum(self.replica_sizes)), given))

    def ask_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """The same of some stages, with another thing given to each."""
        if self._lost is not None:
            raise self._lost
        # Processes that share a stage hold the same of a job, and answer the same.
        each = 1 if what in READ else self._num_tensor
        asked = [stage * self._num_tensor + place for stage in given for place in range(each)]
        for index in asked:
            try:
                tell(self._connections[index], (what, given[index // self._num_tensor]))
            except OSError:
                raise self._lose(index) from None
        return self._gather(asked, is_together=what in TOGETHER)[::each]

    def close(self) -> None:
        """Ends them and removes what they left behind."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + END_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill()
        self._folder.cleanup()

    def _start(self, order: StageOrder) -> None:
        mine, its = Pipe()
        command = [sys.executable, "-m", "weft.execute.stages.stage_process", str(its.fileno())]
        with self._log(order.process).open("wb") as out:
            # A session of its own: Ctrl-C is for the coordinator, which stops at a step boundary.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[its.fileno()],
                # It sees its own GPU alone.
                env={**os.environ, VISIBLE: self._gpus[order.process]} if self._gpus else None,
                start_new_session=True,
            )
        its.close()
        self.processes.append(process)
        self._connections.append(mine)
        tell(mine, order)

    def _gather(self, asked: Sequence[int], *, is_together: bool) -> list[Any]:
        """Waits for an answer of every stage that was asked; raises what one raised."""
        found: dict[int, StageAnswer] = {}
        while len(found) < len(asked):
            waiting = {self._connections[index]: index for index in asked if index not in found}
            for connection in wait(list(waiting), timeout=1.0):
                index = waiting[connection]  # type: ignore[index]
                told = self._hear(index)
                if isinstance(told, StageAnswer):
                    found[index] = told
                    if told.error is not None and is_together:
                        raise self._failed(index, told.error)
            self._end_silent(list(waiting.values()))
        errors = [told.error for told in found.values() if told.error is not None]
        if errors:
            raise errors[0]
        return [found[index].found for index in asked]

    def _failed(self, index: int, error: Exception) -> WeftError:
        """Ends all stages because one cannot go on, and says why."""
        if not isinstance(error, WeftError):
            return self._lose(index, f"failed ({error})")
        self._kill()
        return error

    def _hear(self, index: int) -> StageAnswer | StageAlive:
        self._heard_s[index] = time.monotonic()
        try:
            told: StageAnswer | StageAlive = hear(self._connections[index])
        except (EOFError, OSError):
            raise self._lose(index) from None
        return told

    def _end_silent(self, waiting: Sequence[int]) -> None:
        for index in waiting:
            if time.monotonic() - self._heard_s[index] > self._silent_s:
                raise self._lose(index, f"gave no sign of life for {self._silent_s:g} s")

    def _lose(self, index: int, how: str | None = None) -> StageLostError:
        """Ends all stages, because of one that is gone."""
        if how is None:
            with suppress(subprocess.TimeoutExpired):
                self.processes[index].wait(END_S)
            code = self.processes[index].poll()
            how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended{self._last_words(index)}"
        self._kill()
        hint = "Every job goes on from its last checkpoint with --resume."
        self._lost = StageLostError(f"{how}, so all stages were ended.", where=self._name(index), hint=hint)
        return self._lost

    def _name(self, index: int) -> str:
        stage, place = divmod(index, self._num_tensor)
        return f"stage {stage}" if self._num_tensor == 1 else f"stage {stage}, device {place}"

    def _kill(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log(self, index: int) -> Path:
        return Path(self._folder.name) / f"stage-{index}.log"

    def _last_words(self, index: int) -> str:
        """The last line that a stage printed."""
        with suppress(OSError):
            lines = [line for line in self._log(index).read_text(errors="replace").splitlines() if line.strip()]
            return f" ({lines[-1].strip()})" if lines else ""
        return ""
