"""What the parts of a running sweep share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.report.trackers import Trackers
from weft.spec.space import Space
from weft.spec.sweep import SweepSpec
from weft.store.run_dir import RunDirectory
from weft.sweeps.configure import Configurations
from weft.sweeps.record.previous_sweep import PreviousSweep
from weft.sweeps.record.trials_file import Trial
from weft.sweeps.search.objective import TrialObjective
from weft.sweeps.search.samplers import Sampler
from weft.sweeps.sweep_engine import SweepEngine


@dataclass(kw_only=True)
class SweepContext:
    """What a sweep works with: what was asked for, what was loaded for it, and where its results go."""

    spec: SweepSpec
    space: Space
    sampler: Sampler
    sampler_name: str
    objective: TrialObjective
    engine: SweepEngine
    configurations: Configurations
    folder: Path
    directory: RunDirectory
    base_dir: Path
    trackers: Trackers
    startup_s: float
    """What loading and checking everything took."""
    previous: PreviousSweep | None = None
    """The sweep that this one starts from."""
    copy_trial: Callable[[Mapping[str, Any], Trial], None] = lambda point, trial: None
    """Tells others of a trial that has ended, such as an Optuna storage."""
