"""What a device was measured to need, stored as JSON, and the cost model made of it.

A profile belongs to one device, backbone, storage and step: its fits hold for every mix of jobs there, not elsewhere.
Some measurements are held out of the fits; on them the errors are counted, and the 95 % error of the memory fit is the
margin to plan with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.plan.cost.fit import MEMORY_TERMS, STEP_TERMS, TIME_TERMS, Fit, FitError, MicrobatchLoad, fit

VERSION = 1
QUANTITIES: Mapping[str, Sequence[str]] = {
    "forward_s": TIME_TERMS,
    "backward_s": TIME_TERMS,
    "step_s": STEP_TERMS,
    "peak_bytes": MEMORY_TERMS,
    "reserved_bytes": MEMORY_TERMS,
}
"""What is fitted, and on which terms."""


@dataclass(frozen=True)
class Measurement:
    """One microbatch, measured."""

    load: MicrobatchLoad
    forward_s: float
    backward_s: float
    step_s: float
    """Optimizer steps of all its jobs together."""
    peak_bytes: float
    """Most bytes of tensors at once, frozen weights and optimizers included."""
    reserved_bytes: float
    """What the allocator took for them; on a CPU the same."""
    held_out: bool = False
    """Not fitted, but predicted, to know the error."""


@dataclass(frozen=True)
class Setup:
    """What a profile is of."""

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
    """A measured device."""

    setup: Setup
    measurements: tuple[Measurement, ...]
    fits: Mapping[str, Fit]
    errors: Mapping[str, FitError]
    """On measurements that were held out."""

    @property
    def margin(self) -> float:
        """Share to leave free beyond predicted memory."""
        return self.errors["reserved_bytes"].p95

    @property
    def time_error(self) -> FitError:
        """Of both passes together, on measurements that were held out."""
        held = [found for found in self.measurements if found.held_out]
        measured = [found.forward_s + found.backward_s for found in held]
        return FitError.of([self.seconds(found.load) for found in held], measured)

    def memory_bytes(self, load: MicrobatchLoad) -> float:
        """What the allocator takes for a microbatch, everything included; add the margin to be safe."""
        return self.fits["reserved_bytes"].predict(load)

    def seconds(self, load: MicrobatchLoad) -> float:
        """A microbatch forward and back, without the optimizers."""
        return self.fits["forward_s"].predict(load) + self.fits["backward_s"].predict(load)

    def to_json(self) -> str:
        """The file's text."""
        tree = {"version": VERSION, **asdict(self)}
        return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def fit_profile(setup: Setup, measurements: Sequence[Measurement]) -> Profile:
    """Fits every quantity on what is not held out, and counts the errors on what is."""
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
    """The profile in a file that `weft profile` wrote."""
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
    """A dataclass from its JSON object; every field there, of its type, and no other."""
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
