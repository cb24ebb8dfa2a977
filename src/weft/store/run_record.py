"""What run.json tells of a run."""

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
    """What run.json tells of a run; what was not known when it was written is left out of the file."""

    run_name: str | None = None
    base_model: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    kernels: str | None = None
    """Which way through the model it takes: `reference` or `fused`."""
    capacity: Capacity | None = None
    layouts: tuple[str, ...] = ()
    """Those it was trained in, in their order, as `--layout` says them; stages:1 is one device. Earlier versions
    wrote replicas:N for N replicas with an engine each."""
    jobs: tuple[str, ...] = ()
    """The jobs of a jobs file; empty where jobs come and go."""
    started_at: str | None = None
    template_clock: str | None = None
    """What time it is for the run's chat templates, however often it is resumed: when it began, in local time."""
    template_digest: str | None = None
    """SHA-256 of the tokenizer's chat template."""
    versions: Mapping[str, str] | None = None
    """Of the libraries, by name; `write_run` fills them in."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunRecord:
        """The record as any version of Weft wrote it."""
        names = [field.name for field in dataclasses.fields(cls)]
        known = {name: value[name] for name in names if name in value}
        return cls(**{**known, "layouts": tuple(value.get("layouts", ())), "jobs": tuple(value.get("jobs", ()))})

    def in_layout(self, layout: str) -> RunRecord:
        """The same run, which goes on in a layout."""
        return self if self.layouts[-1:] == (layout,) else dataclasses.replace(self, layouts=(*self.layouts, layout))

    def to_json(self) -> dict[str, Any]:
        """What goes into run.json."""
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return known if self.layouts else {name: value for name, value in known.items() if name != "layouts"}


def library_versions() -> dict[str, str]:
    """Versions of Python and of what the numbers depend on, as installed, without importing any of it."""
    versions = {"weft": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "safetensors", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
