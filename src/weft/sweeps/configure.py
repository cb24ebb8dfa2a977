"""Makes trials ready to train: their jobs, with data that is read and tokenised once for all that share it.

Everything that can be wrong with a configuration is found here, before the sweep writes or trains anything.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.data.chat.chat_template import Tokenizer
from weft.data.dataset import JobData
from weft.data.load import load_job_data, of_job
from weft.data.order import BatchSchedule
from weft.data.tokens.tokenise import with_new_tokens
from weft.errors import ConfigError, WeftError
from weft.spec import JobSpec
from weft.spec.load_sweep import trial_job
from weft.spec.space import Space, params_of, setting_path, value_key
from weft.spec.sweep import SweepSpec
from weft.sweeps.sweep_engine import CheckingSide

MAX_CHECKED = 1000
"""Points of a grid that are checked one by one before the sweep starts; beyond them, every value at least once."""
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
    """From params to jobs and their data."""

    def __init__(
        self, spec: SweepSpec, executor: CheckingSide, base_dir: Path, clock: datetime.datetime | None = None
    ) -> None:
        """`clock` is what time it is for the chat templates: when the sweep began; None: now."""
        self._spec = spec
        self.executor = executor
        self._base_dir = base_dir
        self.clock = clock or datetime.datetime.now()
        self._data: dict[tuple[Any, ...], JobData] = {}
        self._new_tokens: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._jobs: dict[tuple[str, str], JobSpec] = {}

    def job(self, name: str, params: Mapping[str, Any]) -> JobSpec:
        """The job of a configuration, evaluated as often as early stopping needs; raises if it cannot be trained."""
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
        """The data of a job with its own settings; jobs that read files in the same way get the very same samples."""
        is_split = job.eval_data is not None and not isinstance(job.eval_data, tuple)
        named = tuple(sorted(job.data_columns.items()))
        settings = (getattr(job, name) for name in _DATA_SETTINGS)
        tokens, leading = job.adapter.new_tokens, job.adapter.num_leading_rows
        key = (*settings, leading, named, job.chat_template, tokens, job.seed if is_split else None)
        if key not in self._data:
            self._data[key] = load_job_data(job, self.executor.tokenizer, self._base_dir, clock=self.clock)
            self._new_tokens[key] = tokens
        return of_job(self._data[key], job)

    def loaded(self) -> list[JobData]:
        """All data that has been read so far."""
        return list(self._data.values())

    def read_with(self) -> list[Tokenizer]:
        """The tokenizers that all data so far was read with, in the same order."""
        return [with_new_tokens(self.executor.tokenizer, tokens) for tokens in self._new_tokens.values()]

    def check(self, space: Space, budget: int | None) -> None:
        """Raises for the first configuration that cannot be trained, looking at as many as can be looked at."""
        total = space.num_points
        points = list(space.probes())
        if total is not None and total <= min(MAX_CHECKED, budget or MAX_CHECKED):
            points += [space.point_at(index) for index in range(total)]
        for point in points:
            self.job("trial", params_of(point))

    def num_steps(self, job: JobSpec) -> int:
        """Optimizer steps of a whole job."""
        return BatchSchedule.of(job, *self.data(job).train.sizes).num_steps

    def forward_tokens(self, job: JobSpec) -> int:
        """Tokens that a whole job runs forward alone."""
        data = self.data(job)
        return data.forward_tokens(BatchSchedule.of(job, *data.train.sizes), job.eval_steps)

    def _eval_steps(self, job: JobSpec, data: JobData) -> int | None:
        """How often a trial is evaluated: as it says itself, or as often as there may be a rung."""
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
    """Why a configuration that only showed up while sampling cannot be trained."""
    chosen = ", ".join(f"{name} {value}" for name, value in params.items())
    return f"cannot be trained with {chosen}: {error}"
