"""The sites of an adapter by PEFT's rules: linears of the backbone, or for some methods its blocks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from weft.adapters.method import Attachment
from weft.errors import ConfigError, did_you_mean
from weft.plan.families import FAMILIES
from weft.settings import DOWN, GATE_UP, answers_pattern, is_expert_path
from weft.spec import AdapterSpec

ALL = {
    Attachment.LINEAR: ("all-linear", "all"),
    Attachment.BLOCK_OUTPUT: ("all-blocks", "all"),
    Attachment.INPUT: ("all",),
    Attachment.KEYS_AND_VALUES: ("all",),
}
"""Words for all sites of a kind; the first one is documented."""
SHARED = {"lm_head": "the output head", "embed_out": "the output head"} | dict.fromkeys(
    ("embed_tokens", "embed_in", "wte", "wpe", "word_embeddings"), "an embedding"
)
_LAYER_INDEX = re.compile(r"\.(?:layers|h|blocks|block|layer)\.(\d+)\.")


def choose_modules(
    spec: AdapterSpec, kind: Attachment, paths: Sequence[str], spared: Collection[str] = ()
) -> list[str]:
    """The paths of the sites that an adapter is on, out of `paths`, all sites of a kind, in their order. `spared`:
    names of linears that the words for all sites leave out. A name in target_modules that matches no module is an
    error, even if other names match."""
    if not paths:
        families = ", ".join(FAMILIES)
        raise ConfigError(f"the backbone has no {kind.value} to adapt; {families} models do.", where="adapter.method")
    plain = [p for p in paths if not is_expert_path(p)]
    matched = {p for p in plain if _matches(spec.target_modules, p, kind)}
    if spec.target_modules in ALL[kind]:
        matched = {p for p in matched if not is_named(p, spared)}
    matched.update(expert_products(spec, paths))
    chosen = [p for p in paths if p in matched]
    if isinstance(spec.target_modules, tuple):
        for name in spec.target_modules:
            if not any(_named(name, p) for p in plain):
                leaves = sorted({p.rsplit(".", 1)[-1] for p in plain})
                raise _unknown_module(name, leaves, kind, has_experts=len(plain) < len(paths))
    if spec.exclude_modules is not None:
        chosen = [p for p in chosen if not _matches(spec.exclude_modules, p, kind)]
    if spec.layers_to_transform is not None:
        chosen = _in_layers(chosen, spec.layers_to_transform)
    if not chosen:
        raise _no_module_chosen(spec, plain, kind)
    _refuse_idle_patterns(spec, chosen)
    return chosen


_OF_MIXTURES = {
    "experts": "Set experts: shared, separate or full to train routed experts.",
    **dict.fromkeys(("gate", "router"), "Routers stay frozen."),
}
"""Hints for names of modules that are no linears."""


def _unknown_module(name: str, leaves: Sequence[str], kind: Attachment, *, has_experts: bool) -> ConfigError:
    has = f"it has {', '.join(leaves)}."
    if name.rpartition(".")[-1] in SHARED:
        found = f"{name} is {SHARED[name.rpartition('.')[-1]]}, shared by all jobs and never adapted; besides {has}"
        return ConfigError(found, where="adapter.target_modules")
    return ConfigError(
        f"the backbone has no {kind.value} {name!r}; {has}",
        where="adapter.target_modules",
        hint=_OF_MIXTURES[name] if has_experts and name in _OF_MIXTURES else did_you_mean(name, leaves),
    )


def _refuse_idle_patterns(spec: AdapterSpec, chosen: Sequence[str]) -> None:
    """ConfigError for a key of rank_pattern or alpha_pattern that matches no adapted module."""
    for setting, patterns in (("rank_pattern", spec.rank_pattern), ("alpha_pattern", spec.alpha_pattern)):
        for pattern in patterns:
            if not any(answers_pattern(path, pattern) for path in chosen):
                raise ConfigError(
                    f"matches no adapted module: {pattern!r}; modules have names such as {chosen[0]}.",
                    where=f"adapter.{setting}",
                )


def is_target(spec: AdapterSpec, kind: Attachment, path: str) -> bool:
    """Whether PEFT, given a config with this spec, puts an adapter on a module path (`all-linear` counts as all).
    Unlike `choose_modules`, it finds layers by their number anywhere in the path, and a module that is named by its
    whole path is a target in any layer."""
    if spec.exclude_modules is not None and _answers(spec.exclude_modules, path):
        return False
    names = spec.target_modules
    if isinstance(names, str):
        return names == ALL[kind][0] or _answers(names, path)
    if path in names:
        return True
    if not _answers(names, path):
        return False
    if not spec.layers_to_transform:
        return True
    match = re.match(r".*?\.[^.]*\.(\d+)\.", path)
    return match is not None and int(match[1]) in spec.layers_to_transform


def _no_module_chosen(spec: AdapterSpec, paths: Sequence[str], kind: Attachment) -> ConfigError:
    found = f"no {kind.value} of the backbone matches"
    if spec.target_modules in {words[0] for words in ALL.values()} - {ALL[kind][0]}:
        return ConfigError(
            f"got {spec.target_modules}; {spec.method} adapters sit on {kind.value}s, for which it is {ALL[kind][0]}.",
            where="adapter.target_modules",
        )
    if isinstance(spec.target_modules, str) and not any(_matches(spec.target_modules, p, kind) for p in paths):
        return ConfigError(
            f"{found} {spec.target_modules!r}; one text is a regular expression over whole paths such as {paths[0]}, "
            "names go in a list.",
            where="adapter.target_modules",
        )
    limit = "exclude_modules" if spec.exclude_modules is not None else "layers_to_transform"
    return ConfigError(f"{found} target_modules once {limit} is applied.", where=f"adapter.{limit}")


def expert_products(spec: AdapterSpec, paths: Iterable[str]) -> list[str]:
    """The products of experts that an adapter is on by its `experts`; ConfigError if there are none."""
    if spec.experts == "none":
        return []
    products = [p for p in paths if is_expert_path(p)]
    if not products:
        raise ConfigError("the backbone has no routed experts that can be trained.", where="adapter.experts")
    if spec.experts != "full":
        return [p for p in products if not p.endswith(GATE_UP)]
    gated = {p.rpartition(".")[0] for p in products if p.endswith(GATE_UP)}
    return [p for p in products if p.endswith((GATE_UP, DOWN)) or p.rpartition(".")[0] not in gated]


def refuse_experts(spec: AdapterSpec, experts: Iterable[str]) -> None:
    """ConfigError if `target_modules` matches weights of experts, given their paths: `experts` chooses those."""
    targets = spec.target_modules
    if targets in (*ALL[Attachment.LINEAR], spec.config.auto_targets):
        return
    targeted = next((path for path in experts if _answers(targets, path)), None)
    if targeted is not None:
        raise _targets_expert(targeted)


def _targets_expert(path: str) -> ConfigError:
    return ConfigError(
        f"{path} is a weight of routed experts, which target_modules does not choose; name linears outside of them, "
        "and set experts: shared, separate or full to train them too.",
        where="adapter.target_modules",
    )


def leaf_names(chosen: Iterable[str], paths: Iterable[str]) -> list[str] | None:
    """The last names of the chosen modules if these names choose exactly those modules, else None.

    Products of experts are left out. PEFT applies their names to routed experts too.
    """
    paths = list(paths)
    chosen = {p for p in chosen if not is_expert_path(p)}
    leaves = {p.rsplit(".", 1)[-1] for p in chosen}
    products = {p.rsplit(".", 1)[-1] for p in paths if is_expert_path(p)}
    same = {p for p in paths if p.rsplit(".", 1)[-1] in leaves and not is_expert_path(p)}
    return sorted(leaves) if same == chosen and not leaves & products else None


def _matches(targets: str | tuple[str, ...], path: str, kind: Attachment) -> bool:
    return targets in ALL[kind] or _answers(targets, path)


def _answers(targets: str | tuple[str, ...], path: str) -> bool:
    """Whether a path is one of the names, or all of it matches the regular expression."""
    if isinstance(targets, tuple):
        return is_named(path, targets)
    return re.fullmatch(targets, path) is not None


def is_named(path: str, names: Collection[str]) -> bool:
    """Whether one of the names is that of a module."""
    return any(_named(name, path) for name in names)


def _named(name: str, path: str) -> bool:
    return path == name or path.endswith("." + name)


def _in_layers(paths: list[str], layers: tuple[int, ...]) -> list[str]:
    indices = {p: int(m.group(1)) for p in paths if (m := _LAYER_INDEX.search(p))}
    num_layers = max(indices.values(), default=-1) + 1
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"layer {layer} does not exist; the backbone has layers 0 to {num_layers - 1}.",
                where="adapter.layers_to_transform",
            )
    return [p for p in paths if indices.get(p) in layers]
