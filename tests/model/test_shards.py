"""A backbone whose frozen weights are gathered layer by layer gives the bits of a whole one, in less memory."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import chosen, each_value, slow
from safetensors.torch import load_file, save_file
from test_load_backbone import save
from test_model_part import FAMILIES, with_adapter
from tiny_families import FAMILIES as TINY
from tiny_families import plain_model
from tiny_models import assert_same_bits, job_spec, random_backbone, random_data, small_job, train
from tiny_shards import Late, spread

from weft.adapters.frozen import quantise
from weft.errors import ModelError
from weft.kernels.device import CPU
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.model.model_part import ModelPart
from weft.model.shards import ALIGNMENT, LayerRing, TorchPeers
from weft.parallel.stages.stage_runner import stage_runner
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.spec import BackboneSpec

KINDS = ["none", "fp8", "int8", "nf4"]


def stored_as(kind: str, name: str = "llama", **options: Any) -> Backbone:
    """A tiny random backbone on the reference path, whose linears are stored in a way."""
    backbone = random_backbone(name, **options)
    for linear in backbone.linears.values():
        linear.frozen = quantise(linear.weight, kind)
    return backbone


def two_ways(whole: Backbone, other: Backbone) -> None:
    """Scores and gradients of two microbatches and of an evaluation in between are the same."""
    (mine, batch), (others, other_batch) = with_adapter(whole), with_adapter(other)
    for _ in range(2):
        assert whole.launch(batch, 64).scores() == other.launch(other_batch, 64).scores()
        assert whole.scores(batch, 64) == other.scores(other_batch, 64)
    for name, group in mine.groups.items():
        assert group.grad.abs().sum() > 0
        assert group.grad.equal(others.groups[name].grad), name


@pytest.mark.parametrize(("kind", "dtype"), each_value(KINDS, [torch.float32, torch.bfloat16]))
def test_shards_however_weights_are_stored_then_have_the_bits_of_the_whole(kind, dtype):
    """Three devices, five layers: slices and parities do not come out even."""
    options: dict[str, Any] = {"dtype": dtype, "num_hidden_layers": 5}
    two_ways(stored_as(kind, **options), spread(stored_as(kind, **options), 3, 1))


def deep(name: str) -> dict[str, Any]:
    """Settings of a family's model with more layers than there are buffers."""
    settings = TINY[name][1]
    kinds = {"layer_types": settings["layer_types"] * 2} if "layer_types" in settings else {}
    return {"num_hidden_layers": 4, **kinds}


@pytest.mark.parametrize("name", FAMILIES)
def test_shards_of_every_family_then_have_the_bits_of_the_whole(name):
    two_ways(random_backbone(name, **deep(name)), spread(random_backbone(name, **deep(name))))


def fused(name: str, kind: str) -> Backbone:
    backbone = stored_as(kind, name, **deep(name))
    backbone.use_kernels("fused")
    return backbone


@pytest.mark.parametrize(
    ("name", "kind"),
    chosen([*(("llama", kind) for kind in KINDS), ("qwen2_sliding", "fp8"), ("gemma3_text", "none")], 2, 3, 4, 5),
)
def test_shards_on_the_fused_path_then_have_the_bits_of_the_whole(name, kind):
    """Its products read weights that were joined, of which the linears have parts."""
    two_ways(fused(name, kind), spread(fused(name, kind), 2, 1))


def jobs() -> list[Any]:
    """One of them learns in one layer, and gradients go back no further; two read weights as they start."""
    adapters = {"late": {"layers_to_transform": (2,)}, "dora": {"method": "dora", "r": 3}}
    adapters |= {"pissa": {"init_lora_weights": "pissa", "r": 2}, "diff": {"method": "diff_pruning", "density": 0.05}}
    found = [small_job("plain", max_grad_norm=0.05, max_steps=3)]
    for seed, (name, adapter) in enumerate(adapters.items()):
        spec = job_spec(name, seed=seed, adapter=adapter, max_steps=2, max_grad_norm=0.1)
        found.append((spec, random_data(seed, num_samples=5)))
    return found


@pytest.mark.parametrize("kind", [slow("none"), "int8"])
def test_jobs_when_trained_on_shards_then_have_the_bits_of_a_whole_backbone(kind):
    """Also where a job reads weights of layers that are not here."""
    expected = train(stored_as(kind, num_hidden_layers=4), jobs(), capacity=48)
    for name, outcome in train(spread(stored_as(kind, num_hidden_layers=4)), jobs(), capacity=48).items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("kind", KINDS)
def test_shards_hold_their_part_of_the_linears_and_two_layers_to_the_byte(kind):
    whole, count, num_layers = stored_as(kind, num_hidden_layers=6), 3, 6
    linears = sum(linear.frozen.num_bytes for linear in whole.linears.values())
    rest = whole.num_bytes - linears
    own = spread(stored_as(kind, num_hidden_layers=6), count)
    layer = -(-linears // num_layers // (count * ALIGNMENT)) * count * ALIGNMENT
    padding = num_layers * 7 * 3 * ALIGNMENT
    assert linears / count + 2 * layer <= own.num_bytes - rest <= linears / count + 2 * layer + padding
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in own.model.parameters()}
    # Of the parameters themselves nothing else is left: all layers read the two buffers.
    assert sum(storage.nbytes() for storage in storages.values()) <= rest + 2 * (layer + 7 * 3 * ALIGNMENT)


def noted_ring(num_layers: int) -> tuple[Late, LayerRing]:
    peers = Late()
    ring = spread(random_backbone(num_hidden_layers=num_layers), peers=peers).ring
    assert ring is not None
    return peers, ring


def test_microbatch_when_it_comes_to_a_layer_then_the_next_one_is_on_its_way():
    """And what it still has at the turning point and at the end is not gathered again."""
    peers, ring = noted_ring(4)
    ring.begin(back=False)
    assert peers.calls == ["start 0", "start 1", "wait 0", "wait 1"]
    peers.calls.clear()
    for back in (False, True):
        for layer in (3, 2, 1, 0) if back else (0, 1, 2, 3):
            peers.calls.append(f"use {layer}")
            ring.use(layer)
        ring.end(then_back=not back)
        if not back:
            ring.begin(back=True)
    forward = ["use 0", "use 1", "start 2", "use 2", "wait 2", "start 3", "use 3", "wait 3"]
    back = ["use 3", "use 2", "start 1", "use 1", "wait 1", "start 0", "use 0", "wait 0"]
    assert peers.calls == forward + back
    peers.calls.clear()
    ring.begin(back=False)
    assert peers.calls == []


def test_microbatch_when_another_goes_first_then_that_one_finds_its_layers_on_their_way():
    """Between stages several are under way, forward and back in turn."""
    peers, ring = noted_ring(4)
    ways = [False, False, True, False, True, True]
    for index, back in enumerate(ways):
        peers.calls.clear()
        with ring.before(back=ways[index + 1] if index + 1 < len(ways) else False):
            ring.begin(back=back)
            assert index == 0 or not any(call.startswith("start") for call in peers.calls)
            ring.end(then_back=True)
        following = ways[index + 1] if index + 1 < len(ways) else False
        turned = [call for call in peers.calls if call.startswith("start")][-2:]
        if back == following:
            assert turned == (["start 3", "start 2"] if back else ["start 0", "start 1"])


@pytest.mark.parametrize("back", [True, False])
def test_device_without_work_then_gathers_what_the_others_do_in_their_order(back):
    """No peer waits for one that has fewer microbatches, or whose gradients end early."""
    (busy, ring), (idle, empty) = noted_ring(5), noted_ring(5)
    for stop in (0, 2, 5):
        for turned in (False, True) if back else (False,):
            ring.begin(back=turned)
            for layer in range(4, stop - 1, -1) if turned else range(5):
                ring.use(layer)
            ring.end(then_back=back and not turned)
            empty.run_empty_pass(back=turned, then_back=back and not turned)
            assert busy.calls == idle.calls


def test_layer_when_used_out_of_turn_then_is_refused():
    """Else a microbatch would read the weights of another layer."""
    _, ring = noted_ring(3)
    with pytest.raises(AssertionError, match="layer 0 is not the next"):
        ring.use(0)
    ring.begin(back=False)
    ring.use(0)
    with pytest.raises(AssertionError, match="layer 2 is not the next"):
        ring.use(2)


def test_weights_when_read_out_of_turn_then_are_those_of_their_layer():
    expected, own = random_backbone(num_hidden_layers=4), spread(random_backbone(num_hidden_layers=4))
    for path, linear in own.linears.items():
        assert linear.weight.equal(expected.linears[path].weight)


def saved_model(folder: Path, **changes: Any) -> str:
    """A tiny random model on disk."""
    return str(save(plain_model("llama", **changes), folder))


@pytest.mark.parametrize(("kind", "kernels"), each_value(KINDS, ["reference", "fused"]))
def test_shards_when_loaded_from_files_then_have_the_weights_of_the_whole(kind, kernels):
    """One reads no weights of another's slices; both together have them all."""
    spec = BackboneSpec("tiny", device="cpu", quantize=kind, kernels=kernels)
    whole, own = load_backbone(spec), load_backbone(spec, peers=Late(1, 3))
    assert own.ring is not None
    own.ring.begin(back=False)
    for layer in range(whole.model.config.num_hidden_layers):
        own.ring.use(layer)
        for path in (path for path in own.linears if f".layers.{layer}." in path):
            expected = whole.linears[path].frozen.stored
            assert all(x.equal(expected[name]) for name, x in own.linears[path].frozen.stored.items())
    for path, linear in own.linears.items():
        assert linear.weight.equal(whole.linears[path].weight)
        assert linear.bias_O is None
    kept = [name for name, _ in own.model.named_parameters() if "frozen" not in name]
    assert all(own.model.get_parameter(name).equal(whole.model.get_parameter(name)) for name in kept)


@pytest.mark.parametrize(("kind", "kernels"), each_value(KINDS, ["fused", "reference"]))
def test_shards_when_they_are_those_of_a_last_stage_then_have_the_bits_of_the_whole_stage(kind, kernels, tmp_path):
    """It has no embedding: where it lives and in what it computes is not to be read off weights that are elsewhere."""
    spec = BackboneSpec(saved_model(tmp_path), device="cpu", dtype="bfloat16", quantize=kind, kernels=kernels)
    found = []
    for peers in (None, Late(1, 2)):
        stage = load_backbone(spec, ModelPart(1, 2, 2), peers)
        assert (stage.device, stage.dtype) == (CPU, torch.bfloat16)
        adapter, batch = with_adapter(stage)
        crossing = torch.randn(batch.num_rows, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        runner = stage_runner(stage)
        runner.forward(0, batch, 64, crossing)
        gradient, scores = runner.backward(0, None)
        assert gradient is not None and scores is not None
        found.append(
            (gradient, scores.scores(), torch.cat([group.grad.flatten() for group in adapter.groups.values()]))
        )
    (gradient, scores, grads), (other_gradient, other_scores, other_grads) = found
    assert gradient.equal(other_gradient) and scores == other_scores
    assert grads.abs().sum() > 0 and grads.equal(other_grads)


def peak_kb() -> int:
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def test_shards_while_they_are_loaded_then_never_have_the_whole_model(tmp_path):
    """A quarter of it, one layer as it is read and written, and at the end the two buffers."""
    layers = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
    name = saved_model(tmp_path, **layers, num_key_value_heads=4)
    whole_kb = (tmp_path / "model.safetensors").stat().st_size // 1024
    assert whole_kb > 50_000
    load_backbone(BackboneSpec("tiny", device="cpu"))
    gc.collect()
    before = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]
    Path("/proc/self/clear_refs").write_text("5")
    own = load_backbone(
        BackboneSpec(name, device="cpu", kernels="reference"), peers=TorchPeers(0, 4, torch.device("cpu"))
    )
    assert own.num_bytes // 1024 < 0.6 * whole_kb
    assert peak_kb() - before < 0.8 * whole_kb


def test_weight_when_it_is_not_in_the_files_then_the_model_is_refused(tmp_path):
    name = saved_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is not in the model's files"):
        load_backbone(BackboneSpec(name, device="cpu"), peers=TorchPeers(0, 2, torch.device("cpu")))


@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_memory_model_reports_what_shards_hold(kind):
    """But for what is padded."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    own = spread(stored_as(kind, num_hidden_layers=6, **sizes), 3)
    shape = ModelShape.from_config(own.model.config.to_dict())
    model = MemoryModel(shape, kind, activation_bytes=4, shards=3)
    assert model.weight_bytes() == pytest.approx(own.num_bytes, rel=0.02)
    assert model.weight_bytes() < 0.8 * replace(model, shards=1).weight_bytes()
