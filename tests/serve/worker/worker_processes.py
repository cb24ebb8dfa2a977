"""Workers as processes that are killed, stopped and requested to leave; a program of its own, used by tests.

    python worker_processes.py DIRECTORY

Every directory in there named after one of PLAYS holds a bench with jobs in its queue. Prints what was done to whom, by
directory, as JSON. The parent imports everything once and forks, so that a worker costs no import; it computes nothing
itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import torch
from worker_bench import PATIENCE_S, Bench

import weft.serve.db.leases
import weft.serve.worker.prepare
from weft.cli.service.worker import StopSignals
from weft.engine.program_run import StartedMicrobatch
from weft.job_state import FINAL_STATES
from weft.serve.blobs import Blobs
from weft.serve.db.engine import open_database
from weft.serve.db.tables import EVENTS, FILES, JOBS, MODELS
from weft.serve.worker.worker import Worker
from weft.store import faults

LEASE_S = 1.0
KILLS = 7
"""Workers that are killed before one is left alone."""
LATE_IMPORTS = (
    "uvicorn.protocols.http.auto",
    "uvicorn.loops.auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
"""What is imported only when a model is loaded or a server starts; loading one here would leave threads, which a fork
loses."""


def bench_at(folder: Path) -> Bench:
    given = folder / "database-url"
    url = given.read_text() if given.exists() else f"sqlite:///{folder / 'weft.db'}"
    return Bench(folder, open_database(url), Blobs(str(folder / "blobs")))


def child(folder: Path, *, plan: str | None = None, before: Callable[[], None] | None = None, **options: Any) -> int:
    """Forks a worker; returns the process's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        signals = StopSignals()
        if before is not None:
            before()
        bench = bench_at(folder)
        chosen = replace(bench.options(), **{"lease_s": LEASE_S, "pulse_s": 0.1, **options})
        signals.worker = Worker(chosen, bench.database, bench.blobs)
        if plan:
            faults.arm(faults.parse(plan))
        signals.worker.run()
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> str:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "done", -signal.SIGKILL: "killed"}.get(status, f"failed {status}")


def all_over(bench: Bench) -> bool:
    with bench.database.read() as tx:
        return not tx.execute(sa.select(JOBS.c.id).where(JOBS.c.status.not_in(FINAL_STATES))).first()


def leave(pid: int) -> str:
    os.kill(pid, signal.SIGTERM)
    return ended(pid)


def forgive() -> None:
    """How often a job may lose its worker is another play's matter, and those that have train on together."""
    weft.serve.db.leases.MAX_ATTEMPTS = weft.serve.db.leases.SUSPECT_AFTER = 10**6


def killed(folder: Path) -> list[str]:
    """Workers that die at a random durable operation or at a random time, until every job is over."""
    rng = random.Random(5)
    ends: list[str] = []
    bench = bench_at(folder)
    while not all_over(bench):
        plan = f"kill@{rng.randint(1, 250)}" if len(ends) < KILLS and len(ends) % 3 < 2 else None
        pid = child(folder, plan=plan, before=forgive)
        if plan is None and len(ends) < KILLS:
            time.sleep(rng.uniform(0.3, 1.0))
            os.kill(pid, signal.SIGKILL)
        wait(lambda pid=pid: not is_there(pid) or all_over(bench))
        if is_there(pid):
            os.kill(pid, signal.SIGTERM)
        ends.append(ended(pid))
    return ends


def killed_of_two(folder: Path) -> list[str]:
    """Two workers at a time, of which one or the other dies at a random moment, until every job is over."""
    rng = random.Random(8)
    bench = bench_at(folder)
    ends: list[str] = []

    def another() -> int:
        return child(folder, before=forgive, max_jobs=3)

    pair = [another(), another()]
    while not all_over(bench):
        left = jobs(bench)
        done = sum(job["step"] for job in left)
        wait(lambda left=left, done=done: len(jobs(bench)) < len(left) or sum(j["step"] for j in jobs(bench)) > done)
        if len(ends) < KILLS:
            time.sleep(rng.uniform(0.0, 0.4))
            victim = rng.randrange(2)
            os.kill(pair[victim], signal.SIGKILL)
            ends.append(ended(pair[victim]))
            pair[victim] = another()
    return [*ends, *(leave(pid) for pid in pair)]


def two_killed_of_three(folder: Path) -> list[str]:
    """Three workers, of which two are killed while all hold jobs; the one that is left ends every job."""
    rng = random.Random(3)
    bench = bench_at(folder)
    workers = [child(folder) for _ in range(3)]
    wait(lambda: len({job["worker"] for job in jobs(bench)} - {None}) == 3)
    ends: list[str] = []
    for part in (0.2, 0.5):
        wait(lambda part=part: steps(bench) >= part * sum(job["settings"]["max_steps"] for job in all_jobs(bench)))
        time.sleep(rng.uniform(0.0, 0.3))
        victim = workers.pop(rng.randrange(len(workers)))
        os.kill(victim, signal.SIGKILL)
        ends.append(ended(victim))
    wait(lambda: all_over(bench))
    return [*ends, *map(leave, workers)]


def undisturbed(folder: Path) -> list[str]:
    """One worker that is left alone until every job is over."""
    bench = bench_at(folder)
    pid = child(folder)
    wait(lambda: all_over(bench))
    return [leave(pid)]


def is_there(pid: int) -> bool:
    """Whether a child has not ended; one that has still waits to be reaped."""
    return state(pid) not in ("Z", "X")


def stopped(folder: Path, plan: str, *, until_all_over: bool) -> dict[str, Any]:
    """A worker is stopped at a durable operation beyond its lease; a second takes over; then the first goes on.

    It does when all jobs are over, or as soon as the second one has them.
    """
    bench = bench_at(folder)
    first = child(folder, plan=plan)
    wait(lambda: state(first) == "T" or all_over(bench))
    was_stopped = state(first) == "T"
    stop_outside_a_transaction(folder, first)
    before = {job["id"]: job["fence"] for job in jobs(bench)}
    second = child(folder)
    wait(lambda: all_over(bench) if until_all_over else all(before[job["id"]] < job["fence"] for job in jobs(bench)))
    was = everything(bench)
    os.kill(first, signal.SIGCONT)
    wait(lambda: all_over(bench))
    time.sleep(0.8)
    is_same = everything(bench) == was
    return {"was_stopped": was_stopped, "is_same": is_same, "ends": [leave(first), leave(second)]}


def stop_outside_a_transaction(folder: Path, pid: int) -> None:
    """Lets a stopped worker go on by moments until it holds no lock of SQLite's.

    All its threads stop together; where one of them is inside a transaction no process can write until it goes on.
    Nothing but SQLite itself could change that, so what is tested is a worker that stops anywhere else.
    """
    while is_locked(folder):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)
        os.kill(pid, signal.SIGSTOP)


def is_locked(folder: Path) -> bool:
    with contextlib.closing(sqlite3.connect(folder / "weft.db", isolation_level=None, timeout=0.3)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        connection.execute("ROLLBACK")
        return False


def all_jobs(bench: Bench) -> list[Any]:
    with bench.database.read() as tx:
        return list(tx.execute(sa.select(JOBS)).mappings())


def jobs(bench: Bench) -> list[Any]:
    """The jobs that have not ended."""
    return [row for row in all_jobs(bench) if row["status"] not in FINAL_STATES]


def steps(bench: Bench) -> int:
    return sum(job["step"] for job in all_jobs(bench))


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait(until: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout
    while not until():
        assert time.monotonic() < deadline, "timed out while waiting"
        time.sleep(0.02)


def everything(bench: Bench) -> str:
    """All rows about jobs, and the names of all blobs they name."""
    with bench.database.read() as tx:
        rows = [
            [list(map(str, row)) for row in tx.execute(sa.select(table))] for table in (JOBS, EVENTS, MODELS, FILES)
        ]
    return json.dumps(rows)


def drained(folder: Path) -> dict[str, Any]:
    """Workers that are requested to leave at random moments, then one that is left alone until every job is over."""
    rng = random.Random(1)
    bench = bench_at(folder)
    ends: list[str] = []
    seconds: list[float] = []
    wrong: list[str] = []
    for turn in range(5):
        done = sum(job["step"] for job in jobs(bench))
        pid = child(folder)
        if turn % 2:
            wait(lambda done=done: sum(job["step"] for job in jobs(bench)) > done)
        time.sleep(rng.uniform(0.0, 0.5))
        at = time.monotonic()
        ends.append(leave(pid))
        seconds.append(time.monotonic() - at)
        wrong += [str(job) for job in jobs(bench) if job["attempts"] or job["worker"] or job["status"] != "queued"]
    pid = child(folder)
    wait(lambda: all_over(bench))
    ends.append(leave(pid))
    return {"ends": ends, "seconds": seconds, "wrong": wrong}


def poisoned(folder: Path) -> list[str]:
    """Workers that die whenever they read a certain file, until every job is over."""

    def arm() -> None:
        real = weft.serve.worker.prepare.load_job_data

        def deadly(spec: Any, *rest: Any, **options: Any) -> Any:
            if spec.seed == 666:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(spec, *rest, **options)

        weft.serve.worker.prepare.load_job_data = deadly

    bench = bench_at(folder)
    ends: list[str] = []
    while not all_over(bench):
        pid = child(folder, before=arm)
        wait(lambda pid=pid: not is_there(pid) or all_over(bench))
        if is_there(pid):
            os.kill(pid, signal.SIGTERM)
        ends.append(ended(pid))
    return ends


def hung(folder: Path) -> list[str]:
    """A worker whose training hangs for good, then one that is well."""

    def arm() -> None:
        real, seen = StartedMicrobatch.count, iter(range(5))

        def endless(self: StartedMicrobatch) -> Any:
            if next(seen, None) is None:
                time.sleep(3600)
            return real(self)

        StartedMicrobatch.count = endless

    bench = bench_at(folder)
    ends = [ended(child(folder, before=arm, stuck_s=1.0))]
    last = child(folder)
    wait(lambda: all_over(bench))
    return [*ends, leave(last)]


PLAYS: dict[str, Callable[[Path], Any]] = {
    "killed": killed,
    "killed-of-two": killed_of_two,
    "two-killed-of-three": two_killed_of_three,
    "undisturbed": undisturbed,
    "stopped-checkpoint": lambda folder: stopped(folder, "stop@3:checkpoint.write", until_all_over=True),
    "stopped-result": lambda folder: stopped(folder, "stop@1:blob.commit", until_all_over=True),
    "stopped-metrics": lambda folder: stopped(folder, "stop@5:metrics.append", until_all_over=False),
    "drained": drained,
    "poisoned": poisoned,
    "hung": hung,
}


def main(folder: Path) -> None:
    for module in LATE_IMPORTS:
        importlib.import_module(module)
    print(json.dumps({name: play(folder / name) for name, play in PLAYS.items() if (folder / name).exists()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
