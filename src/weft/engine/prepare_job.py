"""Makes a job ready to start, or refuses it before anything changes.

What would raise inside a microbatch would take the neighbours with it, so all of that is found here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.backbone.backbone import Backbone
from weft.data.dataset import JobData, load_job_data
from weft.engine.live_job import LiveJob
from weft.engine.placement import WAITING
from weft.errors import ConfigError, DataError
from weft.inference.attach import adapter_dir
from weft.spec import AdapterSpec, JobSpec
from weft.store.peft_files import read_adapter


def prepare_job(spec: JobSpec, data: JobData | None, backbone: Backbone, capacity: int, base_dir: Path) -> LiveJob:
    """The job with its data and a fresh adapter, where jobs wait; paths are relative to `base_dir`."""
    _check_length(spec, backbone, capacity)
    if data is None:
        data = load_job_data(spec, backbone.tokenizer, base_dir)
    _check_samples(spec, data, backbone, capacity)
    if spec.init_adapter is None:
        return LiveJob(spec, data, backbone.new_adapter(spec.adapter, spec.seed, WAITING))
    path = adapter_dir(base_dir / spec.init_adapter)
    stored, tensors, _ = read_adapter(path)
    if spec.adapter == AdapterSpec():
        spec = replace(spec, adapter=stored)
    adapter = backbone.new_adapter(spec.adapter, spec.seed, WAITING)
    adapter.load(tensors, str(path))
    return LiveJob(spec, data, adapter)


def _check_length(spec: JobSpec, backbone: Backbone, capacity: int) -> None:
    # The smaller of them, so that who lowers it to what is said here has done enough.
    limit, what = min((capacity, "capacity"), (backbone.max_positions, "backbone's positions"))
    if spec.max_length > limit:
        raise ConfigError(f"max_length {spec.max_length} is above the {what} ({limit}).", where="max_length")


def _check_samples(spec: JobSpec, data: JobData, backbone: Backbone, capacity: int) -> None:
    longest = min(capacity, backbone.max_positions)
    vocabulary = backbone.vocabulary
    for sample in [*data.train.samples, *(data.eval.samples if data.eval else ())]:
        if sample.length > longest:
            found = f"a sample of {sample.length} tokens is above the {longest} that fit the capacity and backbone"
        elif not sample.num_supervised:
            found = "a sample has no supervised token"
        elif sample.tokens.min() < 0 or sample.tokens.max() >= vocabulary:
            found = f"a sample has a token outside 0 to {vocabulary - 1}, which is all the backbone knows"
        else:
            continue
        raise DataError(f"{found}.", where=spec.name)
