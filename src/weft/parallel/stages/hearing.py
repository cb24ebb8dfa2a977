"""What a microbatch has to know of references, on its way through a stage in front of it.

On one device a reference is heard before the first microbatch that asks for it. So it is here: its samples go from
stage to stage right before that microbatch, forward only and by the same channel, so that no plan has to know of them.
Only the last stage hears what is said; the others know by themselves what has been asked (`stage_references.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

import torch

from weft.engine.execute.references import Asked, ReferencePass, reference_passes, requested_rows
from weft.model.packed import PackedBatch
from weft.parallel.stages.stage import Stage
from weft.parallel.stages.transport import Channel
from weft.plan.types import Microbatch


class Hearing:
    """The references of one microbatch on one stage."""

    def __init__(self, stage: Stage, asked: Sequence[Asked], row_tile: int, limit: int) -> None:
        """From now on all that is `asked` counts as asked for; passes have at most `limit` tokens or one sample."""
        self._stage, self._row_tile = stage, row_tile
        self._asked = asked
        self._entering: deque[torch.Tensor] = deque()
        self._leaving: list[torch.Tensor] = []
        self._passes: list[tuple[ReferencePass, PackedBatch]] = []
        for each in reference_passes(asked, limit):
            for one in each.asked:
                one.rows.is_coming = True
            self._passes.append((each, each.packed(row_tile, stage.backbone.device)))

    @property
    def num_passes(self) -> int:
        """Ways through the model."""
        return len(self._passes)

    @property
    def num_rows(self) -> int:
        """Rows that run, padding included."""
        return sum(batch.num_rows for _, batch in self._passes)

    def receive(self) -> Generator[None, None, None]:
        """Waits for what the stage before has made of all passes."""
        for _, batch in self._passes:
            self._entering.append((yield from self._stage.receive_activation(batch)))

    def run(self) -> None:
        """Runs all passes through this stage."""
        stage = self._stage
        for each, batch in self._passes:
            entering_TD = self._entering.popleft() if self._entering else None
            left = stage.runner.read(batch, self._row_tile, entering_TD)
            if stage.is_last:
                each.learn(stage.backbone, batch, left)
            else:
                self._leaving.append(left)
                for one in each.asked:
                    one.rows.learn()

    def send(self) -> None:
        """Hands them on to the next stage."""
        for left_TD in self._leaving:
            self._stage.transport.send(left_TD, self._stage.device + 1, Channel.ACTIVATION)
        self._leaving.clear()

    def end(self) -> None:
        """Lets go of what is not kept; the microbatch has read it."""
        for each in self._asked:
            if not each.reference.keeps:
                each.rows.let_go()


def stage_reference_pass(stage: Stage, microbatch: Microbatch, batch: PackedBatch, row_tile: int) -> Hearing:
    """What a microbatch of a program has to know."""
    askers = {name: stage.asker(name) for name in microbatch.job_tokens}
    return Hearing(stage, requested_rows(microbatch, batch, row_tile, askers), row_tile, batch.num_rows)
