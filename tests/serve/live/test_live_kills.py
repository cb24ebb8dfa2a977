"""Fifty jobs while API processes, workers and the whole service are killed: each ends once, as in a quiet run."""

from __future__ import annotations

import io
import os
import random
import signal
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
from service_process import PATIENCE_S, Service, Trained, Wish, train, wait

from weft.job_state import FINAL_STATES
from weft.serve.blob_gc import delete_unnamed_blobs, named_blobs
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, open_database
from weft.serve.db.tables import EVENTS, JOBS, MODELS
from weft.serve.records.usage import usage_of

pytestmark = [pytest.mark.slow, pytest.mark.faults]
NUM_JOBS = 50
TENANTS = ("ash", "birch")
WISHES = [Wish(f"wish{i}", seed=i, max_steps=4 + i % 3, batch_size=2 + i % 3, save_steps=1) for i in range(10)]


@dataclass
class Story:
    """What was asked for and done to whom."""

    service: Service
    database: Database
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    accepted: dict[str, str] = field(default_factory=dict)
    """Jobs by the key they were sent with."""
    killed: Counter[str] = field(default_factory=Counter)

    def steps(self) -> int:
        with self.database.read() as tx:
            return int(tx.execute(sa.select(sa.func.coalesce(sa.func.sum(JOBS.c.step), 0))).scalar_one())

    def is_over(self) -> bool:
        with self.database.read() as tx:
            left = sa.select(sa.func.count()).select_from(JOBS).where(JOBS.c.status.not_in(FINAL_STATES))
            return len(self.accepted) == NUM_JOBS and tx.execute(left).scalar_one() == 0

    def kill_child(self, kind: str) -> None:
        """SIGKILL to a child of a kind, somewhere within a moment."""
        time.sleep(self.rng.uniform(0.0, 0.3))
        os.kill(self.rng.choice(wait(lambda: self.service.children(kind))), signal.SIGKILL)
        self.killed[kind] += 1


def test_jobs_when_everything_is_killed_at_random_moments_then_every_accepted_job_ends_once(tmp_path: Path):
    service = Service(tmp_path / "data", ("--api-processes", "2"))
    for tenant in TENANTS:
        service.add_tenant(tenant)
    database = open_database(f"sqlite:///{service.data_dir / 'weft.db'}")
    story = Story(service, database)
    service.start()
    try:
        with ThreadPoolExecutor(6) as threads:
            sent = [threads.submit(send, story, number) for number in range(NUM_JOBS)]
            haunt(story)
            for one in sent:
                one.result()
        wait(story.is_over, 90)
        expected = train(WISHES, tmp_path / "twins")
        assert story.killed["api"] >= 3 and story.killed["worker"] >= 2 and story.killed["service"] == 1
        assert_each_ended_once(story, expected)
    finally:
        service.stop()
        database.close()


def send(story: Story, number: int) -> None:
    """Sends one job until it is accepted, whoever dies meanwhile."""
    wish, tenant, key = WISHES[number % len(WISHES)], TENANTS[number % len(TENANTS)], f"job-{number}"
    with story.service.sdk(tenant, max_retries=2, timeout=10) as client:
        file = until_answered(lambda: client.files.create(file=(f"{wish.name}.jsonl", wish.data), purpose="fine-tune"))
        headers = {"Idempotency-Key": key}
        create = client.fine_tuning.jobs.create
        job = until_answered(lambda: create(training_file=file.id, extra_headers=headers, **wish.request))
        story.accepted[key] = job.id


def until_answered(ask: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except (openai.APIConnectionError, openai.InternalServerError):
            assert time.monotonic() < deadline


def haunt(story: Story) -> None:
    """Kills one after another, each when a random part of the work is done."""
    rng = story.rng
    for least, most in ((2, 10), (15, 35)):
        accepted = rng.randint(least, most)
        wait(lambda accepted=accepted: len(story.accepted) >= accepted)
        story.kill_child("api")
    for kind, least, most in (("worker", 1, 40), ("service", 70, 110), ("worker", 130, 170), ("api", 180, 220)):
        steps = rng.randint(least, most)
        wait(lambda steps=steps: story.steps() >= steps)
        if kind == "service":
            story.service.kill()
            story.killed[kind] += 1
            story.service.start()
        else:
            story.kill_child(kind)


def assert_each_ended_once(story: Story, expected: dict[str, Trained]) -> None:
    blobs = Blobs(str(story.service.data_dir / "blobs"))
    delete_unnamed_blobs(story.database, blobs, older_than_s=-60)
    with story.database.read() as tx:
        jobs = {row.id: row for row in tx.execute(sa.select(JOBS))}
        models = {row.job: row for row in tx.execute(sa.select(MODELS))}
        events: dict[str, list[Any]] = {id: [] for id in jobs}
        for event in tx.execute(sa.select(EVENTS).order_by(EVENTS.c.seq)):
            events[event.job].append(event)
        used = {tenant: usage_of(tx, tenant)["totals"]["trained"] for tenant in TENANTS}
        assert {name for name, _ in blobs.names()} == named_blobs(tx), (
            "what crashes left over is gone, all else is there"
        )
    assert set(jobs) == set(story.accepted.values()), "none lost, none made twice"
    assert set(models) == set(jobs)
    for key, id in story.accepted.items():
        wish, job = WISHES[int(key.removeprefix("job-")) % len(WISHES)], jobs[id]
        assert job.status == "succeeded", job.error
        with blobs.open(models[id].blob) as stream, zipfile.ZipFile(io.BytesIO(stream.read())) as packed:
            files = {name: packed.read(name) for name in packed.namelist()}
        assert Trained(files, job.trained_tokens) == expected[wish.name]
        told = [event.data["step"] for event in events[id] if event.type == "metrics"]
        assert told == list(range(1, wish.max_steps + 1)), "every step is told once"
        assert sum("successfully completed" in event.message for event in events[id]) == 1
    for number, tenant in enumerate(TENANTS):
        mine = range(number, NUM_JOBS, len(TENANTS))
        assert used[tenant] == sum(expected[WISHES[i % len(WISHES)].name].tokens for i in mine)
