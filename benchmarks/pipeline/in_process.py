"""A divided model in one process, for tests and for measurements on one device: stages that take turns, and a peer that
stands in for all devices that share the frozen weights."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import torch

from weft.kernels.device import Stream, current_stream, has_streams, mark, on_stream, wait_for
from weft.model.backbone import Backbone
from weft.model.shards import PendingGather
from weft.parallel.stages.stage import Stage, stage_positions
from weft.parallel.stages.stage_process import TOGETHER, RunningStage, answer
from weft.parallel.stages.transport import DIRECTIONS, Channel, Route
from weft.parallel.stages.work import Due, StagedWork, StageOutcome, due_at
from weft.plan.pipeline.append import Lists

Parcel = tuple[torch.Tensor, Any]
"""What was sent, and a mark of the stream that made it."""


Boxes = defaultdict[Route, deque[Parcel]]
"""What has been sent, by its way."""


class LocalTransport:
    """Between stages that take turns in one process; those of one GPU work at the same time, each on its stream."""

    def __init__(self, stage: int, boxes: Boxes) -> None:
        """`boxes` are shared by all stages."""
        self._stage = stage
        self._boxes = boxes
        self._missed: Route | None = None

    @property
    def awaited(self) -> Route | None:
        """On which way something was looked for in vain in this turn, and still is not there; None: it may go on."""
        return self._missed if self._missed is not None and not self._boxes[self._missed] else None

    def begin_turn(self) -> None:
        """Its stage runs now, until it must wait."""
        self._missed = None

    def open(self, routes: Collection[Route]) -> None:
        """Has nothing to make ready; refuses ways that processes would not have."""
        assert all(route.direction in DIRECTIONS for route in routes)

    def send(self, tensor: torch.Tensor, to_stage: int, channel: Channel) -> None:
        """Puts it where the other finds it."""
        self._boxes[Route(channel, self._stage, to_stage)].append((tensor, mark(tensor.device)))

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, from_stage: int, channel: Channel
    ) -> torch.Tensor | None:
        """What lies there, or None: the other stage must have its turn first."""
        route = Route(channel, from_stage, self._stage)
        box = self._boxes[route]
        if not box:
            self._missed = route
            return None
        tensor, ready = box.popleft()
        assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype, "stages disagree about what is sent"
        wait_for(tensor, ready)
        return tensor

    def finish(self) -> None:
        """Has nothing to wait for."""


class LocalStages:
    """Stages of this process."""

    def __init__(self, *replicas: Sequence[Backbone]) -> None:
        """`replicas`: of each, the parts of its backbone in order."""
        self._boxes: Boxes = defaultdict(deque)
        self.replica_sizes = [len(parts) for parts in replicas]
        parts = [part for own in replicas for part in own]
        self._transports = [LocalTransport(device, self._boxes) for device in range(len(parts))]
        self.stages = [
            Stage(position, part, transport)
            for position, part, transport in zip(
                stage_positions(self.replica_sizes), parts, self._transports, strict=True
            )
        ]
        self._going = [RunningStage(stage) for stage in self.stages]
        self._ended: dict[int, dict[int, StageOutcome]] = defaultdict(dict)
        """Outcomes of programs by stage, until `wait` collects them."""
        self._num_appended = 0

    def call_all(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.call_each(what, {stage.device: given for stage in self.stages})

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Lets the stages run in turn, each until it must wait for another. Where one fails, all end."""
        waiting = {device: answer(self.stages[device], what, own) for device, own in given.items()}
        try:
            found = self._take_turns(waiting)
        except BaseException:
            for index, running in waiting.items():
                with self.stages[index].at_work():
                    running.close()
            if what in TOGETHER:
                # Other calls may fail while programs go on, and leaves what they have sent.
                self._boxes.clear()
            raise
        return [found[device] for device in given]

    def _take_turns(self, waiting: dict[int, Generator[None, None, Any]]) -> dict[int, Any]:
        """Runs them to their ends, and returns their results."""
        found: dict[int, Any] = {}
        while waiting:
            for index, running in list(waiting.items()):
                self._transports[index].begin_turn()
                try:
                    with self.stages[index].at_work():
                        next(running)
                except StopIteration as end:
                    found[index] = end.value
                    del waiting[index]
            self._check_not_stuck(waiting)
        return found

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        """Runs the stages' lists in turn."""
        self._num_appended += 1
        for stage, (going, own) in enumerate(zip(self._going, lists, strict=True)):
            going.append(self._num_appended, work, own, due_at(due, stage))
        self._run()
        return self._num_appended

    def go_on(self, lists: Lists, due: Due) -> None:
        """Runs the rest in turn."""
        for stage, (going, own) in enumerate(zip(self._going, lists, strict=True)):
            going.program.go_on(own, due_at(due, stage))
        self._run()

    def outcomes(self, number: int) -> list[StageOutcome]:
        """The outcomes so far."""
        found = self._ended.pop(number)
        return [found[stage] for stage in range(len(self.stages))]

    def check(self) -> None:
        """Has no process that could end."""

    def close(self) -> None:
        """Has nothing to end."""

    def _run(self) -> None:
        try:
            while working := [stage for stage, going in enumerate(self._going) if going.program.has_work]:
                for stage in working:
                    self._transports[stage].begin_turn()
                    for number, outcome in self._going[stage].turn():
                        self._ended[number][stage] = outcome
                self._check_not_stuck([stage for stage in working if self._going[stage].program.has_work])
        except BaseException:
            for going in self._going:
                going.fail()
            self._boxes.clear()
            raise

    def _check_not_stuck(self, working: Collection[int]) -> None:
        """RuntimeError if all that have work left wait for each other: they would for ever."""
        awaited = [self._transports[stage].awaited for stage in working]
        routes = [route for route in awaited if route is not None]
        if routes and len(routes) == len(working):
            waits = ", ".join(f"{r.target} for {r.channel.name.lower()} of {r.source}" for r in routes)
            raise RuntimeError(f"stages wait for each other for ever: {waits}")


class HostPeers:
    """Stands in for other devices: their slices lie in this machine's own memory, pinned where there is a GPU.

    For one GPU, to measure how much of gathering is hidden, and for tests.
    """

    can_be_recorded = True

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        """`index`: which of the `count` the one device here is."""
        self.index, self.count = index, count
        self._device = device
        self._stream = Stream(device) if has_streams(device) else None
        self._slices: dict[int, list[torch.Tensor]] = {}

    def keep(self, layer: int, whole: torch.Tensor) -> torch.Tensor:
        """One slice; the others go to the machine's memory."""
        slices = list(whole.chunk(self.count))
        own = slices[self.index].clone()
        host = [one.cpu().clone() for one in slices]
        self._slices[layer] = host if self._stream is None else [one.pin_memory() for one in host]
        return own

    def gather(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> PendingGather:
        """Copies the others' slices, on a GPU beside whatever else it does."""
        if self._stream is None:
            self._copy(layer, own, into)
            return _Copied(None)
        # What is overwritten has been read: that was requested before.
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            self._copy(layer, own, into)
        return _Copied(self._stream)

    def most(self, number: int) -> int:
        """That of the one device there is."""
        return number

    def _copy(self, layer: int, own: torch.Tensor, into: torch.Tensor) -> None:
        slices = self._slices[layer]
        for position, target in enumerate(into.chunk(self.count)):
            target.copy_(own if position == self.index else slices[position], non_blocking=True)


class _Copied:
    """A copy that a stream makes, or that has been made."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def wait(self) -> None:
        """Makes all later work of the device wait for it."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)
