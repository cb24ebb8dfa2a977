"""The contents of run.json."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from weft import __version__
from weft.spec.run import Capacity


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of run.json; fields that were unknown when it was written are left out of the file."""

    run_name: str | None = None
    base_model: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    kernels: str | None = None
    """Execution path: `reference` or `fused`."""
    capacity: Capacity | None = None
    layouts: tuple[str, ...] = ()
    """Layouts it was trained in, in order, in the notation of `--layout`; stages:1 is one device. Earlier versions
    wrote replicas:N for N replicas with an engine each."""
    jobs: tuple[str, ...] = ()
    """Jobs of a jobs file; empty where jobs come and go."""
    started_at: str | None = None
    template_clock: str | None = None
    """Time for the run's chat templates, also after a resume: when it began, in local time."""
    template_digest: str | None = None
    """SHA-256 of the tokenizer's chat template."""
    versions: Mapping[str, str] | None = None
    """Versions of the libraries by name; `write_run` fills them in."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunRecord:
        """The record as any version of Weft wrote it."""
        names = [field.name for field in dataclasses.fields(cls)]
        known = {name: value[name] for name in names if name in value}
        return cls(**{**known, "layouts": tuple(value.get("layouts", ())), "jobs": tuple(value.get("jobs", ()))})

    def in_layout(self, layout: str) -> RunRecord:
        """The same run, continued in a layout."""
        return self if self.layouts[-1:] == (layout,) else dataclasses.replace(self, layouts=(*self.layouts, layout))

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return known if self.layouts else {name: value for name, value in known.items() if name != "layouts"}


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that numbers depend on, without importing them."""
    versions = {"weft": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "safetensors", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
