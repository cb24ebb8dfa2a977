"""One AdamW per job, and one call for all jobs that step together.

On a CPU each job's torch.optim.AdamW steps by itself, to the bits of a job trained alone with torch. On a GPU one fused
kernel steps all of them, and what it did is read once, when somebody asks. Either way the moments live in the job's
torch optimizer, under torch's names, and no job's result depends on who steps with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from weft.adapters.lora import Adapter
from weft.kernels.adamw import ParameterLane, Update, Updated, adamw
from weft.spec import JobSpec


class Optimizer:
    """The optimizer of one adapter: its two flat buffers, each with a learning rate of its own."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        self.adapter = adapter
        self.spec = spec
        groups = []
        for params, grad in ((adapter.params_a, adapter.grad_a), (adapter.params_b, adapter.grad_b)):
            # The optimizer's parameter is the flat buffer itself, so its steps show in every module's view.
            parameter = torch.nn.Parameter(params, requires_grad=True)
            parameter.grad = grad
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
        """The learning rate of the next step; B's is higher with LoRA+."""
        group_a, group_b = self._torch.param_groups
        group_a["lr"], group_b["lr"] = rate, rate * (self.spec.loraplus_lr_ratio or 1.0)

    @property
    def states(self) -> list[dict[str, torch.Tensor]]:
        """What torch keeps of A and of B: exp_avg, exp_avg_sq and step, on the CPU; empty before the first step."""
        return [self._torch.state[group["params"][0]] for group in self._torch.param_groups]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The states by name, for a checkpoint."""
        return {f"optimizer_{s}.{k}": v for s, state in zip("ab", self.states, strict=True) for k, v in state.items()}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the states that `tensors` described."""
        for side, state in zip("ab", self.states, strict=True):
            state.clear()
            prefix = f"optimizer_{side}."
            for name, tensor in tensors.items():
                if name.startswith(prefix):
                    key = name.removeprefix(prefix)
                    state[key] = tensor.clone() if key == "step" else tensor.to(self.adapter.params_a.device, copy=True)

    def make_moments(self) -> None:
        """Takes the memory for moments that are not there yet, as the first step would."""
        for state, params in zip(self.states, (self.adapter.params_a, self.adapter.params_b), strict=True):
            if not state:
                # All or nothing: memory may end between the two, and this is then tried again.
                moments = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")}
                state.update(step=torch.tensor(0.0), **moments)

    def step(self, is_finite: bool) -> Updated:
        """Clips and applies the gradients with torch, unless they or the loss are not finite; then forgets them."""
        adapter = self.adapter
        norm = float(torch.stack([adapter.grad_a.norm(), adapter.grad_b.norm()]).norm())
        skipped = not (is_finite and math.isfinite(norm))
        if not skipped:
            self._clip(norm)
            self._torch.step()
        adapter.zero_grad()
        largest = float(torch.stack([adapter.params_a.abs().max(), adapter.params_b.abs().max()]).max())
        return Updated(norm, largest, skipped)

    def update(self, is_finite: bool) -> Update:
        """The same step, for the fused kernel."""
        adapter, spec = self.adapter, self.spec
        buffers = ((adapter.params_a, adapter.grad_a), (adapter.params_b, adapter.grad_b))
        self.make_moments()
        lane_a, lane_b = (
            ParameterLane(params, grad, state["exp_avg"], state["exp_avg_sq"], group["lr"])
            for state, (params, grad), group in zip(self.states, buffers, self._torch.param_groups, strict=True)
        )
        return Update(
            (lane_a, lane_b),
            int(self.states[0]["step"]) + 1,
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
            self.adapter.grad_a.mul_(factor)
            self.adapter.grad_b.mul_(factor)


Results = Callable[[], list[Updated]]
"""Waits for the device and says what the steps did; to be asked before the next steps of the same jobs."""


def step_together(
    optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None = None
) -> Results:
    """Starts the step of every job given, each as if alone; one is left out if the loss of its global batch is not
    finite, as the host knows (`finite`) or the device alone (`finite_J`)."""
    start = step_fused if optimizers[0].adapter.params_a.is_cuda else _step_each
    results = start(optimizers, finite, finite_J)
    for optimizer in optimizers:
        optimizer.adapter.changed()
    return results


def _step_each(optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
    if finite_J is not None:
        finite = [known and found > 0 for known, found in zip(finite, finite_J.tolist(), strict=True)]
    results = [optimizer.step(is_finite) for optimizer, is_finite in zip(optimizers, finite, strict=True)]
    return lambda: results


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
            for state in optimizer.states:
                state["step"] += not updated.skipped
        return found

    return results
