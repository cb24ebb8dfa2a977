"""The engine is measured on the microbatch that bare steps are measured on, and leaves no state."""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.clock import Effort
from benchmarks.steps import step as module
from benchmarks.steps.regimes import BF16, FEW, BenchProgram, BenchRun
from benchmarks.steps.step import BenchJobs, measure, measure_engine
from weft.model.backbone import Backbone
from weft.model.load import make_backbone
from weft.plan.cost.shape import SHAPES

CPU = torch.device("cpu")
RUN = BenchRun(BenchProgram.WEFT_ENGINE, FEW)


@pytest.fixture
def backbone() -> Backbone:
    return make_backbone(SHAPES["tiny"], BF16, torch.float32, CPU, "reference")


def test_engine_when_measured_then_runs_the_microbatch_of_the_bare_steps(backbone, monkeypatch, tmp_path):
    """Also its tokens and rows are those; slots and directory are free again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[torch.Tensor] = []
    launch = Backbone.launch
    monkeypatch.setattr(Backbone, "launch", lambda self, *given: seen.append(given[0].ids) or launch(self, *given))
    measured = measure(backbone, RUN, Effort())
    jobs = BenchJobs(backbone, FEW)
    assert (measured.tokens, measured.rows) == (jobs.batch.num_tokens, jobs.batch.num_rows)
    assert len(seen) >= 24 and sorted(seen[-1]) == sorted(jobs.batch.ids)
    jobs.detach()
    assert all(not linear.slots for linear in backbone.linears.values())
    assert list(tmp_path.iterdir()) == []


def test_engine_when_measured_then_the_warm_up_does_not_count(backbone, monkeypatch):
    """The microbatches of the first program take ten seconds each, the others one."""
    clock = iter([*(10.0 * i for i in range(1, 9)), *(81.0 + i for i in range(50))])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert measure_engine(backbone, RUN, Effort()).seconds == pytest.approx(1.0)


def test_engine_when_given_a_time_then_goes_on_that_long(backbone):
    begun = time.perf_counter()
    measure_engine(backbone, RUN, Effort(repeats=2, in_a_row_s=0.3))
    assert time.perf_counter() - begun >= 0.6
