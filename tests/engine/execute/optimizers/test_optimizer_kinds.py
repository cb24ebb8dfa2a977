"""Every kind of optimizer steps as its published formula or torch's own implementation does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from thread_devices import ThreadDevices, on_devices
from tiny_models import job_spec, shallow_backbone
from transformers.optimization import Adafactor as TransformersAdafactor

from weft.engine.execute.optimizers import OPTIMIZER_KINDS, optimizer_of
from weft.engine.execute.optimizers.gated import orthogonal
from weft.engine.execute.optimizers.optimizer import (
    VECTOR,
    Optimizer,
    PartOfStep,
    gradient_norm,
    step_by_kind,
    step_together,
)
from weft.parallel.stages.shares import join_team
from weft.plan.cost.memory import job_state, optimizer_bytes
from weft.spec.choices import OPTIMIZERS

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw"},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "sgd": {"optim": "sgd"},
    "momentum": {"optim": "sgd", "momentum": 0.9},
    "nesterov": {"optim": "sgd", "momentum": 0.8, "nesterov": True},
    "lion": {"optim": "lion", "adam_beta2": 0.99},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optim": "muon"},
    "muon-slow": {"optim": "muon", "momentum": 0.8},
}
GATED = [name for name in KINDS if not name.startswith("adamw")]
EXACT = [name for name in KINDS if name != "adamw_8bit"]
"""Whose weights an oracle gives to the last bits."""
NUM_STEPS = 24


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def make(backbone: Any, kind: str, **settings: Any) -> Optimizer:
    """An optimizer that clips and decays; of LoRA by default."""
    spec = job_spec("job", weight_decay=0.1, **{"max_grad_norm": 3.0, **KINDS[kind], **settings})
    return optimizer_of(backbone.new_adapter(spec.adapter, 1), spec)


def set_gradients(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.adapter.groups.values():
        group.grad.copy_(torch.randn(group.grad.shape, generator=generator) / 8)


def steps(optimizer: Optimizer, num: int = NUM_STEPS, first: int = 0) -> None:
    for step in range(first, first + num):
        set_gradients(optimizer, step)
        optimizer.set_rate(1e-2 / (step + 1))
        (updated,) = step_together([optimizer], [True])()
        assert not updated.skipped and updated.error is None


def bits(optimizer: Optimizer) -> list[torch.Tensor]:
    return [*optimizer.adapter.flat().values(), *optimizer.tensors().values()]


def same_bits(one: Optimizer, other: Optimizer) -> bool:
    return all(x.equal(y) for x, y in zip(bits(one), bits(other), strict=True))


class LionInDoubles(torch.optim.Optimizer):
    """The published formula, word by word."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["p"] = torch.zeros_like(p, dtype=torch.float64), p.detach().double()
                (b1, b2), g = group["betas"], p.grad.double()
                update = torch.sign(b1 * state["m"] + (1 - b1) * g)
                state["p"] -= group["lr"] * (update + group["weight_decay"] * state["p"])
                state["m"] = b2 * state["m"] + (1 - b2) * g
                p.data.copy_(state["p"])


def oracle(kind: str, params: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    settings = KINDS[kind]
    matrices = [p for p in params if p.ndim == 2 and min(p.shape) > 1]
    rest = [p for p in params if not any(p is matrix for matrix in matrices)]
    match settings["optim"]:
        case "adamw":
            return [torch.optim.AdamW(params, weight_decay=0.1)]
        case "sgd":
            given = {name: settings[name] for name in ("momentum", "nesterov") if name in settings}
            return [torch.optim.SGD(params, lr=1.0, weight_decay=0.1, **given)]
        case "lion":
            return [LionInDoubles(params, {"lr": 1.0, "betas": (0.9, 0.99), "weight_decay": 0.1})]
        case "adafactor":
            plain = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
            return [TransformersAdafactor(params, lr=1.0, weight_decay=0.1, **plain)]
    momentum = settings.get("momentum", 0.95)
    given = {"weight_decay": 0.1, "momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
    muon = [torch.optim.Muon(matrices, **given)] if matrices else []
    return [*muon, *([torch.optim.AdamW(rest, weight_decay=0.1)] if rest else [])]


@pytest.mark.parametrize("method", ["lora", "ia3"])
@pytest.mark.parametrize("kind", EXACT)
def test_kind_when_stepped_many_times_then_equals_its_oracle(backbone, kind, method):
    """Weights after 24 clipped and decayed steps, matrices and vectors, at 1e-6.

    Muon's are not clipped: its bf16 iterations make much of the last bit of a gradient.
    """
    limit = 1e6 if kind.startswith("muon") else 3.0
    mine = make(backbone, kind, adapter={"method": method}, max_grad_norm=limit)
    params = {
        (path, index): torch.nn.Parameter(tensor)
        for path, tensors in mine.adapter.tensors().items()
        for index, tensor in enumerate(tensors)
    }
    others = oracle(kind, list(params.values()))
    for step in range(NUM_STEPS):
        set_gradients(mine, step)
        grads = mine.adapter.split({name: group.grad for name, group in mine.adapter.groups.items()})
        for (path, index), param in params.items():
            param.grad = grads[path][index].clone()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), limit)
        rate = 1e-2 / (step + 1)
        for other in others:
            for group in other.param_groups:
                group["lr"] = rate
            other.step()
        mine.set_rate(rate)
        updated = mine.step(is_finite=True)
        assert updated.grad_norm == pytest.approx(float(norm), rel=1e-6)
    found = mine.adapter.tensors()
    for (path, index), param in params.items():
        assert (found[path][index] - param).norm() <= 1e-6 * param.norm(), (path, index)
    assert updated.largest == max(float(param.abs().max()) for param in found_tensors(mine))
    assert not any(group.grad.any() for group in mine.adapter.groups.values())


def found_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(optimizer.adapter.flat().values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", [0, 3])
def test_kind_when_a_step_is_not_finite_then_it_changes_no_bit_and_does_not_count(backbone, kind, when):
    """Whether the host knows it, the device, or the gradient shows it; also before the first step."""
    smooth, rough = make(backbone, kind), make(backbone, kind)
    steps(smooth, when)
    steps(rough, when)
    for spoiled in ("host", "device", "gradient"):
        set_gradients(rough, 99)
        if spoiled == "gradient":
            rough.adapter.groups["b"].grad[3] = math.nan
        (updated,) = step_by_kind([rough], [spoiled != "host"], torch.tensor([float(spoiled != "device")]))()
        assert updated.skipped and not any(group.grad.any() for group in rough.adapter.groups.values())
    steps(smooth, 3, when)
    steps(rough, 3, when)
    assert same_bits(smooth, rough)


def test_kinds_when_they_step_together_then_each_has_the_bits_it_has_alone(backbone):
    """Also beside one whose gradient is NaN and one that raises."""
    alone, together = ([make(backbone, kind) for kind in GATED] for _ in range(2))
    broken, diverging = make(backbone, "lion"), make(backbone, "sgd")

    def breaks(*given: Any) -> None:
        raise RuntimeError("its own")

    broken.update = breaks  # type: ignore[attr-defined]
    for step in range(4):
        for optimizer in (*alone, *together, broken, diverging):
            set_gradients(optimizer, step)
        diverging.adapter.groups["a"].grad.fill_(math.inf)
        found = step_by_kind([broken, *together, diverging], [True] * (len(GATED) + 2), torch.ones(len(GATED) + 2))()
        assert str(found[0].error) == "its own" and found[-1].skipped
        assert found[1:-1] == [step_together([optimizer], [True])()[0] for optimizer in alone]
    for one, other in zip(alone, together, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_when_it_goes_on_from_its_tensors_then_ends_with_the_same_bits(backbone, kind):
    whole, first, again = (make(backbone, kind) for _ in range(3))
    steps(whole, 9)
    steps(first, 5)
    again.adapter.put(first.adapter.flat())
    again.take({name: tensor.clone() for name, tensor in first.tensors().items()})
    steps(again, 4, first=5)
    assert same_bits(again, whole)


@pytest.mark.parametrize("method", ["lora", "ia3"])
@pytest.mark.parametrize("kind", KINDS)
def test_kind_when_its_moments_are_made_then_they_take_what_admission_counts(backbone, kind, method):
    """The count may be above, by what shapes decide, and never below."""
    optimizer = make(backbone, kind, adapter={"method": method})
    optimizer.make_moments()
    held = sum(t.numel() * t.element_size() for name, t in optimizer.tensors().items() if not name.endswith(".step"))
    counted = optimizer_bytes(optimizer.spec) * optimizer.adapter.num_parameters
    scales = 2 * 4 * len(optimizer.adapter.groups)  # of a block that is not full
    assert held <= counted + scales * (kind == "adamw_8bit")
    assert held >= counted or kind.startswith(("adafactor", "muon"))


def test_orthogonal_when_a_matrix_is_given_then_its_singular_values_are_near_one():
    for shape in ((8, 60), (60, 8), (5, 5)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        values = torch.linalg.svdvals(orthogonal(matrix).float())
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_registry_when_compared_with_the_choices_then_has_all_of_them():
    assert tuple(sorted(OPTIMIZER_KINDS)) == tuple(sorted(OPTIMIZERS))


@pytest.mark.parametrize("kind", KINDS)
def test_step_when_a_part_is_all_of_an_adapter_then_is_the_step_of_one_device(backbone, kind):
    """As on a GPU, by stages that have whole adapters; a step whose loss is not finite is skipped there."""
    part, whole = make(backbone, kind), make(backbone, kind)
    for step in range(3):
        for optimizer in (part, whole):
            set_gradients(optimizer, step)
            optimizer.set_rate(1e-2)
        norm = part.norm_of([group.grad for group in part.adapter.groups.values()])
        is_finite = torch.tensor(float(step != 1))
        given = PartOfStep(norm, dict.fromkeys(part.adapter.groups, 0))
        updated = part.start_part(is_finite, given)()
        (expected,) = type(whole).start_all([whole], [True], is_finite.view(1))()
        assert updated == expected and updated.skipped == (step == 1)
        assert same_bits(part, whole)


@pytest.mark.parametrize("is_by_kernel", [False, True])
def test_adamw_when_devices_share_layers_then_each_has_a_part_of_the_moments_and_steps_to_the_bits_of_one(
    backbone, is_by_kernel
):
    """By torch, and by the reference implementation of the kernel."""

    def run(devices: ThreadDevices | None) -> tuple[Optimizer, float]:
        spec = job_spec("job", weight_decay=0.1, max_grad_norm=3.0)
        adapter = backbone.new_adapter(spec.adapter, 1)
        adapter.devices = devices
        optimizer = optimizer_of(adapter, spec)
        for step in range(3):
            set_gradients(optimizer, step)
            grads = {name: group.grad for name, group in adapter.groups.items()}
            numbers = {name: grad.numel() // VECTOR * VECTOR for name, grad in grads.items()}
            part = PartOfStep(gradient_norm(grads.values()), numbers)
            updated = optimizer.start_part(torch.tensor(1.0), part)() if is_by_kernel else optimizer.step(True, part)
            assert not any(grad.any() for grad in grads.values())
        optimizer.take(dict(optimizer.tensors()))
        return optimizer, updated.largest

    (whole, largest), parts = run(None), on_devices(3, run)
    moments = {name for name, tensor in whole.tensors().items() if tensor.ndim}
    for optimizer, its_largest in parts:
        assert its_largest == pytest.approx(largest)
        assert all(x.equal(whole.adapter.flat()[name]) for name, x in optimizer.adapter.flat().items())
        assert all(
            3 * x.numel() <= whole.tensors()[name].numel() + 3 * VECTOR for name, x in optimizer.tensors().items()
        )
    first, *others = [optimizer.tensors() for optimizer, _ in parts]
    joined = join_team([first, *({name: own[name] for name in moments} for own in others)])
    assert all(joined[name].equal(x) for name, x in whole.tensors().items())
    assert job_state(whole.spec).on(4) == optimizer_bytes(whole.spec) / 4
