"""Fifty jobs while API processes, workers and the whole service are killed: each ends once, as in a quiet run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sent_jobs import TENANTS, SentJobs
from service_process import Service, Wish, train, wait

from weft.serve.db.engine import open_database

pytestmark = [pytest.mark.slow, pytest.mark.faults]
NUM_JOBS = 50
WISHES = [Wish(f"wish{i}", seed=i, max_steps=4 + i % 3, batch_size=2 + i % 3, save_steps=1) for i in range(10)]


@dataclass
class Story:
    """What was done to whom."""

    jobs: SentJobs
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    killed: Counter[str] = field(default_factory=Counter)

    def kill_child(self, kind: str) -> None:
        """SIGKILL to a child of a kind, somewhere within a moment."""
        time.sleep(self.rng.uniform(0.0, 0.3))
        os.kill(self.rng.choice(wait(lambda: self.jobs.service.children(kind))), signal.SIGKILL)
        self.killed[kind] += 1


def test_jobs_when_everything_is_killed_at_random_moments_then_every_accepted_job_ends_once(tmp_path: Path):
    service = Service(tmp_path / "data", ("--api-processes", "2"))
    for tenant in TENANTS:
        service.add_tenant(tenant)
    database = open_database(f"sqlite:///{service.data_dir / 'weft.db'}")
    story = Story(SentJobs(service, database, WISHES, NUM_JOBS))
    service.start()
    try:
        with ThreadPoolExecutor(6) as threads:
            sent = [threads.submit(story.jobs.send, number) for number in range(NUM_JOBS)]
            haunt(story)
            for one in sent:
                one.result()
        wait(story.jobs.are_over, 90)
        expected = train(WISHES, tmp_path / "twins")
        assert story.killed["api"] >= 3 and story.killed["worker"] >= 2 and story.killed["service"] == 1
        story.jobs.assert_each_ended_once(expected)
    finally:
        service.stop()
        database.close()


def haunt(story: Story) -> None:
    """Kills one after another, each when a random part of the work is done."""
    rng = story.rng
    for least, most in ((2, 10), (15, 35)):
        accepted = rng.randint(least, most)
        wait(lambda accepted=accepted: len(story.jobs.accepted) >= accepted)
        story.kill_child("api")
    for kind, least, most in (("worker", 1, 40), ("service", 70, 110), ("worker", 130, 170), ("api", 180, 220)):
        steps = rng.randint(least, most)
        wait(lambda steps=steps: story.jobs.steps() >= steps)
        if kind == "service":
            story.jobs.service.kill()
            story.killed[kind] += 1
            story.jobs.service.start()
        else:
            story.kill_child(kind)
