"""Optimizers in plain torch operations: SGD, Lion, Adafactor and Muon. Steps are taken or skipped on the device.

    norm = ‖gradient‖;  open = loss and norm are finite;  gradient ← clipped where open, 0 where not
    if the gate is closed, every change of a state or weight is multiplied by 0, and the value itself by 1

So no host waits for a step, a skipped step changes no bit, and results are read later together. Jobs step one by one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch

from weft.adapters.adapter import Adapter
from weft.engine.execute.optimizers.optimizer import Optimizer, PartOfStep, Results, gradient_norm
from weft.kernels.adamw import Updated
from weft.kernels.device_event import AsyncCopy
from weft.spec import JobSpec

State = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class SteppedTensor:
    params: torch.Tensor
    grad: torch.Tensor
    state: State
    rate: float


class Gate:
    """Decision on the device whether a step is taken."""

    def __init__(self, is_open: torch.Tensor) -> None:
        self.is_open = is_open
        self._one, self._zero = is_open.float(), (~is_open).float()

    def moves(self, number: float) -> torch.Tensor:
        """The number if the step is taken, else 0."""
        return self._one * number

    def keeps(self, number: float) -> torch.Tensor:
        """The number if the step is taken, else 1."""
        return self._one * number + self._zero


class GatedOptimizer(Optimizer):
    """An optimizer in torch operations that never wait for the device. A subclass defines a tensor's state and step."""

    by_module: ClassVar[bool] = False
    """True: each module's tensors are stepped by themselves; False: the flat buffers of whole groups."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        super().__init__(adapter, spec)
        self._states: dict[str, State] = {name: {} for name, _, _, _ in self._named()}

    @abstractmethod
    def fresh(self, params: torch.Tensor) -> State: ...

    @abstractmethod
    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        """Takes one step; the gradient is clipped, and zero if the gate is closed."""

    @property
    def states(self) -> dict[str, State]:
        return self._states

    def make_moments(self) -> None:
        for name, _, params, _ in self._named():
            if not self._states[name]:
                self._states[name].update(self.fresh(params))

    def free_memory(self) -> None:
        """Allocates its states, and frees what a step holds for a moment for torch to reuse."""
        super().free_memory()
        torch.empty(2 * self.adapter.num_parameters, device=self.adapter.device)

    def step(self, is_finite: bool, part: PartOfStep | None = None) -> Updated:
        norm = None if part is None else part.norm
        return self._start(torch.tensor(is_finite, device=self.adapter.device), norm)()

    def start_part(self, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
        self.free_memory()
        return self._start(is_finite > 0, part.norm)

    @classmethod
    def start_all(cls, optimizers: Sequence[Self], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
        """Starts one job's step after another. An error is that job's result: jobs before it have changed."""
        started: list[Callable[[], Updated]] = []
        for index, (optimizer, is_finite) in enumerate(zip(optimizers, finite, strict=True)):
            # A tensor made from a host number would make the host wait.
            of_batch = torch.full((), is_finite, dtype=torch.bool, device=optimizer.adapter.device)
            found = of_batch if finite_J is None else of_batch & (finite_J[index] > 0)
            try:
                started.append(optimizer._start(found))
            except Exception as error:
                started.append(partial(Updated, math.nan, math.nan, True, error))
        return lambda: [result() for result in started]

    def _start(self, is_finite: torch.Tensor, norm: torch.Tensor | None = None) -> Callable[[], Updated]:
        self.make_moments()
        groups = self.adapter.groups.values()
        norm = gradient_norm(group.grad for group in groups) if norm is None else norm
        gate = Gate(is_finite & norm.isfinite())
        limit = self.spec.max_grad_norm
        for group in groups:
            if limit:
                group.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
            group.grad.masked_fill_(~gate.is_open, 0.0)
        rates = self.rates
        for name, group_name, params, grad in self._named():
            self.update(SteppedTensor(params, grad, self._states[name], rates[group_name]), gate)
        self.adapter.zero_grad()
        largest = torch.stack([torch.linalg.vector_norm(group.params, math.inf) for group in groups]).max()
        arrival = AsyncCopy(torch.stack([norm, largest, gate.moves(1.0)])).begin()

        def result() -> Updated:
            norm, largest, is_open = arrival.get().tolist()
            for state in self._states.values():
                if "step" in state:
                    state["step"] += is_open
            return Updated(norm, largest, not is_open)

        return result

    def _named(self) -> Iterable[tuple[str, str, torch.Tensor, torch.Tensor]]:
        """Every tensor that is stepped by itself: its name, its group's name, weights and gradient."""
        groups = self.adapter.groups
        if not self.by_module:
            for name, group in groups.items():
                yield name, name, group.params, group.grad
            return
        params = self.adapter.split(self.adapter.trained())
        grads = self.adapter.split({name: group.grad for name, group in groups.items()})
        for path, views in params.items():
            of_views = self.adapter.groups_of(path)
            for index, (name, view, grad) in enumerate(zip(of_views, views, grads[path], strict=True)):
                # The tensors of a head share a group.
                own = path if of_views.count(name) == 1 else f"{path}.{index}"
                yield f"{name}.{own}", name, view, grad


class SGD(GatedOptimizer):
    """Stochastic gradient descent, as torch.optim.SGD; keeps a moving sum of gradients where there is a momentum.

    d = g + decay · w;  b ← μ b + d;  w ← w - rate · (d + μ b if nesterov else b)
    """

    def fresh(self, params: torch.Tensor) -> State:
        return {"momentum_buffer": torch.zeros_like(params)} if self.spec.used_momentum else {}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        momentum, decay = self.spec.used_momentum, self.spec.weight_decay
        direction = tensor.grad
        if decay:
            direction.add_(tensor.params * gate.moves(decay))
        if momentum:
            buffer = tensor.state["momentum_buffer"]
            buffer.mul_(gate.keeps(momentum)).add_(direction)
            direction = direction.add_(buffer, alpha=momentum) if self.spec.nesterov else buffer
        tensor.params.sub_(direction * gate.moves(tensor.rate))


class Lion(GatedOptimizer):
    """Steps by the sign of a moving mean (Chen et al. 2023, "Symbolic discovery of optimization algorithms").

    w ← (1 - rate · decay) w - rate · sign(β₁ m + (1-β₁) g);  m ← β₂ m + (1-β₂) g
    """

    def fresh(self, params: torch.Tensor) -> State:
        return {"exp_avg": torch.zeros_like(params)}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        spec, exp_avg = self.spec, tensor.state["exp_avg"]
        signs = torch.lerp(exp_avg, tensor.grad, 1 - spec.adam_beta1).sign_()
        tensor.params.mul_(gate.keeps(1 - tensor.rate * spec.weight_decay))
        tensor.params.sub_(signs.mul_(gate.moves(tensor.rate)))
        exp_avg.lerp_(tensor.grad, gate.moves(1 - spec.adam_beta2))


LEAST_SQUARE = 1e-30
DECAY = -0.8


class Adafactor(GatedOptimizer):
    """Keeps the mean squares of each matrix's rows and columns (Shazeer and Stern 2018).

        s = g² + 1e-30;  row ← row + (mean of s by rows - row) t^-0.8;  col likewise;  v = row colᵀ / mean(row)
        u = g / √v;  u ← u / max(1, rms(u));  w ← (1 - rate · decay) w - rate · u

    Of a vector all of v is kept. The settings are those of transformers' Trainer: the job's rate, no relative steps.
    torch.optim.Adafactor also multiplies its rate by the size of the weights, so that a LoRA's B, which starts at zero,
    would hardly move.
    """

    by_module = True

    def fresh(self, params: torch.Tensor) -> State:
        state = {"step": torch.tensor(0.0)}
        if params.ndim != 2:
            return state | {"exp_avg_sq": torch.zeros_like(params)}
        rows, columns = params.shape
        return state | {"exp_avg_sq_row": params.new_zeros(rows), "exp_avg_sq_col": params.new_zeros(columns)}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        state, share = tensor.state, gate.moves((float(tensor.state["step"]) + 1) ** DECAY)
        squares = tensor.grad.square().add_(LEAST_SQUARE)
        if tensor.params.ndim == 2:
            row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            row.lerp_(squares.mean(dim=-1), share)
            column.lerp_(squares.mean(dim=-2), share)
            scale = (row / row.mean()).rsqrt_().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
        else:
            scale = state["exp_avg_sq"].lerp_(squares, share).rsqrt()
        change = scale.mul_(tensor.grad)
        change.div_(change.square().mean().sqrt().clamp(min=1.0))
        # Before the first taken step the means are zero, and 0 · ∞ is NaN.
        change.masked_fill_(~gate.is_open, 0.0)
        tensor.params.mul_(gate.keeps(1 - tensor.rate * self.spec.weight_decay)).sub_(change.mul_(tensor.rate))


NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that moves every singular value towards 1."""
LEAST_NORM = 1e-7


class Muon(GatedOptimizer):
    """Steps matrices by an orthogonal direction (Jordan et al. 2024), and all other tensors by AdamW.

        b ← μ b + (1-μ) g;  d = (1-μ) g + μ b;  o = U Vᵀ of d = U S Vᵀ, about, by five Newton-Schulz iterations in bf16
        w ← (1 - rate · decay) w - 0.2 · √(the longer side) · rate · o

    This is torch.optim.Muon with its `match_rms_adamw`, which makes a step about as large as AdamW's, so that a
    learning rate that is good for AdamW is good here too. A tensor with a side of 1 is no matrix.
    """

    by_module = True

    def fresh(self, params: torch.Tensor) -> State:
        if _is_matrix(params):
            return {"momentum_buffer": torch.zeros_like(params)}
        moments = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **moments}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        tensor.params.mul_(gate.keeps(1 - tensor.rate * self.spec.weight_decay))
        if not _is_matrix(tensor.params):
            self._update_vector(tensor, gate)
            return
        momentum, buffer = self.spec.used_momentum, tensor.state["momentum_buffer"]
        buffer.lerp_(tensor.grad, gate.moves(1 - momentum))
        direction = orthogonal(tensor.grad.lerp(buffer, momentum)).float()
        size = 0.2 * math.sqrt(max(tensor.params.shape)) * tensor.rate
        tensor.params.sub_(direction.mul_(gate.moves(size)))

    def _update_vector(self, tensor: SteppedTensor, gate: Gate) -> None:
        spec, state, number = self.spec, tensor.state, float(tensor.state["step"]) + 1
        exp_avg = state["exp_avg"].lerp_(tensor.grad, gate.moves(1 - spec.adam_beta1))
        exp_avg_sq = state["exp_avg_sq"].mul_(gate.keeps(spec.adam_beta2))
        exp_avg_sq.addcmul_(tensor.grad, tensor.grad, value=1 - spec.adam_beta2)
        scale = (exp_avg_sq.sqrt() / math.sqrt(1 - spec.adam_beta2**number)).add_(spec.adam_epsilon)
        tensor.params.sub_((exp_avg / scale).mul_(gate.moves(tensor.rate / (1 - spec.adam_beta1**number))))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Approximately the nearest matrix whose singular values are all 1, by Newton-Schulz iterations in bf16."""
    first, third, fifth = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x


def _is_matrix(params: torch.Tensor) -> bool:
    return params.ndim == 2 and min(params.shape) > 1
