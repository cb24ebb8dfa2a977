"""One AdamW per job, and one call for all jobs that step together.

On a CPU each job's torch.optim.AdamW steps by itself, to the bits of a job trained alone with torch. On a GPU one fused
kernel steps all of them, and what it did is read once, when somebody asks. Either way the moments live in the job's
torch optimizer, under torch's names, and no job's result depends on who steps with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from weft.adapters.adapter import Adapter
from weft.kernels.adamw import ParameterLane, Update, Updated, adamw
from weft.kernels.device import is_gpu
from weft.spec import JobSpec


class Optimizer:
    """The optimizer of one adapter: its flat buffers, one per group, each with a learning rate of its own."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        self.adapter = adapter
        self.spec = spec
        groups = []
        for group in adapter.groups.values():
            # The optimizer's parameter is the flat buffer itself, so its steps show in every module's view.
            parameter = torch.nn.Parameter(group.params, requires_grad=True)
            parameter.grad = group.grad
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

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step; a group of the method may have another."""
        factors = self.adapter.method.rate_factors(self.spec)
        for group, factor in zip(self._torch.param_groups, factors, strict=True):
            group["lr"] = rate * factor

    @property
    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """What torch keeps of each group: exp_avg, exp_avg_sq and step, on the CPU; empty before the first step."""
        states = (self._torch.state[group["params"][0]] for group in self._torch.param_groups)
        return dict(zip(self.adapter.groups, states, strict=True))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The states by name, for a checkpoint."""
        return {f"optimizer_{name}.{key}": v for name, state in self.states.items() for key, v in state.items()}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes the states in `tensors` its own; they are where the adapter is."""
        for group, state in self.states.items():
            state.clear()
            prefix = f"optimizer_{group}."
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    key = name.removeprefix(prefix)
                    state[key] = tensor.cpu() if key == "step" else tensor

    def make_moments(self) -> None:
        """Takes the memory for moments that are not there yet, as the first step would."""
        for name, state in self.states.items():
            if not state:
                # All or nothing: memory may end between the two, and this is then tried again.
                params = self.adapter.groups[name].params
                moments = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.tensor(0.0), **moments)

    def step(self, is_finite: bool) -> Updated:
        """Clips and applies the gradients with torch, unless they or the loss are not finite; then forgets them."""
        groups = self.adapter.groups.values()
        norm = float(torch.stack([group.grad.norm() for group in groups]).norm())
        skipped = not (is_finite and math.isfinite(norm))
        if not skipped:
            self._clip(norm)
            self._torch.step()
        self.adapter.zero_grad()
        largest = float(torch.stack([group.params.abs().max() for group in groups]).max())
        return Updated(norm, largest, skipped)

    def update(self, is_finite: bool) -> Update:
        """The same step, for the fused kernel."""
        spec = self.spec
        self.make_moments()
        states, groups = self.states.values(), self.adapter.groups.values()
        lanes = tuple(
            ParameterLane(group.params, group.grad, state["exp_avg"], state["exp_avg_sq"], torch_group["lr"])
            for state, group, torch_group in zip(states, groups, self._torch.param_groups, strict=True)
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


Results = Callable[[], list[Updated]]
"""Waits for the device and says what the steps did; to be asked before the next steps of the same jobs."""


def step_together(
    optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None = None
) -> Results:
    """Starts the step of every job given, each as if alone; one is left out if the loss of its global batch is not
    finite, as the host knows (`finite`) or the device alone (`finite_J`)."""
    start = step_fused if is_gpu(optimizers[0].adapter.device) else _step_each
    results = start(optimizers, finite, finite_J)
    for optimizer in optimizers:
        optimizer.adapter.changed()
    return results


def _step_each(optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
    if finite_J is not None:
        finite = [known and found > 0 for known, found in zip(finite, finite_J.tolist(), strict=True)]
    results = [_step_alone(optimizer, is_finite) for optimizer, is_finite in zip(optimizers, finite, strict=True)]
    return lambda: results


def _step_alone(optimizer: Optimizer, is_finite: bool) -> Updated:
    """Steps one job. What that raises is an answer about this job: the steps of the others are taken."""
    try:
        return optimizer.step(is_finite)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Updated(math.nan, math.nan, True, error)


def step_fused(
    optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None = None
) -> Results:
    """All steps in one call of the fused kernel.

    Memory is taken before anything is changed, so running out of it leaves every job as it was.
    """
    updates = [optimizer.update(is_finite) for optimizer, is_finite in zip(optimizers, finite, strict=True)]
    wait = adamw(updates, finite_J)

    def results() -> list[Updated]:
        found = wait()
        for optimizer, updated in zip(optimizers, found, strict=True):
            for state in optimizer.states.values():
                state["step"] += not updated.skipped
        return found

    return results
