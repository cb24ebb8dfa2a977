"""What the stages tell each other about a job's step: parts of its gradient, and the verdict about the whole.

A job's step needs the norm of its whole gradient. Whoever has a part of it sends it to the first of them, the judge,
which tells all stages that step the norm and whether the losses are finite. Parts of one replica are put together
(`gradient.py`). Where several replicas have samples of the job, the judge adds their sums (`spread_sums.py`), and each
stage gets what it steps by.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import torch

from weft.execute.stages.gradient import JobShare, Verdict, gradient_part, judge_gradient, part_size
from weft.execute.stages.spread_sums import SpreadPart, by_group, judge_sums, receive_part, slices
from weft.execute.stages.stage import Stage
from weft.execute.stages.transport import FIRST_FREE
from weft.plan.program import Measure, Program, Step

StepOf = tuple[str, int]
"""A job and its step."""


class StepExchange:
    """One stage's side of it, for one program."""

    def __init__(self, stage: Stage, program: Program) -> None:
        self._stage, self._program = stage, program
        self._measuring = program.measuring
        self._replicas = program.replicas
        steps = sorted({(i.job, i.step) for own in program.stages for i in own if isinstance(i, Step)})
        self._numbers = {step: number for number, step in enumerate(steps)}
        self._found: dict[StepOf, tuple[Verdict, torch.Tensor | None]] = {}
        """On the judge, until it steps itself."""

    def is_measured(self, step: StepOf) -> bool:
        """Whether the program says when; where one stage has all layers, that is when it steps."""
        return Measure(*step) in self._measuring

    def measure(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Sends this stage's part to the judge; the judge waits for all."""
        judge, tag = self._measuring.get(Measure(*step), (self._stage.device,))[0], self._tags(step)[0]
        if judge != self._stage.device:
            for message in self._messages(step, is_finite):
                self._stage.transport.send(message, judge, tag)
        elif self._is_spread(step[0]):
            yield from self._judge_spread(step, is_finite)
        else:
            yield from self._judge(step, is_finite)

    def verdict(self, step: StepOf) -> Generator[None, None, Verdict]:
        """Waits for what the judge found; a gradient that was summed elsewhere is in its place then."""
        stage, weights = self._stage, self._stage.weights_of(step[0])
        found = self._found.pop(step, None)
        if found is not None:
            verdict, own = found
        else:
            judge, tag = self._measuring[Measure(*step)][0], self._tags(step)[1]
            told = yield from self._received(judge, tag, (2,), torch.float32)
            verdict, own = Verdict(*told.unbind()), None
            if self._is_spread(step[0]) and weights is not None:
                share = stage.own_shares(step[0])[stage.index]
                own = yield from self._received(judge, tag, (share.num_trained,), torch.float32)
        if own is not None and weights is not None:
            weights.adapter.put_gradients(by_group(own, stage.own_shares(step[0])[stage.index]))
        return verdict

    def _is_spread(self, job: str) -> bool:
        """Whether several replicas hold the job."""
        return len(self._stage.shares[job]) > 1

    def _messages(self, step: StepOf, is_finite: torch.Tensor) -> list[torch.Tensor]:
        """This stage's part."""
        weights = self._stage.weights_of(step[0])
        if self._is_spread(step[0]):
            return SpreadPart.of(weights, is_finite=bool(is_finite > 0)).messages()
        if weights is not None:
            if self._stage.backbone.devices is not None:
                weights.adapter.add_up_gradients(self._stage.backbone.devices)
            weights.adapter.complete_gradients()
        return [gradient_part(weights, is_finite)]

    def _judge(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Judges a gradient that one replica has."""
        stage, tag = self._stage, self._tags(step)[0]
        shares, parts = stage.own_shares(step[0]), self._messages(step, is_finite)
        for place in range(1, len(shares)):
            size = (part_size(shares[place]),)
            parts.append((yield from self._received(stage.device + place, tag, size, torch.float32)))
        verdict = judge_gradient(parts, shares, stage.optimizer_kind(step[0]).norm_of)
        self._found[step] = (verdict, None)
        for place in range(1, len(shares)):
            stage.transport.send(verdict.told, stage.device + place, self._tags(step)[1])

    def _judge_spread(self, step: StepOf, is_finite: torch.Tensor) -> Generator[None, None, None]:
        """Judges the sum of what several replicas have, and gives every stage its part of it."""
        stage, (part_tag, verdict_tag) = self._stage, self._tags(step)
        measuring = {*self._measuring[Measure(*step)]}
        all_shares = stage.shares[step[0]]
        replicas: list[tuple[Sequence[SpreadPart], Sequence[JobShare]]] = []
        for replica, shares in all_shares.items():
            devices = self._replicas[replica]
            if devices.start not in measuring:
                continue
            parts: list[SpreadPart] = []
            for device, share in zip(devices, shares, strict=True):
                if device == stage.device:
                    parts.append(SpreadPart.of(stage.weights_of(step[0]), is_finite=bool(is_finite > 0)))
                else:
                    parts.append((yield from receive_part(partial(self._received, device, part_tag), share)))
            replicas.append((parts, shares))
        verdict, gradient = judge_sums(replicas)
        for replica, shares in all_shares.items():
            for device, own in zip(self._replicas[replica], slices(gradient, shares), strict=True):
                if device == stage.device:
                    self._found[step] = (verdict, own)
                    continue
                stage.transport.send(verdict.told, device, verdict_tag)
                if len(own):
                    stage.transport.send(own, device, verdict_tag)

    def _received(
        self, device: int, tag: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Generator[None, None, torch.Tensor]:
        """Waits for the next tensor that a device sends."""
        while (tensor := self._stage.transport.receive(shape, dtype, device, tag)) is None:
            yield
        return tensor

    def _tags(self, step: StepOf) -> tuple[int, int]:
        """Of the parts of a gradient, and of what the judge finds; each step of a program has its own."""
        first = FIRST_FREE + 2 * self._numbers[step]
        return first, first + 1
