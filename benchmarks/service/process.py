"""A real `weft serve` to measure, one process that answers and one worker that trains, and what the worker did.

What the worker did and when is read from the metrics.jsonl of its jobs. A line has the seconds since the worker's
engine began. A file's time of change less those of its last line is when that was: every line is written as soon as its
step is done, so the least over all files is off by milliseconds.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.processes import child_variables
from benchmarks.service.clients import Answers, Plan, write_plan
from weft.errors import WeftError

START_S, STOP_S = 120.0, 90.0


@dataclass(frozen=True)
class Service:
    """A service that answers."""

    port: int
    data_dir: Path
    pid: int

    def cpu_s(self) -> float:
        """Processor time that the process which answers has taken; its workers are others."""
        return _cpu_s(self.pid)

    def worker_cpu_s(self) -> float:
        """Processor time that its worker has taken."""
        found = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/children")]
        return sum(_cpu_s(int(pid)) for text in found for pid in text.split())

    def new_key(self, tenant: str) -> str:
        """A key of a new tenant."""
        _weft("keys", "tenants", "create", tenant, "--data-dir", str(self.data_dir))
        return _weft("keys", "create", "--tenant", tenant, "--data-dir", str(self.data_dir)).strip()

    def upload(self, key: str, content: bytes) -> str:
        """The id of a new training file."""
        edge = "weft-bench-boundary"
        parts = [
            f'--{edge}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n',
            f'--{edge}\r\ncontent-disposition: form-data; name="file"; filename="train.jsonl"\r\n\r\n',
        ]
        body = "".join(parts).encode() + content + f"\r\n--{edge}--\r\n".encode()
        with self.open("/v1/files", key, body, f"multipart/form-data; boundary={edge}") as answer:
            return str(json.load(answer)["id"])

    def get(self, path: str, key: str) -> Any:
        """What a path answers."""
        with self.open(path, key) as answer:
            return json.load(answer)

    def open(self, path: str, key: str, body: bytes | None = None, kind: str = "application/json") -> IO[bytes]:
        """An answer to read from."""
        headers = {"authorization": f"Bearer {key}", "content-type": kind}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        stream: IO[bytes] = urllib.request.urlopen(request, timeout=60)
        return stream


def run_clients(plan: Plan) -> Answers:
    """Lets clients in a process of their own follow a plan, to its end."""
    command = [sys.executable, "-m", "benchmarks.service.clients"]
    done = subprocess.run(
        command, input=write_plan(plan), capture_output=True, text=True, start_new_session=True, env=child_variables()
    )
    if done.returncode != 0:
        raise WeftError(f"a client ended with {done.stderr.strip()[-500:]}", where="benchmarks serve")
    return Answers(**json.loads(done.stdout))


@contextlib.contextmanager
def running_service(data_dir: Path) -> Iterator[Service]:
    """A service with one worker for the embedded backbone, on a free port; stopped when the block ends."""
    with (data_dir.parent / "serve.log").open("wb") as log:
        command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--data-dir", str(data_dir)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            if not line.startswith("serving"):
                raise WeftError(f"`weft serve` did not start; see {log.name}.", where="benchmarks serve")
            service = Service(int(line.rpartition(":")[2].partition("/")[0]), data_dir, process.pid)
            _wait_for_worker(service)
            yield service
        finally:
            process.terminate()
            process.stdout.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def spinning_programs(num: int) -> Iterator[None]:
    """Programs that never rest, as others on a busy machine; they end with the block."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _wait_for_worker(service: Service) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError):
            if service.get("/readyz", "")["workers"]:
                return
        if time.monotonic() > deadline:
            raise WeftError(f"no worker came up in {START_S:.0f} s.", where="benchmarks serve")
        time.sleep(0.2)


def _cpu_s(pid: int) -> float:
    *_, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    return sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")


def _weft(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise WeftError(done.stderr.strip(), where=f"weft {arguments[0]}")
    return done.stdout


@dataclass(frozen=True)
class TrainedStep:
    """One optimizer step of one job."""

    job: str
    step: int
    at: float
    """Unix seconds when it was done."""
    tokens: int


def read_steps(data_dir: Path) -> list[TrainedStep]:
    """All steps so far of all jobs that train."""
    files = {path: _records(path) for path in data_dir.glob("work/*/*/metrics.jsonl")}
    began = min((path.stat().st_mtime - lines[-1]["time"] for path, lines in files.items() if lines), default=0.0)
    steps = []
    for path, lines in files.items():
        before = 0.0
        for line in lines:
            job, tokens = path.parent.name.partition(".")[0], line["num_tokens"] - before
            steps.append(TrainedStep(job, int(line["step"]), began + line["time"], int(tokens)))
            before = line["num_tokens"]
    return steps


def tokens_per_s(steps: list[TrainedStep], start: float, end: float) -> float:
    """Tokens of all jobs per second in a span of time; 0 if no job has two steps in it.

    Jobs take turns, and all of a round end at nearly the same time. So a job's time from one of its steps to another is
    that of whole rounds, which the span itself is not; the mean over jobs.
    """
    ordered = sorted(steps, key=lambda step: step.at)
    ends, totals = [step.at for step in ordered], [0, *itertools.accumulate(step.tokens for step in ordered)]
    of_job: dict[str, list[float]] = {}
    for at, step in zip(ends, ordered, strict=True):
        if start <= at <= end:
            of_job.setdefault(step.job, []).append(at)
    rates = []
    for first, *_, last in (times for times in of_job.values() if len(times) > 1):
        tokens = totals[bisect.bisect_right(ends, last)] - totals[bisect.bisect_right(ends, first)]
        rates.append(tokens / (last - first))
    return statistics.mean(rates) if rates else 0.0


def _records(path: Path) -> list[dict[str, float]]:
    """The training lines of a file; one that is being written is left out."""
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return [line for line in map(json.loads, whole) if "num_tokens" in line]
