"""Which captured graph serves a microbatch, without a GPU: captures are only counted."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from weft.kernels.lora.tables import Needs
from weft.model.fused.graphs import CAPTURE_COST, MAX_GRAPHS, Captured, CapturedGraphs, GraphKey, InFlightBuffers
from weft.model.fused.inputs import InputShape
from weft.model.path import Memory

NARROW, WIDE = Needs.of((8,), drops=False), Needs.of((8, 64), drops=False)


def key(num_rows: int = 8192, num_spans: int = 64, needs: Needs | None = NARROW, version: int = 0) -> GraphKey:
    """What a microbatch wants."""
    drops = needs is not None and needs.drops
    return GraphKey(InputShape(num_rows, num_spans, 0, needs is not None, drops), 2048, needs, version)


class Shelf:
    """Graphs that are the keys they were captured for."""

    def __init__(self) -> None:
        self.captured: list[GraphKey] = []
        self.graphs = CapturedGraphs(self._capture, lambda: None)

    def _capture(self, wanted: GraphKey) -> Captured:
        self.captured.append(wanted)
        return cast(Captured, wanted)

    def run(self, wanted: GraphKey) -> GraphKey:
        """The graph that ran."""
        return cast(GraphKey, self.graphs.graph(wanted))


def test_graph_when_a_larger_one_is_there_then_nothing_is_captured():
    """The first evaluation and the end of a run find what training has captured."""
    shelf = Shelf()
    full = shelf.run(key())
    for wanted in (key(2048), key(4096, 16), key(8192, 32), key(2048, needs=None)):
        assert shelf.run(wanted) == full
    assert shelf.captured == [full]


def test_graph_when_it_does_not_fit_then_one_is_captured():
    for first, wanted in [
        (key(4096), key(8192)),
        (key(num_spans=32), key(num_spans=64)),
        (key(needs=NARROW), key(needs=WIDE)),
        (key(needs=None), key(needs=NARROW)),
        (key(), key(version=1)),
        (key(needs=Needs.of((8,), drops=True)), key(needs=NARROW)),
        (key(needs=NARROW), key(needs=Needs.of((8,), drops=True))),
        # Ranks of 128 and of 256 have launches of their own, which round otherwise.
        (key(needs=Needs.of((8, 256), drops=False)), key(needs=Needs.of((8, 128), drops=False))),
    ]:
        shelf = Shelf()
        shelf.run(first)
        assert shelf.run(wanted) == wanted
        assert shelf.captured == [first, wanted]


def test_graph_when_smaller_microbatches_go_on_then_they_get_their_own():
    """What the large one wasted has then paid for it: never more than one capture's worth and a microbatch."""
    shelf = Shelf()
    shelf.run(key())
    runs = list(itertools.takewhile(lambda graph: graph == key(), (shelf.run(key(2048)) for _ in range(100))))
    assert len(runs) * (8192 - 2048) <= CAPTURE_COST * 8192 < (len(runs) + 2) * 8192
    assert shelf.captured == [key(), key(2048)]
    assert shelf.run(key(2048)) == key(2048)


def test_graph_when_several_fit_then_the_one_that_wastes_least_runs():
    shelf = Shelf()
    for known in (key(4096), key(6144), key(8192)):
        shelf.run(known)
    assert shelf.run(key(2048)) == key(4096)
    assert shelf.run(key(4096, needs=None)) == key(4096)


def test_graphs_when_there_are_many_then_those_used_longest_ago_go():
    shelf = Shelf()
    kinds = [key(2048 * number) for number in range(1, MAX_GRAPHS + 2)]
    for kind in kinds:
        shelf.run(kind)
    assert shelf.run(kinds[-1]) == kinds[-1]
    assert len(shelf.captured) == MAX_GRAPHS + 1
    assert shelf.run(kinds[0]) == kinds[1], "the first has gone"


def test_graphs_when_the_table_has_moved_then_old_ones_are_never_used_again():
    shelf = Shelf()
    shelf.run(key())
    shelf.run(key(version=1))
    assert shelf.run(key(version=1, num_rows=2048)) == key(version=1)
    assert shelf.run(key()) == key()
    assert len(shelf.captured) == 3


@pytest.mark.parametrize(("runs_pairs", "is_captured"), [(False, True), (True, False)])
def test_buffers_when_passes_take_turns_then_capture_nothing(runs_pairs, is_captured, monkeypatch):
    """A graph would hold a pass from its beginning to its end."""
    monkeypatch.setattr("weft.model.fused.graphs.is_gpu", lambda device: True)
    devices = SimpleNamespace(can_be_recorded=True, runs_pairs=runs_pairs)
    model: Any = SimpleNamespace(device=torch.device("cpu"), ring=None, devices=devices)
    table: Any = None
    assert InFlightBuffers(model, table, Memory(), lambda *_: None)._is_captured == is_captured
