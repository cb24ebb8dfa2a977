"""Checkpoints in 8 and in 4 bits are read to the bits that transformers makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_families import plain_model
from tiny_models import random_sample
from tiny_wholes import whole_model
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from weft.errors import ModelError
from weft.model.load import OriginalWeights, load_backbone, load_plain_model
from weft.model.packed import SlotSample, pack_samples
from weft.model.packing.experts import ExpertWeight, store_experts
from weft.model.source import TINY
from weft.model.stored_forms import ModelFiles, of_mxfp4
from weft.spec import AdapterSpec, BackboneSpec

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def save(model: Any, path: Path, stored: dict[str, Any], change: Any) -> Path:
    """A model directory whose tensors another form has replaced."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path / name)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
    return path


def in_four_bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(0), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, num_in, num_out = found.pop(name).shape
            shape = (num_experts, num_out, num_in // 32)
            found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            found[f"{name}_scales"] = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        else:
            found[name] = tensor.contiguous()
    return found


def in_eight_bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator, found = torch.Generator().manual_seed(0), dict(tensors)
    for name, tensor in tensors.items():
        if "layers" in name and name.endswith("proj.weight"):
            blocks = [-(-size // 128) for size in tensor.shape]
            found[name] = (tensor * 100).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) / 50 + 0.01
    return found


def gpt_oss(path: Path) -> Path:
    model = plain_model("gpt_oss", hidden_size=64, intermediate_size=32, head_dim=16)
    return save(model, path, MXFP4, in_four_bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_when_read_then_has_the_bits_of_transformers(dtype, tmp_path):
    path = gpt_oss(tmp_path / "model")
    mine = load_plain_model(BackboneSpec(str(path), dtype, "cpu")).state_dict()
    options = {"dtype": getattr(torch, dtype), "quantization_config": transformers.Mxfp4Config(dequantize=True)}
    theirs = transformers.GptOssForCausalLM.from_pretrained(path, **options).state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name].to(mine[name].dtype)) for name in mine)
    assert load_backbone(BackboneSpec(str(path), dtype, "cpu")).linears


def test_mxfp4_when_a_model_is_loaded_then_each_tensor_is_read_only_when_it_is_needed(tmp_path, monkeypatch):
    path, read = gpt_oss(tmp_path / "model"), []
    whole = ModelFiles._whole
    monkeypatch.setattr(ModelFiles, "_whole", lambda *given: read.append(given[1]) or whole(*given))
    state = ModelFiles(str(path)).state(torch.bfloat16)
    assert not read
    model = load_plain_model(BackboneSpec(str(path), "bfloat16", "cpu"))
    assert sorted(read) == sorted(set(read)) and len(read) == len(state) == len(model.state_dict())


def test_mxfp4_when_blocks_have_every_code_and_scale_then_each_is_a_bfloat16():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    scales = torch.arange(96, dtype=torch.uint8).view(2, 3, 16) + 60
    mine = of_mxfp4(blocks, scales, torch.bfloat16)
    assert torch.equal(mine, convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))
    assert torch.equal(mine.float(), of_mxfp4(blocks, scales, torch.float32))


@pytest.mark.parametrize("whole", [False, True])
def test_fp8_when_read_then_has_the_bits_of_transformers(whole, tmp_path):
    """Of a text model with blocks of 128, and of one in a vision-language model."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    model = whole_model("mistral3_untied") if whole else plain_model("qwen3", **sizes)
    path = save(model, tmp_path / "model", FP8, in_eight_bits)
    mine = load_plain_model(BackboneSpec(str(path), "bfloat16", "cpu"))
    stored, make = load_file(path / "model.safetensors"), Fp8Dequantize(None)
    prefix = "language_model.model." if whole else "model."
    files = OriginalWeights("mine", str(path), "model", torch.bfloat16)
    for name in ("layers.0.self_attn.k_proj", "layers.1.mlp.down_proj"):
        weight, scale = (stored[f"{prefix}{name}.weight{end}"] for end in ("", "_scale_inv"))
        expected = make._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
        assert torch.equal(mine.model.get_submodule(name).weight, expected)
        assert torch.equal(files.find(f"model.{name}", tuple(expected.shape)), expected)
    assert torch.equal(mine.lm_head.weight, model.lm_head.weight.to(torch.bfloat16))


def test_fp8_when_blocks_do_not_divide_a_weight_then_the_last_are_smaller():
    from weft.model.stored_forms import _of_blocks

    w8_OD, scale = torch.ones(130, 257).to(torch.float8_e4m3fn), torch.arange(6.0).view(2, 3)
    found = _of_blocks(w8_OD, scale)
    assert (found[129, 256], found[127, 0], found[128, 127], found[0, 255]) == (5.0, 0.0, 3.0, 1.0)


def test_form_when_unknown_then_refused_in_a_sentence(tmp_path):
    path = save(plain_model("llama"), tmp_path / "model", {"quant_method": "gptq", "bits": 4}, dict)
    with pytest.raises(ModelError, match="its weights are stored as gptq; Weft reads fp8 and mxfp4, or plain weights"):
        load_plain_model(BackboneSpec(str(path), device="cpu"))


def step(path: Path, quantize: str = "fp8") -> tuple[list[float], list[torch.Tensor], int]:
    """Losses and gradients of a microbatch, and the bytes of the model."""
    backbone = load_backbone(BackboneSpec(str(path), "bfloat16", "cpu", quantize=quantize))
    adapter = backbone.new_adapter(AdapterSpec(r=3, init_lora_weights=False), 0)
    sample = random_sample(np.random.default_rng(0), 17, high=60)
    batch = pack_samples([SlotSample(sample, backbone.attach(adapter))], 128, backbone.device)
    losses = backbone.forward_backward(batch, 128)
    return losses, [group.grad.clone() for group in adapter.groups.values()], backbone.num_bytes


def test_mxfp4_when_kept_in_fp8_then_not_a_bit_is_lost(tmp_path, monkeypatch):
    """Experts in 8 bits give the bits of experts in 16; that linears are in 8 bits too is another matter."""
    path = gpt_oss(tmp_path / "model")
    kept = step(path)
    monkeypatch.setattr("weft.model.load.store_experts", lambda *_: None)
    dense = step(path)
    assert kept[0] == dense[0]
    assert all(torch.equal(one, other) for one, other in zip(kept[1], dense[1], strict=True))
    assert kept[2] < dense[2]


def experts(scales: int) -> Any:
    """Experts whose blocks differ by so many octaves."""
    model = plain_model("gpt_oss", hidden_size=64, intermediate_size=32, head_dim=16).to(torch.bfloat16)
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 2, 8, 16)[:, :, :, 0].expand(4, 64, 2, 16)
    powers = torch.tensor([120, 120 + scales], dtype=torch.uint8).expand(4, 64, 2)
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data = of_mxfp4(codes, powers, torch.bfloat16)
    return model


def test_experts_when_scales_span_14_octaves_then_are_kept_in_fp8_and_beyond_refused():
    for octaves in (0, 3, 14):
        model = experts(octaves)
        expected = model.model.layers[0].mlp.experts.gate_up_proj.detach()
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.data.zero_()
        store_experts(model, "mine")
        own = model.model.layers[0].mlp.experts
        assert own.gate_up_proj.dtype == torch.float8_e4m3fn
        assert torch.equal(ExpertWeight.of(own, "gate_up_proj").dense(), expected)
    with pytest.raises(ModelError, match=r"gate_up_proj spans more than 14 octaves for one output"):
        store_experts(experts(15), "mine")
