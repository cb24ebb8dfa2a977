"""Where a run's wall clock goes is counted while it trains, and recorded."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tiny_models import job_spec, random_backbone, random_data, small_job, submit

from weft.engine.engine import Engine
from weft.engine.events import CheckpointSaved
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.protocol import EvaluationWork, MicrobatchWork
from weft.store.wall_clock import Activity


class Compiling(LocalExecutor):
    """Reports that its first microbatch and its first evaluation waited for kernels for four seconds."""

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        self.compiled: list[type] = []

    def compiling_s(self) -> float:
        return 4.0 * len(self.compiled)

    def start(self, work: Any) -> Any:
        if isinstance(work, MicrobatchWork | EvaluationWork) and type(work) not in self.compiled:
            self.compiled.append(type(work))
        return super().start(work)


def evaluated() -> Any:
    return job_spec("evaluated", eval_data=2, eval_steps=2, max_steps=4), random_data(3, num_eval=2)


def test_run_when_it_has_ended_then_its_recorded_figures_sum_up_to_its_wall_clock(tmp_path):
    """From the request for an engine to the last file; a run that is killed has left its figures, too."""
    begun_s = time.perf_counter()
    engine = Engine(random_backbone("llama_odd"), capacity=48)
    submit(engine, small_job("a", save_steps=2), evaluated())
    engine.keep_in(tmp_path / "run")
    file = tmp_path / "run" / "time.json"
    assert all(file.exists() for event in engine.events() if isinstance(event, CheckpointSaved))
    longest_s = time.perf_counter() - begun_s
    found = json.loads(file.read_text())
    parts = {activity: found[activity.key] for activity in Activity}
    assert found["wall_s"] == pytest.approx(sum(parts.values()))
    assert found["wall_s"] <= longest_s + 0.004
    spent = {name: [s.duration_s for s in engine.timeline.spans if s.name == name] for name in ("step", "eval")}
    spent["step"] += [s.duration_s for s in engine.timeline.spans if s.name == "forward_backward"]
    assert parts[Activity.COMPUTING] == pytest.approx(sum(spent["step"]), abs=0.002)
    assert parts[Activity.EVALUATING] == pytest.approx(sum(spent["eval"]), abs=0.002)
    assert parts[Activity.COMPILING] == 0 < parts[Activity.WRITING]


def test_time_when_work_waits_for_kernels_then_that_is_compiling_and_not_computing():
    """Neither the pace of microbatches nor the time of an evaluation holds what was compiled on the way."""
    engine = Engine(Compiling(random_backbone("llama_odd")), capacity=48)
    submit(engine, evaluated())
    engine.run()
    spent: dict[str, list[float]] = {}
    for span in engine.timeline.spans:
        spent.setdefault(span.name, []).append(span.duration_s)
    assert spent["compile"] == [4.0, 4.0]
    for kind in ("eval", "forward_backward"):
        assert spent[kind][0] == 0.0 < min(spent[kind][1:]), "on a CPU it is done once started"
