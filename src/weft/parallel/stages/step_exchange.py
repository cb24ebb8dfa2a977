"""What the stages tell each other about a job's step: parts of its gradient, and the verdict about the whole.

A job's step needs the norm of its whole gradient. Whoever has a part of it sends it to the first of them, the judge,
which tells all stages that step the norm and whether the losses are finite. Parts of one replica are put together
(`gradient.py`), and twins get their sum. Where several replicas have samples of the job, the judge adds their sums
(`spread_sums.py`), and each stage gets what it steps by. When a replica is lost meanwhile, no gradient of a spread job
is whole any more: its steps are left out and nobody waits for what does not come, so that all other jobs of the program
go on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from weft.parallel.stages.gradient import JobShare, Verdict, by_group, combine_gradient_norm, gradient_part, part_size
from weft.parallel.stages.routes import Due, StepOf
from weft.parallel.stages.spread_sums import SpreadPart, combine_spread_sums, receive_part, slices
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.transport import Channel, Route, StageGoneError
from weft.plan.program import Measure, Program, Step

Part = torch.Tensor | SpreadPart
"""Of a gradient: of a job that one replica has, or of one that is spread."""


@dataclass(frozen=True)
class Judged:
    """What a stage steps a job by."""

    verdict: Verdict
    gradient: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By group, what was summed elsewhere: its part of the sum of all replicas, if there are several, or of twins."""


class StepExchange:
    """One stage's side of it, for one program or for several that go on."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._measuring: dict[Measure, tuple[int, ...]] = {}
        """Who measures the steps that are left here."""
        self._replicas: Sequence[range] = ()
        self._due: defaultdict[Route, deque[StepOf]] = defaultdict(deque)
        self._parts: dict[tuple[int, StepOf], Part] = {}
        """On the judge: what stages have sent and nobody has asked for, by stage and step."""
        self._judged: dict[StepOf, Judged] = {}
        """What has been found or heard and not been stepped by."""
        self._is_cut_off = False
        """A replica is gone that this stage has heard of."""

    def know(self, program: Program) -> None:
        """A program begins."""
        self._replicas = program.replicas
        own = {(i.job, i.step) for i in program.stages[self._stage.device] if isinstance(i, Measure | Step)}
        self._measuring |= {of: stages for of, stages in program.measuring.items() if (of.job, of.step) in own}

    def expect(self, due: Due) -> None:
        """Others are going to tell of these steps, behind all that they were going to tell of."""
        for route, steps in due.items():
            self._due[route] += steps

    def is_measured(self, step: StepOf) -> bool:
        """Whether the program says when; where one stage has all layers, that is when it steps."""
        return Measure(*step) in self._measuring

    def measure(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Sends this stage's part to the judge; the judge waits for all."""
        judge = self._measuring.get(Measure(*step), (self._stage.device,))[0]
        if judge != self._stage.device:
            for message in self._messages(step, is_finite):
                self._stage.transport.send(message, judge, Channel.PART)
        elif self._is_spread(step[0]):
            yield from self._combine_spread(step, is_finite)
        else:
            yield from self._judge(step, is_finite)

    def verdict(self, step: StepOf) -> Generator[None, None, Verdict]:
        """Waits for what the judge found; a gradient that was summed elsewhere is in its place then."""
        stage, weights = self._stage, self._stage.weights_of(step[0])
        while step not in self._judged:
            judge = self._measuring[Measure(*step)][0]
            try:
                coming = self._due[Route(Channel.NORM, judge, stage.device)].popleft()
                self._judged[coming] = yield from self._receive_norm(judge, coming)
            except StageGoneError:
                if not self._is_spread(step[0]):
                    raise
                self._is_cut_off = True
                return self._left_out()
        found = self._judged.pop(step)
        self._measuring.pop(Measure(*step), None)
        if found.gradient and weights is not None:
            weights.adapter.write_gradients(found.gradient)
        return found.verdict

    def _is_spread(self, job: str) -> bool:
        """Whether several replicas hold the job."""
        return len(self._stage.shares[job]) > 1

    def _messages(self, step: StepOf, is_finite: torch.Tensor) -> list[torch.Tensor]:
        """This stage's part."""
        weights = self._stage.weights_of(step[0])
        if self._is_spread(step[0]):
            return SpreadPart.of(weights, is_finite=bool(is_finite > 0)).messages(self._stage.backbone.device)
        if weights is not None:
            weights.adapter.complete_gradients()
            if self._stage.backbone.devices is not None:
                weights.adapter.add_up_gradients(self._stage.backbone.devices)
        return [gradient_part(weights, is_finite)]

    def _judge(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Judges a gradient that one replica has."""
        stage, shares = self._stage, self._stage.replica_shares(step[0])
        parts = self._messages(step, is_finite)
        others = range(stage.device + 1, stage.device + len(shares))
        for device in others:
            part = yield from self._part(device, step)
            assert isinstance(part, torch.Tensor)
            parts.append(part)
        verdict, twins = combine_gradient_norm(parts, shares, stage.optimizer_kind(step[0]).norm_of)
        self._judged[step] = Judged(verdict, twins)
        for device, share in zip(others, shares[1:], strict=True):
            stage.transport.send(verdict.told, device, Channel.NORM)
            for group in share.twins:
                stage.transport.send(twins[group], device, Channel.NORM)

    def _combine_spread(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Judges the sum of what several replicas have, and gives every stage its part of it."""
        stage, all_shares = self._stage, self._stage.shares[step[0]]
        found = yield from self._summed(step, is_finite)
        for replica, shares in all_shares.items():
            if found is None:
                verdict = self._left_out()
                parts = [torch.zeros(share.num_trained, device=stage.backbone.device) for share in shares]
            else:
                verdict, parts = found[0], slices(found[1], shares)
            for device, own in zip(self._replicas[replica], parts, strict=True):
                if device == stage.device:
                    self._judged[step] = Judged(verdict, by_group(own, self._share(device, step[0])))
                    continue
                stage.transport.send(verdict.told, device, Channel.NORM)
                if len(own):
                    stage.transport.send(own, device, Channel.NORM)

    def _summed(
        self, step: StepOf, is_finite: torch.Tensor
    ) -> Generator[None, None, tuple[Verdict, dict[str, torch.Tensor]] | None]:
        """What is found of the sum of all replicas; None if one of them is gone. What the others have sent is taken
        nevertheless: they wait for that."""
        stage, measuring = self._stage, {*self._measuring[Measure(*step)]}
        replicas: list[tuple[Sequence[SpreadPart], Sequence[JobShare]]] = []
        for replica, shares in stage.shares[step[0]].items():
            devices = self._replicas[replica]
            if devices.start not in measuring:
                continue
            parts: list[SpreadPart] = []
            for device in devices:
                if device == stage.device:
                    part: Part = SpreadPart.of(stage.weights_of(step[0]), is_finite=bool(is_finite > 0))
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

    def _left_out(self) -> Verdict:
        """What lets a job take no step."""
        return Verdict(*torch.zeros(2, device=self._stage.backbone.device).unbind())

    def _part(self, device: int, step: StepOf) -> Generator[None, None, Part]:
        """What another stage measured of a step; what it sent before that is kept."""
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

    def _receive_norm(self, judge: int, step: StepOf) -> Generator[None, None, Judged]:
        told = yield from self._received(judge, Channel.NORM, (2,), torch.float32)
        share, gradient = self._share(self._stage.device, step[0]), dict[str, torch.Tensor]()
        if not self._is_spread(step[0]):
            for group in share.twins:
                size = (share.sizes[group],)
                gradient[group] = yield from self._received(judge, Channel.NORM, size, torch.float32)
        elif share.num_trained:
            size = (share.num_trained,)
            gradient = by_group((yield from self._received(judge, Channel.NORM, size, torch.float32)), share)
        return Judged(Verdict(*told.unbind()), gradient)

    def _share(self, device: int, job: str) -> JobShare:
        """What a stage holds of a job."""
        replica = next(number for number, devices in enumerate(self._replicas) if device in devices)
        return self._stage.shares[job][replica][device - self._replicas[replica].start]

    def _received(
        self, device: int, channel: Channel, shape: Sequence[int], dtype: torch.dtype
    ) -> Generator[None, None, torch.Tensor]:
        """Waits for the next tensor that a stage sends."""
        while (tensor := self._stage.transport.receive(shape, dtype, device, channel)) is None:
            yield
        return tensor
