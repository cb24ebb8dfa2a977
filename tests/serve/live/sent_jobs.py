"""Jobs that are sent to a service on which much goes wrong, and what must be left of them."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai
import sqlalchemy as sa
from service_process import PATIENCE_S, Service, Trained, Wish

from weft.job_state import FINAL_STATES
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.db.files import delete_unnamed_blobs, named_blobs
from weft.serve.db.tables import EVENTS, JOBS, MODELS
from weft.serve.db.usage import usage_of

TENANTS = ("ash", "birch")


@dataclass
class SentJobs:
    """Wishes of two tenants in turn, sent over and over until there are so many jobs."""

    service: Service
    database: Database
    wishes: list[Wish]
    number: int
    accepted: dict[int, str] = field(default_factory=dict)
    """Jobs by their number."""

    def wish(self, number: int) -> Wish:
        """What a job is to be."""
        return self.wishes[number % len(self.wishes)]

    def send(self, number: int) -> None:
        """Sends one job until it is accepted, whichever process dies meanwhile."""
        wish, tenant = self.wish(number), TENANTS[number % len(TENANTS)]
        with self.service.sdk(tenant, max_retries=2, timeout=10) as client:
            file = until_answered(
                lambda: client.files.create(file=(f"{wish.name}.jsonl", wish.data), purpose="fine-tune")
            )
            headers = {"Idempotency-Key": f"job-{number}"}
            create = client.fine_tuning.jobs.create
            job = until_answered(lambda: create(training_file=file.id, extra_headers=headers, **wish.request))
            self.accepted[number] = job.id

    def steps(self) -> int:
        """Steps that all jobs have taken."""
        with self.database.read() as tx:
            return int(tx.execute(sa.select(sa.func.coalesce(sa.func.sum(JOBS.c.step), 0))).scalar_one())

    def are_over(self) -> bool:
        """Whether all have been sent and have ended."""
        with self.database.read() as tx:
            left = sa.select(sa.func.count()).select_from(JOBS).where(JOBS.c.status.not_in(FINAL_STATES))
            return len(self.accepted) == self.number and tx.execute(left).scalar_one() == 0

    def assert_each_ended_once(self, expected: dict[str, Trained]) -> None:
        """Adapters, events and accounts are those of a service on which nothing goes wrong."""
        blobs = Blobs(str(self.service.data_dir / "blobs"))
        delete_unnamed_blobs(self.database, blobs, older_than_s=-60)
        with self.database.read() as tx:
            jobs = {row.id: row for row in tx.execute(sa.select(JOBS))}
            models = {row.job: row for row in tx.execute(sa.select(MODELS))}
            events: dict[str, list[Any]] = {id: [] for id in jobs}
            for event in tx.execute(sa.select(EVENTS).order_by(EVENTS.c.seq)):
                events[event.job].append(event)
            used = {tenant: usage_of(tx, tenant)["totals"]["trained"] for tenant in TENANTS}
            assert {name for name, _ in blobs.names()} == named_blobs(tx), (
                "what crashes left over is gone, all else is there"
            )
        assert set(jobs) == set(self.accepted.values()), "none lost, none made twice"
        assert set(models) == set(jobs)
        for number, id in self.accepted.items():
            wish, job = self.wish(number), jobs[id]
            assert job.status == "succeeded", job.error
            with blobs.open(models[id].blob) as stream, zipfile.ZipFile(io.BytesIO(stream.read())) as packed:
                files = {name: packed.read(name) for name in packed.namelist()}
            assert Trained(files, job.trained_tokens) == expected[wish.name]
            steps = [event.data["step"] for event in events[id] if event.type == "metrics"]
            assert steps == list(range(1, wish.max_steps + 1)), "every step is reported once"
            assert sum("successfully completed" in event.message for event in events[id]) == 1
        for i, tenant in enumerate(TENANTS):
            mine = range(i, self.number, len(TENANTS))
            assert used[tenant] == sum(expected[self.wish(number).name].tokens for number in mine)


def until_answered(send: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return send()
        except (openai.APIConnectionError, openai.InternalServerError):
            assert time.monotonic() < deadline
