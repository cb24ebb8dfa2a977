"""Makes a job ready to start, or refuses it before anything changes.

What would raise inside a microbatch would take the neighbours with it, so all of that is found here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from weft.data.dataset import Dataset, JobData
from weft.data.load import check_teacher, load_job_data
from weft.data.samples import Samples
from weft.data.tokenise import new_token_ids
from weft.engine.execute.protocol import Executor, NewJob, Replica, ReplicaFacts
from weft.engine.execute.references import adapter_digest
from weft.engine.inference.attach import BASE, StoredAdapter, adapter_dir, read_stored
from weft.engine.jobs.live_job import LiveJob
from weft.engine.jobs.progress import check_steps
from weft.errors import ConfigError, DataError, size
from weft.plan.cost.memory import job_bytes, job_state
from weft.spec import AdapterSpec, JobSpec
from weft.store.peft_files import read_adapter


def prepare_job(spec: JobSpec, data: JobData | None, executor: Executor, capacity: int, base_dir: Path) -> LiveJob:
    """The job with its data, added to the executor without a seat; paths are relative to `base_dir`."""
    _check_limits(spec, executor.facts, capacity)
    if data is None:
        data = load_job_data(spec, executor.tokenizer, base_dir)
    start, name, trained_on, submitted, stored_spec = None, "", None, spec, None
    if spec.init_adapter is not None:
        path = adapter_dir(base_dir / spec.init_adapter)
        stored, start, config = read_adapter(path)
        name = str(path)
        trained_on = config.get("base_model_name_or_path")
        if spec.adapter == AdapterSpec():
            _refuse_unread(name, stored, executor)
            spec = replace(spec, adapter=stored)
        if spec.adapter.method != stored.method:
            found = f"{name} is of the method {stored.method}; adapter.method is {spec.adapter.method}."
            raise ConfigError(found, where="init_adapter")
        stored_spec = stored
    data = data.led_by(spec.adapter.num_leading_rows)
    check_teacher(data.train, spec)
    setting = reference_setting(data.train)
    reference = read_reference(spec, data.train, base_dir)
    if setting == "teacher" and reference is not None and reference.spec.trains_rows:
        found = f"{reference.path} has rows of tokens of its own; a teacher predicts by the backbone's"
        raise ConfigError(f"{found}, so name another.", where=setting)
    _check_samples(spec, data, executor, capacity, reference)
    job = LiveJob(spec, data, submitted=submitted)
    check_steps(spec, job.progress.num_steps)
    if reference is not None:
        job.progress.inputs["reference"] = adapter_digest(reference)
    if spec.adapter != submitted.adapter:
        job.progress.inputs["adapter"] = json.loads(json.dumps(asdict(spec.adapter)))
    added = executor.add(NewJob(spec, job.progress.batches, data.eval, start, name, stored_spec, reference))
    job.num_parameters, job.num_reference_parameters = added.num_parameters, added.num_reference_parameters
    job.lane, job.kernel_bytes = added.lane, added.kernel_bytes
    bases = {"init_adapter": trained_on, setting: None if reference is None else reference.base_model}
    if added.trained is not None:
        facts = executor.facts
        num_bytes = job_bytes(added.num_parameters, facts.weight_bytes, job_state(spec), min(facts.tensor))
        cost = f"{added.num_parameters:,} parameters, {size(num_bytes)} with gradients and optimizer"
        job.notes = (f"{spec.name}: {added.trained}; {cost}.",)
    job.notes += tuple(
        f"{spec.name}: {which} was trained on {base}, not on {executor.facts.base_model}."
        for which, base in bases.items()
        if isinstance(base, str) and base != executor.facts.base_model
    )
    return job


def reference_setting(train: Dataset) -> str:
    return "reference" if train.distillation is None else "teacher"


def read_reference(spec: JobSpec, train: Dataset, base_dir: Path) -> StoredAdapter | None:
    """The adapter that a job compares with; None: the bare backbone, or nothing."""
    named = getattr(spec, reference_setting(train))
    return None if named in (None, BASE) else read_stored(base_dir / named)


def _check_limits(spec: JobSpec, facts: ReplicaFacts, capacity: int) -> None:
    # The smaller limit, so that lowering max_length to it once is enough.
    limit, what = min((capacity, "capacity"), (facts.max_positions, "backbone's positions"))
    if spec.max_length > limit:
        raise ConfigError(f"max_length {spec.max_length} is above the {what} ({limit}).", where="max_length")
    if (spec.distillation_top_k or 0) > facts.vocabulary:
        problem = f"got {spec.distillation_top_k}; the backbone has {facts.vocabulary:,} tokens"
        raise ConfigError(f"{problem}.", where="distillation_top_k")


def _refuse_unread(name: str, stored: AdapterSpec, replica: Replica) -> None:
    """ConfigError if a job takes its adapter from a directory whose new tokens its data was not read with."""
    known = len(replica.tokenizer) if stored.new_tokens else 0
    ids = new_token_ids(replica.tokenizer, stored.new_tokens)
    if any(one >= known for one in ids):
        tokens = ", ".join(map(json.dumps, stored.new_tokens))
        raise ConfigError(f"{name} has new tokens; write adapter: {{new_tokens: [{tokens}], …}}.", where="init_adapter")


def _vocabulary(spec: JobSpec, data: Dataset, replica: Replica, reference: StoredAdapter | None) -> int:
    """Number of tokens that samples may have: with new ones if the reference knows them too."""
    readers = [spec.adapter]
    if data.reads_reference:
        readers.append(AdapterSpec() if reference is None else reference.spec)
    known = replica.facts.vocabulary
    beyond = []
    for tokens in (reader.new_tokens for reader in readers):
        ids = new_token_ids(replica.tokenizer, tokens)
        beyond.append({token: one for token, one in zip(tokens, ids, strict=True) if one >= known})
    return known + len(beyond[0]) if all(found == beyond[0] for found in beyond) else known


def _check_samples(
    spec: JobSpec, data: JobData, replica: Replica, capacity: int, reference: StoredAdapter | None
) -> None:
    longest = min(capacity, replica.facts.max_positions)
    leading = max(data.train.num_leading, 0 if reference is None else reference.spec.num_leading_rows)
    vocabulary = _vocabulary(spec, data.train, replica, reference)
    for part in (data.train, data.eval):
        found = None if part is None else _flaw(part.samples, longest - leading, vocabulary)
        if found is not None:
            raise DataError(f"{found}.", where=spec.name)
    group = max(part.longest_group for part in (data.train, data.eval) if part is not None)
    if group > capacity:
        found = f"a row's samples have {group} tokens together"
        raise DataError(f"{found}; the capacity they have to share is {capacity}.", where=spec.name)


def _flaw(samples: Samples, longest: int, vocabulary: int) -> str | None:
    outside = samples.outside(vocabulary)
    flawed = np.concatenate([np.flatnonzero((samples.lengths > longest) | (samples.num_supervised == 0)), outside])
    if not len(flawed):
        return None
    first = int(flawed.min())
    if samples.lengths[first] > longest:
        return f"a sample of {samples.lengths[first]} tokens is above the {longest} that fit the capacity and backbone"
    if samples.num_supervised[first] == 0:
        return "a sample has no supervised token"
    return f"a sample has a token outside 0 to {vocabulary - 1}, which is all the backbone knows"
