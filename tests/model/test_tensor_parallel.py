"""Layers divided over devices find what one device finds, for every method that can be divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from covering import each_value
from thread_devices import ThreadDevices, on_devices
from tiny_models import SETTINGS, random_backbone, random_sample

from weft.adapters.adapter import Adapter
from weft.methods.registry import has_kernels
from weft.model.backbone import Backbone
from weft.model.divided import divide, why_not_divisible
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import Memory
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.spec import AdapterSpec

T = TypeVar("T")
FAMILIES = ["llama", "llama_tied", "mistral", "qwen2_sliding", "qwen3", "gemma3_text"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 3, "lora_dropout": 0.3},
    "lora_of_high_rank": {"r": 16, "lora_dropout": 0.1},
    "lora_fa": {"r": 3, "freeze_a": True, "lora_dropout": 0.3},
    "pissa": {"r": 3, "init_lora_weights": "pissa"},
    "olora": {"r": 3, "init_lora_weights": "olora"},
    "dora": {"method": "dora", "r": 3},
    "dora_dropping": {"method": "dora", "r": 3, "lora_dropout": 0.3},
    "vera": {"method": "vera", "vera_rank": 5, "lora_dropout": 0.3},
    "ia3": {"method": "ia3"},
    "ia3_anywhere": {"method": "ia3", "target_modules": "all-linear", "feedforward_modules": ("up_proj", "o_proj")},
    "bitfit": {"method": "bitfit"},
    "bottleneck": {"method": "bottleneck", "bottleneck_size": 5},
    "prompt": {"method": "prompt_tuning", "num_virtual_tokens": 3},
    "prefix": {"method": "prefix_tuning", "num_virtual_tokens": 3},
}


def with_adapters(backbone: Backbone, *names: str) -> tuple[list[Adapter], PackedBatch]:
    """Adapters that change something on a backbone, and samples of them all in one microbatch."""
    rng, adapters, slot_samples = np.random.default_rng(0), [], []
    for name in names:
        adapter = backbone.new_adapter(AdapterSpec(**ADAPTERS[name]), 3)
        draw = torch.Generator().manual_seed(5)
        adapter.put({name: x + 0.2 * torch.randn(x.shape, generator=draw) for name, x in adapter.trained().items()})
        slot = backbone.attach(adapter)
        for length in (5, 17, 9):
            sample = random_sample(rng, length).led_by(backbone.leading_rows(slot))
            slot_samples.append(SlotSample(sample, slot, 0.1, dropout_key=length, step_key=4))
        adapters.append(adapter)
    return adapters, pack_samples(slot_samples, 64, backbone.device)


def on_divided(
    name: str,
    count: int,
    run: Callable[[Backbone, ThreadDevices], T],
    *,
    kernels: str = "reference",
    memory: Memory | None = None,
    **options: Any,
) -> list[T]:
    """What is found on each of so many devices that share a model."""
    # One after another: models are drawn from the seed of the process.
    backbones = [random_backbone(name, **options) for _ in range(count)]

    def run_divided(devices: ThreadDevices) -> T:
        backbone = backbones[devices.index]
        divide(backbone, devices)
        backbone.use_kernels(kernels, memory)
        assert backbone.path.name == kernels
        return run(backbone, devices)

    return on_devices(count, run_divided)


def gradients(adapters: list[Adapter]) -> list[torch.Tensor]:
    return [group.grad.clone() for adapter in adapters for group in adapter.groups.values()]


def check(name: str, count: int, *adapters: str, **options: Any) -> None:
    whole = random_backbone(name, **options)
    one, batch = with_adapters(whole, *adapters)
    starts = [adapter.tensors() for adapter in one]
    losses = whole.forward_backward(batch, 64)
    for adapter in one:
        adapter.complete_gradients()

    def run(backbone: Backbone, devices: ThreadDevices) -> tuple[list[float], list[torch.Tensor]]:
        mine, own_batch = with_adapters(backbone, *adapters)
        for adapter, start in zip(mine, starts, strict=True):
            for path, tensors in adapter.tensors().items():
                assert all(x.equal(y) for x, y in zip(tensors, start[path], strict=True)), path
        found = backbone.forward_backward(own_batch, 64)
        for adapter in mine:
            adapter.complete_gradients()
            adapter.add_up_gradients(devices)
        return found, gradients(mine)

    everywhere = on_divided(name, count, run, **options)
    for found, grads in everywhere:
        assert found == everywhere[0][0]
        assert found == pytest.approx(losses, rel=1e-5)
        for mine, first, expected in zip(grads, everywhere[0][1], gradients(one), strict=True):
            assert mine.equal(first)
            assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max()


HAVE_KERNELS = [name for name, settings in ADAPTERS.items() if has_kernels(AdapterSpec(**settings))]


on_both_paths = pytest.mark.parametrize("kernels", ["reference", "fused"])


@pytest.mark.parametrize(
    ("kernels", "adapter"), [*(("reference", name) for name in ADAPTERS), *(("fused", name) for name in HAVE_KERNELS)]
)
def test_adapter_when_layers_are_divided_then_starts_and_gradients_are_those_of_one_device(kernels, adapter):
    """With biases everywhere; all devices end with the same bits."""
    check("llama", 2, adapter, kernels=kernels, attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize(("family", "kernels"), each_value(FAMILIES, ["fused", "reference"]))
def test_family_when_layers_are_divided_then_gradients_are_those_of_one_device(family, kernels):
    """Whatever stands between the linears."""
    check(family, 2, "lora", "prefix", kernels=kernels)


@pytest.mark.parametrize(("kernels", "other"), [("reference", "dora_dropping"), ("fused", "dora")])
def test_devices_when_four_then_gradients_are_those_of_one_device(kernels, other):
    check("llama", 4, "lora", other, "vera", kernels=kernels, num_key_value_heads=4)


@on_both_paths
def test_methods_when_they_share_a_microbatch_then_gradients_are_those_of_one_device(kernels):
    check("llama", 2, "lora", "dora", "ia3", "bitfit", "bottleneck", "prompt", "vera", kernels=kernels)


@on_both_paths
def test_corners_when_parts_of_modules_are_as_wide_as_others_then_each_module_has_its_own(kernels):
    """Half the width of the MLP is that of the residual stream."""
    check("llama", 2, "vera", kernels=kernels, intermediate_size=2 * SETTINGS["hidden_size"])


@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_layers_when_made_again_on_divided_devices_then_gradients_are_those_of_one_device(recompute):
    check("gemma3_text", 2, "lora", "bottleneck", kernels="fused", memory=Memory(recompute))


@on_both_paths
def test_devices_when_a_microbatch_runs_then_meet_once_per_divided_input_and_once_per_row_split_module(kernels):
    """Two forward and two backward in every layer, but for the gradient of embeddings, which is not needed."""

    def run(backbone: Backbone, devices: ThreadDevices) -> int:
        _, batch = with_adapters(backbone, "lora")
        before = devices.num_met
        backbone.forward_backward(batch, 64)
        return devices.num_met - before

    layers = SETTINGS["num_hidden_layers"]
    assert on_divided("llama", 2, run, kernels=kernels) == [4 * layers - 1] * 2


@on_both_paths
def test_memory_when_layers_are_divided_then_each_device_has_its_part_of_every_linear(kernels):
    whole = sum(linear.weight.numel() for linear in random_backbone("llama").linears.values())

    def held(backbone: Backbone, devices: ThreadDevices) -> int:
        stored = [linear.weight.untyped_storage() for linear in backbone.linears.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in stored}.values())

    assert on_divided("llama", 2, held, kernels=kernels) == [whole * 4 // 2] * 2


@pytest.mark.parametrize(
    ("count", "changes", "why"),
    [
        (2, {}, None),
        (3, {}, "has 4 heads, which 3 devices cannot share evenly; tensor may be 1, 2"),
        (4, {}, "has 2 key and value heads, which 4 devices cannot share evenly; tensor may be 1, 2"),
        (2, {"intermediate_size": 49}, "has 49 rows, which 2 devices cannot share evenly; tensor may be 1"),
    ],
)
def test_model_when_devices_cannot_share_it_evenly_then_one_sentence_names_what_fits(count, changes, why):
    assert why_not_divisible({"model_type": "llama", **SETTINGS, **changes}, count) == why


@pytest.mark.parametrize(
    ("quantize", "changes", "keeps"),
    [
        ("nf4", {"hidden_size": 128, "intermediate_size": 256}, None),
        ("nf4", {"hidden_size": 128, "intermediate_size": 192}, "192 inputs or outputs, of which nf4 keeps 64"),
        ("fp8", {"hidden_size": 64, "intermediate_size": 64}, None),
        ("fp8", {"hidden_size": 64, "intermediate_size": 48}, "48 inputs or outputs, of which fp8 keeps 16"),
        ("fp8", {"hidden_size": 64, "intermediate_size": 50}, None),
        ("int8", {"intermediate_size": 6}, None),
    ],
)
def test_weights_when_parts_would_not_hold_whole_blocks_then_refused_in_one_sentence(quantize, changes, keeps):
    why = why_not_divisible({"model_type": "llama", **SETTINGS, **changes}, 2, quantize)
    assert why is None if keeps is None else why is not None and f"has weights of {keeps} together" in why


@pytest.mark.parametrize("kind", ["phi3", "gpt2"])
def test_model_when_its_linears_are_others_then_one_sentence_names_the_families_that_fit(kind):
    why = why_not_divisible({"model_type": kind, **SETTINGS}, 2)
    assert why is not None and kind in why and "tensor parallel is for llama, mistral, qwen2, " in why


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3"])
def test_device_when_it_has_its_part_then_holds_what_the_memory_model_predicts(name):
    def held(backbone: Backbone, devices: ThreadDevices) -> tuple[int, int]:
        adapter = backbone.new_adapter(AdapterSpec(r=3, target_modules="all-linear"), 3)
        frozen = sum(x.numel() * x.element_size() for x in backbone.model.parameters())
        return frozen, sum(x.numel() for x in adapter.trained().values())

    shape = ModelShape.from_config(random_backbone(name).model.config.to_dict())
    model = MemoryModel(shape, activation_bytes=4, tensor_parallel=2)
    for frozen, num_trained in on_divided(name, 2, held):
        assert frozen == model.weight_bytes()
        assert num_trained * (model.trained_bytes_each + 8 / 2) == model.adapter_bytes(3)
