"""AdamW whose moments are kept in 8 bits a number: a quarter of their memory, and two thirds of a step's traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch

from weft.adapters.adapter import Adapter
from weft.engine.execute.optimizers.optimizer import Optimizer, PartOfStep, Results, counting_steps
from weft.kernels.adamw import Update, Updated
from weft.kernels.adamw_8bit import SCALED, QuantisedLane, adamw_8bit
from weft.kernels.launch import cdiv
from weft.spec import JobSpec


class AdamW8bit(Optimizer):
    """Steps the flat buffers of an adapter; on a GPU one kernel for all jobs of this kind."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        super().__init__(adapter, spec)
        self._states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in adapter.groups}

    @property
    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Codes and scales of the first moment and of the root of the second, and the step, by group."""
        return self._states

    def make_moments(self) -> None:
        """Takes the memory for moments that are not there yet."""
        for name, state in self._states.items():
            if not state:
                params = self.adapter.groups[name].params
                num_scales = cdiv(params.numel(), SCALED)
                state.update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(params, dtype=torch.int8),
                    exp_avg_scales=params.new_zeros(num_scales),
                    root=torch.zeros_like(params, dtype=torch.uint8),
                    root_scales=params.new_zeros(num_scales),
                )

    def step(self, is_finite: bool, part: PartOfStep | None = None) -> Updated:
        """Clips and applies the gradients. A part is all of an adapter: stages that would cut one refuse its job."""
        return self.start_all([self], [is_finite], None)()[0]

    def start_part(self, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
        """The same on a GPU."""
        results = self.start_all([self], [True], is_finite.float().view(1))
        return lambda: results()[0]

    @classmethod
    def start_all(cls, optimizers: Sequence[Self], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
        """All steps in one call of the kernel; memory is taken before anything is changed."""
        updates = [optimizer._update(is_finite) for optimizer, is_finite in zip(optimizers, finite, strict=True)]
        return counting_steps(optimizers, adamw_8bit(updates, finite_J))

    def _update(self, is_finite: bool) -> Update:
        spec = self.spec
        self.make_moments()
        lanes = tuple(
            QuantisedLane(
                params_P=group.params,
                grad_P=group.grad,
                exp_avg_P=state["exp_avg"],
                exp_avg_sq_P=state["root"],
                rate=rate,
                exp_avg_scales=state["exp_avg_scales"],
                root_scales=state["root_scales"],
            )
            for state, group, rate in zip(
                self._states.values(), self.adapter.groups.values(), self.rates.values(), strict=True
            )
        )
        number = int(next(iter(self._states.values()))["step"]) + 1
        betas = (spec.adam_beta1, spec.adam_beta2)
        return Update(
            lanes, number, betas, spec.adam_epsilon, spec.weight_decay, spec.max_grad_norm, is_finite=is_finite
        )
