"""A search space: which settings of a job vary, and over which values.

    learning_rate: {min: 1e-5, max: 1e-2, log: true}    a range; `step` or `int: true` make it discrete
    r: [8, 16, 64]                                      choices
    lora_alpha: {times_r: [0.25, 1, 4]}                 the same as ["0.25r", "1r", "4r"]
    _: [{r: 8, lora_alpha: 8}, {r: 64, lora_alpha: 16}] settings that vary together

A point of the space maps the name of each parameter to a value. `params` are the same with settings that vary together
written one by one; they become a job's settings by their own names. Where `method` is searched, a setting of one method
does not apply to points of another and is not among their params, so some points have the same params.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, did_you_mean
from weft.settings import as_named_now, convert, describe, field_names, is_usable_number, join
from weft.spec.adapter import AdapterSpec
from weft.spec.job import JobSpec

SPACE = "space"
"""The setting of a sweep that holds its parameters."""
TOGETHER = "_"
"""The parameter whose values are settings that vary together."""
_METHOD = "adapter.method"
_WORDS = ("choices", "min", "max", "log", "step", "int", "times_r")
_ELSEWHERE = {
    **dict.fromkeys(("low", "lower", "from", "start"), "Did you mean min?"),
    **dict.fromkeys(("high", "upper", "to", "end"), "Did you mean max?"),
    **dict.fromkeys(("values", "options", "value", "categorical"), "Did you mean choices?"),
    **dict.fromkeys(("distribution", "scale", "type"), "A range is even, or logarithmic with log: true."),
}
"""Hints for other tools' words."""
_NOT_SEARCHED = ("name", "priority", "tenant")
_MOST_COMPARED = 1000
"""Maximum number of points that are compared; in larger spaces all count as different."""


@dataclass(frozen=True)
class Choices:
    name: str
    values: tuple[Any, ...]

    def draw(self, share: float) -> Any:
        """The value at a share in [0, 1) of the list."""
        return self.values[int(share * len(self.values))]

    def holds(self, value: Any) -> bool:
        return any(same(value, mine) for mine in self.values)

    def value_of(self, value: Any) -> Any:
        """The choice that equals a value under any of its names; else the value."""
        now = _as_named_now(self.name, value)
        return next((mine for mine in self.values if same(now, _as_named_now(self.name, mine))), value)

    def samples(self) -> tuple[Any, ...]:
        return self.values


@dataclass(frozen=True)
class Range:
    """A number between two ends, both included."""

    name: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    @property
    def values(self) -> tuple[Any, ...] | None:
        if self.step is None:
            return None
        count = int((self.high - self.low) / self.step + 1e-9) + 1
        return tuple(self._tidy(self.low + i * self.step) for i in range(count))

    def draw(self, share: float) -> Any:
        """The value at a share in [0, 1) of the range, on a logarithmic scale if `log` is set."""
        values = self.values
        if values is not None and not self.log:
            return values[int(share * len(values))]
        if not self.log:
            return self._tidy(self.low + share * (self.high - self.low))
        value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return self._tidy(value if values is None else min(values, key=lambda known: abs(known - value)))

    def holds(self, value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high

    def samples(self) -> tuple[Any, ...]:
        return (self._tidy(self.low), self._tidy(self.high))

    def _tidy(self, value: float) -> float | int:
        return round(value) if self.whole else float(f"{value:.12g}")


Parameter = Choices | Range


@dataclass(frozen=True)
class Space:
    parameters: tuple[Parameter, ...]

    @property
    def num_points(self) -> int | None:
        """Number of points; None if they cannot be counted."""
        total = 1
        for parameter in self.parameters:
            values = parameter.values
            if values is None:
                return None
            total *= len(values)
        return total

    @functools.cached_property
    def num_distinct(self) -> int | None:
        """Number of points that differ in the settings that apply to them; None if they cannot be counted."""
        total = self.num_points
        if total is None or total > _MOST_COMPARED:
            return total
        return len({value_key(params_of(self.point_at(index))) for index in range(total)})

    def point_at(self, index: int) -> dict[str, Any]:
        """A point by its index; the last parameter varies fastest."""
        point: dict[str, Any] = {}
        for parameter in reversed(self.parameters):
            values = parameter.values
            assert values is not None, "only countable points have numbers"
            index, number = divmod(index, len(values))
            point[parameter.name] = values[number]
        return {parameter.name: point[parameter.name] for parameter in self.parameters}

    def probes(self) -> Iterator[dict[str, Any]]:
        """Points that contain every choice and every end of a range at least once, with a method that it applies to."""
        firsts = {parameter.name: parameter.samples()[0] for parameter in self.parameters}
        method = next((p for p in self.parameters if setting_path(p.name) == _METHOD), None)
        for parameter in self.parameters:
            owners = owners_of(setting_path(parameter.name))
            owner = next((name for name in owners if method is not None and method.holds(name)), None)
            its_method = {method.name: owner} if method is not None and owner is not None else {}
            for value in parameter.samples():
                yield {**firsts, **its_method, parameter.name: value}

    def point_of(self, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """The point with these params under any names; None if it is not in this space. A parameter that does not apply
        to the point has its first value."""
        given = {setting_path(name): value for name, value in params.items()}
        point: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.name == TOGETHER:
                fitting = [v for v in parameter.values or () if _is_part(v, given)]
                value = fitting[0] if fitting else None
            else:
                path = setting_path(parameter.name)
                value = given.get(path)
                if path not in given and not applies(path, given.get(_METHOD)):
                    value = parameter.samples()[0]
                if isinstance(parameter, Choices):
                    value = parameter.value_of(value)
            if value is None or not parameter.holds(value):
                return None
            point[parameter.name] = value
        return point


def params_of(point: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a point, by the names in the sweep file."""
    params: dict[str, Any] = {}
    for name, value in point.items():
        params |= value if name == TOGETHER else {name: value}
    method = next((value for name, value in params.items() if setting_path(name) == _METHOD), None)
    return {name: value for name, value in params.items() if applies(setting_path(name), method)}


def applies(path: str, method: Any) -> bool:
    """Whether a setting such as `adapter.r` applies to a PEFT method; None: the method is not searched."""
    owners = owners_of(path)
    return method is None or not owners or method in owners


def owners_of(path: str) -> tuple[str, ...]:
    """The PEFT methods of a setting; empty if it is for all."""
    inner = path.removeprefix("adapter.")
    cls = JobSpec if inner == path else AdapterSpec
    return next((field.metadata["methods"] for field in dataclasses.fields(cls) if field.name == inner), ())


def same(one: Any, other: Any) -> bool:
    """Whether two values of a parameter are equal: lists and tuples, 1 and 1.0 are; true and 1 are not."""
    return value_key(one) == value_key(other)


def value_key(value: Any) -> str:
    """A text that equal values share."""
    return json.dumps(_plain(value), sort_keys=True, default=str)


def read_space(tree: Any) -> Space:
    """The space of a sweep file; a ConfigError names the wrong parameter."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"expected parameters such as r: [8, 16], got {describe(tree)}.", where=SPACE)
    parameters = list(_parameters(tree, "", SPACE))
    if not parameters:
        raise ConfigError("there is nothing to search; name at least one parameter, e.g. r: [8, 16].", where=SPACE)
    spelled: dict[str, str] = {}
    for parameter in parameters:
        names = [name for value in parameter.values or () for name in value] if parameter.name == TOGETHER else []
        for name in dict.fromkeys(names or [parameter.name]):
            path = setting_path(name)
            if path in spelled:
                found = f"{spelled[path]} and {name} are" if spelled[path] != name else f"{name} is"
                raise ConfigError(f"{found} searched twice; keep one.", where=join(SPACE, name))
            spelled[path] = name
    return Space(tuple(parameters))


def setting_path(name: str) -> str:
    """The path of a setting in a job, such as `adapter.r`; unknown names stay unchanged."""
    first, _, rest = name.partition(".")
    known = field_names(JobSpec).get(first)
    if rest and known == "adapter":
        return f"adapter.{field_names(AdapterSpec).get(rest, rest)}"
    if known is not None or rest:
        return known or name
    return f"adapter.{field_names(AdapterSpec)[name]}" if name in field_names(AdapterSpec) else name


def _as_named_now(name: str, value: Any) -> Any:
    """A value of the parameter `name` by its current name."""
    path = setting_path(name)
    inner = path.removeprefix("adapter.")
    return as_named_now(JobSpec if inner == path else AdapterSpec, {inner: value})[inner]


def _parameters(tree: Mapping[Any, Any], prefix: str, where: str) -> Iterator[Parameter]:
    for key, value in tree.items():
        name, inner = join(prefix, str(key)), join(where, str(key))
        if name == TOGETHER:
            yield _together(value, inner)
        elif field_names(JobSpec).get(name) == "adapter" and isinstance(value, Mapping):
            yield from _parameters(value, name, inner)
        else:
            _check_name(name, inner)
            yield _parameter(name, value, inner)


def _check_name(name: str, where: str) -> None:
    path = setting_path(name)
    if path == "adapter":
        raise ConfigError(f"name what varies of it, such as {name}: {{r: [8, 16]}}.", where=where)
    adapter = {f"adapter.{field}" for field in field_names(AdapterSpec)}
    known = {*field_names(JobSpec), *field_names(AdapterSpec), *adapter} - set(_NOT_SEARCHED)
    if path not in known:
        hint = did_you_mean(name, sorted(known)) or "`weft config` lists all settings of jobs and adapters."
        raise ConfigError("is no setting that can be searched.", where=where, hint=hint)


def _parameter(name: str, value: Any, where: str) -> Parameter:
    if isinstance(value, Mapping):
        for word in value:
            if word not in _WORDS:
                hint = _ELSEWHERE.get(str(word)) or did_you_mean(str(word), _WORDS)
                hint = hint or f"Accepted are {', '.join(_WORDS)}."
                raise ConfigError("unknown word.", where=join(where, str(word)), hint=hint)
        kinds = [word for word in ("choices", "times_r") if word in value] + ["min"] * (
            "min" in value or "max" in value
        )
        if len(kinds) != 1 or (kinds[0] != "min" and len(value) > 1):
            raise ConfigError("write a list, {choices: [...]}, {min: ..., max: ...} or {times_r: [...]}.", where=where)
        if kinds == ["min"]:
            return _range(name, value, where)
        if kinds == ["times_r"]:
            return _times_r(name, value["times_r"], where)
        value = value["choices"]
    # A single value is a list of one, as in other tools' files.
    values = value if isinstance(value, list | tuple) else [value]
    return _choices(name, values, where)


def _choices(name: str, values: Any, where: str) -> Choices:
    if not values:
        raise ConfigError("the list is empty; name at least one value.", where=where)
    tidy = tuple(_number(value) for value in values)
    for index, value in enumerate(tidy):
        if any(same(value, earlier) for earlier in tidy[:index]):
            raise ConfigError(f"{describe(value)} is there twice.", where=f"{where}.{index}")
    return Choices(name, tidy)


def _times_r(name: str, values: Any, where: str) -> Choices:
    if setting_path(name) != "adapter.lora_alpha":
        raise ConfigError("only lora_alpha can be a multiple of r.", where=where)
    listed = values if isinstance(values, list | tuple) else [values]
    for index, value in enumerate(listed):
        if isinstance(value, str) and not is_number(value):
            raise ConfigError(f"expected a factor such as 2, got {describe(value)}.", where=f"{where}.times_r.{index}")
    factors = [convert(value, float, f"{where}.times_r.{index}") for index, value in enumerate(listed)]
    return _choices(name, [f"{factor:g}r" for factor in factors], where)


def _range(name: str, value: Mapping[str, Any], where: str) -> Range:
    for word in ("min", "max"):
        if word not in value:
            raise ConfigError(f"{word} is missing.", where=where)
    low, high = (_finite(value[word], f"{where}.{word}") for word in ("min", "max"))
    log, whole = (convert(value.get(word, False), bool, f"{where}.{word}") for word in ("log", "int"))
    step = None if value.get("step") is None else _finite(value["step"], f"{where}.step")
    if low > high:
        raise ConfigError(f"min {low:g} is above max {high:g}.", where=where)
    if log and low <= 0:
        raise ConfigError(f"a logarithmic range needs a min above 0, got {low:g}.", where=where)
    if step is not None and step <= 0:
        raise ConfigError(f"must be above 0, got {step:g}.", where=f"{where}.step")
    if step is not None and step > high - low > 0:
        raise ConfigError(f"{step:g} is larger than the range from {low:g} to {high:g}.", where=f"{where}.step")
    whole = whole or (_takes_whole_numbers(name) and float(low).is_integer() and float(high).is_integer())
    if whole and not all(float(number).is_integer() for number in (low, high, step or 1)):
        raise ConfigError("whole numbers need a whole min, max and step.", where=where)
    if whole and step is None and not log:
        step = 1.0
    return Range(name, low, high, log, step, whole)


def _together(value: Any, where: str) -> Choices:
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) and item for item in value):
        raise ConfigError("expected a list of settings that go together, such as [{r: 8, lr: 1e-3}].", where=where)
    for index, item in enumerate(value):
        for name in item:
            _check_name(str(name), f"{where}.{index}.{name}")
    return Choices(TOGETHER, tuple({str(name): _number(v) for name, v in item.items()} for item in value))


def _takes_whole_numbers(name: str) -> bool:
    whole = {"adapter.r", "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"}
    return setting_path(name) in whole | {"max_steps", "seed", "max_length", "eval_steps"}


def _finite(value: Any, where: str) -> float:
    number: float = convert(value, float, where)
    if not math.isfinite(number):
        raise ConfigError(f"expected a finite number, got {number}.", where=where)
    return number


def is_number(text: str) -> bool:
    return not isinstance(_number(text), str)


def _number(value: Any) -> Any:
    """A number that YAML 1.1 read as text, such as 1e-4, as a number."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {setting_path(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and is_usable_number(value) else value


def _is_part(value: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return all(
        setting_path(k) in given and same(_as_named_now(k, v), _as_named_now(k, given[setting_path(k)]))
        for k, v in value.items()
    )
