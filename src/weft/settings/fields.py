"""Reads plain mappings into the spec dataclasses: aliases, types, limits, and did-you-mean.

A spec is a frozen dataclass whose fields are made with `setting(...)`. `read(cls, mapping, where)` returns an instance
or raises a ConfigError that names the field. Numbers written as text are accepted (`1e-4` is text in YAML 1.1).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from weft.errors import ConfigError, WrongTypeError, closest
from weft.settings.other_trainers import is_harmless, why_refused

T = TypeVar("T")
V = TypeVar("V", int, float)
REQUIRED: Any = dataclasses.MISSING
LARGEST = 10**18
"""The size of the largest number that any setting takes. The product of two is still a float32, and a whole number of
this size is still one of 64 bits; beyond that, the libraries below raise in the middle of a step."""


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy, in words and as a test; `most` is the upper end, where it has one of its own."""

    low: str
    test: Callable[[Any], bool]
    most: float | None = None

    @property
    def text(self) -> str:
        """The whole rule in words."""
        return self.low if self.most is None else f"{self.low} and at most {_plain(self.most)}"

    def broken_by(self, value: Any) -> str | None:
        """The part of the rule that a value breaks, in words; None if it breaks none."""
        if not self.test(value):
            return self.low
        return f"at most {_plain(self.most)}" if self.most is not None and value > self.most else None


class FormerNames(type):
    """Keywords may have the names that earlier versions had for them."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        former = {field.metadata.get("former"): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in settings:
            if former.get(key) in settings:
                raise ConfigError(f"{former[key]} and {key} are two names of one setting; keep one.")
        return super().__call__(*args, **{former.get(key, key): value for key, value in settings.items()})


class KnownKeywords(metaclass=FormerNames):
    """A spec that people make in Python: a keyword it does not have is a ConfigError with the one that was meant."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuses keywords before the dataclass does."""
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
    is_path: bool = False,
) -> Any:
    """A dataclass field with the names users know it by and the values it takes.

    It may be of some PEFT methods only, or of some objectives or optimizers. Synonyms are other words for the choices.
    In a path, `~` is the user's home. `former` is the name in earlier versions, which Python code may still use.
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
        "is_path": is_path,
    }
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(low: float, most: float | None = None) -> Rule:
    """The value is `low` or more, and no more than `most`."""
    return Rule(f"at least {_plain(low)}", lambda v: v >= low, most)


def above(low: float, most: float | None = None) -> Rule:
    """The value is more than `low`, and no more than `most`."""
    return Rule(f"above {_plain(low)}", lambda v: v > low, most)


def between(low: float, high: float) -> Rule:
    """The value is in [low, high)."""
    return Rule(f"at least {_plain(low)} and below {_plain(high)}", lambda v: low <= v < high)


def _plain(limit: float) -> str:
    """A limit as people write it: 4294967296, not 4.29497e+09."""
    return str(int(limit)) if float(limit).is_integer() else f"{limit:g}"


def read(cls: type[T], values: Any, where: str = "") -> T:
    """Builds a `cls` from a mapping; every problem is a ConfigError naming `where.field`."""
    if not isinstance(values, Mapping):
        raise WrongTypeError.of(
            f"expected a mapping of settings, got {describe(values)}.", where or None, (dict,), values
        )
    names = field_names(cls)
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        name = names.get(str(key))
        place = join(where, str(key))
        if name is None:
            if is_harmless(str(key), value):
                continue
            raise _unknown_key(str(key), list(names), place)
        if name in spelled and spelled[name] != key:
            raise ConfigError(f"{spelled[name]} and {key} are two names of one setting; keep one.", where=place)
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
    """Converts and checks every field of a spec in place; called by each spec as it is made.

    So `AdapterSpec(r="8")` in Python and `r: "8"` in a file go the same way.
    """
    hints = typing.get_type_hints(type(spec))
    for field in dataclasses.fields(spec):
        value = convert(getattr(spec, field.name), hints[field.name], field.name)
        value = field.metadata["synonyms"].get(value, value) if isinstance(value, str) else value
        _check(field, value, field.name)
        if field.metadata["is_path"]:
            value = _at_home(value)
        object.__setattr__(spec, field.name, value)


def _at_home(value: Any) -> Any:
    """A path, or several, with `~` replaced; what is no path stays as it is."""
    if isinstance(value, tuple):
        return tuple(map(_at_home, value))
    return os.path.expanduser(value) if isinstance(value, str) else value


def refuse_foreign(spec: Any, method: str) -> None:
    """ConfigError if a setting that only another PEFT method has is not as by default."""
    for field in dataclasses.fields(spec):
        owners = field.metadata["methods"]
        if owners and method not in owners and not _is_default(spec, field):
            raise ConfigError(f"is a setting of {listed(owners)}; the method is {method}.", where=field.name)


def refuse_foreign_objective(spec: Any, objective: str) -> None:
    """ConfigError if a setting that only other objectives have is not as by default."""
    for field in dataclasses.fields(spec):
        owners = field.metadata["objectives"]
        if owners and objective not in owners and not _is_default(spec, field):
            raise ConfigError(f"is a setting of {listed(owners)}; the objective is {objective}.", where=field.name)


def refuse_foreign_optim(spec: Any, optim: str) -> None:
    """ConfigError if a setting that only other optimizers have is not as by default."""
    for field in dataclasses.fields(spec):
        owners = field.metadata["optims"]
        if owners and optim not in owners and not _is_default(spec, field):
            raise ConfigError(f"is a setting of {listed(owners)}; optim is {optim}.", where=field.name)


def _is_default(spec: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return bool(getattr(spec, field.name) == default)


def without_foreign(spec: type, settings: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Settings under their own names, less those that only other PEFT methods have."""
    owners = {field.name: field.metadata["methods"] for field in dataclasses.fields(spec)}
    return {name: value for name, value in settings.items() if not owners.get(name) or method in owners[name]}


def listed(names: Sequence[str]) -> str:
    """Names as a sentence has them."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def field_names(cls: type) -> dict[str, str]:
    """Every accepted spelling of every field of `cls`, mapped to the field's own name."""
    names: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        names[field.name] = field.name
        names.update(dict.fromkeys(field.metadata.get("aliases", ()), field.name))
    return names


def as_named_now(cls: type, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that any version recorded, with today's names and values."""
    names, synonyms = field_names(cls), {field.name: field.metadata["synonyms"] for field in dataclasses.fields(cls)}
    now = {names.get(name, name): value for name, value in recorded.items()}
    return {n: synonyms.get(n, {}).get(value, value) if isinstance(value, str) else value for n, value in now.items()}


def join(where: str, key: str) -> str:
    """`jobs.0` and `adapter` make `jobs.0.adapter`."""
    return f"{where}.{key}" if where else key


def describe(value: Any) -> str:
    """A short text for a bad value: what the user wrote and, for containers, its kind."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def convert(value: Any, hint: Any, where: str) -> Any:
    """The value as the type `hint`, or a ConfigError saying what is accepted."""
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
    """How a type is named to users."""
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
        # What is wrong inside a mapping is said of its own settings.
        specs = [option for option in others if _holds_spec(option)]
        if len(specs) == 1:
            return convert(value, specs[0], where)
        # What is wrong inside a list or a mapping is said of the item, where there is only one such option.
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
    """Whether a type is a spec, or a list that may have some."""
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
        # Whole numbers first: one of a thousand digits has no float to ask.
        is_finite = number is not None and (isinstance(number, int) or math.isfinite(number))
        if number is not None and not is_finite and hint is float:
            raise ConfigError(f"expected a finite number, got {number}.", where=where)
        if number is not None and is_finite and abs(number) > LARGEST:
            raise ConfigError(f"{describe(value)} is too large; the most is {LARGEST:.0e}.", where=where)
        if number is not None and hint is float:
            return float(number)
        if number is not None and is_finite and float(number).is_integer():
            return int(number)
    raise WrongTypeError.of(f"expected {_with_article(hint)}, got {describe(value)}.", where, (hint,), value)


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
        guess = closest(value, [*map(str, choices), *field.metadata["synonyms"]]) if isinstance(value, str) else None
        hint = f"Did you mean {guess}?" if guess else None
        raise ConfigError(f"got {describe(value)}; accepted are {accepted}.", where=where, hint=hint)


def _required(cls: type) -> list[str]:
    """The settings without a default, in the order of the fields."""
    fields = dataclasses.fields(cls)
    return [f.name for f in fields if f.default is REQUIRED and f.default_factory is REQUIRED]


def _unknown_key(key: str, names: list[str], place: str) -> ConfigError:
    reason = why_refused(key)
    if reason is not None:
        return ConfigError(reason, where=place)
    guess = closest(key, names)
    hint = f"Did you mean {guess}?" if guess else "`weft config` lists all settings."
    return _unknown(place or repr(key), hint)


def _unknown(place: str, hint: str) -> ConfigError:
    return ConfigError("unknown setting.", where=place, hint=hint)


def first_match(patterns: Mapping[str, V], module: str, default: V) -> V:
    """PEFT's rule: of the keys that match a module path, the first wins."""
    return next((value for pattern, value in patterns.items() if answers_pattern(module, pattern)), default)


def check_pattern(pattern: str, where: str) -> None:
    """ConfigError if a text is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression ({error}).", where=where) from None


def answers_pattern(module: str, pattern: str) -> bool:
    """Whether a module path ends, at a dot, with what a key of rank_pattern or its like describes."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
