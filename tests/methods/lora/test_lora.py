"""New adapters start as PEFT's do, each module from its own draw."""

from __future__ import annotations

import math

import peft
import pytest
import torch
from adapter_on import adapter_on
from torch import nn
from whole_linear import WholeLinear

from weft.adapters.adapter import Adapter
from weft.engine.execute.weights import JobWeights
from weft.errors import AdapterFileError, ConfigError
from weft.methods.registry import cost_ranks
from weft.spec import AdapterSpec, JobSpec

CPU = torch.device("cpu")
D, O, R = 96, 160, 24  # noqa: E741
INITS = (True, False, "gaussian", "orthogonal")


def adapter(seed: int = 0, modules: dict[str, tuple[int, int]] | None = None, **settings) -> Adapter:
    shapes = modules or {"a.x": (O, D), "b.x": (O, D)}
    sites = {path: WholeLinear(num_in, num_out, device="meta") for path, (num_out, num_in) in shapes.items()}
    return adapter_on(sites, AdapterSpec(**{"r": R, **settings}), seed)


def peft_weights(init: bool | str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, O))
    module = peft.get_peft_model(model, peft.LoraConfig(r=R, target_modules=["0"], init_lora_weights=init)).base_model
    lora = module.model[0]
    return lora.lora_A["default"].weight.detach(), lora.lora_B["default"].weight.detach()


def same_distribution(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Mean, spread, fourth moment and range agree within five standard errors or so of samples of this size."""
    if not other.any():
        return not mine.any()
    mine, other = mine.flatten().double() / other.std(), other.flatten().double() / other.std()
    bound = 6 / math.sqrt(mine.numel())
    return (
        abs(mine.mean() - other.mean()) < bound * 1.5
        and abs(mine.std() - other.std()) < bound
        and abs(mine.pow(4).mean() / other.pow(4).mean() - 1) < 3 * bound
        and abs(mine.abs().max() / other.abs().max() - 1) < 0.25
    )


@pytest.mark.parametrize("init", INITS)
def test_start_when_any_init_then_distributed_as_pefts(init):
    weights = adapter(init_lora_weights=init).modules["a.x"]
    expected_a, expected_b = peft_weights(init)
    assert same_distribution(weights.a_RD, expected_a)
    assert same_distribution(weights.b_OR, expected_b)


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_start_when_promised_then_the_update_is_zero(init):
    weights = adapter(init_lora_weights=init).modules["a.x"]
    assert weights.a_RD.abs().sum() > 0
    assert (weights.b_OR @ weights.a_RD).abs().max() < 1e-5


def test_start_when_orthogonal_then_both_sides_can_learn_at_once():
    """A and B are both away from zero, so neither waits for the other's first step."""
    weights = adapter(init_lora_weights="orthogonal").modules["a.x"]
    assert torch.linalg.matrix_rank(weights.a_RD) == torch.linalg.matrix_rank(weights.b_OR) == R // 2


def test_start_when_false_then_the_update_is_not_zero():
    weights = adapter(init_lora_weights=False).modules["a.x"]
    assert (weights.b_OR @ weights.a_RD).abs().max() > 1e-3


@pytest.mark.parametrize("init", INITS)
def test_start_when_seed_or_module_differs_then_other_numbers(init):
    first, again, other = (adapter(seed, init_lora_weights=init) for seed in (1, 1, 2))
    assert torch.equal(first.groups["a"].params, again.groups["a"].params) and torch.equal(
        first.groups["b"].params, again.groups["b"].params
    )
    assert not torch.equal(first.groups["a"].params, other.groups["a"].params)
    assert not torch.equal(first.modules["a.x"].a_RD, first.modules["b.x"].a_RD)


def test_start_when_other_modules_are_adapted_too_then_mine_is_the_same():
    alone = adapter(modules={"b.x": (O, D)}).modules["b.x"]
    beside = adapter(modules={"a.x": (D, O), "b.x": (O, D), "c.x": (O, D)}).modules["b.x"]
    assert torch.equal(alone.a_RD, beside.a_RD)


def test_start_when_made_then_the_global_generator_is_untouched():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    adapter()
    assert torch.equal(torch.rand(4), expected)


def test_buffers_when_a_view_changes_then_the_flat_parameters_do():
    made = adapter(rank_pattern={"b.x": 5})
    made.modules["b.x"].a_RD.fill_(7.0)
    made.modules["a.x"].b_OR.fill_(8.0)
    made.modules["b.x"].grad_b_OR.fill_(9.0)
    assert (made.groups["a"].params == 7).sum() == 5 * D
    assert (made.groups["b"].params == 8).sum() == R * O
    assert (made.groups["b"].grad == 9).sum() == 5 * O
    assert made.num_parameters == (R + 5) * (D + O)
    made.zero_grad()
    assert not made.groups["b"].grad.any()


def test_scale_when_rslora_or_patterns_then_as_peft():
    made = adapter(lora_alpha=12, use_rslora=True, rank_pattern={"b.x": 4}, alpha_pattern={"a.x": 6})
    assert made.modules["a.x"].scale == pytest.approx(6 / math.sqrt(R))
    assert made.modules["b.x"].scale == pytest.approx(12 / math.sqrt(4))
    assert adapter(lora_alpha=12).modules["a.x"].scale == pytest.approx(12 / R)


def test_rank_when_above_the_smaller_side_then_refused_by_name():
    with pytest.raises(ConfigError, match=rf"rank 17 is above the smaller side of b\.x \(16 x {D}\)") as caught:
        adapter(modules={"a.x": (O, D), "b.x": (16, D)}, r=17)
    assert caught.value.where == "adapter.r"


def test_rank_when_as_large_as_the_smaller_side_then_accepted():
    assert adapter(modules={"b.x": (16, D)}, r=16).modules["b.x"].a_RD.shape == (16, D)


def test_load_when_given_back_its_own_tensors_then_every_bit_returns():
    made, fresh = adapter(1, init_lora_weights=False), adapter(2)
    fresh.load(made.tensors(), "here")
    assert torch.equal(fresh.groups["a"].params, made.groups["a"].params) and torch.equal(
        fresh.groups["b"].params, made.groups["b"].params
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("a.x"), "a.x is not in the file"),
        (lambda t: t.update({"z.x": t["a.x"]}), "z.x is not a module of this adapter"),
        (lambda t: t.update({"a.x": (t["a.x"][0][:3], t["a.x"][1])}), "expected"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_load_when_tensors_do_not_fit_then_names_them_and_changes_nothing(change, reason):
    made = adapter()
    before = made.groups["a"].params.clone()
    tensors = adapter(5, init_lora_weights=False).tensors()
    change(tensors)
    with pytest.raises(AdapterFileError, match=reason):
        made.load(tensors, "some/adapter")
    assert torch.equal(made.groups["a"].params, before)


def test_tensors_when_read_then_they_are_copies():
    made = adapter()
    made.tensors()["a.x"][0].fill_(5)
    assert not (made.groups["a"].params == 5).any()


def test_cost_ranks_when_a_pattern_has_a_higher_rank_then_it_is_the_widest():
    """Times are counted with the rank of most modules, memory with the highest."""
    ranks = cost_ranks(AdapterSpec(r=8, rank_pattern={"q_proj": 32, "k_proj": 2}))
    assert (ranks.usual, ranks.widest) == (8, 32)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapter_when_a_is_frozen_then_nothing_of_it_is_trained_or_kept_for_it(method):
    """No gradient, no moments, no rate; its weights are in checkpoints and files all the same."""
    spec = AdapterSpec(method=method, r=R, freeze_a=True)
    made = adapter_on({"a.x": WholeLinear(D, O).requires_grad_(False)}, spec)
    trained = ["b"] if method == "lora" else ["b", "m"]
    assert list(made.groups) == trained and list(made.flat()) == ["a", *trained]
    assert made.num_parameters == R * O + (O if method == "dora" else 0)
    weights = JobWeights(JobSpec("me", ("rows",), adapter=spec, loraplus_lr_ratio=4.0), made)
    weights.optimizer.set_rate(1e-3)
    weights.optimizer.make_moments()
    names = weights.tensors()
    assert "params_a" in names and not any(name.startswith("optimizer_a") for name in names)
    weights.keep_best()
    before = made.tensors()
    made.put({name: x + 1 for name, x in made.flat().items() if name != "a"})
    found = weights.modules(weights.tensors(), best=True)
    assert all(x.equal(y) for x, y in zip(found["a.x"], before["a.x"], strict=True))
