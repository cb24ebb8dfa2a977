"""AdamW: torch's on a CPU, to the bits of a job trained alone with torch; on a GPU one fused kernel for all jobs.

Either way the moments live in the job's torch optimizer, under torch's names. With 8 bits a number they take a quarter
of the memory, and a step two thirds of the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch.optim.adamw import adamw as step_with_torch

from weft.adapters.adapter import Adapter
from weft.adapters.devices import Devices
from weft.engine.execute.optimizers.optimizer import (
    PREFIX,
    VECTOR,
    Optimizer,
    PartOfStep,
    Results,
    counting_steps,
    gradient_norm,
)
from weft.kernels.adamw import ParameterLane, Update, Updated, adamw, adamw_norm
from weft.kernels.adamw_8bit import SCALED, QuantisedLane, adamw_8bit
from weft.kernels.device_event import AsyncCopy
from weft.kernels.launch import cdiv
from weft.spec import JobSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(Optimizer):
    """Steps the flat buffers of an adapter, one per group, each with its own learning rate. Where devices share every
    layer, each has the moments of a part of every buffer, steps it, and gets the other parts from the others."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        super().__init__(adapter, spec)
        groups = []
        self._own = {
            name: _own_numbers(group.params.numel(), adapter.devices) for name, group in adapter.groups.items()
        }
        for name, group in adapter.groups.items():
            # The optimizer's parameter is the flat buffer itself, so its steps show in every module's view.
            parameter = torch.nn.Parameter(group.params[self._own[name]], requires_grad=True)
            parameter.grad = group.grad[self._own[name]]
            groups.append({"params": [parameter]})
        self._torch = torch.optim.AdamW(
            groups,
            lr=spec.learning_rate,
            betas=(spec.adam_beta1, spec.adam_beta2),
            eps=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=True,
        )

    @property
    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        states = (self._torch.state[group["params"][0]] for group in self._torch.param_groups)
        return dict(zip(self.adapter.groups, states, strict=True))

    def make_moments(self) -> None:
        for name, state in self.states.items():
            if not state:
                # Both or none: memory may run out between the two, and this is then tried again.
                params = self.adapter.groups[name].params[self._own[name]]
                moments = {name: torch.zeros_like(params) for name in MOMENTS}
                state.update(step=torch.tensor(0.0), **moments)

    def step(self, is_finite: bool, part: PartOfStep | None = None) -> Updated:
        groups = self.adapter.groups.values()
        norm = float(gradient_norm(group.grad for group in groups)) if part is None else float(part.norm)
        skipped = not (is_finite and math.isfinite(norm))
        if not skipped:
            self._clip(norm)
            for torch_group, rate in zip(self._torch.param_groups, self.rates.values(), strict=True):
                torch_group["lr"] = rate
            fills = {} if part is None else self._fills(part)
            if any(fills.values()):
                self._step_filled(fills)
            else:
                self._torch.step()
            self._share_steps()
        self.adapter.zero_grad()
        largest = float(torch.stack([group.params.abs().max() for group in groups]).max())
        return Updated(norm, largest, skipped)

    @property
    def divided(self) -> frozenset[str]:
        return frozenset(f"{PREFIX}{name}.{key}" for name in self.states for key in MOMENTS)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().take(tensors)
        for name, state in self.states.items():
            for key in state.keys() & {*MOMENTS} if self.adapter.devices is not None else ():
                if state[key].numel() == self.adapter.groups[name].params.numel():
                    state[key] = state[key][self._own[name]].clone()

    def _share_steps(self) -> None:
        """Exchanges stepped values: each device gets the parts of the buffers that the others have stepped."""
        devices = self.adapter.devices
        if devices is None:
            return
        for name, group in self.adapter.groups.items():
            own, num_all = self._own[name], group.params.numel()
            mine_P = group.params[own]
            padded_P = torch.nn.functional.pad(mine_P, (0, _part_size(num_all, devices.count) - mine_P.numel()))
            group.params.copy_(torch.cat(devices.gather(padded_P))[:num_all])

    def _fills(self, part: PartOfStep) -> dict[str, int]:
        """Zeros to put in front of each group, so that torch's vectors hold the same numbers as in the whole buffer."""
        found = {}
        for name, own in self._own.items():
            num = self.adapter.groups[name].params[own].numel()
            found[name] = -min(max(part.num_by_vectors[name] - own.start, 0), num) % VECTOR
        return found

    def _step_filled(self, fills: Mapping[str, int]) -> None:
        """Torch's step over copies with zeros in front."""
        spec, rates = self.spec, self.rates
        for name, state in self.states.items():
            group, numbers, fill = self.adapter.groups[name], self._own[name], fills[name]
            own = (group.params[numbers], group.grad[numbers], state["exp_avg"], state["exp_avg_sq"])
            filled = [torch.nn.functional.pad(tensor, (fill, 0)) for tensor in own]
            params, grad, exp_avg, exp_avg_sq = filled
            step_with_torch(
                [params],
                [grad],
                [exp_avg],
                [exp_avg_sq],
                max_exp_avg_sqs=[],
                state_steps=[state["step"]],
                fused=True,
                amsgrad=False,
                beta1=spec.adam_beta1,
                beta2=spec.adam_beta2,
                lr=rates[name],
                weight_decay=spec.weight_decay,
                eps=spec.adam_epsilon,
                maximize=False,
            )
            for tensor, stepped in zip(own, filled, strict=True):
                tensor.copy_(stepped[fill:])

    @classmethod
    def norm_of(cls, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        return adamw_norm(grads)

    def start_part(self, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
        wait = adamw([self.update(True)], is_finite.float().view(1), part.norm.float().view(1))
        results = counting_steps([self], wait)
        if self.adapter.devices is None:
            return lambda: results()[0]
        groups = self.adapter.groups.values()
        for group in groups:
            group.grad.zero_()
        self._share_steps()
        # The kernel has seen this device's numbers alone.
        arrival = AsyncCopy(torch.stack([torch.linalg.vector_norm(group.params, math.inf) for group in groups])).begin()
        return lambda: replace(results()[0], largest=float(arrival.get().max()))

    @classmethod
    def start_all(cls, optimizers: Sequence[Self], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
        """All steps in one call of the fused kernel. Memory is allocated before any change is made."""
        updates = [optimizer.update(is_finite) for optimizer, is_finite in zip(optimizers, finite, strict=True)]
        return counting_steps(optimizers, adamw(updates, finite_J))

    def update(self, is_finite: bool) -> Update:
        spec = self.spec
        self.make_moments()
        states, groups = self.states.values(), self.adapter.groups.values()
        lanes = tuple(
            ParameterLane(group.params[own], group.grad[own], state["exp_avg"], state["exp_avg_sq"], rate)
            for state, group, own, rate in zip(states, groups, self._own.values(), self.rates.values(), strict=True)
        )
        return Update(
            lanes,
            int(next(iter(states))["step"]) + 1,
            (spec.adam_beta1, spec.adam_beta2),
            spec.adam_epsilon,
            spec.weight_decay,
            spec.max_grad_norm,
            is_finite,
        )

    def _clip(self, norm: float) -> None:
        if not self.spec.max_grad_norm:
            return
        factor = self.spec.max_grad_norm / (norm + 1e-6)
        if factor < 1:
            for group in self.adapter.groups.values():
                group.grad.mul_(factor)


def _part_size(num_all: int, count: int) -> int:
    """Number of values of a buffer that each of `count` devices steps, in whole vectors; the last ones may step
    fewer."""
    return cdiv(cdiv(num_all, count), VECTOR) * VECTOR


def _own_numbers(num_all: int, devices: Devices | None) -> slice:
    if devices is None:
        return slice(0, num_all)
    size = _part_size(num_all, devices.count)
    return slice(min(num_all, devices.index * size), min(num_all, (devices.index + 1) * size))


class AdamW8bit(Optimizer):
    """Steps the flat buffers of an adapter; on a GPU one kernel serves all jobs of this kind."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        super().__init__(adapter, spec)
        self._states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in adapter.groups}

    @property
    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        return self._states

    def make_moments(self) -> None:
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
        """Clips and applies the gradients. A part is a whole adapter: stages that would divide one refuse its job."""
        return self.start_all([self], [is_finite], None)()[0]

    def start_part(self, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
        results = self.start_all([self], [True], is_finite.float().view(1))
        return lambda: results()[0]

    @classmethod
    def start_all(cls, optimizers: Sequence[Self], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
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
