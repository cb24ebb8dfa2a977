"""Starts a job by EVA on one stage: the job's first samples go from stage to stage, and each hears its own modules.

Jobs get their seats while programs run, which have the ways between the stages to themselves. So here the coordinator
carries what crosses a border (`find_start.py`). It also hears from all stages when they know enough, which one device
would ask of all its modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.adapters.adapter import Adapter
from weft.engine.execute.eva import LinearInputs, passes, set_initial_directions
from weft.engine.execute.protocol import NewJob
from weft.kernels.device import CPU
from weft.model.backbone import Backbone


@dataclass(frozen=True)
class StagePassResult:
    """What a stage tells of one pass."""

    left_TD: torch.Tensor | None
    """On the CPU, for the next stage, if there is one."""
    is_enough: bool
    """Whether it need not hear more."""


class StageStart:
    """One job's start on one stage."""

    def __init__(self, backbone: Backbone, job: NewJob, adapter: Adapter | None) -> None:
        """`adapter`: its share of the stage, if it has one."""
        eva = job.spec.adapter.eva
        assert eva is not None and backbone.part is not None
        ranks = {} if adapter is None else {path: job.spec.adapter.rank_for(path) for path in adapter.modules}
        self._backbone, self._adapter = backbone, adapter
        self._is_last = backbone.part.is_last
        self._inputs = LinearInputs(backbone, ranks, eva, job.spec.seed)
        self._passes = passes(job.batches.samples_from(0))

    def hear(self, entering_TD: torch.Tensor | None) -> StagePassResult | None:
        """Runs the next pass; None if there are no more samples."""
        samples = next(self._passes, None)
        if samples is None:
            return None
        left_TD = self._inputs.run(samples, None if entering_TD is None else entering_TD.to(self._backbone.device))
        return StagePassResult(None if self._is_last else left_TD.to(CPU), self._inputs.are_enough)

    def give(self) -> None:
        """Puts what has been heard into the share."""
        if self._adapter is not None:
            set_initial_directions(self._adapter, self._inputs.directions())
