"""Messages between stages about a job's step: parts of its gradient, the norm, and sums.

A job's step needs the norm of its whole gradient. Every stage that has a part of it sends it to the first of them, the
root stage, which returns the norm, and whether the losses are finite, to all stages that step. Parts of one replica are
put together, and tied rows get their sum. Where several replicas have samples of the job, the root
stage adds their sums, and each stage receives the gradient it steps by. When a replica is lost meanwhile, no gradient
of a spread job is whole any more: its steps are skipped and no stage waits for them, so that all other jobs of the
program continue. `work.py` has the order of messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from weft.parallel.stages.shares import (
    GradientNorm,
    JobShare,
    SpreadPart,
    by_group,
    combine_gradient_norm,
    combine_spread_sums,
    gradient_part,
    part_size,
    receive_part,
    slices,
)
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.transport import Channel, Route, StageGoneError
from weft.parallel.stages.work import Due, StepOf
from weft.plan.program import Measure, Program, Step

Part = torch.Tensor | SpreadPart


@dataclass(frozen=True)
class MeasuredStep:
    norm: GradientNorm
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Gradient by group that the root stage has summed: over several replicas, or over tied rows."""


class StepExchange:
    """One stage's side of the exchange, for one program or several consecutive ones."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._measuring: dict[Measure, tuple[int, ...]] = {}
        self._replicas: Sequence[range] = ()
        self._due: defaultdict[Route, deque[StepOf]] = defaultdict(deque)
        self._parts: dict[tuple[int, StepOf], Part] = {}
        """Parts of gradients that have arrived early on the root stage, by stage and step."""
        self._measured: dict[StepOf, MeasuredStep] = {}
        self._is_cut_off = False
        """True once a replica is gone."""

    def know(self, program: Program) -> None:
        self._replicas = program.replicas
        own = {(i.job, i.step) for i in program.stages[self._stage.device] if isinstance(i, Measure | Step)}
        self._measuring |= {of: stages for of, stages in program.measuring.items() if (of.job, of.step) in own}

    def expect(self, due: Due) -> None:
        for route, steps in due.items():
            self._due[route] += steps

    def is_measured(self, step: StepOf) -> bool:
        """True if the program measures the step separately; else that happens when it steps."""
        return Measure(*step) in self._measuring

    def measure(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Sends this stage's part to the root stage, which waits for all."""
        root = self._measuring.get(Measure(*step), (self._stage.device,))[0]
        if root != self._stage.device:
            for message in self._messages(step, is_finite):
                self._stage.transport.send(message, root, Channel.PART)
        elif self._is_spread(step[0]):
            yield from self._combine_spread(step, is_finite)
        else:
            yield from self._combine(step, is_finite)

    def gradient_norm(self, step: StepOf) -> Generator[None, None, GradientNorm]:
        """Waits for the root stage's result, and writes a gradient that was summed elsewhere into the adapter."""
        stage, weights = self._stage, self._stage.weights_of(step[0])
        while step not in self._measured:
            root = self._measuring[Measure(*step)][0]
            try:
                coming = self._due[Route(Channel.NORM, root, stage.device)].popleft()
                self._measured[coming] = yield from self._receive_norm(root, coming)
            except StageGoneError:
                if not self._is_spread(step[0]):
                    raise
                self._is_cut_off = True
                return self._left_out()
        found = self._measured.pop(step)
        self._measuring.pop(Measure(*step), None)
        if found.gradient and weights is not None:
            weights.adapter.write_gradients(found.gradient)
        return found.norm

    def _is_spread(self, job: str) -> bool:
        return len(self._stage.shares[job]) > 1

    def _messages(self, step: StepOf, is_finite: torch.Tensor) -> list[torch.Tensor]:
        weights = self._stage.weights_of(step[0])
        if self._is_spread(step[0]):
            return self._own_part(step, is_finite).messages(self._stage.backbone.device)
        if weights is not None and self._stage.backbone.devices is not None:
            weights.adapter.add_up_gradients(self._stage.backbone.devices)
        elif weights is not None:
            weights.adapter.complete_gradients()
        return [gradient_part(weights, is_finite)]

    def _combine(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        stage, shares = self._stage, self._stage.replica_shares(step[0])
        parts = self._messages(step, is_finite)
        others = range(stage.device + 1, stage.device + len(shares))
        for device in others:
            part = yield from self._part(device, step)
            assert isinstance(part, torch.Tensor)
            parts.append(part)
        norm, tied = combine_gradient_norm(parts, shares, stage.optimizer_kind(step[0]).norm_of)
        self._measured[step] = MeasuredStep(norm, tied)
        for device, share in zip(others, shares[1:], strict=True):
            stage.transport.send(norm.message, device, Channel.NORM)
            for group in share.tied:
                stage.transport.send(tied[group], device, Channel.NORM)

    def _combine_spread(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Measures the sum over several replicas, and gives every stage its part of it."""
        stage, all_shares = self._stage, self._stage.shares[step[0]]
        found = yield from self._summed(step, is_finite)
        for replica, shares in all_shares.items():
            if found is None:
                norm = self._left_out()
                parts = [torch.zeros(share.num_trained, device=stage.backbone.device) for share in shares]
            else:
                norm, parts = found[0], slices(found[1], shares)
            for device, own in zip(self._replicas[replica], parts, strict=True):
                if device == stage.device:
                    self._measured[step] = MeasuredStep(norm, by_group(own, self._share(device, step[0])))
                    continue
                stage.transport.send(norm.message, device, Channel.NORM)
                if len(own):
                    stage.transport.send(own, device, Channel.NORM)

    def _summed(
        self, step: StepOf, is_finite: torch.Tensor
    ) -> Generator[None, None, tuple[GradientNorm, dict[str, torch.Tensor]] | None]:
        """Sum over all replicas; None if one of them is gone. What the others send is received all the same."""
        stage, measuring = self._stage, {*self._measuring[Measure(*step)]}
        replicas: list[tuple[Sequence[SpreadPart], Sequence[JobShare]]] = []
        for replica, shares in stage.shares[step[0]].items():
            devices = self._replicas[replica]
            if devices.start not in measuring:
                continue
            parts: list[SpreadPart] = []
            for device in devices:
                if device == stage.device:
                    part: Part = self._own_part(step, is_finite)
                else:
                    try:
                        part = yield from self._part(device, step)
                    except StageGoneError:
                        self._is_cut_off = True
                        continue
                assert isinstance(part, SpreadPart)
                parts.append(part)
            replicas.append((parts, shares))
        return None if self._is_cut_off else combine_spread_sums(replicas, stage.optimizer_kind(step[0]).norm_of)

    def _own_part(self, step: StepOf, is_finite: torch.Tensor) -> SpreadPart:
        stage = self._stage
        return SpreadPart.of(stage.weights_of(step[0]), stage.backbone.devices, is_finite=bool(is_finite > 0))

    def _left_out(self) -> GradientNorm:
        return GradientNorm(*torch.zeros(2, device=self._stage.backbone.device).unbind())

    def _part(self, device: int, step: StepOf) -> Generator[None, None, Part]:
        due = self._due[Route(Channel.PART, device, self._stage.device)]
        while (device, step) not in self._parts:
            coming = due.popleft()
            share, receive = self._share(device, coming[0]), partial(self._received, device, Channel.PART)
            part: Part
            if self._is_spread(coming[0]):
                part = yield from receive_part(receive, share)
            else:
                part = yield from receive((part_size(share),), torch.float32)
            self._parts[device, coming] = part
        return self._parts.pop((device, step))

    def _receive_norm(self, root: int, step: StepOf) -> Generator[None, None, MeasuredStep]:
        message = yield from self._received(root, Channel.NORM, (2,), torch.float32)
        share, gradient = self._share(self._stage.device, step[0]), dict[str, torch.Tensor]()
        if not self._is_spread(step[0]):
            for group in share.tied:
                size = (share.sizes[group],)
                gradient[group] = yield from self._received(root, Channel.NORM, size, torch.float32)
        elif share.num_trained:
            size = (share.num_trained,)
            gradient = by_group((yield from self._received(root, Channel.NORM, size, torch.float32)), share)
        return MeasuredStep(GradientNorm(*message.unbind()), gradient)

    def _share(self, device: int, job: str) -> JobShare:
        replica = next(number for number, devices in enumerate(self._replicas) if device in devices)
        return self._stage.shares[job][replica][device - self._replicas[replica].start]

    def _received(
        self, device: int, channel: Channel, shape: Sequence[int], dtype: torch.dtype
    ) -> Generator[None, None, torch.Tensor]:
        while (tensor := self._stage.transport.receive(shape, dtype, device, channel)) is None:
            yield
        return tensor
