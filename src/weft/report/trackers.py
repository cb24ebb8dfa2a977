"""Sends every metric to experiment trackers as well: TensorBoard, Weights & Biases, MLflow; one tracker run per job.

A tracker may be offline, misconfigured or full, and none of that may cost a training step. The first error of a tracker
is reported once, and that tracker gets nothing more. Only a missing package stops a run, before it starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.engine.events import EvalDone, Event, JobEnded, StepDone
from weft.errors import MissingExtraError, install_command, not_accepted

LOG = logging.getLogger(__name__)
TRACKED = (
    "loss",
    "mean_token_accuracy",
    "grad_norm",
    "learning_rate",
    "epoch",
    "num_tokens",
    "eval_loss",
    "eval_mean_token_accuracy",
)
"""Metrics of steps and evaluations that trackers get."""


class Tracker(Protocol):
    def log(self, job: str, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, job: str, state: str) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Writes event files to `<run_dir>/tensorboard/<job>`."""

    def __init__(self, run_dir: Path, run_name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open_writer: Callable[..., Any] = SummaryWriter
        self._root = run_dir / "tensorboard"
        self._writers: dict[str, Any] = {}

    def log(self, job: str, step: int, metrics: Mapping[str, float]) -> None:
        if job not in self._writers:
            self._writers[job] = self._open_writer(str(self._root / job), flush_secs=10)
        for name, value in metrics.items():
            self._writers[job].add_scalar(_panel(name), value, global_step=step)

    def finish(self, job: str, state: str) -> None:
        writer = self._writers.pop(job, None)
        if writer is not None:
            writer.close()

    def close(self) -> None:
        for job in list(self._writers):
            self.finish(job, "")


class WandbTracker:
    """One Weights & Biases run per job, all in the group `run_name`; the project is WANDB_PROJECT's. `options` are
    further arguments of `wandb.init`, for all runs."""

    def __init__(self, run_dir: Path, run_name: str, **options: Any) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run_dir, self._group, self._options = run_dir, run_name, options
        self._runs: dict[str, Any] = {}

    def log(self, job: str, step: int, metrics: Mapping[str, float]) -> None:
        if job not in self._runs:
            # create_new: by default wandb would end the first job's run when the second one starts.
            options = {"name": job, "group": self._group, "dir": str(self._run_dir), "reinit": "create_new"}
            self._runs[job] = self._wandb.init(**options | self._options)
        self._runs[job].log({_panel(name): value for name, value in metrics.items()}, step=step)

    def finish(self, job: str, state: str) -> None:
        run = self._runs.pop(job, None)
        if run is not None:
            run.finish(exit_code=1 if state == "failed" else 0)

    def close(self) -> None:
        """Ends runs of jobs that never ended as failed."""
        for job in list(self._runs):
            self.finish(job, "failed")


class MlflowTracker:
    """One MLflow run per job inside a parent run `run_name`, in the experiment `weft`."""

    EXPERIMENT = "weft"
    STATUSES: Mapping[str, str] = {"succeeded": "FINISHED", "cancelled": "KILLED"}

    def __init__(self, run_dir: Path, run_name: str) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._make_metric: Callable[..., Any] = Metric
        self._make_client: Callable[[], Any] = MlflowClient
        self._run_name = run_name
        self._client: Any = None
        self._experiment = self._parent = ""
        self._runs: dict[str, str] = {}

    def log(self, job: str, step: int, metrics: Mapping[str, float]) -> None:
        if self._client is None:
            self._start()
        if job not in self._runs:
            self._runs[job] = self._create_run(job, {"mlflow.parentRunId": self._parent})
        now = int(1000 * time.time())
        self._client.log_batch(self._runs[job], [self._make_metric(k, v, now, step) for k, v in metrics.items()])

    def finish(self, job: str, state: str) -> None:
        run = self._runs.pop(job, None)
        if run is not None:
            self._client.set_terminated(run, self.STATUSES.get(state, "FAILED"))

    def close(self) -> None:
        """Ends open runs as failed, then the parent run."""
        for job in list(self._runs):
            self.finish(job, "failed")
        if self._client is not None:
            self._client.set_terminated(self._parent, "FINISHED")

    def _start(self) -> None:
        """Connects to the server; not at construction, where an error would end the whole run."""
        client = self._make_client()
        known = client.get_experiment_by_name(self.EXPERIMENT)
        self._experiment = known.experiment_id if known else client.create_experiment(self.EXPERIMENT)
        self._client = client
        self._parent = self._create_run(self._run_name, {})

    def _create_run(self, name: str, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(self._experiment, run_name=name, tags=dict(tags))
        return str(run.info.run_id)


TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


class Trackers:
    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._warn = warn

    def record(self, event: Event, name: str | None = None) -> None:
        """Records the metrics of a step or an evaluation, and the end of a job; trackers need no other events. Trackers
        know the job by `name`; by default that is the job's own."""
        if isinstance(event, StepDone | EvalDone):
            fields = event.fields()
            metrics = {metric: fields[metric] for metric in (*TRACKED, *event.metrics) if metric in fields}
            job, step = name or event.job, event.step
            self._each(lambda tracker: tracker.log(job, step, metrics))
        elif isinstance(event, JobEnded):
            self.finish(name or event.job, event.state)

    def finish(self, job: str, state: str) -> None:
        self._each(lambda tracker: tracker.finish(job, state))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # a tracker is another process or another company; training goes on
                del self._trackers[name]
                self._warn(f"{name} stopped working and gets no more metrics: {type(error).__name__}: {error}")


def open_trackers(
    names: Sequence[str],
    run_dir: Path,
    run_name: str,
    *,
    warn: Callable[[str], None] = LOG.warning,
) -> Trackers:
    """The named trackers, ready for metrics; a MissingExtraError when a package is not installed. `warn` gets one
    sentence when a tracker fails later on."""
    opened: dict[str, Tracker] = {}
    for name in names:
        if name not in TRACKERS:
            raise not_accepted(name, TRACKERS, "report_to")
        try:
            opened[name] = TRACKERS[name](run_dir, run_name)
        except ImportError as error:
            message = f"{name} cannot be imported ({error}); install it with: {install_command(name)}"
            raise MissingExtraError(message, where="report_to") from None
    return Trackers(opened, warn)


def _panel(name: str) -> str:
    """`eval/loss` for eval_loss and `train/loss` for loss: the panel names of Hugging Face's trainer."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
