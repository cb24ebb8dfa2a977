"""Buffers in flight as a GPU has them, with graphs that only repeat what they were captured from.

A stand-in for a capture reads and writes fixed buffers, as a graph does, so copies that were forgotten show here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_model_part import part_of, with_adapter
from tiny_models import random_backbone, random_sample

from weft.kernels.lora.tables import BARE, SampleRows
from weft.model.fused import graphs
from weft.model.fused.graphs import Captured
from weft.model.fused.inputs import Inputs, InputShape
from weft.model.fused.model import FusedModel
from weft.model.fused.step import run_backward, run_forward
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.parallel.stages.stage_runner import stage_runner


def repeating(
    model: FusedModel, shape: InputShape, table: Any, row_tile: int | None, memory: Any, pool: Any, lane: int
) -> Captured:
    """What `capture` returns, but nothing is recorded: what a graph would do is done when it is replayed."""
    buffer = torch.zeros(shape.layout["end"][0], dtype=torch.int32)
    grad_TD = torch.zeros(shape.num_rows, model.hidden, dtype=model.dtype)
    entering_TD = None if model.is_first else torch.zeros_like(grad_TD)
    left_TD, back_TD = torch.zeros_like(grad_TD), None if model.is_first else torch.zeros_like(grad_TD)
    passed: list[Any] = []

    def forward() -> None:
        inputs = Inputs(shape, buffer, spans_in(Inputs(shape, buffer)))
        passed[:] = [run_forward(model, inputs, table, row_tile, memory, entering_TD, needs_grad=True)]
        left_TD.copy_(passed[0].left_TD)

    def backward() -> None:
        found_TD = run_backward(passed.pop(), grad_TD)
        if back_TD is not None and found_TD is not None:
            back_TD.copy_(found_TD)

    graphs: list[Any] = [SimpleNamespace(replay=run) for run in (forward, backward)]
    return Captured(Inputs(shape, buffer), entering_TD, left_TD, grad_TD, back_TD, *graphs)


def spans_in(inputs: Inputs) -> tuple[SampleRows, ...]:
    """The samples, read from the tables as kernels do; the reference implementations know them only this way."""
    runs = inputs.part("tiles_N4").tolist()
    found = []
    for start, end in zip(inputs.part("bounds").tolist(), inputs.part("bounds").tolist()[1:], strict=False):
        if end > start:
            slot = next(slot for first, last, slot, _ in runs if first <= start < last)
            found.append(SampleRows(start, end, slot))
    assert any(span.slot != BARE for span in found)
    return tuple(found)


@pytest.fixture(autouse=True)
def _captured(monkeypatch):
    monkeypatch.setattr(graphs, "capture", repeating)
    monkeypatch.setattr(graphs, "graph_pool", lambda: object())
    monkeypatch.setattr(graphs.InFlightBuffers, "_is_captured", True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def of_lengths(slot: int, lengths: tuple[int, ...]) -> PackedBatch:
    rng = np.random.default_rng(sum(lengths))
    slot_samples = [SlotSample(random_sample(rng, n), slot, 0.1, dropout_key=n, step_key=4) for n in lengths]
    return pack_samples(slot_samples, 64, torch.device("cpu"))


LENGTHS = [(20, 30, 40), (5, 17), (33, 9)]
"""The first is the largest: the others run on what was captured for it."""


def test_stages_when_graphs_have_fixed_buffers_then_three_microbatches_in_flight_do_not_disturb_each_other():
    whole = random_backbone("gemma3_text", kernels="fused")
    adapter, _ = with_adapter(whole)
    expected = [whole.launch(of_lengths(1, lengths), 64).scores() for lengths in LENGTHS]
    parts = [part_of("gemma3_text", 0, 1, "fused"), part_of("gemma3_text", 1, 2, "fused")]
    shares = [with_adapter(part)[0] for part in parts]
    first, last = (stage_runner(part) for part in parts)
    batches = [of_lengths(1, lengths) for lengths in LENGTHS]
    crossing = [first.forward(k, batch, 64, None) for k, batch in enumerate(batches)]
    assert all(left_TD.shape[0] == batch.num_rows for left_TD, batch in zip(crossing, batches, strict=True))
    back = []
    for k, batch in enumerate(batches):
        last.forward(k, batch, 64, crossing[k])
        # The third is in the place that the first has left.
        back += [last.backward(k - 1, None)] if k else []
    back.append(last.backward(2, None))
    # What goes back is read only after all of it was made.
    assert [scores.scores() for _, scores in back if scores is not None] == expected
    for k, (gradient_TD, _) in enumerate(back):
        first.backward(k, gradient_TD)
    for group in adapter.groups:
        joined = torch.cat([share.groups[group].grad for share in shares])
        assert joined.equal(adapter.groups[group].grad)
