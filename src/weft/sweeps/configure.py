"""Makes trials ready to train: their jobs, with data that is read and tokenised once for all that share it.

Everything that can be wrong with a configuration is found here, before the sweep writes or trains anything.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from weft.data.chat_template import Tokenizer
from weft.data.dataset import JobData
from weft.data.load import Prompt, load_job_data, of_job
from weft.data.order import BatchSchedule
from weft.data.tokenise import with_new_tokens
from weft.engine.execute.references import adapter_digest
from weft.engine.inference.generate import Answer
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.prepare_job import read_reference, reference_setting
from weft.engine.run_engine import ReplicaSide, RunEngine, RunJob
from weft.errors import ConfigError, WeftError
from weft.model.resolve import ResolvedModel, resolve
from weft.objectives.objective import MeanScores
from weft.plan.families import is_described
from weft.spec import AdapterSpec, JobSpec
from weft.spec.load_sweep import trial_job
from weft.spec.sampling import Decoding
from weft.spec.space import Space, params_of, setting_path, value_key
from weft.spec.sweep import SweepSpec
from weft.store.wall_clock import TimeSplit

MAX_CHECKED = 1000
"""Points of a grid up to which all are checked before the sweep starts; beyond, every value at least once."""
_DATA_SETTINGS = (
    "train_sources",
    "eval_data",
    "objective",
    "data_format",
    "max_length",
    "long_samples",
    "train_on_inputs",
    "mask_history",
    "group_texts",
    "labels",
)


class Configurations:
    def __init__(
        self, spec: SweepSpec, executor: CheckingSide, base_dir: Path, clock: datetime.datetime | None = None
    ) -> None:
        """`clock`: time for chat templates, the start of the sweep; None: now."""
        self._spec = spec
        self.executor = executor
        self._base_dir = base_dir
        self.clock = clock or datetime.datetime.now()
        self._data: dict[tuple[Any, ...], JobData] = {}
        self._new_tokens: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._jobs: dict[tuple[str, str], JobSpec] = {}
        self._references: dict[str | None, dict[str, str]] = {}

    @functools.cached_property
    def model(self) -> ResolvedModel | None:
        """Counts what formulas know of layers of one kind only; None where all layers are alike."""
        return None if is_described(self.executor.facts.config) else resolve(self._spec.backbone)

    @property
    def adapters(self) -> list[AdapterSpec]:
        """Those of the trials made so far."""
        return [job.adapter for job in self._jobs.values()]

    def job(self, name: str, params: Mapping[str, Any]) -> JobSpec:
        key = (name, value_key(params))
        if key not in self._jobs:
            self._jobs[key] = self._make_job(name, params)
        return self._jobs[key]

    def _make_job(self, name: str, params: Mapping[str, Any]) -> JobSpec:
        spec = self._spec
        job = trial_job(spec, name, params)
        data = self.data(job)
        num_samples = data.train.num_groups
        if job.batch_size > num_samples:
            raise self._error(
                f"a batch of {job.batch_size:,} samples is larger than the data set of {num_samples:,}.",
                "global_batch_size",
                params,
            )
        try:
            if job.init_adapter is None:
                self.executor.check_adapter(job.adapter)
        except ConfigError as error:
            raise self._error(error.message, error.where or "adapter", params, error.hint) from None
        return replace(job, eval_steps=self._eval_steps(job, data))

    def data(self, job: JobSpec) -> JobData:
        is_split = job.eval_data is not None and not isinstance(job.eval_data, tuple)
        named = tuple(sorted(job.data_columns.items()))
        settings = (getattr(job, name) for name in _DATA_SETTINGS)
        tokens, leading = job.adapter.new_tokens, job.adapter.num_leading_rows
        key = (*settings, leading, named, job.chat_template, tokens, job.seed if is_split else None)
        if key not in self._data:
            self._data[key] = load_job_data(job, self.executor.tokenizer, self._base_dir, clock=self.clock)
            self._new_tokens[key] = tokens
        return of_job(self._data[key], job)

    def inputs(self, job: JobSpec) -> dict[str, Any]:
        """`JobProgress.inputs` of a job that need not be in the engine; without the settings of an `init_adapter`."""
        data = self.data(job)
        inputs = LiveJob(job, data).progress.inputs
        named = getattr(job, reference_setting(data.train))
        if named not in self._references:
            adapter = read_reference(job, data.train, self._base_dir)
            self._references[named] = {} if adapter is None else {"reference": adapter_digest(adapter)}
        return {**inputs, **self._references[named]}

    def loaded(self) -> list[JobData]:
        return list(self._data.values())

    def read_with(self) -> list[Tokenizer]:
        return [with_new_tokens(self.executor.tokenizer, tokens) for tokens in self._new_tokens.values()]

    def check(self, space: Space, budget: int | None) -> None:
        """Raises for the first configuration that cannot be trained, within the number that can be checked."""
        total = space.num_points
        points = list(space.probes())
        if total is not None and total <= min(MAX_CHECKED, budget or MAX_CHECKED):
            points += [space.point_at(index) for index in range(total)]
        for point in points:
            self.job("trial", params_of(point))

    def num_steps(self, job: JobSpec) -> int:
        return BatchSchedule.of(job, *self.data(job).train.sizes).num_steps

    def forward_tokens(self, job: JobSpec) -> int:
        data = self.data(job)
        return data.forward_tokens(BatchSchedule.of(job, *data.train.sizes), job.eval_steps)

    def _eval_steps(self, job: JobSpec, data: JobData) -> int | None:
        """Steps between evaluations: the job's own setting, or as many as between rungs."""
        rule = self._spec.early_stop
        if job.eval_steps is not None or data.eval is None or rule.rule == "none":
            return job.eval_steps
        schedule = BatchSchedule.of(job, *data.train.sizes)
        steps = rule.first_rung
        if rule.unit == "progress":
            steps = schedule.num_steps * rule.first_rung
        elif rule.unit == "tokens":
            mean_tokens = data.train.summary.num_tokens / data.train.num_groups
            steps = rule.first_rung / (mean_tokens * job.batch_size)
        return min(max(1, math.ceil(round(steps, 6))), schedule.num_steps)

    def _error(self, message: str, setting: str, params: Mapping[str, Any], hint: str | None = None) -> ConfigError:
        guilty = [name for name in params if setting_path(name) == setting]
        return ConfigError(message, where=f"space.{guilty[0]}" if guilty else f"defaults.{setting}", hint=hint)


def configuration_error(error: WeftError, params: Mapping[str, Any]) -> str:
    """The error of a configuration that was first seen while sampling."""
    chosen = ", ".join(f"{name} {value}" for name, value in params.items())
    return f"cannot be trained with {chosen}: {error}"


class SweepJob(RunJob, Protocol):
    @property
    def data(self) -> JobData: ...

    @property
    def may_end(self) -> bool: ...

    @property
    def has_best(self) -> bool: ...


class CheckingSide(ReplicaSide, Protocol):
    """A replica, or what all replicas have in common, that knows which adapters fit."""

    def check_adapter(self, adapter: AdapterSpec) -> None: ...


class SweepEngine(RunEngine, Protocol):
    """Trains the trials of a sweep; calls about a job use its present weights."""

    @property
    def jobs(self) -> Mapping[str, SweepJob]: ...

    @property
    def executor(self) -> CheckingSide: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def time_split(self) -> TimeSplit:
        """Wall-clock time of the sweep by activity, over all its sessions."""

    def hold(self, name: str, step: int) -> None: ...

    def hold_steps(self, name: str) -> None:
        """Lets a job take no further step; `jobs` has its final position."""

    def pause(self, name: str) -> None: ...

    def resume(self, name: str) -> None: ...

    def cancel(self, name: str) -> None: ...

    def forget(self, name: str) -> None: ...

    def evaluate(self, name: str) -> MeanScores: ...

    def answer(self, name: str, prompts: Sequence[Prompt], decoding: Decoding) -> list[Answer]: ...

    def export_adapter(self, name: str, directory: Path | str) -> None: ...
