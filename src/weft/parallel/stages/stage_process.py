"""A stage in a process of its own: it answers its coordinator's requests, and ends when that is gone."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import io
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

from weft.engine.execute.memory import load_part_within_memory
from weft.engine.execute.protocol import ReplicaFaultError, ReplicaMemoryError
from weft.errors import JobError, ModelError, WeftError
from weft.kernels.device import is_out_of_memory
from weft.model.model_part import ModelPart
from weft.model.resolve import resolve
from weft.model.shards import TorchHostPeers, TorchPeers
from weft.parallel.stages.interpreter import StageProgram
from weft.parallel.stages.stage import Stage, StagePosition
from weft.parallel.stages.stage_passes import answer_prompts, evaluate_jobs, read_prompts
from weft.parallel.stages.transport import (
    LOCALHOST,
    HostTransport,
    Teams,
    TorchDevices,
    TorchTransport,
    Transport,
    address_of_peer,
    goes_through_host,
    join_devices,
    network_variables,
    tensor_devices,
)
from weft.parallel.stages.work import Due, StagedWork, StageOutcome, all_routes, due_at, routes_of, steps_due
from weft.plan.program import Instruction
from weft.spec import BackboneSpec

JOIN = "join"
END = "end"
MACHINE = "machine"


@dataclass(frozen=True)
class StageOrder:
    position: StagePosition
    backbone: BackboneSpec
    part: ModelPart
    teams: Teams
    tensor: int
    """Index of this process among those that share the stage."""
    rings: tuple[tuple[int, ...], ...] = ()
    backend: str = "gloo"
    memory_limit: float | str | None = None

    @property
    def ring(self) -> tuple[int, ...]:
        """Stages that share the frozen weights of this one, itself included; empty if it shares none."""
        return next((ring for ring in self.rings if self.position.device in ring), ())

    @property
    def process(self) -> int:
        return self.teams.processes(self.position.device)[self.tensor]

    @property
    def num_tensor(self) -> int:
        return self.teams.sizes[self.position.device]


@dataclass(frozen=True)
class StageAnswer:
    number: int
    found: Any = None
    error: Exception | None = None


class StageMemoryError(JobError, ReplicaFaultError):
    """A stage ran out of memory during work of all stages, so that none can continue."""


@dataclass(frozen=True)
class StageAlive:
    """A sign of life."""


class _Copies(ForkingPickler):
    """Pickles like multiprocessing, but tensors as bytes instead of shared memory."""

    def reducer_override(self, what: Any) -> Any:
        if not isinstance(what, torch.Tensor):
            return NotImplemented
        data = what.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, what.dtype, tuple(what.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def send_message(connection: Connection, what: Any) -> None:
    buffer = io.BytesIO()
    _Copies(buffer).dump(what)
    connection.send_bytes(buffer.getvalue())


def receive_message(connection: Connection) -> Any:
    return connection.recv()


def answer(stage: Stage, what: str, given: tuple[Any, ...]) -> Generator[None, None, Any]:
    """Returns a stage's result of a call; yields where another stage must run first."""
    if what in TOGETHER:
        try:
            return (yield from TOGETHER[what](stage, *given))
        except BaseException:
            stage.references.forget()
            raise
    # Calls about the backbone alone go to its executor.
    return getattr(stage if hasattr(stage, what) else stage.local, what)(*given)


def run_program(stage: Stage, work: StagedWork) -> Generator[None, None, StageOutcome]:
    """Runs a stage's instructions of a program; drops the rest if it fails."""
    program = StageProgram(stage)
    stage.transport.open(routes_of(work.program))
    program.append(0, work, work.program.stages[stage.device], due_at(steps_due(work.program), stage.device))
    try:
        yield from program.run()
        stage.transport.finish()
    finally:
        stage.forget()
    ((_, outcome),) = program.ended
    return outcome


TOGETHER: dict[str, Callable[..., Generator[None, None, Any]]] = {
    "run": run_program,
    "evaluate": evaluate_jobs,
    "answer": answer_prompts,
    "read_prompts": read_prompts,
}
"""Calls in which stages wait for each other."""


class RunningStage:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.program = StageProgram(stage)
        self._running: Generator[None, None, None] | None = None

    def append(self, number: int, work: StagedWork, instructions: Sequence[Instruction], due: Due) -> None:
        if self.program.is_over:
            self.stage.transport.open(all_routes(work.program))
        self.program.append(number, work, instructions, due)

    def turn(self) -> list[tuple[int, StageOutcome]]:
        """Runs an instruction, unless it has to wait for another stage; returns the programs that ended."""
        self._running = self._running or self.program.run()
        try:
            with self.stage.at_work():
                next(self._running)
        except StopIteration:
            self._running = None
        except BaseException:
            self.fail()
            raise
        ended, self.program.ended = self.program.ended, []
        if ended and self.program.is_over:
            self.forget()
        return ended

    def forget(self) -> None:
        """Drops everything; microbatches are numbered from 0 again."""
        self.program, self._running = StageProgram(self.stage), None
        self.stage.forget()

    def fail(self) -> None:
        self.forget()
        self.stage.references.forget()


ALIVE_S = 1.0
"""Seconds between signs of life."""
LONGEST_WAIT = datetime.timedelta(hours=12)
"""Longest wait for another stage; the coordinator ends all stages long before, if one is gone or silent."""


def main(connection: Connection, *, lost_code: int = 0) -> None:
    """Serves its coordinator to the end; exits with `lost_code` when that is gone."""
    # `kill -USR1` writes to the stage's log what it waits for.
    faulthandler.register(signal.SIGUSR1)
    lock = threading.Lock()

    def reply(what: StageAnswer | StageAlive) -> None:
        try:
            with lock:
                send_message(connection, what)
        except OSError:
            # The coordinator is gone, and this process has nothing to save.
            os._exit(lost_code or 1)

    def beat() -> None:
        while True:
            reply(StageAlive())
            time.sleep(ALIVE_S)

    threading.Thread(target=beat, name="weft-alive", daemon=True).start()
    try:
        coordinator = address_of_peer(connection)
        if coordinator is not None:
            os.environ.update(network_variables(connection))
        member = _loaded(receive_message(connection), coordinator, reply)
        if member is not None:
            _serve(member, connection, reply)
    except (EOFError, ConnectionError):
        os._exit(lost_code)


def _loaded(order: StageOrder, coordinator: str | None, reply: Callable[[StageAnswer], None]) -> StageMember | None:
    """The stage, or None after reporting why it cannot be loaded."""
    try:
        member = StageMember(order, coordinator)
    except Exception as error:
        reply(StageAnswer(0, error=_unloaded(error, order.position.device)))
        return None
    reply(StageAnswer(0))
    return member


def _serve(member: StageMember, connection: Connection, reply: Callable[[StageAnswer], None]) -> None:
    """Answers calls; during programs, between two instructions."""
    going: RunningStage | None = None
    while True:
        if going is not None and going.program.has_work and not connection.poll():
            number = going.program.oldest
            try:
                for number, outcome in going.turn():
                    reply(StageAnswer(number, outcome))
            except Exception as error:
                _report_failure(member, number, error, reply)
            continue
        number, what, given = receive_message(connection)
        if what == "append":
            going = going or RunningStage(member.stage)
            going.append(number, *given)
        elif what == "go_on":
            assert going is not None, "a program goes on that was begun"
            going.program.go_on(*given)
        elif what == END:
            return
        else:
            try:
                found = StageAnswer(number, _answered(member, what, given))
            except Exception as error:
                _report_failure(member, number, error, reply, what)
                continue
            reply(found)


def _report_failure(
    member: StageMember, number: int, error: Exception, reply: Callable[[StageAnswer], None], what: str = ""
) -> None:
    found = sendable(error, member.device, what)
    if not isinstance(found, WeftError | ReplicaMemoryError):
        # Stages that wait for this one notice the closed connections.
        member.leave()
    reply(StageAnswer(number, error=found))


def _unloaded(error: Exception, stage: int) -> Exception:
    found = sendable(error, stage)
    if isinstance(found, StageMemoryError):
        return ModelError("its GPU has no memory for its layers; quantize, or use more stages.", where=found.where)
    return found


def sendable(error: Exception, stage: int, what: str = "") -> Exception:
    if isinstance(error, WeftError) or (what in ("seat", "attach_stored") and isinstance(error, ReplicaMemoryError)):
        return error
    if isinstance(error, ReplicaMemoryError) or is_out_of_memory(error):
        hint = "Every job goes on from its last checkpoint with --resume."
        found = "its GPU ran out of memory; lower capacity, set recompute: full, or divide the model over more devices."
        return StageMemoryError(found, where=f"stage {stage}", hint=hint)
    return RuntimeError(f"{type(error).__name__}: {error}")


class StageMember:
    def __init__(self, order: StageOrder, coordinator: str | None = None) -> None:
        """`coordinator`: its machine's address; None: this machine."""
        self._order, self._coordinator = order, coordinator
        model = resolve(order.backbone)
        device = model.device
        self._is_by_host = goes_through_host(device, order.backend)
        self._peers: TorchPeers | None = None
        if ring := order.ring:
            kind = TorchHostPeers if self._is_by_host else TorchPeers
            self._peers = kind(ring.index(order.position.device), len(ring), device)
        self._devices: TorchDevices | None = None
        if order.num_tensor > 1:
            self._devices = tensor_devices(order.tensor, order.num_tensor, device, order.backend)
        self._backbone = load_part_within_memory(model, order.memory_limit, order.part, self._peers, self._devices)
        self._stage: Stage | None = None

    @property
    def device(self) -> int:
        return self._order.position.device

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "a stage joins the others first"
        return self._stage

    def join(self, where: str | int) -> None:
        """Joins the other stages by a file, or by a store at this port of the coordinator's machine."""
        order, number = self._order, sum(self._order.teams.sizes)
        store: Any
        if isinstance(where, str):
            store = dist.FileStore(where, number)  # type: ignore[attr-defined]
        else:
            host = self._coordinator or LOCALHOST
            store = dist.TCPStore(host, where, is_master=False, timeout=LONGEST_WAIT)  # type: ignore[attr-defined]
        mine = f"{MACHINE}/{platform.node()}"
        store.add(mine, 1)
        dist.init_process_group(order.backend, store=store, rank=order.process, world_size=number, timeout=LONGEST_WAIT)
        for ring in order.rings:
            # Gathering and sending have separate groups, so neither waits for the other.
            group = dist.new_group(ring, timeout=LONGEST_WAIT)
            if self._peers is not None and ring == order.ring:
                self._peers.group = group
        if max(order.teams.sizes) > 1:
            groups = join_devices(self.device, order.teams, LONGEST_WAIT)
            if self._devices is not None:
                self._devices.groups = groups
        self._stage = Stage(order.position, self._backbone, self._transport())
        # All have joined, so all have been counted.
        self._stage.num_processes = store.add(mine, 0)

    def _transport(self) -> Transport:
        order, device = self._order, self._backbone.device
        if self._is_by_host:
            return HostTransport(order.position.device, device, LONGEST_WAIT, order.teams, order.tensor)
        return TorchTransport(order.position.device, device, LONGEST_WAIT, order.teams, order.tensor)

    def leave(self) -> None:
        if not dist.is_initialized():
            return
        if self._stage is not None:
            # It holds on to the connections.
            del self._stage.transport
        if self._peers is not None:
            self._peers.group = None
        dist.destroy_process_group()
        gc.collect()


def _answered(member: StageMember, what: str, given: tuple[Any, ...]) -> Any:
    """Runs the stage to its answer; receiving blocks, so it never has to yield."""
    if what == JOIN:
        member.join(*given)
        return None
    stage = member.stage
    running: Generator[None, None, Any] = answer(stage, what, given)
    while True:
        try:
            with stage.at_work():
                next(running)
        except StopIteration as end:
            return end.value
