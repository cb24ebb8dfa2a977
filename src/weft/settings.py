"""How settings are declared, read and checked."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from weft.errors import ConfigError, WrongTypeError, did_you_mean
from weft.other_trainers import is_harmless, why_refused

T = TypeVar("T")
V = TypeVar("V", int, float)
REQUIRED: Any = dataclasses.MISSING
LARGEST = 10**18
"""Largest absolute value of any setting. The product of two is still a float32, and an integer of this size still
has 64 bits; beyond that, the libraries below raise in the middle of a step."""


@dataclass(frozen=True)
class Rule:
    """A condition on values, in words and as a test; `most` is a separate upper limit."""

    low: str
    test: Callable[[Any], bool]
    most: float | None = None

    @property
    def text(self) -> str:
        return self.low if self.most is None else f"{self.low} and at most {_plain(self.most)}"

    def broken_by(self, value: Any) -> str | None:
        """The part of the rule that a value breaks, in words; None if it breaks none."""
        if not self.test(value):
            return self.low
        return f"at most {_plain(self.most)}" if self.most is not None and value > self.most else None


class FormerNames(type):
    """Lets keywords have the names of earlier versions."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        former = {field.metadata.get("former"): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in settings:
            if former.get(key) in settings:
                raise ConfigError(f"{former[key]} and {key} are two names of one setting; keep one.")
        return super().__call__(*args, **{former.get(key, key): value for key, value in settings.items()})


class KnownKeywords(metaclass=FormerNames):
    """A spec for Python code: an unknown keyword is a ConfigError with a suggestion."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        own = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in settings:
            if key not in own:
                also = field_names(cls).get(key)
                raise _unknown_key(key, own, key) if also is None else _unknown(key, f"Did you mean {also}?")
        # A copy is made without arguments, and gets its fields later.
        missing = _required(cls)[len(args) :] if args or settings else []
        for name in missing:
            if name not in settings:
                raise ConfigError(f"{name} is missing.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        validate(self)


def setting(
    default: Any = REQUIRED,
    *,
    factory: Callable[[], Any] | None = None,
    aliases: tuple[str, ...] = (),
    former: str | None = None,
    rule: Rule | None = None,
    choices: tuple[Any, ...] | None = None,
    methods: tuple[str, ...] = (),
    objectives: tuple[str, ...] = (),
    optims: tuple[str, ...] = (),
    synonyms: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
    is_path: bool = False,
) -> Any:
    """A dataclass field with its aliases and accepted values.

    It may apply to some PEFT methods, objectives or optimizers only. Synonyms are other words for the choices;
    `elsewhere` has other trainers' words that are no choice, each with a sentence. In a path, `~` is the user's home.
    `former` is the name in earlier versions, which Python code may still use.
    """
    metadata = {
        "aliases": aliases if former is None else (*aliases, former),
        "former": former,
        "rule": rule,
        "choices": choices,
        "methods": methods,
        "objectives": objectives,
        "optims": optims,
        "synonyms": synonyms or {},
        "elsewhere": elsewhere or {},
        "is_path": is_path,
    }
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(low: float, most: float | None = None) -> Rule:
    return Rule(f"at least {_plain(low)}", lambda v: v >= low, most)


def above(low: float, most: float | None = None) -> Rule:
    return Rule(f"above {_plain(low)}", lambda v: v > low, most)


def between(low: float, high: float) -> Rule:
    return Rule(f"at least {_plain(low)} and below {_plain(high)}", lambda v: low <= v < high)


def _plain(limit: float) -> str:
    return str(int(limit)) if float(limit).is_integer() else f"{limit:g}"


def read(cls: type[T], values: Any, where: str = "") -> T:
    """Builds a `cls` from a mapping; every problem is a ConfigError naming `where.field`."""
    if not isinstance(values, Mapping):
        raise WrongTypeError.of(
            f"expected a mapping of settings, got {describe(values)}.", where or None, (dict,), values
        )
    kind: type = cls
    names = field_names(kind)
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        name = names.get(str(key))
        path = join(where, str(key))
        if name is None:
            if is_harmless(str(key), value):
                continue
            raise _unknown_key(str(key), list(names), path)
        if name in spelled and spelled[name] != key:
            raise ConfigError(f"{spelled[name]} and {key} are two names of one setting; keep one.", where=path)
        spelled[name] = str(key)
        given[name] = value
    for name in _required(cls):
        if name not in given:
            raise ConfigError(f"{name} is missing.", where=where or None)
    try:
        return cls(**given)
    except ConfigError as error:
        inner = error.where or ""
        raise error.at(join(where, inner) if inner else where or None) from None


def validate(spec: Any) -> None:
    """Converts and checks every field of a spec in place; called by each spec as it is made. So `AdapterSpec(r="8")` in
    Python and `r: "8"` in a file go the same way."""
    kind: type = type(spec)
    hints = _type_hints(kind)
    for field in dataclasses.fields(spec):
        value = convert(getattr(spec, field.name), hints[field.name], field.name)
        value = field.metadata["synonyms"].get(value, value) if isinstance(value, str) else value
        _check(field, value, field.name)
        if field.metadata["is_path"]:
            if value == "":
                raise ConfigError("is empty; write a name or a path.", where=field.name)
            value = _at_home(value)
        object.__setattr__(spec, field.name, value)


@functools.cache
def _type_hints(spec: type) -> dict[str, Any]:
    return typing.get_type_hints(spec)


def _at_home(value: Any) -> Any:
    """A path, or several, with `~` replaced; other values unchanged."""
    if isinstance(value, tuple):
        return tuple(map(_at_home, value))
    return os.path.expanduser(value) if isinstance(value, str) else value


def refuse_foreign(spec: Any, kind: str, chosen: str, chosen_by: str) -> None:
    """ConfigError if a setting that only other methods, objectives or optims (`kind`) have is not as by default."""
    for field in dataclasses.fields(spec):
        owners = field.metadata[kind]
        if owners and chosen not in owners and not _is_default(spec, field):
            raise ConfigError(f"is a setting of {listed(owners)}; {chosen_by} is {chosen}.", where=field.name)


def _is_default(spec: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return bool(getattr(spec, field.name) == default)


def without_foreign(spec: type, settings: Mapping[str, Any], kind: str, chosen: str) -> dict[str, Any]:
    """Settings under their own names, without those that only other methods, objectives or optims (`kind`) have."""
    owners = {field.name: field.metadata[kind] for field in dataclasses.fields(spec)}
    return {name: value for name, value in settings.items() if not owners.get(name) or chosen in owners[name]}


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@functools.cache
def field_names(cls: type) -> Mapping[str, str]:
    names: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        names[field.name] = field.name
        names.update(dict.fromkeys(field.metadata.get("aliases", ()), field.name))
    return names


def as_named_now(cls: type, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings of any version, with current names and values."""
    names, synonyms = field_names(cls), {field.name: field.metadata["synonyms"] for field in dataclasses.fields(cls)}
    now = {names.get(name, name): value for name, value in recorded.items()}
    return {n: synonyms.get(n, {}).get(value, value) if isinstance(value, str) else value for n, value in now.items()}


def join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def describe(value: Any) -> str:
    """A short text for a bad value: the value itself or, for containers, its kind."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = str(value) if isinstance(value, datetime.date) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_usable_number(value: object) -> bool:
    """True for a finite number, not true or false, of at most LARGEST."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value as the type `hint`; a ConfigError names the accepted type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, where)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else read(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(item, args[0], f"{where}.{i}") for i, item in enumerate(items))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise WrongTypeError.of(f"expected a mapping, got {describe(value)}.", where, (dict,), value)
        return {str(k): convert(v, args[1], join(where, str(k))) for k, v in value.items()}
    if origin is typing.Literal and value in args:
        return value
    return _convert_scalar(value, hint, where)


def type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return "mapping"
    if origin is typing.Literal:
        return " or ".join(str(word) for word in args)
    if dataclasses.is_dataclass(hint):
        return "mapping"
    known = {int: "whole number", float: "number", bool: "true/false", str: "text", type(None): "nothing"}
    return known.get(hint, getattr(hint, "__name__", str(hint)))


def _convert_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    # A value that already is one of the options stays it: 0.1 must not become "0.1", nor true become 1.
    for option in options:
        if isinstance(option, type) and type(value) is option:
            return convert(value, option, where)
    others = [option for option in options if option is not type(None)]
    if isinstance(value, Mapping | list | tuple):
        # Errors inside a mapping name its own settings.
        specs = [option for option in others if _holds_spec(option)]
        if len(specs) == 1:
            return convert(value, specs[0], where)
        # Errors inside a list or a mapping name the item, if there is only one such option.
        kind = dict if isinstance(value, Mapping) else tuple
        alike = [option for option in others if typing.get_origin(option) is kind]
        if len(alike) == 1:
            return convert(value, alike[0], where)
    if len(others) == 1:
        return convert(value, others[0], where)
    for option in others:
        try:
            return convert(value, option, where)
        except ConfigError:
            continue
    names = " or ".join(_with_article(option) for option in others)
    raise WrongTypeError.of(f"expected {names}, got {describe(value)}.", where, tuple(others), value)


def _holds_spec(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_holds_spec(inner) for inner in typing.get_args(hint))


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        if "\0" in value:
            raise ConfigError(f"{describe(value)} holds a NUL character.", where=where)
        return value
    if hint in (int, float) and not isinstance(value, bool):
        number = _number(value)
        # Whole numbers first: one of a thousand digits has no float.
        is_finite = number is not None and (isinstance(number, int) or math.isfinite(number))
        if number is not None and not is_finite and hint is float:
            raise ConfigError(f"expected a finite number, got {number}.", where=where)
        if number is not None and is_finite and abs(number) > LARGEST:
            raise ConfigError(f"{describe(value)} is too large; the most is {LARGEST:.0e}.", where=where)
        if number is not None and hint is float:
            return float(number)
        if number is not None and is_finite and float(number).is_integer():
            return int(number)
    error = WrongTypeError.of(f"expected {_with_article(hint)}, got {describe(value)}.", where, (hint,), value)
    if hint is str and isinstance(value, bool | int | float | datetime.date):
        error.hint = "In YAML, put texts such as no, 1 or 2024-01-01 in quotes."
    raise error


def _with_article(hint: Any) -> str:
    is_countable = hint in (int, float) or typing.get_origin(hint) in (tuple, dict)
    return f"a {type_name(hint)}" if is_countable else type_name(hint)


def _number(value: Any) -> float | int | None:
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None


def _check(field: dataclasses.Field[Any], value: Any, where: str) -> None:
    if value is None:
        return
    rule: Rule | None = field.metadata.get("rule")
    if rule is not None and isinstance(value, int | float) and not isinstance(value, bool):
        broken = rule.broken_by(value)
        if broken is not None:
            raise ConfigError(f"must be {broken}, got {describe(value)}.", where=where)
    choices = field.metadata.get("choices")
    if choices is not None and value not in choices:
        accepted = ", ".join(str(c).lower() if isinstance(c, bool) else str(c) for c in choices)
        hint = None
        if isinstance(value, str):
            hint = field.metadata["elsewhere"].get(value.lower().replace("-", "_"))
            hint = hint or did_you_mean(value, [*map(str, choices), *field.metadata["synonyms"]])
        raise ConfigError(f"got {describe(value)}; accepted are {accepted}.", where=where, hint=hint)


def _required(cls: type) -> list[str]:
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if f.default is REQUIRED and f.default_factory is REQUIRED]


def _unknown_key(key: str, names: list[str], where: str) -> ConfigError:
    reason = why_refused(key)
    if reason is not None:
        return ConfigError(reason, where=where)
    return _unknown(where or repr(key), did_you_mean(key, names) or "`weft config` lists all settings.")


def _unknown(where: str, hint: str) -> ConfigError:
    return ConfigError("unknown setting.", where=where, hint=hint)


def first_match(patterns: Mapping[str, V], module: str, default: V) -> V:
    """PEFT's rule: the first key that matches a module path wins."""
    return next((value for pattern, value in patterns.items() if answers_pattern(module, pattern)), default)


GATE_UP, GATE, UP, DOWN = "gate_up_proj", "gate_proj", "up_proj", "down_proj"
"""Names of the products of a layer's routed experts."""
_EXPERTS = re.compile(rf"(?:.*\.)?experts\.(?:{GATE_UP}|{GATE}|{UP}|{DOWN})")


def is_expert_path(path: str) -> bool:
    """Whether a module path is that of a product of all experts of a layer."""
    return _EXPERTS.fullmatch(path) is not None


def check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression ({error}).", where=where) from None


def answers_pattern(module: str, pattern: str) -> bool:
    """Whether a module path ends, at a dot, with a match of a key of rank_pattern or similar."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
