"""What the fused step does on GPUs of other kinds, known by their capability alone."""

from __future__ import annotations

import itertools
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import random_backbone, random_sample

from weft.adapters import frozen
from weft.adapters.frozen import quantise
from weft.kernels.lora.tables import Needs
from weft.kernels.storage import has_fp8
from weft.model.fused import graphs
from weft.model.fused.inputs import InputShape, input_shape
from weft.model.fused.model import why_not
from weft.model.fused.path import FusedPath
from weft.model.load import fp8_copies
from weft.model.packed import SlotSample, pack_samples
from weft.model.packing import attention
from weft.model.packing.attention import needs_bounds
from weft.spec import AdapterSpec

GPU = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch see a GPU of a capability."""

    def see(*capability: int, memory: int = 80 << 30) -> None:
        has_fp8.cache_clear()
        needs_bounds.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

    yield see
    has_fp8.cache_clear()
    needs_bounds.cache_clear()


@pytest.mark.parametrize(
    ("capability", "is_torchs"), [((8, 0), True), ((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)]
)
def test_attention_when_a_gpu_has_little_shared_memory_then_is_torchs(gpu, capability, is_torchs):
    gpu(*capability)
    assert needs_bounds(GPU) is is_torchs


@pytest.mark.parametrize(("capability", "copies"), [((8, 0), 1), ((8, 9), 2), ((9, 0), 2)])
def test_fp8_copies_when_a_gpu_multiplies_no_fp8_then_there_is_one(gpu, capability, copies):
    gpu(*capability)
    assert fp8_copies(8_000_000_000, GPU) == copies


@pytest.mark.parametrize(
    ("capability", "size", "dtype", "reason"),
    [
        ((9, 0), 64, torch.bfloat16, None),
        ((9, 0), 100, torch.bfloat16, None),
        ((8, 0), 100, torch.bfloat16, "heads of 100"),
        ((8, 0), 96, torch.bfloat16, None),
        ((9, 0), 512, torch.bfloat16, "heads of 512"),
        ((9, 0), 64, torch.float32, "float32"),
    ],
)
def test_fused_kernels_when_attention_does_not_take_the_model_then_gives_the_reason(
    gpu, capability, size, dtype, reason
):
    gpu(*capability)
    backbone = random_backbone("llama")
    backbone.model.config.head_dim = size
    found = why_not(backbone.model, backbone.linears, GPU, dtype)
    assert found is None if reason is None else reason in str(found)


def test_varlen_when_torch_has_the_option_then_keys_are_not_split_by_the_longest_sample(monkeypatch):
    older, newer = (lambda query: query), (lambda query, enable_gqa=False, num_splits=None: query)
    for kernel, options in ((older, {}), (newer, {"enable_gqa": True, "num_splits": 1})):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
        attention._options.cache_clear()
        assert attention._options() == options
    attention._options.cache_clear()


def test_shape_when_attention_knows_the_samples_then_there_are_enough_for_every_multiprocessor():
    """Six heads of 32 samples are more than any GPU's multiprocessors, so no sample is shared out among several."""
    batch = pack_samples([SlotSample(random_sample(np.random.default_rng(0), 5), None, 1.0)], 128, torch.device("cpu"))
    assert input_shape(batch, with_longest=True).num_spans * 6 >= 148
    assert input_shape(batch, with_longest=False).num_spans == 16


def test_capture_when_memory_ends_then_what_it_held_is_free_before_the_next_try(monkeypatch):
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def capture(*_: object) -> str:
        if not held:
            kept = [torch.zeros(8) for _ in range(4)]
            held.extend(weakref.ref(tensor) for tensor in kept)
            raise torch.OutOfMemoryError("CUDA out of memory")
        alive.append(sum(tensor() is not None for tensor in held))
        return "captured"

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    fused = random_backbone("llama", kernels="fused").path
    assert isinstance(fused, FusedPath)
    only = fused.new_buffers()
    wanted = only._key(InputShape(128, 16, 0, True, False), None)
    assert only._graphs.graph(wanted) == "captured"  # type: ignore[comparison-overlap]
    assert alive == [0]


def test_graphs_when_jobs_come_and_go_then_only_the_first_of_a_kind_is_captured_for(monkeypatch):
    """One with dropout or wide ranks takes kernels of its own while it is there; evaluation takes training's."""
    taken: list[Needs] = []
    monkeypatch.setattr(graphs, "capture", lambda _model, _shape, table, *_: taken.append(table.needs) or "captured")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    moments = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    backbone = random_backbone("llama", kernels="fused")
    fused = backbone.path
    assert isinstance(fused, FusedPath)
    only = fused.new_buffers()
    backbone.attach(backbone.new_adapter(AdapterSpec(r=8), 0))
    training, evaluation = InputShape(128, 16, 0, True, True), InputShape(128, 16, 0, True, False)
    for _ in range(2):
        for spec in (
            AdapterSpec(r=4),
            AdapterSpec(r=4, lora_dropout=0.1),
            AdapterSpec(r=20, target_modules=("q_proj",)),
        ):
            slot = backbone.attach(backbone.new_adapter(spec, 0))
            for shape in (training, evaluation, training):
                only._graphs.graph(only._key(shape, None))
            backbone.detach(slot)
            only._graphs.graph(only._key(training, None))
    narrow, dropping, wide = Needs.of((8,), drops=False), Needs.of((8,), drops=True), Needs.of((8, 20), drops=False)
    assert taken == [narrow, dropping, wide]
    assert backbone.compiling_s == fused.captured_s == 3, "each capture is timed, and nothing else is"


def test_fp8_product_when_rows_come_in_tiles_then_each_is_a_product_of_its_own(monkeypatch):
    """Otherwise the check whether all rows may go at once would compare a product with itself."""
    seen: list[int] = []

    def product(x8_LK: torch.Tensor, w8_KN: torch.Tensor, *, scale_a: torch.Tensor, **_: object) -> torch.Tensor:
        seen.append(len(x8_LK))
        return (x8_LK.float() @ w8_KN.float() * scale_a).bfloat16()

    weight = quantise(torch.randn(32, 64), "fp8")
    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.dtype is torch.float8_e4m3fn))
    factors = weight.factors(torch.randn(96, 64))
    one, tiled = frozen._scaled_mm(factors, None), frozen._scaled_mm(factors, 32)
    assert seen == [96, 32, 32, 32] and torch.equal(one, tiled)
