"""A service whose workers have layouts: a stage that is killed under load costs no job and no byte."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import service_process
from sent_jobs import TENANTS, SentJobs, until_answered
from service_process import Service, Wish, train, wait

from benchmarks.pipeline.killed_layouts import STAGE
from benchmarks.processes import child_processes
from weft.serve.db.engine import open_database

pytestmark = [pytest.mark.slow, pytest.mark.faults]
WISHES = [Wish(f"wish{i}", seed=i, max_steps=20 + i, save_steps=1) for i in range(4)]


@pytest.mark.parametrize("layout", ["stages:2", "spread:2"])
def test_jobs_when_stages_are_killed_while_they_train_then_every_job_ends_once(tmp_path: Path, monkeypatch, layout):
    monkeypatch.setattr(service_process, "small_model", lambda: "tiny")
    service = Service(tmp_path / "data", ("--layout", layout))
    for tenant in TENANTS:
        service.add_tenant(tenant)
    database = open_database(f"sqlite:///{service.data_dir / 'weft.db'}")
    jobs = SentJobs(service, database, WISHES, len(WISHES))
    service.start()
    try:
        for number in range(len(WISHES)):
            jobs.send(number)
        (worker,) = wait(lambda: service.children("worker"))
        for stage, least in ((1, 8), (0, 30)):
            wait(lambda least=least: jobs.steps() >= least)
            os.kill(child_processes(worker, STAGE)[stage], signal.SIGKILL)
        with service.sdk(TENANTS[0]) as client:
            chat = [{"role": "user", "content": "warp"}]
            complete = client.chat.completions.create
            answer = until_answered(lambda: complete(model="tiny", messages=chat, max_tokens=4, temperature=0))
        wait(jobs.are_over)
        assert answer.choices[0].message.content
        assert service.children("worker") == [worker], "it has started its stages again"
        jobs.assert_each_ended_once(train(WISHES, tmp_path / "twins"))
    finally:
        assert service.stop() == 0
        database.close()
