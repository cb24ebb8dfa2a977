"""The parts of a model, run one after another, give the bits of the whole, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from covering import each_pair
from tiny_models import random_backbone, random_model, random_sample

from weft.kernels.dropout import mix, module_key
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.model.model_part import ModelPart, keep_part
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.parallel.stages.stage_runner import stage_runner
from weft.spec import AdapterSpec, BackboneSpec

TOKENIZER: Any = SimpleNamespace(eos_token_id=None)
FAMILIES = ["llama", "llama_tied", "mistral", "qwen2_sliding", "qwen3", "phi3", "gemma3_text"]
FAMILIES += ["smollm3", "olmo3", "ministral3", "granite", "granitemoehybrid"]


def part_of(name: str, first: int, end: int, kernels: str, **options: Any) -> Backbone:
    model, part = random_model(name, **options), ModelPart(first, end, 2)
    keep_part(model, part)
    backbone = Backbone(model, TOKENIZER, name, part)
    backbone.use_kernels(kernels)
    return backbone


def with_adapter(backbone: Backbone) -> tuple[Any, PackedBatch]:
    """An adapter that changes something on a backbone, and samples on its slot."""
    adapter = backbone.new_adapter(AdapterSpec(r=3, lora_dropout=0.1), 3)
    for path, (_, b) in adapter.split(adapter.flat()).items():
        b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(mix(1, module_key(path)))))
    slot, rng = backbone.attach(adapter), np.random.default_rng(0)
    slot_samples = [SlotSample(random_sample(rng, n), slot, 0.1, dropout_key=n, step_key=4) for n in (5, 17, 9)]
    return adapter, pack_samples(slot_samples, 64, backbone.device)


@pytest.mark.parametrize(
    ("name", "kernels", "dtype"), each_pair(FAMILIES, ["reference", "fused"], [torch.float32, torch.bfloat16])
)
def test_parts_when_run_one_after_another_then_scores_and_gradients_are_the_wholes(name, kernels, dtype):
    """Two microbatches are under way at once."""
    whole = random_backbone(name, kernels=kernels, dtype=dtype)
    adapter, batch = with_adapter(whole)
    expected = [whole.launch(batch, 64).scores() for _ in range(2)]
    parts = [part_of(name, 0, 1, kernels, dtype=dtype), part_of(name, 1, 2, kernels, dtype=dtype)]
    shares, batches = zip(*(with_adapter(part) for part in parts), strict=True)
    first, last = (stage_runner(part) for part in parts)
    crossing = [first.forward(lane, batches[0], 64, None) for lane in range(2)]
    found = []
    for lane in range(2):
        last.forward(lane, batches[1], 64, crossing[lane])
        gradient, scores = last.backward(lane, None)
        assert scores is not None
        found.append(scores.scores())
        assert first.backward(lane, gradient) == (None, None)
    assert found == expected
    for group in adapter.groups:
        joined = torch.cat([share.groups[group].grad for share in shares])
        assert joined.equal(adapter.groups[group].grad)


def test_part_when_loaded_from_files_then_has_its_own_layers_alone():
    """And paths, starting values and places to choose from are those of the whole."""
    spec = BackboneSpec("tiny", device="cpu")
    whole = load_backbone(spec)
    num_layers = whole.model.config.num_hidden_layers
    parts = [
        load_backbone(spec, ModelPart(0, 1, num_layers)),
        load_backbone(spec, ModelPart(1, num_layers, num_layers)),
    ]
    kept = [dict(part.model.named_parameters()) for part in parts]
    assert not kept[0].keys() & kept[1].keys() - {"model.embed_tokens.weight"}
    for path, weight in whole.model.named_parameters():
        assert any(path in own and own[path].equal(weight) for own in kept), path
    assert [*parts[0].linears, *parts[1].linears] == list(whole.linears)
    adapter = AdapterSpec(r=2, layers_to_transform=(num_layers - 1,))
    assert parts[0].sites.targets(adapter) == whole.sites.targets(adapter)
