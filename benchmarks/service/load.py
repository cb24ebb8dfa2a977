"""The service under load on one machine: 1,000 jobs in the queue, 200 clients that poll, and a worker that trains.

serve_submit_1000_s     1,000 jobs made by 8 clients at once, each of which waits for its answer, while the first train.
serve_retrieve_p99_ms   of clients that request their own job every 5 seconds, as the SDK's `wait_for_processing` does,
serve_list_p99_ms       and in turn for the newest 20 jobs of their tenant.
serve_training_slowed   tokens per second lost beside these clients; the median over pairs of times without and with.
serve_worker_cpu_lost   processor time that the worker lost to them, as a share of what it has without: what the clients
                        and the service take from it, without the machine's own moods, which move tokens per second by
                        more than a tenth from one second to the next.
serve_api_cores         processor time of the process that answers, per second beside these clients,
serve_clients_cores     and that of the clients themselves, which share the machine with what they measure.
serve_event_latency_s   from the end of a step to its event at a client that streams, beside the others: p99.
serve_eager_…           the same beside clients that send one every second.
serve_contended_…       the same as the first while as many other programs as there are cores never rest.

Clients, service and training share the cores, so what the clients take slows training like what the service takes.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import typer

from benchmarks.figures import Kind, Parts, Targets
from benchmarks.report import (
    JsonFile,
    run_parts,
)
from benchmarks.service.clients import Plan, Query
from benchmarks.service.process import (
    Service,
    TrainedStep,
    read_steps,
    run_clients,
    running_service,
    spinning_programs,
    tokens_per_s,
)
from weft.cli.demo import SKILLS
from weft.cli.service.serve import need_serve
from weft.errors import WeftError

CONTENDED = "serve_contended"
POLL_S = {"serve": 5.0, "serve_eager": 1.0, CONTENDED: 5.0}
"""Seconds between two requests of a client, by what its figures are called."""
NUM_SUBMITTERS = 8
TENANTS = ("acme", "globex", "initech", "umbrella")
NUM_SAMPLES = 240
WARM_UP_S, WAIT_S = 1.0, 120.0
"""Left out at each end of a stretch; the most that anything may take to begin."""
JOBS = "/v1/fine_tuning/jobs"


@dataclass(frozen=True)
class Load:
    """How much of it."""

    num_jobs: int = 1000
    num_clients: int = 200
    stretch_s: float = 9.0
    num_pairs: int = 5
    """Of a stretch without and one with clients, for each kind of client; every other pair begins with the clients."""


FULL = Load()


@dataclass
class Listener:
    """A client that streams the events of a job."""

    service: Service
    job: str
    key: str
    seen: dict[int, float] = field(default_factory=dict)
    """When the event of a step came, by its number."""

    def start(self) -> None:
        """Listens in a thread until the service ends."""
        threading.Thread(target=self._listen, name="listener", daemon=True).start()

    def _listen(self) -> None:
        with self.service.open(f"{JOBS}/{self.job}/events?stream=true", self.key) as stream:
            for line in stream:
                if line.startswith(b"data: {"):
                    data = json.loads(line[6:])["data"] or {}
                    self.seen[int(data.get("step", -1))] = time.time()

    def latencies(self, steps: list[TrainedStep], spans: list[tuple[float, float]]) -> list[float]:
        """Seconds from the end of each step that was done in one of the spans to its event."""
        mine = [step for step in steps if step.job == self.job and step.step in self.seen]
        inside = [step for step in mine if any(start < step.at < end - WARM_UP_S for start, end in spans)]
        return [self.seen[step.step] - step.at for step in inside]


@dataclass
class Stretches:
    """Times without and with clients, in unix seconds, and how long their answers took."""

    service: Service
    quiet: list[tuple[float, float]] = field(default_factory=list)
    busy: list[tuple[float, float]] = field(default_factory=list)
    milliseconds: dict[str, list[float]] = field(default_factory=lambda: {"retrieve": [], "list": []})
    cpu_s: Counter[str] = field(default_factory=Counter)
    """Processor time with clients, by who took it."""
    worker_cores: dict[str, list[float]] = field(default_factory=lambda: {"quiet": [], "busy": []})
    """Processor time of the worker per second of each stretch."""

    def add(self, plan: Plan) -> None:
        """One more of each; which comes first takes turns, so that what drifts does not favour either."""
        steps = (self._rest, self._query) if len(self.quiet) % 2 == 0 else (self._query, self._rest)
        for step in steps:
            step(plan)

    def _rest(self, plan: Plan) -> None:
        began, worker = time.time(), self.service.worker_cpu_s()
        time.sleep(plan.for_s)
        self._add("quiet", began, worker)

    def _query(self, plan: Plan) -> None:
        began, worker, before = time.time(), self.service.worker_cpu_s(), self.service.cpu_s()
        answers = run_clients(plan)
        for kind, times in answers.milliseconds.items():
            self.milliseconds[kind] += times
        self.cpu_s.update({"api": self.service.cpu_s() - before, "clients": answers.cpu_s})
        self._add("busy", began, worker)

    def _add(self, kind: str, began: float, worker_cpu_s: float) -> None:
        ended = time.time()
        (self.quiet if kind == "quiet" else self.busy).append((began, ended))
        self.worker_cores[kind].append((self.service.worker_cpu_s() - worker_cpu_s) / (ended - began))

    def figures(self, name: str, steps: list[TrainedStep], listener: Listener) -> dict[str, float]:
        """Everything that is known of them."""
        rates = [
            [tokens_per_s(steps, start + WARM_UP_S, end - WARM_UP_S) for start, end in part]
            for part in (self.quiet, self.busy)
        ]
        latencies = listener.latencies(steps, self.busy)
        found = {
            **{f"{name}_{kind}_p99_ms": _quantile(times, 0.99) for kind, times in self.milliseconds.items()},
            **{f"{name}_{kind}_p50_ms": _quantile(times, 0.5) for kind, times in self.milliseconds.items()},
            f"{name}_training_slowed": _median_loss(*rates),
            f"{name}_worker_cpu_lost": _median_loss(self.worker_cores["quiet"], self.worker_cores["busy"]),
            f"{name}_tokens_per_s_quiet": statistics.mean(rates[0]),
            f"{name}_tokens_per_s_busy": statistics.mean(rates[1]),
            **{f"{name}_{who}_cores": taken / _length(self.busy) for who, taken in self.cpu_s.items()},
            f"{name}_event_latency_s": _quantile(latencies, 0.99),
            f"{name}_event_latency_p50_s": _quantile(latencies, 0.5),
        }
        # On a slow machine a stretch may be too short for two steps of a job; what was not measured is left out.
        return {key: value for key, value in found.items() if value is not None}


def measure_load(load: Load = FULL) -> dict[str, float]:
    """Keys as in `python -m benchmarks serve --json`."""
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder) / "data") as service:
        keys = [service.new_key(tenant) for tenant in TENANTS]
        jobs, submit_s = _submit(service, keys, load.num_jobs)
        _wait_for_training(service)
        training = {step.job for step in read_steps(service.data_dir)}
        listener = Listener(service, *next(owned for owned in jobs if owned[0] in training))
        listener.start()
        stretches = {name: Stretches(service) for name in POLL_S}
        for _ in range(load.num_pairs):
            for name, every_s in POLL_S.items():
                with spinning_programs(os.cpu_count() or 1 if name == CONTENDED else 0):
                    stretches[name].add(_polling(service.port, jobs[-load.num_clients :], every_s, load.stretch_s))
        steps = read_steps(service.data_dir)
    figures = {f"serve_submit_{load.num_jobs}_s": submit_s}
    for name, found in stretches.items():
        figures |= found.figures(name, steps, listener)
    return figures


def _submit(service: Service, keys: list[str], num_jobs: int) -> tuple[list[tuple[str, str]], float]:
    """Jobs with the keys of their owners, and how long it took to make them."""
    rows = SKILLS["reverse"].rows(0, NUM_SAMPLES)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    # Long enough to train through everything that follows; in short steps, so that tokens can be counted finely, and
    # without checkpoints, which all jobs would write at about the same time.
    more = {"model": "tiny", "max_steps": 100_000, "hyperparameters": {"batch_size": 2}, "lora": {"r": 8}}
    more |= {"settings": {"save_steps": 100_000}}
    bodies = [json.dumps({**more, "training_file": service.upload(key, data)}) for key in keys]
    connections = []
    for index in range(NUM_SUBMITTERS):
        whose = index % len(keys)
        num = len(range(index, num_jobs, NUM_SUBMITTERS))
        connections.append((Query("submit", JOBS, keys[whose], bodies[whose]),) * num)
    began = time.perf_counter()
    answers = run_clients(Plan(service.port, tuple(connections)))
    took = time.perf_counter() - began
    owners = dict(zip(TENANTS, keys, strict=True))
    return [(job["id"], owners[job["organization_id"]]) for job in answers.bodies], took


def _polling(port: int, jobs: list[tuple[str, str]], every_s: float, for_s: float) -> Plan:
    queries = [(Query("retrieve", f"{JOBS}/{job}", key), Query("list", JOBS, key)) for job, key in jobs]
    # Every other client begins with the list, so that both are requested all the time.
    turned = [pair if index % 2 else pair[::-1] for index, pair in enumerate(queries)]
    return Plan(port, tuple(turned), every_s, for_s)


def _wait_for_training(service: Service) -> None:
    """Until the worker trains all it takes at once: steps come, and no new jobs among them."""
    deadline, known = time.monotonic() + WAIT_S, -1
    while True:
        time.sleep(3.0)
        found = len({step.job for step in read_steps(service.data_dir)})
        if found == known and found > 0:
            return
        known = found
        if time.monotonic() > deadline:
            raise WeftError(f"no job trains after {WAIT_S:.0f} s.", where="benchmarks serve")


def _median_loss(quiet: list[float], busy: list[float]) -> float | None:
    """The median of what was lost from each quiet time to its busy one; None if nothing was done in any quiet time."""
    losses = [1 - b / q for q, b in zip(quiet, busy, strict=True) if q > 0]
    return statistics.median(losses) if losses else None


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def _quantile(values: list[float], share: float) -> float | None:
    """The smallest value that is at least as large as `share` of them; None if there are none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else None


TARGETS: Targets = {
    "serve_retrieve_p99_ms": (Kind.MILLISECONDS, 100.0),
    "serve_list_p99_ms": (Kind.MILLISECONDS, 100.0),
    "serve_submit_1000_s": (Kind.SECONDS, 30.0),
    "serve_training_slowed": (Kind.WASTE, 0.05),
    "serve_event_latency_s": (Kind.SECONDS, 1.0),
    "serve_worker_cpu_lost": (Kind.WASTE, 0.05),
    f"{CONTENDED}_retrieve_p99_ms": (Kind.MILLISECONDS, 250.0),
    f"{CONTENDED}_list_p99_ms": (Kind.MILLISECONDS, 250.0),
    f"{CONTENDED}_training_slowed": (Kind.WASTE, None),
    f"{CONTENDED}_worker_cpu_lost": (Kind.WASTE, None),
    "serve_eager_retrieve_p99_ms": (Kind.MILLISECONDS, None),
    "serve_eager_list_p99_ms": (Kind.MILLISECONDS, None),
    "serve_eager_training_slowed": (Kind.WASTE, None),
    "serve_eager_worker_cpu_lost": (Kind.WASTE, None),
    "serve_eager_event_latency_s": (Kind.SECONDS, None),
}
PARTS: Parts = {"load": measure_load}


def serve(json: JsonFile = None) -> None:
    """The service under load: 1,000 jobs in the queue and 200 clients that poll while a worker trains."""
    need_serve()
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
