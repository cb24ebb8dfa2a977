"""The peers do what their descriptions state, and get their best batch."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from benchmarks.clock import Effort, Measured
from benchmarks.steps import peers
from benchmarks.steps.peers import (
    Missing,
    adapter_steps,
    best_batch,
    frozen_steps,
    liger_kernels,
    measure_peers,
    with_adapter,
)
from benchmarks.steps.regimes import HANDFUL, BenchProgram, BenchRun, padded_batch
from weft.model.load import build
from weft.plan.cost.shape import SHAPES

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]
SMALL = Effort(warmups=1, repeats=1, batch_sizes=(1, 2), num_batches=2)
RUN = BenchRun(BenchProgram.PEFT_BEST, HANDFUL)


def test_adapter_step_when_taken_then_trains_the_adapter_alone():
    model = with_adapter(build(TINY, torch.float32, CPU, "sdpa"), 0.0)
    trained = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * TINY.layers
    assert all("lora_" in name for name in trained)
    step = adapter_steps(model)
    for number in range(2):
        step(padded_batch((8, 12), 2, number, 256, CPU)[0])
    now = dict(model.named_parameters())
    assert all(not torch.equal(now[name], old) for name, old in trained.items())


def test_frozen_step_when_taken_then_runs_the_whole_backward(monkeypatch):
    model = build(TINY, torch.float32, CPU, "sdpa")
    reached = []
    model.model.layers[0].self_attn.q_proj.register_full_backward_hook(lambda *_: reached.append(1))
    frozen_steps(model)(padded_batch((8, 12), 2, 0, 256, CPU)[0])
    assert reached == [1]


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({4: 100, 8: 150, 16: None}, 8),  # memory ends
        ({4: 100, 8: 150, 16: 151, 32: 999}, 16),  # nothing more to gain
        ({4: 100, 8: 90, 16: 999}, 4),
    ],
)
def test_best_batch_when_searched_upward_then_stops_at_no_gain_or_no_memory(speeds, best, monkeypatch):
    def at_size(step: object, run: BenchRun, size: int, *_: object) -> Measured:
        if speeds[size] is None:
            raise torch.OutOfMemoryError
        return Measured(speeds[size], speeds[size], 1.0, 0.0, f"batch {size}")

    monkeypatch.setattr(peers, "_at_size", at_size)
    assert best_batch(lambda _: None, RUN, 256, CPU, Effort()).detail == f"batch {best}"


def test_best_batch_when_not_even_the_smallest_fits_then_reports_it(monkeypatch):
    def at_size(*_: object) -> Measured:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(peers, "_at_size", at_size)
    with pytest.raises(torch.OutOfMemoryError):
        best_batch(lambda _: None, RUN, 256, CPU, Effort())


def test_batches_when_lengths_differ_then_totals_are_taken_over_several():
    seen: list[tuple[int, ...]] = []
    measured = best_batch(lambda b: seen.append(tuple(b["input_ids"].shape)), RUN, 256, CPU, SMALL, (4,))
    assert len(set(seen)) == 2  # two batches of other lengths
    assert measured.rows == sum(rows * columns for rows, columns in dict.fromkeys(seen))
    assert measured.tokens < measured.rows


def test_measure_peers_when_all_are_requested_then_each_is_measured_or_its_absence_explained():
    runs = [
        BenchRun(p, HANDFUL)
        for p in (BenchProgram.PEFT_SOLO, BenchProgram.PEFT_BEST, BenchProgram.LIGER_BEST, BenchProgram.HF_FROZEN)
    ]
    found = dict(measure_peers(TINY, runs, torch.float32, CPU, SMALL))
    assert list(found) == [runs[3], runs[0], runs[1], runs[2]]
    assert all(isinstance(found[run], Measured) for run in (runs[0], runs[1], runs[3]))
    assert found[runs[0]].detail == "batch 1"
    liger = found[runs[2]]
    assert isinstance(liger, Missing)
    assert "liger-kernel is not installed" in liger.reason or "need a GPU" in liger.reason


def test_liger_when_it_patches_transformers_then_it_is_put_back(monkeypatch):
    model = build(TINY, torch.float32, CPU, "sdpa")
    modeling = sys.modules[type(model).__module__]
    own = modeling.LlamaRMSNorm

    def patch(model: object) -> None:
        modeling.LlamaRMSNorm = object

    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    with liger_kernels(model):
        assert modeling.LlamaRMSNorm is object
    assert modeling.LlamaRMSNorm is own
