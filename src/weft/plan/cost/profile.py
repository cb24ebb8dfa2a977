"""Measured requirements of a device, stored as JSON, and the cost model made of them.

A profile is valid for one device, backbone, storage and step, for any mix of jobs. Some measurements are held out of
the fits to count the errors; the 95 % error of the memory fit is the margin to plan with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.plan.cost.fit import MEMORY_TERMS, STEP_TERMS, TIME_TERMS, Fit, FitError, MicrobatchLoad, fit
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.shape import ModelShape, stage_layers

VERSION = 1
QUANTITIES: Mapping[str, Sequence[str]] = {
    "forward_s": TIME_TERMS,
    "backward_s": TIME_TERMS,
    "step_s": STEP_TERMS,
    "peak_bytes": MEMORY_TERMS,
    "reserved_bytes": MEMORY_TERMS,
}


@dataclass(frozen=True)
class Measurement:
    load: MicrobatchLoad
    forward_s: float
    backward_s: float
    step_s: float
    """Seconds of the optimizer steps of all its jobs."""
    peak_bytes: float
    """Peak bytes of tensors, frozen weights and optimizers included."""
    reserved_bytes: float
    """Bytes taken by the allocator; on a CPU equal to the peak."""
    held_out: bool = False
    """True if the measurement is not fitted, but used to count the error."""


@dataclass(frozen=True)
class Setup:
    device: str
    model: str
    hidden: int
    num_layers: int
    layer_weights: int
    head_weights: int
    layer_adapter_width: int
    """Adapter parameters of a layer per rank, on all linears."""
    activation_bytes: int
    row_tile: int
    quantize: str = "none"
    recompute: str = "none"
    kernels: str = "fused"


@dataclass(frozen=True)
class Profile:
    setup: Setup
    measurements: tuple[Measurement, ...]
    fits: Mapping[str, Fit]
    errors: Mapping[str, FitError]
    """Relative errors on held-out measurements, by measured quantity."""

    @property
    def margin(self) -> float:
        return self.errors["reserved_bytes"].p95

    @property
    def time_error(self) -> FitError:
        held = [found for found in self.measurements if found.held_out]
        measured = [found.forward_s + found.backward_s for found in held]
        return FitError.of([self.seconds(found.load) for found in held], measured)

    def memory_bytes(self, load: MicrobatchLoad) -> float:
        """Bytes of the allocator for a microbatch, everything included; add the margin to be safe."""
        return self.fits["reserved_bytes"].predict(load)

    def seconds(self, load: MicrobatchLoad) -> float:
        return self.fits["forward_s"].predict(load) + self.fits["backward_s"].predict(load)

    def to_json(self) -> str:
        tree = {"version": VERSION, **asdict(self)}
        return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def fit_profile(setup: Setup, measurements: Sequence[Measurement]) -> Profile:
    """Fits every quantity, and counts the errors on held-out measurements."""
    seen = [found for found in measurements if not found.held_out]
    held = [found for found in measurements if found.held_out]
    if len(seen) < len(MEMORY_TERMS) or not held:
        raise ConfigError(
            f"got {len(seen)} measurements to fit and {len(held)} to check; at least {len(MEMORY_TERMS)} and 1 are "
            "needed.",
            where="profile",
        )
    fits, errors = {}, {}
    for name, terms in QUANTITIES.items():
        fits[name] = fit([m.load for m in seen], [getattr(m, name) for m in seen], terms)
        errors[name] = fits[name].error([m.load for m in held], [getattr(m, name) for m in held])
    return Profile(setup, tuple(measurements), fits, errors)


def load_profile(path: str | Path) -> Profile:
    where = f"--profile {path}"
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}).", where=where) from None
    except ValueError as error:
        raise ConfigError(f"is not JSON ({error}).", where=where) from None
    if not isinstance(tree, dict) or "version" not in tree:
        raise ConfigError("is no profile; `weft profile --out FILE` writes one.", where=where)
    if tree["version"] != VERSION:
        raise ConfigError(f"has version {tree['version']!r}; this Weft reads version {VERSION}.", where=where)
    try:
        return _from_tree(tree)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"is damaged: {type(error).__name__} {error}; measure again with `weft profile`.", where=where
        ) from None


def _from_tree(tree: dict[str, Any]) -> Profile:
    fits = {
        name: Fit({term: _number(tree["fits"][name]["prices"][term]) for term in QUANTITIES[name]})
        for name in QUANTITIES
    }
    errors = {name: _record(FitError, tree["errors"][name]) for name in QUANTITIES}
    measurements = tuple(
        _record(Measurement, {**found, "load": _record(MicrobatchLoad, found["load"])})
        for found in tree["measurements"]
    )
    return Profile(_record(Setup, tree["setup"]), measurements, fits, errors)


def _record(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass from a JSON object with exactly its fields and types."""
    types = {field.name: field.type for field in fields(cls)}
    if set(values) != set(types):
        raise ValueError(f"{cls.__name__} has {', '.join(sorted(set(values) ^ set(types)))} amiss")
    for name, value in values.items():
        if types[name] in ("int", "float"):
            _number(value)
        elif types[name] in ("str", "bool") and type(value).__name__ != types[name]:
            raise ValueError(f"{name} is {value!r}")
    return cls(**values)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{value!r} is not a number of at least 0")
    return value


PLAIN_LINK = 25e9
"""Bytes per second to a neighbour on an unknown device: sixteen lanes of PCIe 4."""

KEPT_TERMS = ("rows", "pairs", "rank_tokens", "rank_rows")
"""Memory terms of a microbatch that last until its backward, except one layer's working space."""


def check_profile(profile: Profile, shape: ModelShape, quantize: str, recompute: str, where: str) -> None:
    """Raises ConfigError for a profile of another backbone, storage or recomputation."""
    setup = profile.setup
    if (setup.hidden, setup.num_layers, setup.head_weights) != (shape.hidden, shape.num_layers, shape.head_weights):
        raise ConfigError(
            f"is of {setup.model}, {setup.num_layers} layers of {setup.hidden} and a head of {setup.head_weights:,}; "
            f"{shape.name} has {shape.num_layers} of {shape.hidden} and {shape.head_weights:,}.",
            where=where,
        )
    for name, wanted in (("quantize", quantize), ("recompute", recompute)):
        if getattr(setup, name) != wanted:
            raise ConfigError(f"was measured with {name} {getattr(setup, name)}; this run has {wanted}.", where=where)


@dataclass(frozen=True)
class ProfiledCost:
    profile: Profile
    num_stages: int = 1
    rank: int = 16
    """Rank of the adapters in a microbatch."""
    num_jobs: int = 1
    """Adapters in a microbatch; 0: what each of them adds is counted elsewhere (`apart`)."""
    split: tuple[int, ...] | None = None
    """Layers of every stage; None: as equal as possible."""

    def __post_init__(self) -> None:
        stage_layers(self.profile.setup.num_layers, self.num_stages, self.split)

    def apart(self) -> tuple[ProfiledCost, AdapterTimes]:
        """Returns this model without what each job adds to a microbatch, and that addition: measured, per pass of a
        stage, on average."""
        passes = ("forward_s", "backward_s")
        job_s = sum(self.profile.fits[name].prices["jobs"] for name in passes) / len(passes)
        return replace(self, num_jobs=0), AdapterTimes(job_s / self.num_stages, 0.0)

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._share_s("forward_s", lengths, stage)

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._share_s("backward_s", lengths, stage)

    def transfer_s(self, num_tokens: int) -> float:
        setup = self.profile.setup
        return num_tokens * setup.hidden * setup.activation_bytes / self._link_rate

    def step_s(self, stage: int) -> float:
        setup = self.profile.setup
        parameters = self.rank * setup.layer_adapter_width * self._layers(stage)
        return self.profile.fits["step_s"].predict(replace(MicrobatchLoad.of([], parameters), jobs=1))

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        load = self._load(lengths)
        prices = self.profile.fits["peak_bytes"].prices
        kept = sum(prices[term] * float(getattr(load, term)) for term in KEPT_TERMS)
        return round(kept * self._layers(stage) / self.profile.setup.num_layers)

    def total_bytes(self, microbatch: Sequence[tuple[int, Sequence[int]]], ranks: Sequence[int]) -> int:
        """Bytes of training on one device, with the margin of the fit's error. `microbatch`: rank and sample lengths of
        each job; `ranks`: those of all adapters."""
        parameters = sum(ranks) * self.profile.setup.layer_adapter_width * self.profile.setup.num_layers
        load = MicrobatchLoad.of(microbatch, parameters, self.profile.setup.row_tile, max(ranks, default=0))
        return round(self.profile.memory_bytes(load) * (1.0 + self.profile.margin))

    def _share_s(self, name: str, lengths: Sequence[int], stage: int) -> float:
        if not lengths:
            return 0.0
        fit: Fit = self.profile.fits[name]
        load, setup = self._load(lengths), self.profile.setup
        whole = setup.num_layers * setup.layer_weights + setup.head_weights
        head = setup.head_weights if stage == self.num_stages - 1 else 0
        by_rows = fit.prices["rows"] * load.rows
        rest = fit.predict(load) - by_rows
        layers = self._layers(stage)
        return by_rows * (layers * setup.layer_weights + head) / whole + rest * layers / setup.num_layers

    def _load(self, lengths: Sequence[int]) -> MicrobatchLoad:
        jobs = min(self.num_jobs, len(lengths))
        own = [lengths[job :: jobs or 1] for job in range(jobs or 1)]
        load = MicrobatchLoad.of([(self.rank, samples) for samples in own], 0, self.profile.setup.row_tile)
        return load if jobs else replace(load, jobs=0)

    def _layers(self, stage: int) -> int:
        return stage_layers(self.profile.setup.num_layers, self.num_stages, self.split)[stage]

    @property
    def _link_rate(self) -> float:
        try:
            return find_hardware(self.profile.setup.device).link_rate
        except ConfigError:
            return PLAIN_LINK
