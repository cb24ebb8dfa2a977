"""Reads a run directory; missing, torn or odd values are left out and are never an error.

A report is most needed after a crash, so every file may be absent and every last line half-written. Only a directory
that holds no run at all is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.engine.events import own_metrics
from weft.errors import StorageError
from weft.plan.simulate.step_shares import STEP_SPAN, ReplicaShare
from weft.report.run_data import DispatchedStep, EvalPoint, JobReport, ReportSpan, RunData, TrainPoint, number
from weft.settings import as_named_now
from weft.spec import JobSpec
from weft.store.wall_clock import TimeSplit

SHARE_NUMBERS = ("replica", "tokens", "longest", "predicted_s", "seconds", "busy")
JOB_FILES = ("job.json", "status.json", "metrics.jsonl")
Pair = tuple[Any, Any, set[float | None]]
"""The name of a pass, its device, and two microbatches."""


def read_run(run_dir: Path) -> RunData:
    """All data of a run directory; a StorageError if it is not one."""
    run_dir = Path(run_dir)
    if run_dir.is_file():
        raise StorageError("is a file; name a run's directory.", where=str(run_dir))
    if not run_dir.is_dir():
        raise StorageError("there is no such run directory.", where=str(run_dir))
    info = read_info(run_dir)
    listed = info.get("jobs")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    # After a crash run.json may be gone or older than the directories beside it.
    result = sorted(d.name for d in run_dir.iterdir() if d.is_dir() and any((d / file).is_file() for file in JOB_FILES))
    names += [name for name in result if name not in names]
    if not names and not info:
        raise StorageError("is not a run directory: it holds neither run.json nor jobs.", where=str(run_dir))
    jobs, time = tuple(_read_job(run_dir, name) for name in names), _read_mapping(run_dir / "time.json")
    events = _read_mapping(run_dir / "timeline.json").get("traceEvents")
    events = [event for event in events if isinstance(event, Mapping)] if isinstance(events, list) else []
    return RunData(run_dir, info, jobs, _read_spans(events), _read_steps(events), TimeSplit.from_json(time))


def read_info(run_dir: Path) -> Mapping[str, Any]:
    """The contents of run.json; empty if it cannot be read."""
    return _read_mapping(run_dir / "run.json")


def _read_job(run_dir: Path, name: str) -> JobReport:
    if Path(name).name != name:  # a name that would lead out of the run directory has no files here
        return JobReport(name, {}, {})
    job_dir = run_dir / name
    train, evals = _read_metrics(job_dir / "metrics.jsonl")
    adapter = next((d for d in (job_dir / "adapter", job_dir) if (d / "adapter_config.json").is_file()), None)
    return JobReport(
        name,
        as_named_now(JobSpec, _read_mapping(job_dir / "job.json")),
        _read_mapping(job_dir / "status.json"),
        train,
        evals,
        adapter.relative_to(run_dir).as_posix() if adapter else None,
    )


def _read_metrics(path: Path) -> tuple[tuple[TrainPoint, ...], tuple[EvalPoint, ...]]:
    train: list[TrainPoint] = []
    evals: list[EvalPoint] = []
    latest = offset = 0.0
    for line in _json_lines(path):
        step = number(line.get("step"))
        if step is None:
            continue
        time = number(line.get("time"))
        if time is not None:
            # A resumed run counts its seconds from zero again; here they go on.
            if time + offset < latest:
                offset = latest
            time = latest = time + offset
        eval_loss = number(line.get("eval_loss"))
        if eval_loss is not None:
            _replace_from(evals, int(step))
            accuracy = number(line.get("eval_mean_token_accuracy"))
            evals.append(EvalPoint(int(step), time, eval_loss, accuracy, _further(line, "eval_")))
        elif "loss" in line:
            _replace_from(train, int(step))
            train.append(_train_point(line, int(step), time))
    return tuple(train), tuple(evals)


def _train_point(line: Mapping[str, Any], step: int, time: float | None) -> TrainPoint:
    return TrainPoint(
        step=step,
        time=time,
        loss=number(line.get("loss")),
        accuracy=number(line.get("mean_token_accuracy")),
        grad_norm=number(line.get("grad_norm")),
        learning_rate=number(line.get("learning_rate")),
        num_tokens=number(line.get("num_tokens")),
        further=_further(line),
    )


def _further(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The metrics of a line that only its job's objective has, by their names without `prefix`."""
    own = {name.removeprefix(prefix): number(value) for name, value in own_metrics(line).items()}
    return {name: value for name, value in own.items() if value is not None}


def _replace_from(points: list[TrainPoint] | list[EvalPoint], step: int) -> None:
    """Drops points at or after `step`: a resumed job repeats steps, and the last repetition counts."""
    while points and points[-1].step >= step:
        points.pop()


def _read_steps(events: Sequence[Mapping[str, Any]]) -> tuple[DispatchedStep, ...]:
    """The steps that several replicas shared; a step without one of them is left out."""
    shares: dict[tuple[float, float], dict[int, ReplicaShare]] = {}
    for event in events:
        start, duration, args = number(event.get("ts")), number(event.get("dur")), event.get("args")
        if event.get("name") != STEP_SPAN or start is None or duration is None or not isinstance(args, Mapping):
            continue
        known = {name: number(args.get(name)) for name in SHARE_NUMBERS}
        values: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        if len(values) == len(known):
            counts = {name: int(values.pop(name)) for name in ("replica", "tokens", "longest")}
            share = ReplicaShare(**counts, **values, is_learnt=args.get("is_learnt") is True)
            shares.setdefault((start / 1e6, duration / 1e6), {})[share.replica] = share
    steps = (DispatchedStep(*at, tuple(own[k] for k in sorted(own))) for at, own in sorted(shares.items()))
    return tuple(step for step in steps if [share.replica for share in step.shares] == [*range(len(step.shares))])


def _read_spans(events: Sequence[Mapping[str, Any]]) -> tuple[ReportSpan, ...]:
    spans: list[ReportSpan] = []
    last: Pair | None = None
    for event in events:
        span = _span(event)
        if span is None or span.name == STEP_SPAN:
            continue
        pair = _pair(event)
        if pair is not None and pair == last:
            spans[-1], pair = spans[-1].merged_with(span), None
        else:
            spans.append(span)
        last = pair
    return tuple(sorted(spans, key=lambda span: span.start_s))


def _pair(event: Mapping[str, Any]) -> Pair | None:
    """The key of two microbatches that ran side by side; None for one that ran alone."""
    args = event.get("args")
    if not isinstance(args, Mapping) or number(args.get("beside")) is None:
        return None
    return event.get("name"), event.get("pid"), {number(args.get("microbatch")), number(args.get("beside"))}


def _span(event: Mapping[str, Any]) -> ReportSpan | None:
    start, duration = number(event.get("ts")), number(event.get("dur"))
    if event.get("ph") != "X" or start is None or duration is None:
        return None
    args = event.get("args")
    args = args if isinstance(args, Mapping) else {}
    jobs = args.get("jobs")
    shares = {str(job): number(tokens) or 0.0 for job, tokens in jobs.items()} if isinstance(jobs, Mapping) else {}
    tokens = number(args.get("tokens"))
    peak, predicted = number(args.get("peak_bytes")), number(args.get("predicted_bytes"))
    return ReportSpan(
        str(event.get("name")),
        start / 1e6,
        max(duration, 0.0) / 1e6,
        sum(shares.values()) if tokens is None else tokens,
        number(args.get("rows")) or 0.0,
        shares,
        max(0, int(number(event.get("pid")) or 1) - 1),
        (peak, predicted) if peak and predicted else None,
    )


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
