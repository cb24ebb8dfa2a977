"""What every family on the fast path must do: agree with the reference path, keep neighbours apart, and hold the memory
that the model predicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from thread_devices import EchoDevices
from tiny_families import FAMILIES as TINY
from tiny_models import random_backbone, random_sample

from weft.adapters.adapter import Adapter
from weft.adapters.frozen import KINDS, quantise
from weft.model.backbone import Backbone
from weft.model.divided import divide
from weft.model.fused.inputs import input_shape
from weft.model.fused.path import FusedPath
from weft.model.fused.step import Passed
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import Memory
from weft.objectives.objective import ACCURACY, LOSS, Score
from weft.plan.cost.memory import OFFLOAD_LAYERS, MemoryModel, rank_class
from weft.plan.cost.shape import ModelShape
from weft.plan.families import FAMILIES, describe
from weft.spec import AdapterSpec

MODELS = ["llama", "llama_bias", "llama_tied", "llama_odd", "llama_llama3", "llama_yarn", "llama_linear"]
MODELS += ["mistral", "qwen2", "qwen2_sliding", "qwen3", "gemma3_text", "phi3", "phi3_partial", "phi3_longrope"]
MODELS += ["smollm3", "olmo3", "ministral3", "granite", "granitemoehybrid", "granitemoehybrid_nope"]
"""Tiny models, several of a family where their settings differ."""
every_family = pytest.mark.parametrize("name", FAMILIES)
"""Each has a tiny model of its own name."""
LENGTHS = [(30, 0), (2, 0), (31, 1), (20, None), (25, 2), (11, 3), (9, 3)]
"""Tokens of a sample and the adapter it trains; none is longer than the shortest positions of a model."""
SAVING = [Memory("mlp"), Memory("full"), Memory("none", True), Memory("full", True)]


def specs(backbone: Backbone) -> list[AdapterSpec]:
    """Adapters on all linears and on every second one, with ranks of their own, dropout and scales."""
    names = list(describe(backbone.model.config.to_dict()).sizes.linears)
    return [
        AdapterSpec(r=8, lora_alpha=16),
        AdapterSpec(r=5, lora_alpha=7, lora_dropout=0.2, target_modules=tuple(names[::2])),
        AdapterSpec(r=3, lora_dropout=0.5, use_rslora=True, rank_pattern={names[-2]: 20, names[-1]: 17}),
        AdapterSpec(r=8, target_modules=tuple(names[1::2]), rank_pattern={names[1]: 2}),
    ]


def attached(backbone: Backbone) -> tuple[list[Adapter], list[int]]:
    adapters = [backbone.new_adapter(spec, seed) for seed, spec in enumerate(specs(backbone))]
    for seed, adapter in enumerate(adapters):
        generator = torch.Generator().manual_seed(seed)
        params = adapter.groups["b"].params
        params.copy_(torch.randn(params.shape, generator=generator) * 0.1)
        adapter.changed()
    return adapters, [backbone.attach(adapter) for adapter in adapters]


def packed(slots: Sequence[int], *, drops: bool = True, only: int | None = None) -> PackedBatch:
    """The samples of all adapters, or of one alone."""
    rng = np.random.default_rng(5)
    slot_samples = [
        (
            owner,
            SlotSample(random_sample(rng, n), None if owner is None else slots[owner], 0.01, 7 + n if drops else None),
        )
        for n, owner in LENGTHS
    ]
    chosen = [sample for owner, sample in slot_samples if only is None or owner == only]
    return pack_samples(chosen, 128, torch.device("cpu"))


def gradients(adapters: Sequence[Adapter]) -> list[torch.Tensor]:
    return [adapter.groups[group].grad.clone() for adapter in adapters for group in ("a", "b")]


def run(backbone: Backbone) -> tuple[list[Score], list[Score], list[torch.Tensor]]:
    """Scores with and without dropout, and all gradients."""
    adapters, slots = attached(backbone)
    scores = backbone.launch(packed(slots), 128).scores()
    plain = backbone.scores(packed(slots, drops=False), 128)
    return scores, plain, gradients(adapters)


def test_models_when_counted_then_of_every_family():
    assert {random_backbone(name).model.config.model_type for name in MODELS} == set(FAMILIES) <= set(TINY)


@pytest.mark.parametrize("name", MODELS)
def test_fused_step_when_jobs_are_mixed_then_equals_the_reference(name):
    expected, mine = (run(random_backbone(name, kernels=kernels)) for kernels in ("reference", "fused"))
    for ours, theirs in zip(mine[:2], expected[:2], strict=True):
        assert [s[LOSS].total for s in ours] == pytest.approx([s[LOSS].total for s in theirs], rel=1e-5)
        assert [s[ACCURACY] for s in ours] == [s[ACCURACY] for s in theirs]
    assert expected[0] != expected[1], "dropout changed nothing"
    for one, other in zip(mine[2], expected[2], strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 1e-5 * other.norm()


@every_family
def test_fused_step_when_it_saves_memory_then_same_bits(name):
    """Whatever is made again on the way back, and wherever the rest is kept."""
    expected = run(random_backbone(name, kernels="fused"))
    for memory in SAVING:
        mine = run(random_backbone(name, kernels="fused", memory=memory))
        assert mine[:2] == expected[:2]
        assert all(torch.equal(one, other) for one, other in zip(mine[2], expected[2], strict=True))


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_step_when_an_adapter_has_neighbours_then_same_bits_as_alone(name, dtype):
    backbone = random_backbone(name, kernels="fused", dtype=dtype)
    adapters, slots = attached(backbone)
    together = dict(zip(LENGTHS, backbone.forward_backward(packed(slots), 128), strict=True))
    among = gradients(adapters)
    for adapter in adapters:
        adapter.zero_grad()
    alone = backbone.forward_backward(packed(slots, only=2), 128)
    assert alone == [loss for (_, owner), loss in together.items() if owner == 2]
    assert all(torch.equal(*pair) for pair in zip(gradients([adapters[2]]), among[4:6], strict=True))


@every_family
def test_fused_step_when_a_neighbour_is_nan_then_no_other_adapter_changes(name):
    """A NaN in one adapter's B reaches its own rows and gradients only."""
    backbone = random_backbone(name, kernels="fused")
    adapters, slots = attached(backbone)
    clean_losses = backbone.forward_backward(packed(slots), 128)
    clean = [adapter.groups["b"].grad.clone() for adapter in adapters]
    for adapter in adapters:
        adapter.zero_grad()
    adapters[1].groups["b"].params[7] = float("nan")
    adapters[1].changed()
    losses = backbone.forward_backward(packed(slots), 128)
    for i, (adapter, before) in enumerate(zip(adapters, clean, strict=True)):
        assert torch.equal(adapter.groups["b"].grad, before) == (i != 1)
    for (_, owner), now, before in zip(LENGTHS, losses, clean_losses, strict=True):
        assert (now == before) == (owner != 1)


@every_family
def test_fused_step_when_the_backbone_is_quantised_then_its_gradients_are_the_references(name):
    """But for FP8, where joined products share the scale of a row: within the error of one such number, 1 in 16.
    Sizes are those that FP8 products take."""
    for kind in KINDS:
        found = []
        for kernels in ("fused", "reference"):
            backbone = random_backbone(name, head_dim=8)
            for linear in backbone.linears.values():
                linear.frozen = quantise(linear.weight, kind)
            backbone.use_kernels(kernels, Memory())
            found.append(torch.cat(run(backbone)[2]))
        assert (found[0] - found[1]).norm() < (1 / 16 if kind == "fp8" else 1e-4) * found[1].norm()


def kept_storages(passed: Passed) -> dict[int, int]:
    """Every storage that the layers keep, its bytes once; after the last layer there is one more sum and its norm."""
    found = {}
    for kept in passed.kept:
        tensors = [getattr(kept, name) for name in passed.context.model.moved]
        deltas = (kept.s_qkv, kept.s_out, kept.s_gate_up, kept.s_down)
        tensors += [delta.s_TR for delta in deltas if delta is not None]
        if kept.attended is not None:
            cells = kept.attended.gradients.__closure__
            tensors += [kept.attended.output_THC, *(cell.cell_contents for cell in cells)]
        storages = [t.untyped_storage() for t in (*tensors, passed.y_TD) if isinstance(t, torch.Tensor)]
        found.update({storage.data_ptr(): storage.nbytes() for storage in storages})
    return found


@pytest.mark.parametrize(
    ("name", "mode", "count"),
    [
        *((name, mode, 1) for name in FAMILIES for mode in ("none", "mlp", "full")),
        *((name, "none", 2) for name in FAMILIES if name not in ("phi3", "olmo3", "granitemoehybrid")),
    ],
)
def test_kept_when_compared_with_the_memory_model_then_equal_to_the_byte(name, mode, count):
    """All of it, and of that what `offload` would move; on one device and on one of several that share layers."""
    kinds = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]} if name in ("gemma3_text", "olmo3") else {}
    kinds |= {"layer_types": ["full_attention"] * 3} if name == "granitemoehybrid" else {}
    backbone = random_backbone(name, num_hidden_layers=3, **kinds)
    if count > 1:
        divide(backbone, EchoDevices(count))
    backbone.use_kernels("fused", Memory(mode))
    down = describe(backbone.model.config.to_dict()).sizes.sites[3][0]
    slot = backbone.attach(backbone.new_adapter(AdapterSpec(r=4, rank_pattern={down: 20}), 0))
    batch = pack_samples([SlotSample(random_sample(np.random.default_rng(0), 100), slot)], 128, backbone.device)
    assert isinstance(backbone.path, FusedPath)
    buffers = backbone.path.new_buffers()
    buffers.forward(batch, input_shape(batch, with_longest=False), 128, needs_grad=True)
    passed = buffers._held
    assert isinstance(passed, Passed)
    shape = ModelShape.from_config(backbone.model.config.to_dict())
    model = MemoryModel(shape, recompute=mode, activation_bytes=4, tensor_parallel=count)
    assert backbone.path.table.rank_class == rank_class([20]) == 32
    assert sum(kept_storages(passed).values()) == model.kept_bytes(128, 20)
    large = [getattr(kept, name) for kept in passed.kept[OFFLOAD_LAYERS:] for name in passed.context.model.moved]
    assert sum(t.nbytes for t in large if t is not None) == model.offloaded_bytes(128) > 0
