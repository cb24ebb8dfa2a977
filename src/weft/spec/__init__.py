"""Typed, validated descriptions of backbones, jobs and adapters."""

from weft.spec.adapter import AdapterSpec
from weft.spec.job import JobSpec
from weft.spec.load import load_run, run_from_mapping
from weft.spec.run import BackboneSpec, RunSpec

__all__ = ["AdapterSpec", "BackboneSpec", "JobSpec", "RunSpec", "load_run", "run_from_mapping"]
