"""A worker whose backbone is divided: the bytes and the answers of a worker on one device."""

from __future__ import annotations

import pytest
from covering import slow
from test_worker_prompts import CHAT, blob_of, send_prompt
from worker_bench import Bench

from benchmarks.pipeline.in_process import LocalStages
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.parallel.stages import load_stages
from weft.parallel.stages.load_stages import StageLayout
from weft.serve.db.adapters import source_of_job

QUESTIONS = (
    {"messages": CHAT, "max_tokens": 8, "temperature": 0.8, "seed": 4},
    {"prompt": "warp\n", "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True},
)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Its stages are in this process."""

    def in_process(backbone, *replicas, **_):
        return LocalStages(*[[load_backbone(resolve(backbone), part) for part in parts] for parts in replicas])

    monkeypatch.setattr(load_stages, "StageProcesses", in_process)
    made = Bench.at(tmp_path)
    yield made
    made.database.close()


@pytest.mark.parametrize("sizes", [slow((2,)), (1, 2)])
def test_worker_when_its_backbone_is_divided_then_trains_and_answers_as_one_device_does(bench, sizes):
    first, second = bench.submit(learning_rate=0.05), bench.submit("ash", max_steps=12)
    with bench.worker(layout=StageLayout(sizes)) as worker:
        bench.wait_for_step(second, 1)
        running = send_prompt(worker, model_blob=source_of_job(bench.job(second)), **QUESTIONS[0]).json()
        bench.wait(first, second)
        blob = blob_of(bench, first)
        divided = [send_prompt(worker, model_blob=blob, **own).json() for own in QUESTIONS]
    assert running["completion_tokens"] > 0, running
    for id in (first, second):
        assert bench.adapter(id) == bench.expected(id)[0]
    with bench.worker() as worker:
        assert divided == [send_prompt(worker, model_blob=blob, **own).json() for own in QUESTIONS]
