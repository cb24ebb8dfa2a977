"""One engine that trains the trials of a search, each a job that pauses after an evaluation until it is continued.

So a trial that is stopped after an evaluation has taken no further step, nor has one that is no longer polled. Calls
come from many threads; only the engine's own thread touches the engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune

from weft.engine.events import EvalDone, Event, JobEnded, JobEvent, JobFailed, JobSucceeded, StepDone
from weft.errors import JobError
from weft.parallel.ray.rank_actor import take_over
from weft.spec.load_sweep import trial_job
from weft.spec.sweep import SweepSpec

if TYPE_CHECKING:
    from weft.engine.engine import Engine


class BackboneTrial(tune.Trainable):  # type: ignore[misc]
    """One job on a shared backbone; an iteration is the training up to its next evaluation."""

    def setup(self, config: dict[str, Any], server: Any = None) -> None:
        self._server = server
        self._last: dict[str, Any] = {}
        ray.get(server.submit.remote(self.trial_id, config))

    def step(self) -> dict[str, Any]:
        """Returns the next evaluation; the last one includes the adapter's path."""
        ray.get(self._server.go_on.remote(self.trial_id))
        news = self._next()
        if news.error is not None:
            raise RuntimeError(news.error)
        self._last |= news.metrics
        return {**self._last, "done": news.is_ended}

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Returns what was reported; the weights are in the backbone's run directory."""
        return self._last

    def load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._last = checkpoint

    def cleanup(self) -> None:
        ray.get(self._server.cancel.remote(self.trial_id))

    def _next(self) -> TrialNews:
        while True:
            news: TrialNews | None = ray.get(self._server.news.remote(self.trial_id))
            if news is not None:
                return news


NEWS_S = 5.0
"""Most seconds that a call for news waits."""


@dataclass(frozen=True)
class TrialNews:
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_ended: bool = False
    error: str | None = None


@dataclass
class TunedTrial:
    num_steps: int
    eval_steps: int
    last: Mapping[str, Any] = field(default_factory=dict)
    loss: float | None = None
    news: queue.SimpleQueue[TrialNews] = field(default_factory=queue.SimpleQueue)


class TrialServer:
    """Trains trials; all calls but `news` and `wait_until_loaded` run between two events of the engine."""

    def __init__(self, spec: SweepSpec, out: Path, base_dir: Path, variables: Mapping[str, str | None]) -> None:
        """`spec`: settings of all trials; `out`: directory of results; other paths are relative to `base_dir`."""
        take_over(variables)
        self._spec, self._out, self._base_dir = spec, out, base_dir
        self._trials: dict[str, TunedTrial] = {}
        self._requests: queue.SimpleQueue[tuple[Callable[[Engine], None], Future[None]]] = queue.SimpleQueue()
        self._loaded: Future[None] = Future()
        self._is_over = False
        threading.Thread(target=self._train, name="weft-trials", daemon=True).start()

    def wait_until_loaded(self) -> None:
        """Returns once trials can be submitted; raises if loading failed."""
        self._loaded.result()

    def submit(self, name: str, params: Mapping[str, Any]) -> None:
        self._call(lambda engine: self._begin(engine, name, params))

    def go_on(self, name: str) -> None:
        self._call(lambda engine: self._release(engine, name))

    def news(self, name: str) -> TrialNews | None:
        """The next news of a trial; None if there is none soon."""
        try:
            return self._trials[name].news.get(timeout=NEWS_S)
        except queue.Empty:
            return None

    def cancel(self, name: str) -> None:
        self._call(lambda engine: engine.cancel(name) if not engine.jobs[name].state.is_final else None)

    def close(self) -> None:

        def end(engine: Engine) -> None:
            self._is_over = True
            engine.stop()

        self._call(end)

    def _call(self, act: Callable[[Engine], None]) -> None:
        done: Future[None] = Future()
        self._requests.put((act, done))
        done.result()

    def _train(self) -> None:
        try:
            from weft.engine.train import load_engine

            job = trial_job(self._spec, "trial", {})
            _, engine, _ = load_engine(self._spec, [job])
            engine.keep_in(self._out)
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(None)
        while not self._is_over:
            self._run_request(engine)
            for event in engine.events():
                self._handle(event)
                while not self._requests.empty():
                    self._run_request(engine)
        engine.finish_files()

    def _run_request(self, engine: Engine) -> None:
        act, done = self._requests.get()
        try:
            act(engine)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _begin(self, engine: Engine, name: str, params: Mapping[str, Any]) -> None:
        if name in self._trials:
            if engine.jobs[name].state.is_final:
                raise JobError("has ended; schedulers that pause and restore trials cannot be used.", where=name)
            return
        job = trial_job(self._spec, name, params)
        engine.submit(job, base_dir=self._base_dir)
        num_steps = engine.jobs[name].num_steps
        self._trials[name] = TunedTrial(num_steps, job.eval_steps or num_steps)
        engine.hold(name, 0)

    def _release(self, engine: Engine, name: str) -> None:
        live = engine.jobs[name]
        each = self._trials[name].eval_steps
        engine.hold(name, (live.step // each + 1) * each)

    def _handle(self, event: Event) -> None:
        trial = self._trials.get(event.job) if isinstance(event, JobEvent) else None
        if trial is None:
            return
        if isinstance(event, StepDone):
            trial.loss = event.loss
        elif isinstance(event, EvalDone):
            measured: dict[str, Any] = {
                "eval_loss": event.eval_loss,
                "eval_mean_token_accuracy": event.eval_mean_token_accuracy,
            }
            measured |= {**event.metrics, "loss": trial.loss, "step": event.step}
            if event.step < trial.num_steps:
                trial.news.put(TrialNews(measured))
            else:
                trial.last = measured
        elif isinstance(event, JobEnded):
            found = {**trial.last, **({"adapter": event.adapter_dir} if isinstance(event, JobSucceeded) else {})}
            error = str(event.reason) if isinstance(event, JobFailed) else None
            trial.news.put(TrialNews(found, is_ended=True, error=error))
