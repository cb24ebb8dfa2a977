"""Replays a trace on a cluster, event by event: arrivals, ends, and who goes where.

Between two events every job on an instance goes at a constant speed (`Instance.rates`), so the replay jumps from one
arrival or end to the next: O(events · (log events + jobs of one instance)). A job goes to the instance with the fewest
tokens in hand that has room for it. Deterministic; ties by arrival, then by name, then by number of the instance.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.planning.replay.instance import Instance
from benchmarks.planning.replay.policy import POLICIES, Waiting
from benchmarks.planning.replay.trace import TraceJob
from weft.errors import PlanError

_INSTANT_S = 1e-6
"""Jobs that end within it end together: it is far below a step and far above what rounding does in a week."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a cluster made of a trace."""

    policy: str
    num_jobs: int
    num_instances: int
    throughput_tokens_s: float
    """Of the whole cluster, while jobs arrive; padding does not count."""
    utilisation: float
    """That over what full microbatches without padding would give everywhere."""
    busy_share: float
    """Share of instance time with at least one job, while jobs arrive."""
    jct_mean_s: float
    """Arrival to end, all jobs; the replay goes on until the last has ended."""
    jct_p95_s: float
    queue_mean_s: float
    """Arrival to first start."""
    queue_p95_s: float
    fairness: float
    """Jain's index of how much jobs are slowed down, alone on such an instance over arrival to end: 1, if all alike."""
    late_share: float
    """Share of jobs that end after their deadline."""
    num_ended: int
    """Jobs that ended while others still arrived."""
    num_preemptions: int
    makespan_s: float

    def to_dict(self) -> dict[str, float | int | str]:
        """The figures by name, for JSON."""
        return dataclasses.asdict(self)


@dataclass(slots=True, eq=False)
class _Active:
    """A job on an instance."""

    job: TraceJob
    left_tokens: float
    alone_rate: float
    rate: float = 0.0


@dataclass(slots=True, eq=False)
class _Host:
    """One instance and its jobs."""

    number: int
    active: list[_Active] = field(default_factory=list)
    updated_s: float = 0.0
    version: int = 0
    tokens: float = 0.0
    busy_s: float = 0.0

    def advance(self, now_s: float) -> None:
        """Lets the jobs go on until now."""
        elapsed = now_s - self.updated_s
        self.updated_s = now_s
        if not self.active or elapsed <= 0:
            return
        self.busy_s += elapsed
        for active in self.active:
            trained = active.rate * elapsed
            active.left_tokens -= trained
            self.tokens += trained


class _Cluster:
    """The state of a replay."""

    def __init__(self, instance: Instance, num_instances: int, policy: str) -> None:
        self.instance = instance
        self.hosts = [_Host(number) for number in range(num_instances)]
        self.queue = POLICIES[policy]()
        self.ends: list[tuple[float, int, int]] = []
        """(time, host, version) of the next end on each host; those of an old version are void."""
        self.started_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.num_preemptions = 0
        # One entry per host, so that a place is found without looking at every host in Python.
        self._loads = np.zeros(num_instances)
        self._bytes = np.zeros(num_instances)
        self._counts = np.zeros(num_instances)
        self._lowest = np.full(num_instances, np.inf)
        """The lowest priority on each host."""

    def end_jobs(self, host: _Host, now_s: float) -> None:
        """Takes off what has ended."""
        host.advance(now_s)
        for active in [a for a in host.active if a.left_tokens <= a.rate * _INSTANT_S]:
            self.ended_s[active.job.job] = now_s
            self._remove(host, active)
        self._reschedule(host)

    def dispatch(self, now_s: float) -> None:
        """Gives places to those who wait, in the policy's order, as long as the next one finds a place."""
        while (waiting := self.queue.peek(now_s)) is not None:
            host = self._free_host(waiting.job)
            if host is None and self.queue.preempts:
                host = self._cleared_host(waiting.job, now_s)
            if host is None:
                return
            # What was preempted is queued after it, so the next one is still this one.
            self.queue.pop()
            self._seat(host, waiting, now_s)

    def _free_host(self, job: TraceJob) -> _Host | None:
        """The least loaded host with room."""
        room = self._bytes + job.num_bytes <= self.instance.job_bytes
        if self.instance.max_jobs is not None:
            room &= self._counts < self.instance.max_jobs
        if not room.any():
            return None
        return self.hosts[int(np.argmin(np.where(room, self._loads, np.inf)))]

    def _cleared_host(self, job: TraceJob, now_s: float) -> _Host | None:
        """A host on which jobs of lower priority have made room, the lowest and latest first."""
        hosts = [self.hosts[number] for number in np.flatnonzero(self._lowest < job.priority)]
        for host in sorted(hosts, key=lambda host: min(_yields(active) for active in host.active)):
            leaving = self._leaving(host, job)
            if leaving:
                host.advance(now_s)
                for active in leaving:
                    self._remove(host, active)
                    self.queue.push(Waiting(active.job, active.left_tokens / active.alone_rate))
                self.num_preemptions += len(leaving)
                return host
        return None

    def _leaving(self, host: _Host, job: TraceJob) -> list[_Active]:
        """The jobs that must leave a host for another to fit; none if that does not help."""
        num_jobs, num_bytes = len(host.active) + 1, int(self._bytes[host.number]) + job.num_bytes
        leaving: list[_Active] = []
        for active in sorted((a for a in host.active if a.job.priority < job.priority), key=_yields):
            leaving.append(active)
            num_jobs, num_bytes = num_jobs - 1, num_bytes - active.job.num_bytes
            if self.instance.fits(num_jobs, num_bytes):
                return leaving
        return []

    def _seat(self, host: _Host, waiting: Waiting, now_s: float) -> None:
        job = waiting.job
        alone_rate = self.instance.rates([job])[0]
        host.advance(now_s)
        host.active.append(_Active(job, waiting.left_s * alone_rate, alone_rate))
        self._count(host, job, 1)
        self.started_s.setdefault(job.job, now_s)
        self._reschedule(host)

    def _remove(self, host: _Host, active: _Active) -> None:
        host.active.remove(active)
        self._count(host, active.job, -1)

    def _count(self, host: _Host, job: TraceJob, sign: int) -> None:
        self._loads[host.number] += sign * job.step_tokens
        self._bytes[host.number] += sign * job.num_bytes
        self._counts[host.number] += sign
        self._lowest[host.number] = min((active.job.priority for active in host.active), default=np.inf)

    def _reschedule(self, host: _Host) -> None:
        """Sets the speeds again and foresees the next end."""
        host.version += 1
        if not host.active:
            return
        rates = self.instance.rates([a.job for a in host.active])
        for active, rate in zip(host.active, rates, strict=True):
            active.rate = rate
        soonest = min(max(a.left_tokens, 0.0) / a.rate for a in host.active)
        heapq.heappush(self.ends, (host.updated_s + soonest, host.number, host.version))


def replay(
    trace: Sequence[TraceJob],
    instance: Instance,
    *,
    num_gpus: int = 128,
    gpus_per_instance: int = 1,
    policy: str = "fcfs",
    recorded_on: Instance | None = None,
) -> ReplayReport:
    """Runs a trace to its last end; jobs that fit no instance are an error.

    Durations are those of jobs alone on an instance of `recorded_on`, by default the same; their work is the same on
    any other.
    """
    _check(trace, instance, num_gpus, gpus_per_instance, policy)
    alone_s = {job.job: _alone_s(job, instance, recorded_on or instance) for job in trace}
    jobs = sorted(trace, key=lambda job: (job.arrival_s, job.job))
    cluster = _Cluster(instance, num_gpus // gpus_per_instance, policy)
    horizon_s = jobs[-1].arrival_s
    arrived = 0
    while arrived < len(jobs) or cluster.ends:
        arrival_s = jobs[arrived].arrival_s if arrived < len(jobs) else math.inf
        if cluster.ends and cluster.ends[0][0] <= arrival_s:
            now_s, number, version = heapq.heappop(cluster.ends)
            if cluster.hosts[number].version != version:
                continue
            cluster.end_jobs(cluster.hosts[number], now_s)
        else:
            now_s = arrival_s
            cluster.queue.push(Waiting(jobs[arrived], alone_s[jobs[arrived].job]))
            arrived += 1
            if arrived == len(jobs):
                figures = _while_arriving(cluster, horizon_s)
        cluster.dispatch(now_s)
    return _report(cluster, jobs, policy, figures, alone_s)


def _alone_s(job: TraceJob, instance: Instance, recorded_on: Instance) -> float:
    """What a job takes alone on an instance."""
    return job.duration_s * recorded_on.rates([job])[0] / instance.rates([job])[0]


def _while_arriving(cluster: _Cluster, horizon_s: float) -> tuple[float, float, int]:
    """Tokens, busy seconds and ended jobs up to the last arrival."""
    for host in cluster.hosts:
        host.advance(horizon_s)
    tokens = sum(host.tokens for host in cluster.hosts)
    return tokens, sum(host.busy_s for host in cluster.hosts), len(cluster.ended_s)


def _report(
    cluster: _Cluster,
    jobs: Sequence[TraceJob],
    policy: str,
    figures: tuple[float, float, int],
    alone_s: Mapping[str, float],
) -> ReplayReport:
    tokens, busy_s, num_ended = figures
    # A single instant has no rates; a second keeps the division defined.
    horizon_s = jobs[-1].arrival_s or 1.0
    num_instances = len(cluster.hosts)
    jct = np.array([cluster.ended_s[job.job] - job.arrival_s for job in jobs])
    queued = np.array([cluster.started_s[job.job] - job.arrival_s for job in jobs])
    late = sum(cluster.ended_s[job.job] > job.deadline_s for job in jobs)
    return ReplayReport(
        policy=policy,
        num_jobs=len(jobs),
        num_instances=num_instances,
        throughput_tokens_s=tokens / horizon_s,
        utilisation=tokens / (horizon_s * num_instances * cluster.instance.peak_rate),
        busy_share=busy_s / (horizon_s * num_instances),
        jct_mean_s=float(jct.mean()),
        jct_p95_s=float(np.percentile(jct, 95)),
        queue_mean_s=float(queued.mean()),
        queue_p95_s=float(np.percentile(queued, 95)),
        fairness=_jain(np.array([alone_s[job.job] for job in jobs]) / jct),
        late_share=late / len(jobs),
        num_ended=num_ended,
        num_preemptions=cluster.num_preemptions,
        makespan_s=max(cluster.ended_s.values()),
    )


def _jain(values: np.ndarray) -> float:
    """(Σ x)² / (n · Σ x²)."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def _yields(active: _Active) -> tuple[int, float, str]:
    """Who gives way first: the lowest priority, then who came last."""
    return (active.job.priority, -active.job.arrival_s, active.job.job)


def _check(trace: Sequence[TraceJob], instance: Instance, num_gpus: int, gpus_per_instance: int, policy: str) -> None:
    if policy not in POLICIES:
        raise PlanError(f"is {policy!r}; accepted are {', '.join(POLICIES)}.", where="policy")
    if gpus_per_instance < 1 or num_gpus < gpus_per_instance:
        raise PlanError(
            f"{num_gpus} GPUs with {gpus_per_instance} per instance make no instance; use at least one of each.",
            where="num_gpus",
        )
    if not trace:
        raise PlanError("has no jobs; give at least one.", where="trace")
    for job in trace:
        if not instance.fits(1, job.num_bytes):
            raise PlanError(
                f"needs {job.num_bytes:,} bytes; an instance has {instance.job_bytes:,} for jobs.", where=job.job
            )
