"""A sparse difference trains as autograd does, gates and their penalty included, and its files hold what is open."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_on import adapter_on
from tiny_families import plain_model
from tiny_models import finish, job_spec, random_backbone, random_data
from torch import nn
from torch.func import functional_call

from weft.adapters.adapter import Adapter
from weft.adapters.routing import Routing, Rows, slot_rows
from weft.adapters.sites import SlotLinear
from weft.engine.engine import Engine
from weft.engine.inference.attach import attach_adapter, read_named
from weft.engine.jobs.live_job import LiveJob
from weft.errors import AdapterFileError, ConfigError
from weft.kernels.dropout import mix, module_key
from weft.methods.diff_pruning import weights
from weft.methods.diff_pruning.weights import smallest_positions
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec
from weft.store.peft_files import CONFIG_FILE, read_adapter, write_adapter

CPU = torch.device("cpu")
D, O = 12, 10  # noqa: E741
PATH = "model.layers.0.mlp.up_proj"
GATED = {"method": "diff_pruning", "density": 0.1, "mask": "l0", "l0_weight": 3e-3}


def test_positions_when_chosen_then_are_the_smallest_in_order():
    weight_OD = torch.randn(7, 9)
    found = smallest_positions(weight_OD, 10).long()
    assert found.tolist() == sorted(weight_OD.flatten().abs().argsort()[:10].tolist())


def test_positions_when_many_are_equally_small_then_are_spread_over_the_weight():
    """Of a quantised weight a large part is the same number."""
    weight_OD = torch.zeros(100, 10)
    weight_OD[50, 5] = -1
    found = smallest_positions(weight_OD, 10).tolist()
    assert found == sorted(found) and 505 not in found
    assert all(90 < above - below < 110 for below, above in itertools.pairwise(found))


def test_uniform_when_drawn_then_is_uniform_and_depends_on_the_key_alone():
    first = weights.uniform(5, 20_000, CPU)
    assert first.equal(weights.uniform(5, 30_000, CPU)[:20_000]) and not first.equal(weights.uniform(6, 20_000, CPU))
    assert first.min() > 0 and first.max() < 1
    shares = torch.histc(first, 20, 0, 1) / len(first)
    assert (shares - 0.05).abs().max() < 0.01
    neighbours = torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1]
    assert abs(neighbours) < 0.03


@pytest.mark.parametrize("key", [None, 7])
def test_gates_when_g_changes_a_little_then_they_change_by_their_slopes(key):
    """Finite differences; numbers whose gate opens or closes in between are left out."""
    g, step = torch.linspace(-3, 3, 200), 1e-3
    z, slope = weights.drawn_gates(g, key)
    below, above = weights.drawn_gates(g - step, key)[0], weights.drawn_gates(g + step, key)[0]
    smooth = ((below > 0) == (above > 0)) & ((below < 1) == (above < 1))
    assert (z == 0).any() and (z == 1).any() and (slope > 0).any() and smooth.sum() > 180
    torch.testing.assert_close(slope[smooth], ((above - below) / (2 * step))[smooth], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mask", ["magnitude", "l0"])
def test_gradients_when_the_weight_is_cut_into_blocks_then_are_those_of_autograd(mask, monkeypatch):
    """Blocks of three outputs; a NaN beside the slot's rows stays there."""
    monkeypatch.setattr(weights, "BLOCK", 3 * D + 1)
    torch.manual_seed(0)
    linear = nn.Linear(D, O).requires_grad_(False)
    routing = Routing(slots=(slot_rows(-1, [Rows(2, 5), Rows(5, 8)], 4, 10, step_key=9),))
    slotted = SlotLinear(linear, routing, torch.zeros((), requires_grad=True))
    adapter = adapter_on({PATH: slotted}, AdapterSpec(method="diff_pruning", density=0.3, mask=mask))
    adapter.put({name: x + torch.randn_like(x) for name, x in adapter.flat().items()})
    slotted.put(-1, adapter.modules[PATH])
    x_TD, dy_TO = torch.randn(10, D), torch.randn(10, O)
    x_TD[0], dy_TO[9] = torch.nan, torch.nan
    x_TD.requires_grad_()
    y_TO = slotted(x_TD)
    y_TO.backward(dy_TO)
    params = [param.clone().requires_grad_() for param in adapter.flat().values()]
    own_LD = x_TD[2:8].detach().requires_grad_()
    delta_OD = plain_difference(linear.weight, params, mix(9, module_key(PATH)))
    expected_LO = F.linear(own_LD, linear.weight + delta_OD, linear.bias)
    expected_LO.backward(dy_TO[2:8])
    torch.testing.assert_close(y_TO[2:8], expected_LO, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x_TD.grad[2:8], own_LD.grad, rtol=1e-5, atol=1e-5)
    for group, param in zip(adapter.groups.values(), params, strict=True):
        torch.testing.assert_close(group.grad, param.grad, rtol=1e-5, atol=1e-5)


def plain_difference(weight_OD: torch.Tensor, params: list[torch.Tensor], key: int) -> torch.Tensor:
    """Δ by autograd, with gates as the paper writes them."""
    values = params[0]
    if len(params) == 2:
        u = weights.uniform(key, len(values), CPU)
        values = values * (3 * torch.sigmoid(params[1] + torch.logit(u)) - 1.5).clamp(0, 1)
    positions = weight_OD.flatten().abs().argsort()[: len(values)].sort().values
    return torch.zeros(weight_OD.numel()).index_put((positions,), values).view(weight_OD.shape)


def train_plainly(job: LiveJob, paths: list[str]) -> tuple[dict[str, list[nn.Parameter]], list[float]]:
    """The job alone by transformers, autograd and torch.optim; the penalty is part of the loss of a step."""
    model, spec = plain_model("llama").requires_grad_(False), job.spec
    frozen = {path: model.get_submodule(path).weight for path in paths}
    sizes = {path: round(spec.adapter.density * frozen[path].numel()) for path in paths}
    starts = (0.0,) if spec.adapter.mask == "magnitude" else (0.0, weights.GATE_START)
    params = {path: [nn.Parameter(torch.full((sizes[path],), start)) for start in starts] for path in paths}
    groups = [
        {"params": [own[i] for own in params.values()], "lr": spec.learning_rate * (1, 10)[i]}
        for i in range(len(starts))
    ]
    optimizer, losses = torch.optim.AdamW(groups, weight_decay=spec.weight_decay), []
    for step in range(job.progress.order.num_steps):
        keys = {path: mix(mix(spec.seed, step), module_key(path)) for path in paths}
        changed = {f"{path}.weight": frozen[path] + plain_difference(frozen[path], params[path], keys[path]) for path in paths}  # fmt: skip # noqa: E501
        loss = plain_loss(model, changed, [job.data.train.samples[i] for i in job.progress.order.batch(step)])
        losses.append(float(loss.detach()))
        for own in params.values():
            loss = loss + spec.adapter.l0_weight * sum(torch.sigmoid(g).sum() for g in own[1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([param for own in params.values() for param in own], spec.max_grad_norm)
        optimizer.step()
    return params, losses


def plain_loss(model: Any, changed: dict[str, torch.Tensor], samples: list[Any]) -> torch.Tensor:
    total = torch.zeros(())
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens.astype("int64"))
        targets = torch.where(torch.from_numpy(sample.supervised.copy()), tokens, -100)[1:]
        logits = functional_call(model, changed, (tokens[None],)).logits[0, :-1]
        total = total + F.cross_entropy(logits, targets, reduction="sum")
    return total / sum(int(sample.supervised[1:].sum()) for sample in samples)


@pytest.mark.parametrize("mask", ["magnitude", "l0"])
def test_job_when_its_batch_falls_into_many_microbatches_then_equals_plain_autograd(mask):
    """Twenty steps in fp32. The penalty counts once a step, however many microbatches that step has."""
    adapter = {**GATED, "mask": mask} if mask == "l0" else {"method": "diff_pruning", "density": 0.1}
    engine = Engine(random_backbone(), capacity=24)
    spec = job_spec(
        "me", adapter=adapter, max_steps=20, global_batch_size=5, learning_rate=1e-2, weight_decay=0.05, seed=2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    engine.submit(spec, random_data(2))
    engine.submit(job_spec("lora", seed=4), random_data(4))
    trained = engine.executor.jobs["me"].weights.adapter
    mine = finish(engine)["me"]
    params, losses = train_plainly(engine.jobs["me"], list(trained.modules))
    assert len(losses) == 20 and mine.losses == pytest.approx(losses, rel=1e-5)
    for i, (name, group) in enumerate(trained.groups.items()):
        theirs = torch.cat([own[i].detach() for own in params.values()])
        torch.testing.assert_close(group.params, theirs, rtol=1e-5, atol=1e-5)
        assert theirs.std() > 1e-3, f"{name} have not learned"


def test_penalties_when_added_again_for_the_same_step_then_add_nothing():
    """A step that ran out of memory is tried again; one that was rewound is not the same step."""
    adapter = random_backbone().new_adapter(AdapterSpec(**GATED), 0)
    adapter.complete_gradients()
    once = adapter.groups["gates"].grad.clone()
    assert once.min() > 0 and not adapter.groups["values"].grad.any()
    adapter.complete_gradients()
    assert adapter.groups["gates"].grad.equal(once)
    adapter.zero_grad()
    adapter.complete_gradients()
    assert adapter.groups["gates"].grad.equal(once)
    adapter.changed()
    adapter.complete_gradients()
    assert adapter.groups["gates"].grad.equal(2 * once)


def gated_adapter(seed: int = 1) -> Adapter:
    """On some modules, with about half of its gates open."""
    adapter = random_backbone().new_adapter(AdapterSpec(**GATED, target_modules=["up_proj"]), 0)
    generator = torch.Generator().manual_seed(seed)
    adapter.put({name: torch.randn(x.shape, generator=generator) for name, x in adapter.flat().items()})
    return adapter


def test_files_when_gates_are_closed_then_hold_the_open_ones_and_compute_the_same(tmp_path):
    backbone, adapter = random_backbone(), gated_adapter()
    write_adapter(tmp_path / "a", adapter.spec, adapter.tensors(), base_model="llama", target_names=["up_proj"])
    _, tensors, _ = read_adapter(tmp_path / "a")
    num_open = int((adapter.groups["gates"].params > 0).sum())
    assert sum(len(values) for *_, values in tensors.values()) == num_open < adapter.num_parameters // 3
    sample = random_data(1, num_samples=1, lengths=(12, 13)).train.samples[0]
    slots = [backbone.attach(adapter), attach_adapter(backbone, read_named(str(tmp_path / "a"))), None]
    mine, stored, bare = (backbone.logits(pack_samples([SlotSample(sample, slot)], None, CPU)) for slot in slots)
    assert stored.equal(mine) and not mine.equal(bare)


def test_load_when_the_base_has_other_numbers_then_keeps_the_positions_of_the_file():
    """One trained on a quantised base answers on the dense one, wherever its smallest numbers are."""
    adapter = gated_adapter()
    tensors = adapter.tensors()
    other = random_backbone(seed=9).new_adapter(AdapterSpec(**GATED, target_modules=["up_proj"]), 0)
    other.load(tensors, "a")
    other.take({name: params.clone() for name, params in other.flat().items()})
    for path, own in other.tensors().items():
        assert all(x.equal(y) for x, y in zip(own, tensors[path], strict=True))


@pytest.mark.parametrize(
    ("tensors", "changes", "sentence"),
    [
        (([0, 5], [O, D], [1.0, 2.0]), {"density": None}, "density is missing"),
        (([0, 5], [O, D], [1.0, 2.0]), {"density": 0.01}, "has 2 values; density allows 1"),
        (([0, 5], [O, D], [1.0]), {}, r"has indices \(2,\) and values \(1,\); expected as many of both"),
        (([5, 5], [O, D], [1.0, 2.0]), {}, "do not ascend from 0 to below 120"),
        (([0, 120], [O, D], [1.0, 2.0]), {}, "do not ascend from 0 to below 120"),
        (([-1, 5], [O, D], [1.0, 2.0]), {}, "do not ascend from 0 to below 120"),
        (([0.0, 5.0], [O, D], [1.0, 2.0]), {}, "diff.indices has type F32; accepted are I32, I64"),
    ],
)
def test_read_when_the_files_mean_something_else_then_refused_with_what_is_wrong(tmp_path, tensors, changes, sentence):
    spec = AdapterSpec(method="diff_pruning", density=0.1)
    given = {PATH: tuple(map(torch.tensor, tensors))}
    write_adapter(tmp_path / "a", spec, given, base_model="tiny", target_names=["up_proj"])
    path = tmp_path / "a" / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AdapterFileError, match=sentence):
        read_adapter(tmp_path / "a")


def test_settings_when_a_penalty_has_no_gates_then_is_refused():
    with pytest.raises(ConfigError, match="l0_weight: is for mask l0; mask is magnitude"):
        AdapterSpec(method="diff_pruning", l0_weight=0.1)
