"""Makes a job ready to start, or refuses it before anything changes.

What would raise inside a microbatch would take the neighbours with it, so all of that is found here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.engine.jobs.live_job import LiveJob
from weft.errors import ConfigError, DataError
from weft.execute.protocol import Executor, NewJob, ReplicaFacts
from weft.inference.attach import adapter_dir
from weft.spec import AdapterSpec, JobSpec
from weft.store.peft_files import read_adapter


def prepare_job(spec: JobSpec, data: JobData | None, executor: Executor, capacity: int, base_dir: Path) -> LiveJob:
    """The job with its data, known to the executor, where jobs wait; paths are relative to `base_dir`."""
    _check_length(spec, executor.facts, capacity)
    if data is None:
        data = load_job_data(spec, executor.tokenizer, base_dir)
    _check_samples(spec, data, executor.facts, capacity)
    start, name, trained_on = None, "", None
    if spec.init_adapter is not None:
        path = adapter_dir(base_dir / spec.init_adapter)
        stored, start, config = read_adapter(path)
        name = str(path)
        trained_on = config.get("base_model_name_or_path")
        if spec.adapter == AdapterSpec():
            spec = replace(spec, adapter=stored)
    job = LiveJob(spec, data)
    added = executor.add(NewJob(spec, job.progress.batches, data.eval, start, name))
    job.num_parameters, job.lane = added.num_parameters, added.lane
    if isinstance(trained_on, str) and trained_on != executor.facts.base_model:
        job.notes = (f"{spec.name}: init_adapter was trained on {trained_on}, not on {executor.facts.base_model}.",)
    return job


def _check_length(spec: JobSpec, facts: ReplicaFacts, capacity: int) -> None:
    # The smaller of them, so that who lowers it to what is said here has done enough.
    limit, what = min((capacity, "capacity"), (facts.max_positions, "backbone's positions"))
    if spec.max_length > limit:
        raise ConfigError(f"max_length {spec.max_length} is above the {what} ({limit}).", where="max_length")


def _check_samples(spec: JobSpec, data: JobData, facts: ReplicaFacts, capacity: int) -> None:
    longest = min(capacity, facts.max_positions)
    for sample in [*data.train.samples, *(data.eval.samples if data.eval else ())]:
        if sample.length > longest:
            found = f"a sample of {sample.length} tokens is above the {longest} that fit the capacity and backbone"
        elif not sample.num_supervised:
            found = "a sample has no supervised token"
        elif sample.tokens.min() < 0 or sample.tokens.max() >= facts.vocabulary:
            found = f"a sample has a token outside 0 to {facts.vocabulary - 1}, which is all the backbone knows"
        else:
            continue
        raise DataError(f"{found}.", where=spec.name)
    group = max(part.longest_group for part in (data.train, data.eval) if part is not None)
    if group > capacity:
        found = f"a row's samples have {group} tokens together"
        raise DataError(f"{found}; the capacity they have to share is {capacity}.", where=spec.name)
