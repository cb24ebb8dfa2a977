"""Answers prompts on one stage: every stage keeps what its own layers remember of the answers under way.

For one token of each answer a pass goes through all stages. The last one chooses the tokens as one device does, and
tells all others, so that each of them knows which answers have ended and what comes next. Passes have the prompts that
they have on one device, and so the same bits; while one is on its way, so are others, as many as there are stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack

import torch

from weft.engine.execute.protocol import AnswersWork
from weft.engine.inference.answers import requests_of
from weft.engine.inference.generate import BATCH, Continuation, end_tokens, last_rows, pack_new
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.transport import Channel, Route

Asked = tuple[Continuation, int]
"""An answer, and how many rows its job's adapter has in front of the prompt."""


def answer_prompts(stage: Stage, work: AnswersWork) -> Generator[None, None, list[list[list[int]]]]:
    """The tokens of all answers by job, which only the last stage tells.

    It yields where another stage must have its turn.
    """
    ring = stage.backbone.ring
    with ExitStack() as slots:
        asked = {name: _asked(stage, work, name, slots) for name in work.prompts}
        flat = [one for own in asked.values() for one in own]
        waiting = deque(_Group(stage, flat[start : start + BATCH]) for start in range(0, len(flat), BATCH))
        under_way: deque[_Group] = deque()
        stage.transport.open(_routes(stage))
        while waiting or under_way:
            if waiting and len(under_way) < stage.num_stages:
                group = waiting.popleft()
            else:
                group = under_way.popleft()
                yield from group.hear()
                if not group.going:
                    continue
            if ring is not None:
                ring.most(1)
            yield from group.run()
            under_way.append(group)
        stage.transport.finish()
        while ring is not None and ring.most(0):
            # Devices that share the frozen weights go on until the longest answer of all has ended.
            ring.run_empty_pass(back=False)
    return [[item.tokens for item, _ in own] for own in asked.values()] if stage.is_last else []


class _Group:
    """Answers that share passes."""

    def __init__(self, stage: Stage, asked: Sequence[Asked]) -> None:
        self._stage = stage
        self._ends, self._longest = end_tokens(stage.backbone), stage.backbone.max_positions
        self._chosen: list[int] = []
        """On the last stage: the tokens of the last pass."""
        self.going = list(asked)
        """Those that have not ended."""

    def run(self) -> Generator[None, None, None]:
        """Has this stage read what is new of each."""
        stage, items = self._stage, [item for item, _ in self.going]
        batch = pack_new(items, [num_leading for _, num_leading in self.going], stage.backbone.device)
        entering_TD = None if stage.is_first else (yield from stage.receive_activation(batch))
        caches = [item.cache for item in items]
        if not stage.is_last:
            left_TD = stage.backbone.pass_on(batch, caches, entering_TD)
            stage.transport.send(left_TD, stage.device + 1, Channel.ACTIVATION)
            return
        logits_NV = stage.backbone.logits(batch, last_rows(batch), caches, entering_TD)
        self._chosen = [item.choose(logits_V) for item, logits_V in zip(items, logits_NV, strict=True)]
        for other in range(stage.device - stage.index, stage.device):
            stage.transport.send(torch.tensor(self._chosen, device=stage.backbone.device), other, Channel.CHOICE)

    def hear(self) -> Generator[None, None, None]:
        """Adds what the last stage has chosen in the last pass."""
        stage, chosen = self._stage, self._chosen
        if not stage.is_last:
            shape, last = (len(self.going),), stage.device - stage.index + stage.num_stages - 1
            while (told := stage.transport.receive(shape, torch.int64, last, Channel.CHOICE)) is None:
                yield
            chosen = told.tolist()
        for (item, num_leading), token in zip(self.going, chosen, strict=True):
            item.write(token, self._ends, self._longest, num_leading)
        self.going = [one for one in self.going if not one[0].is_over]


def _asked(stage: Stage, work: AnswersWork, job: str, slots: ExitStack) -> list[Asked]:
    """What a job is asked; its slot is kept as long as `slots` are."""
    slot = None if work.is_bare else slots.enter_context(stage.slot_of(job))
    num_leading = 0 if work.is_bare else stage.leading_rows(job)
    requests = requests_of(work.prompts[job], slot)
    return [(Continuation(request, work.decoding), num_leading) for request in requests]


def _routes(stage: Stage) -> set[Route]:
    """The ways between the stages of a replica."""
    first, last = stage.device - stage.index, stage.device - stage.index + stage.num_stages - 1
    onward = {Route(Channel.ACTIVATION, source, source + 1) for source in range(first, last)}
    return onward | {Route(Channel.CHOICE, last, target) for target in range(first, last)}
