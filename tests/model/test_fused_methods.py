"""Adapters of every method on the fused path; the reference path is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from covering import each_value
from tiny_models import assert_same_bits, random_backbone, random_data, random_sample, train

from weft.adapters.adapter import Adapter
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import Memory
from weft.spec import AdapterSpec, JobSpec

SPECS = {
    "dora": AdapterSpec(method="dora", r=8),
    "dora_few": AdapterSpec(method="dora", r=3, target_modules=("v_proj", "up_proj")),
    "vera": AdapterSpec(method="vera", vera_rank=12, d_initial=0.3),
    "vera_dropped": AdapterSpec(method="vera", vera_rank=16, d_initial=0.3, lora_dropout=0.2),
    "ia3": AdapterSpec(method="ia3"),
    "ia3_outputs": AdapterSpec(method="ia3", target_modules="all-linear", feedforward_modules=()),
    "bitfit": AdapterSpec(method="bitfit", target_modules="all-linear"),
    "bottleneck": AdapterSpec(method="bottleneck", bottleneck_size=12, bottleneck_scale=0.5),
    "pfeiffer": AdapterSpec(
        method="bottleneck", bottleneck_size=8, bottleneck_variant="pfeiffer", bottleneck_activation="gelu"
    ),
    "diff": AdapterSpec(method="diff_pruning", density=0.05),
    "prompt": AdapterSpec(method="prompt_tuning", num_virtual_tokens=5),
    "prefix": AdapterSpec(method="prefix_tuning", num_virtual_tokens=3),
    "pissa": AdapterSpec(r=4, init_lora_weights="pissa"),
    "olora": AdapterSpec(r=3, init_lora_weights="olora", freeze_a=True),
}
NEIGHBOUR = AdapterSpec(r=8, lora_alpha=16)
FAMILIES = ("llama_bias", "qwen2", "qwen3", "gemma3_text", "olmo3", "ministral3", "granite")


def moved(adapter: Adapter, seed: int) -> Adapter:
    """With other weights than it starts with."""
    generator = torch.Generator().manual_seed(seed)
    trained = adapter.trained()
    adapter.put({name: x + 0.1 * torch.randn(x.shape, generator=generator) for name, x in trained.items()})
    return adapter


def packed(backbone: Backbone, slots: list[int | None], lengths: list[tuple[int, int]]) -> PackedBatch:
    """Samples of given lengths, each with the index of its slot."""
    rng = np.random.default_rng(5)
    slot_samples = []
    for length, index in lengths:
        sample = random_sample(rng, length).led_by(backbone.leading_rows(slots[index]))
        slot_samples.append(SlotSample(sample, slots[index], 0.01, 7 + length))
    return pack_samples(slot_samples, 128, torch.device("cpu"))


def run(name: str, spec: AdapterSpec, kernels: str, memory: Memory | None = None) -> list[torch.Tensor]:
    """Losses and gradients of an adapter whose samples lie between those of a LoRA and of no adapter."""
    backbone = random_backbone(name, kernels=kernels, memory=memory if kernels == "fused" else None)
    own, other = moved(backbone.new_adapter(spec, 1), 1), moved(backbone.new_adapter(NEIGHBOUR, 2), 2)
    slots: list[int | None] = [backbone.attach(other), backbone.attach(own), None]
    batch = packed(backbone, slots, [(20, 1), (9, 0), (2, 1), (25, 2), (14, 1)])
    losses = backbone.forward_backward(batch, 128)
    for adapter in (own, other):
        adapter.complete_gradients()
    grads = [group.grad.clone() for adapter in (own, other) for group in adapter.groups.values()]
    return [torch.tensor(losses), *grads]


@pytest.mark.parametrize(("kind", "family"), each_value(list(SPECS), FAMILIES))
def test_fused_step_when_the_method_is_another_then_computes_what_the_reference_path_does(kind, family):
    """Losses and gradients, also those of a LoRA in the same microbatch."""
    spec = SPECS[kind]
    expected, found = run(family, spec, "reference"), run(family, spec, "fused")
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("kind", "recompute"), each_value(["dora", "ia3", "bottleneck", "diff", "prefix"], ["mlp", "full"])
)
def test_fused_step_when_layers_are_made_again_then_not_a_bit_changes(kind, recompute):
    """What other methods change is changed in the same way the second time."""
    kept, again = (run("llama", SPECS[kind], "fused", Memory(choice)) for choice in ("none", recompute))
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_fused_run_when_jobs_of_many_methods_train_together_then_each_ends_as_alone():
    """Weights and losses of whole runs, to the bit: steps find every gradient, and kernels every step."""
    kinds = ("dora", "vera", "ia3", "bottleneck", "diff", "prompt", "pissa")
    jobs = [
        (
            JobSpec(kind, ("random",), max_steps=3, global_batch_size=3, max_length=32, seed=i, adapter=SPECS[kind]),
            random_data(i, num_eval=2),
        )
        for i, kind in enumerate(kinds)
    ]
    together = train(random_backbone("llama", kernels="fused"), jobs, capacity=128)
    for spec, data in jobs:
        alone = train(random_backbone("llama", kernels="fused"), [(spec, data)], capacity=128)
        assert_same_bits(together[spec.name], alone[spec.name])
        assert len(set(alone[spec.name].losses)) == 3
