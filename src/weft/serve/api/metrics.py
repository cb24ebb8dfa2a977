"""Prometheus metrics: what this process has served, and what the database says about jobs and workers right now."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.serve.db.engine import Database
from weft.serve.db.tables import FILES, JOBS, MODELS, USAGE
from weft.serve.jobs.states import STATES
from weft.serve.records.workers import live_workers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The counters of one process, and gauges that are read from the database at each scrape."""

    def __init__(self, database: Database) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("weft_http_requests", "Requests answered.", labels, registry=self.registry)
        self.seconds = Histogram(
            "weft_http_request_seconds", "Time to answer.", labels[:2], buckets=_SECONDS, registry=self.registry
        )
        self.active = Gauge("weft_http_requests_active", "Requests being answered.", registry=self.registry)
        self.uploaded = Counter("weft_uploaded_bytes", "Bytes of files taken in.", registry=self.registry)
        self._of_route: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self.registry.register(_DatabaseFigures(database))

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts one answered request."""
        # Looking a counter up by its labels takes longer than counting.
        found = self._of_route.get((method, route, status))
        if found is None:
            found = self.requests.labels(method, route, str(status)), self.seconds.labels(method, route)
            self._of_route[method, route, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _DatabaseFigures(Collector):
    """Figures of the whole service: every process reports the same."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering does not need the database."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Reads all figures in one transaction."""
        jobs = GaugeMetricFamily("weft_jobs", "Jobs by state.", labels=("state",))
        tokens = CounterMetricFamily("weft_tokens", "Tokens by kind.", labels=("kind",))
        stored = GaugeMetricFamily("weft_stored_bytes", "Bytes kept by kind.", labels=("kind",))
        workers = GaugeMetricFamily("weft_workers", "Workers alive.", labels=("base_model", "draining"))
        speed = GaugeMetricFamily("weft_worker_info", "What a worker says of itself.", labels=("worker", "what"))
        with self._database.read() as tx:
            counts: dict[str, int] = dict(
                tx.execute(sa.select(JOBS.c.status, sa.func.count()).group_by(JOBS.c.status)).all()
            )
            for state in STATES:
                jobs.add_metric((state,), counts.get(state, 0))
            trained = tx.execute(sa.select(sa.func.coalesce(sa.func.sum(JOBS.c.trained_tokens), 0))).scalar_one()
            asked = tx.execute(sa.select(USAGE.c.kind, sa.func.sum(USAGE.c.tokens)).group_by(USAGE.c.kind))
            for kind, count in {"trained": trained, "prompt": 0, "completion": 0, **dict(asked.all())}.items():
                tokens.add_metric((kind,), float(count))
            for kind, table in (("files", FILES), ("models", MODELS)):
                query = sa.select(sa.func.coalesce(sa.func.sum(table.c.bytes), 0)).where(table.c.deleted_at.is_(None))
                stored.add_metric((kind,), float(tx.execute(query).scalar_one()))
            alive = live_workers(tx)
        groups = [(w["base_model"], str(w["is_draining"]).lower()) for w in alive]
        for group in sorted(set(groups)):
            workers.add_metric(group, groups.count(group))
        for worker in alive:
            for what, value in sorted((worker["info"] or {}).items()):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    speed.add_metric((worker["id"], what), value)
        return [jobs, tokens, stored, workers, speed]
