"""The data of a run directory, as plain dataclasses; missing, torn or odd values are left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, counted, size
from weft.methods.configs import CONFIGS
from weft.objectives.objective import HEADLINES
from weft.plan.layout import Layout, parse_layout
from weft.plan.simulate.step_shares import ReplicaShare
from weft.settings import without_foreign
from weft.spec import AdapterSpec
from weft.store.wall_clock import TimeSplit

ONE_DEVICE = str(Layout())


def layouts_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    listed = info.get("layouts")
    result = tuple(str(layout) for layout in listed) if isinstance(listed, list) else ()
    return () if set(result) <= {ONE_DEVICE} else result


def layout_of(info: Mapping[str, Any]) -> str | None:
    return ", then ".join("one device" if name == ONE_DEVICE else name for name in layouts_of(info)) or None


def made_with(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and values; unknown ones are left out."""
    known = [(key, info.get(key)) for key in ("base_model", "device", "dtype", "quantize", "kernels")]
    about = [(key.replace("base_model", "backbone"), str(value)) for key, value in known if value not in (None, "none")]
    layout = layout_of(info)
    if layout is not None:
        about.append(("layout", layout))
    if info.get("capacity"):
        about.append(("capacity", f"{info['capacity']} tokens"))
    versions = info.get("versions")
    if isinstance(versions, Mapping):
        about += [(str(name), str(version)) for name, version in versions.items() if version]
    started = _moment(info.get("started_at"))
    return [*about, ("started", started)] if started else about


def _moment(text: Any) -> str | None:
    try:
        return datetime.fromisoformat(text).strftime("%d %B %Y, %H:%M %Z").strip()
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class TrainPoint:
    step: int
    time: float | None
    loss: float | None
    accuracy: float | None
    """Accuracy of the supervised tokens, 0 to 1; None in metrics from before it was measured."""
    grad_norm: float | None
    learning_rate: float | None
    num_tokens: float | None
    further: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalPoint:
    step: int
    time: float | None
    eval_loss: float
    accuracy: float | None
    further: Mapping[str, float] = field(default_factory=dict)


MEANS = ("tokens", "predicted_s", "seconds", "busy")
PASSES = ("forward_backward", "forward", "backward")
"""Names of spans in which a microbatch runs: all at once, or a stage at a time."""


@dataclass(frozen=True, slots=True)
class ReportSpan:
    name: str
    start_s: float
    duration_s: float
    tokens: float
    rows: float
    jobs: Mapping[str, float]
    replica: int = 0
    memory: tuple[float, float] | None = None
    """Of a measured peak of memory: its bytes, and those that admission predicted."""

    def merged_with(self, other: ReportSpan) -> ReportSpan:
        start_s = min(self.start_s, other.start_s)
        end_s = max(self.start_s + self.duration_s, other.start_s + other.duration_s)
        return replace(
            self,
            start_s=start_s,
            duration_s=end_s - start_s,
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            jobs={**self.jobs, **other.jobs},
        )


@dataclass(frozen=True)
class DispatchedStep:
    """A step whose samples several replicas shared."""

    start_s: float
    seconds: float
    shares: tuple[ReplicaShare, ...]

    @property
    def predicted_s(self) -> float:
        return max(share.predicted_s for share in self.shares)

    @property
    def is_learnt(self) -> bool:
        return all(share.is_learnt for share in self.shares)


@dataclass(frozen=True)
class ReplicaMeans:
    """Means over steps of what one replica did in each."""

    replica: int
    tokens: float
    longest: int
    predicted_s: float
    seconds: float
    busy: float


@dataclass(frozen=True)
class JobReport:
    name: str
    settings: Mapping[str, Any]
    status: Mapping[str, Any]
    train: tuple[TrainPoint, ...] = ()
    evals: tuple[EvalPoint, ...] = ()
    adapter_path: str | None = None
    """Path of its adapter, relative to the run directory; None before there is one."""

    @property
    def state(self) -> str:
        """queued, running, paused, succeeded, failed or cancelled; `unknown` if it is not recorded."""
        return str(self.status.get("state") or "unknown")

    @property
    def remarks(self) -> tuple[str, ...]:
        reason, skipped = str(self.status.get("reason") or ""), number(self.status.get("skipped_steps"))
        return (
            *([reason] if reason and reason != self.state else []),
            *(["stopped early: the evaluation loss got no better"] if self.status.get("early_stopped") is True else []),
            *([f"{counted(round(skipped), 'step')} skipped: loss or gradient not finite"] if skipped else []),
        )

    @property
    def step(self) -> int:
        return int(number(self.status.get("step")) or (self.train[-1].step if self.train else 0))

    @property
    def num_steps(self) -> int | None:
        planned = number(self.status.get("num_steps"))
        return int(planned) if planned is not None else None

    @property
    def final_loss(self) -> float | None:
        return next((p.loss for p in reversed(self.train) if p.loss is not None), None)

    @property
    def best_eval_loss(self) -> float | None:
        return min((p.eval_loss for p in self.evals), default=None)

    @property
    def measured(self) -> dict[str, float]:
        last = self.evals[-1].further if self.evals else self.train[-1].further if self.train else {}
        return {name: last[name] for name in HEADLINES if name in last}

    @property
    def trained_tokens(self) -> float:
        known = number(self.status.get("trained_tokens"))
        if known is not None:
            return known
        return next((p.num_tokens for p in reversed(self.train) if p.num_tokens is not None), 0.0)

    @property
    def start_s(self) -> float:
        """Start of its first step, in seconds of the run; the first is assumed to be as long as the second."""
        times = [p.time for p in self.train[:2] if p.time is not None]
        return max(0.0, 2 * times[0] - times[1]) if len(times) == 2 else 0.0

    @property
    def end_s(self) -> float | None:
        known = number(self.status.get("seconds"))
        return known if known is not None else next((p.time for p in reversed(self.train) if p.time is not None), None)

    @property
    def tokens_per_s(self) -> float | None:
        end = self.end_s
        return self.trained_tokens / (end - self.start_s) if end is not None and end > self.start_s else None

    @property
    def learning_rate(self) -> float | None:
        return number(self.settings.get("learning_rate"))

    @property
    def method_settings(self) -> dict[str, Any]:
        own = without_foreign(AdapterSpec, self._adapter, "methods", self.method)
        return {**self.settings, "adapter": own} if own else dict(self.settings)

    @property
    def method(self) -> str:
        return str(self._adapter.get("method", "lora"))

    @property
    def rank(self) -> int | None:
        config = CONFIGS.get(self.method)
        setting = None if config is None else config.rank_setting
        rank = None if setting is None else number(self._adapter.get(setting))
        return int(rank) if rank is not None else None

    @property
    def _adapter(self) -> Mapping[str, Any]:
        adapter = self.settings.get("adapter")
        return adapter if isinstance(adapter, Mapping) else {}


@dataclass(frozen=True)
class RunData:
    path: Path
    info: Mapping[str, Any]
    jobs: tuple[JobReport, ...]
    spans: tuple[ReportSpan, ...] = field(default=())
    """The timeline in order of time."""
    steps: tuple[DispatchedStep, ...] = ()
    time: TimeSplit | None = None
    """Wall-clock time by activity, over all sessions of the run; None until one has ended."""

    @property
    def name(self) -> str:
        return str(self.info.get("run_name") or self.path.resolve().name)

    @property
    def layouts(self) -> tuple[str, ...]:
        return layouts_of(self.info)

    @property
    def layout(self) -> str | None:
        return layout_of(self.info)

    @property
    def seconds(self) -> float | None:
        ends = [job.end_s for job in self.jobs if job.end_s]
        ends += [p.time for job in self.jobs for p in job.train[-1:] if p.time]
        ends += [p.time for job in self.jobs for p in job.evals[-1:] if p.time]
        ends += [max(span.start_s + span.duration_s for span in self.spans)] if self.spans else []
        return max(ends, default=None)

    @property
    def trained_tokens(self) -> float:
        return sum(job.trained_tokens for job in self.jobs)

    @property
    def tokens_per_s(self) -> float | None:
        return self.trained_tokens / self.seconds if self.seconds else None

    @property
    def memory_in_words(self) -> tuple[str, str] | None:
        """The highest measured peak of a process, and what it is; None without any."""
        peaks = [span.memory for span in self.spans if span.memory is not None]
        if not peaks:
            return None
        error = sum(abs(predicted / peak - 1) for peak, predicted in peaks) / len(peaks)
        what = "resident size of the process" if str(self.info.get("device")) == "cpu" else "tensors of the GPU"
        return size(max(peaks)[0]), f"at most, {what}; {counted(len(peaks), 'peak')}, predicted within {error:.1%}"

    @property
    def microbatches(self) -> tuple[ReportSpan, ...]:
        return tuple(span for span in self.spans if span.name in PASSES)

    @property
    def is_staged(self) -> bool:
        return any(span.name == PASSES[1] for span in self.spans)

    @property
    def compared_steps(self) -> tuple[DispatchedStep, ...]:
        """The steps to compare with their predictions: those predicted from measured passes, or all if none was. Only
        those on the latest replicas."""
        latest = [step for step in self.steps if len(step.shares) == len(self.steps[-1].shares)]
        return tuple(step for step in latest if step.is_learnt) or tuple(latest)

    @property
    def replica_means(self) -> list[ReplicaMeans]:
        found = []
        for own in zip(*(step.shares for step in self.compared_steps), strict=True):
            mean = {name: statistics.fmean(getattr(s, name) for s in own) for name in MEANS}
            found.append(ReplicaMeans(own[0].replica, longest=max(s.longest for s in own), **mean))
        return found

    @property
    def predicted_from(self) -> str:
        return "from measured passes" if all(s.is_learnt for s in self.compared_steps) else "from the hardware table"

    def replica_name(self, index: int) -> str:
        """Its number, and its layout if that is known."""
        if len(self.layouts) == 1:
            with suppress(ConfigError, IndexError):
                layout = parse_layout(self.layouts[0])
                return f"replica {index}" + (f" ({layout.replicas[index]})" if max(layout.shards) == 1 else "")
        return f"replica {index}"

    def band_name(self, index: int) -> str:
        if len(self.layouts) == 1:
            with suppress(ConfigError, IndexError):
                return parse_layout(self.layouts[0]).stage_names[index]
        return f"stage {index}" if self.is_staged else f"replica {index}"


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # JSON allows whole numbers no float can hold
        return None
