"""Adapters on routed experts in files: six layouts are read, three are written.

E experts, r rank, H hidden size, I width of an expert, P the path of a layer's experts; gate and up are one weight of
2I outputs (without a gate it is up alone, of I).

- fused, by PEFT from 0.19 on and by Weft: `P.base_layer.lora_A` (E·r, H) and `.lora_B` (2I, r·E) for gate and up,
  `P.lora_A` (E·r, I) and `.lora_B` (H, r·E) for down.
- swapped, by PEFT 0.17 and 0.18: the same names, with A for B, transposed.
- by expert, by unsloth before September 2026: fused, with the columns of B grouped by expert.
- apart, by PEFT with transformers 4: `P.{e}.gate_proj.lora_A` (r, H), `.lora_B` (I, r) and so on; in Mixtral w1 for
  gate, w3 for up, w2 for down.
- outer, by Tinker: `P.w1.lora_A` (1, r, H), `.lora_B` (E, I, r), w3 alike; `P.w2.lora_A` (E, r, I),
  `.lora_B` (1, H, r).
- doubled, by PEFT 0.21 out of `apart`: fused, where gate and up have 2r ranks: the A of both, and a B of two blocks.

A is grouped by expert (row e·r + j), B by rank (column j·E + e). `by expert` has the shapes of `fused`, so
`ORDER_KEY` in its config marks it. Adapters on gate and up apart, or with shared factors, are written as `doubled`,
and known again by their values: B has two blocks, and shared factors are the same for every expert. In gpt-oss the
outputs of gate and up take turns in 2I.

Inside Weft A is (E, r, in) and B (E, out, r); a factor that experts share has 1 for E.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weft.adapters.method import ModuleTensors
from weft.errors import AdapterFileError
from weft.settings import DOWN, GATE, GATE_UP, UP, answers_pattern, first_match, is_expert_path
from weft.spec import AdapterSpec

ORDER_KEY = "lora_B_layout"
"""The key of adapter_config.json with the order of B's columns."""
BY_EXPERT = "expert_major"
_NAME = re.compile(
    r"(?P<experts>(?:.*\.)?experts)(?:\.(?P<index>\d+))?(?P<inner>\.base_layer)?"
    r"(?:\.(?P<product>gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3))?\.(?P<factor>lora_[AB])\.weight"
)
_PRODUCTS = {"w1": GATE, "w3": UP, "w2": DOWN}
OUTER_NAMES = {GATE: "w1", UP: "w3", DOWN: "w2"}
_MIXTRAL = ("block_sparse_moe.experts", "mlp.experts")
"""Paths of Mixtral's experts in files for one expert, as in transformers 4, and in the model."""
_FUSED_IN_VLLM = ("gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "qwen3_omni_moe")
"""Model types whose experts vLLM 0.33 reads fused; it reads all others apart."""

Pair = tuple[torch.Tensor, torch.Tensor]


def is_expert_name(name: str) -> bool:
    """Whether a tensor of a file belongs to routed experts; `name` is without PEFT's prefix."""
    return _NAME.fullmatch(name) is not None


def read_experts(
    named: Mapping[str, torch.Tensor], spec: AdapterSpec, config: Mapping[str, Any], where: str
) -> tuple[AdapterSpec, dict[str, ModuleTensors]]:
    """The factors by path, out of a file's tensors of experts, and the spec with their settings."""
    grouped: dict[str, dict[tuple[str, ...], torch.Tensor]] = {}
    for name, tensor in named.items():
        match = _NAME.fullmatch(name)
        assert match is not None
        key = (match["index"] or "", match["product"] or match["inner"] or "", match["factor"])
        grouped.setdefault(match["experts"], {})[key] = tensor
    found: dict[str, ModuleTensors] = {}
    scales: dict[str, float] = {}
    for module, own_tensors in sorted(grouped.items()):
        read = _Module(module, own_tensors, spec, config, where)
        own = read.factors()
        found |= own
        scales |= dict.fromkeys(own, read.scale) if read.scale is not None else {}
    for path, pair in found.items():
        if not all(tensor.isfinite().all() for tensor in pair):
            raise AdapterFileError(f"{path} holds a NaN or an infinity.", where=where)
    found = _apart(found)
    return _with_experts(spec, found, scales), found


class _Module:
    """The tensors of one layer's experts in a file."""

    def __init__(
        self,
        path: str,
        tensors: dict[tuple[str, ...], torch.Tensor],
        spec: AdapterSpec,
        config: Mapping[str, Any],
        where: str,
    ) -> None:
        self.path, self.spec, self.config, self.where = path, spec, config, where
        self.is_mixtral = any(product in _PRODUCTS for _, product, _ in tensors)
        self.scale: float | None = None
        """The factor on updates, where a pattern for fused products does not give it."""
        self.pairs: dict[tuple[str, str], Pair] = {}
        """A and B by (expert, product or `.base_layer`)."""
        for index, product, _ in sorted(tensors):
            pair = [tensors.get((index, product, factor)) for factor in ("lora_A", "lora_B")]
            a, b = pair
            if a is None or b is None:
                raise self.error(f"{'lora_A' if a is None else 'lora_B'} of {path}.{index or product} is missing")
            self.pairs[index, _PRODUCTS.get(product, product)] = (a, b)

    def error(self, problem: str) -> AdapterFileError:
        return AdapterFileError(f"{problem}.", where=self.where)

    def factors(self) -> dict[str, ModuleTensors]:
        if any(index for index, _ in self.pairs):
            return self._apart()
        if all(a.ndim == b.ndim == 3 for a, b in self.pairs.values()):
            return self._outer()
        if self.pairs.keys() <= {("", ""), ("", ".base_layer")}:
            return self._fused()
        raise self.error(f"{self.path} has tensors of no known layout of experts")

    def _apart(self) -> dict[str, ModuleTensors]:
        products = sorted({product for _, product in self.pairs})
        experts = sorted({int(index or -1) for index, _ in self.pairs})
        if experts != list(range(len(experts))):
            raise self.error(f"{self.path} has adapters on experts {experts[0]} to {experts[-1]}, but not on all")
        made: dict[str, Pair] = {}
        for product in products:
            pairs = [self.pairs.get((str(expert), product)) for expert in experts]
            if any(pair is None or pair[0].ndim != 2 or pair[1].ndim != 2 for pair in pairs):
                raise self.error(f"{self.path} has no {product} of some experts")
            shapes = {(a.shape, b.shape) for a, b in (pair for pair in pairs if pair is not None)}
            if len(shapes) > 1:
                raise self.error(f"{product} of {self.path} has other shapes on other experts")
            known = [pair for pair in pairs if pair is not None]
            made[product] = torch.stack([a for a, _ in known]), torch.stack([b for _, b in known])
        if DOWN not in made or UP not in made or not made.keys() <= {GATE, UP, DOWN}:
            raise self.error(
                f"{self.path} has adapters on {', '.join(products)}; expected gate_proj, up_proj, down_proj"
            )
        self.scale = self.spec.scale_for(f"{self.path}.0.{DOWN}")
        path = self.path.replace(*_MIXTRAL) if self.is_mixtral else self.path
        return {f"{path}.{name}": pair for name, pair in made.items()}

    def _outer(self) -> dict[str, ModuleTensors]:
        made = {product: pair for (_, product), pair in self.pairs.items()}
        if not {UP, DOWN} <= made.keys() <= {GATE, UP, DOWN}:
            raise self.error(f"{self.path} has shared factors of {', '.join(sorted(made))} only")
        for product, (a, b) in made.items():
            if len(b if product == DOWN else a) != 1 or a.shape[1] != b.shape[2]:
                raise self.error(f"{self.path}.{product} has {tuple(a.shape)} and {tuple(b.shape)}, not shared factors")
        self.scale = self.spec.scale_for(f"{self.path}.{OUTER_NAMES[DOWN]}")
        return {f"{self.path}.{name}": pair for name, pair in made.items()}

    def _fused(self) -> dict[str, ModuleTensors]:
        inner, outer = self.pairs.get(("", ".base_layer")), self.pairs.get(("", ""))
        given = self.config.get("target_parameters")
        targets = [str(name).rpartition(".")[2] for name in given] if isinstance(given, list) else []
        names = [name for name in (GATE_UP, UP, DOWN) if name in targets]
        if outer is None or len(names) != (1 if inner is None else 2):
            listed = ", ".join(targets) or "nothing"
            raise self.error(f"{self.path} has factors of experts, but target_parameters of its config has {listed}")
        pairs = [pair for pair in (inner, outer) if pair is not None]
        found = {name: self._grouped(name, *pair) for name, pair in zip(names, pairs, strict=True)}
        if len(found) == 2:
            found = self._unswapped(found, names[0])
        return {f"{self.path}.{name}": pair for name, pair in found.items()}

    def _grouped(self, name: str, a: torch.Tensor, b: torch.Tensor) -> Pair:
        """A (E, r, in) and B (E, out, r) of one product."""
        rank = first_match(self.spec.rank_pattern, f"{self.path}.{name}", self.spec.r)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % rank:
            shapes = f"lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}"
            raise self.error(f"{self.path}.{name} has {shapes}; expected (experts * {rank}, in) and (out, the same)")
        experts = a.shape[0] // rank
        if self.config.get(ORDER_KEY) == BY_EXPERT:
            b_EOR = b.reshape(len(b), experts, rank).permute(1, 0, 2)
        else:
            b_EOR = b.reshape(len(b), rank, experts).permute(2, 0, 1)
        return a.reshape(experts, rank, a.shape[1]).contiguous(), b_EOR.contiguous()

    def _unswapped(self, found: dict[str, Pair], up: str) -> dict[str, Pair]:
        """The pairs as PEFT has them from 0.19 on; before, A and B of weights (E, out, in) had each other's sizes."""
        (a_up, b_up), (a_down, b_down) = found[up], found[DOWN]
        halves = 2 if up == GATE_UP else 1
        is_now = a_up.shape[2] == b_down.shape[1] and b_up.shape[1] == halves * a_down.shape[2]
        is_old = b_up.shape[1] == a_down.shape[2] and a_up.shape[2] == halves * b_down.shape[1]
        if is_now and (not is_old or not _is_before_0_19(self.config.get("peft_version"))):
            return found
        if not is_old:
            sizes = ", ".join(str(tuple(x.shape)) for x in (a_up, b_up, a_down, b_down))
            raise self.error(f"{self.path} has factors that do not fit together: {sizes}")
        return {
            name: (b.transpose(1, 2).contiguous(), a.transpose(1, 2).contiguous()) for name, (a, b) in found.items()
        }


def _is_before_0_19(version: object) -> bool:
    parts = str(version or "").split(".")
    return len(parts) > 1 and parts[0] == "0" and parts[1].isdigit() and int(parts[1]) < 19


def _apart(found: dict[str, ModuleTensors]) -> dict[str, ModuleTensors]:
    """Fused factors as gate and up apart, and shared ones once, if those of all layers were that when written."""
    made: dict[str, dict[str, Pair]] = {}
    for module, own in by_module(found).items():
        split = _split(*own[GATE_UP]) if GATE_UP in own and DOWN in own else own
        if split is None:
            return found
        made[module] = {**split, **{name: pair for name, pair in own.items() if name != GATE_UP}}
    if all(_repeats(own[DOWN][1]) and _repeats(own[UP][0]) for own in made.values() if {UP, DOWN} <= own.keys()):
        for own in made.values():
            for name, (a, b) in list(own.items()) if {UP, DOWN} <= own.keys() else ():
                own[name] = (a, b[:1]) if name == DOWN else (a[:1], b)
    return {f"{module}.{name}": pair for module, own in made.items() for name, pair in own.items()}


def _split(a: torch.Tensor, b: torch.Tensor) -> dict[str, Pair] | None:
    """Gate and up, if B has a block of ranks for each, one after the other or in turns."""
    rank, half = a.shape[1] // 2, b.shape[1] // 2
    if a.shape[1] % 2 or not (b.any() or _repeats(a)):
        return None
    for gate, up in ((slice(0, half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2))):
        if not b[:, gate, rank:].any() and not b[:, up, :rank].any():
            return {
                GATE: (a[:, :rank].contiguous(), b[:, gate, :rank].contiguous()),
                UP: (a[:, rank:].contiguous(), b[:, up, rank:].contiguous()),
            }
    return None


def _repeats(factor_EMN: torch.Tensor) -> bool:
    """Whether all experts have the same factor."""
    return bool((factor_EMN == factor_EMN[:1]).all())


def _with_experts(spec: AdapterSpec, found: Mapping[str, ModuleTensors], scales: Mapping[str, float]) -> AdapterSpec:
    """The spec with the ranks and scales of these factors."""
    ranks = {path: own[0].shape[1] for path, own in found.items()}
    alphas: dict[str, float] = {}
    for path, rank in ranks.items():
        scale = scales.get(path) or _scale_in_file(spec, path)
        alphas[path] = scale * (math.sqrt(rank) if spec.use_rslora else rank)
    products = {path.rpartition(".")[2]: own for path, own in found.items()}
    is_shared = UP in products and len(products[UP][0]) == 1 < len(products[UP][1])
    kind = "shared" if is_shared else "separate" if GATE in products else "full"
    expected = (GATE_UP, DOWN) if kind == "full" and UP not in products else (UP, DOWN)
    missing = tuple(f"experts.{name}" for name in expected if name not in products)
    excluded = spec.exclude_modules
    if missing:
        excluded = (*((excluded,) if isinstance(excluded, str) else excluded or ()), *missing)
    lowest = min(ranks.values())
    alpha = next(alphas[path] for path, rank in ranks.items() if rank == lowest)
    return dataclasses.replace(
        spec,
        experts=kind,
        expert_r=lowest,
        expert_alpha=alpha,
        exclude_modules=excluded,
        rank_pattern=_patterns(spec.rank_pattern, ranks, lowest),
        alpha_pattern=_patterns(spec.alpha_pattern, alphas, alpha),
    )


def _scale_in_file(spec: AdapterSpec, path: str) -> float:
    """PEFT's scale of a fused product; shared factors of gate and up have that of the product of both."""
    module, _, name = path.rpartition(".")
    fused = f"{module}.{GATE_UP}" if name in (GATE, UP) else path
    rank = first_match(spec.rank_pattern, fused, spec.r)
    alpha = first_match(spec.alpha_pattern, fused, spec.default_alpha)
    return alpha / (math.sqrt(rank) if spec.use_rslora else rank)


def _patterns(given: Mapping[str, Any], wanted: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Patterns of linears, and the products of experts that have another value than the default."""
    others = _of_linears(given, wanted)
    own = {path: value for path, value in wanted.items() if first_match(others, path, default) != value}
    return {**own, **others}


def _is_of_experts(pattern: str, paths: Iterable[str]) -> bool:
    fused = {f"{path.rpartition('.')[0]}.{name}" for path in paths for name in (GATE_UP, UP, DOWN)}
    return "experts" in pattern and any(answers_pattern(path, pattern) for path in (*paths, *fused))


def fused_files(
    spec: AdapterSpec, tensors: Mapping[str, ModuleTensors], *, in_turns: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The fused layout of factors by path: tensors by name without PEFT's prefix, and keys of the config.

    `in_turns`: the outputs of gate and up take turns in the model's weight.
    """
    named: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module, own in by_module(tensors).items():
        scales = {name: spec.scale_for(f"{module}.{name}") for name in own}
        products = _joined(own, scales, in_turns) if GATE in own else own
        for name, (a, b) in products.items():
            inner = ".base_layer" if name != DOWN and DOWN in products else ""
            experts, rank = max(len(a), len(b)), a.shape[1]
            a, b = a.expand(experts, -1, -1), b.expand(experts, -1, -1)
            named[f"{module}{inner}.lora_A.weight"] = a.reshape(-1, a.shape[2])
            named[f"{module}{inner}.lora_B.weight"] = b.permute(1, 2, 0).reshape(b.shape[1], -1)
            ranks[f"{module}.{name}"] = rank
            scale = scales[UP if name == GATE_UP and UP in own else name]
            alphas[f"{module}.{name}"] = scale * (math.sqrt(rank) if spec.use_rslora else rank)
    return {name: tensor.contiguous() for name, tensor in named.items()}, {
        "target_parameters": list(ranks),
        "rank_pattern": {**_short(ranks, spec.r), **_of_linears(spec.rank_pattern, ranks)},
        "alpha_pattern": {**_short(alphas, spec.default_alpha), **_of_linears(spec.alpha_pattern, alphas)},
    }


def _joined(own: Mapping[str, Pair], scales: Mapping[str, float], in_turns: bool) -> dict[str, Pair]:
    """Gate and up as one product with the ranks of both and a B of two blocks, at the scale of up."""
    (a_gate, b_gate), (a_up, b_up) = own[GATE], own[UP]
    # Both blocks have one scale in the file.
    ratio = scales[GATE] / scales[UP] if scales[UP] else 1.0
    b_gate = torch.nn.functional.pad(b_gate if ratio == 1 else b_gate * ratio, (0, a_up.shape[1]))
    b_up = torch.nn.functional.pad(b_up, (a_gate.shape[1], 0))
    b = torch.stack([b_gate, b_up], dim=2).flatten(1, 2) if in_turns else torch.cat([b_gate, b_up], dim=1)
    joined = {GATE_UP: (torch.cat([a_gate, a_up], dim=1), b)}
    return {**joined, DOWN: own[DOWN]} if DOWN in own else joined


def _of_linears(patterns: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in patterns.items() if not _is_of_experts(key, paths)}


def _short(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Patterns for values by path: one for each product that has the same value in all layers."""
    by_name: dict[str, set[Any]] = {}
    for path, value in values.items():
        by_name.setdefault(path.rpartition(".")[2], set()).add(value)
    made: dict[str, Any] = {}
    for path, value in values.items():
        name = path.rpartition(".")[2]
        key = rf".*\.experts\.{name}" if len(by_name[name]) == 1 else re.escape(path)
        if value != default:
            made[key] = int(value) if float(value).is_integer() else value
    return made


def by_module(tensors: Mapping[str, ModuleTensors]) -> dict[str, dict[str, Pair]]:
    """The factors of experts by module and product."""
    found: dict[str, dict[str, Pair]] = {}
    for path, (a, b) in tensors.items():
        if is_expert_path(path):
            module, _, name = path.rpartition(".")
            found.setdefault(module, {})[name] = (a, b)
    return found


def layout_for(spec: AdapterSpec, server: str, family: str | None) -> str:
    """The layout that a server reads for a model type: fused, apart or outer.

    vLLM and SGLang do not look at the layout: a wrong one would be served as another adapter.
    """
    if spec.experts == "none" or server == "peft":
        return "fused"
    if server == "tinker" or (server == "sglang" and spec.experts == "shared"):
        return "outer"
    return "fused" if server == "vllm" and family in _FUSED_IN_VLLM else "apart"


def files_for(
    spec: AdapterSpec, tensors: Mapping[str, ModuleTensors], layout: str, family: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Factors by path in the layouts apart and outer: tensors by name without PEFT's prefix, and keys of the config."""
    named: dict[str, torch.Tensor] = {}
    products: set[str] = set()
    for module, own in by_module(tensors).items():
        pairs = _gate_and_up(own, in_turns=family == "gpt_oss")
        names = OUTER_NAMES if layout == "outer" or family == "mixtral" else {}
        if family == "mixtral":
            module = module.replace(_MIXTRAL[1], _MIXTRAL[0])
        for name, (a, b) in pairs.items():
            written = names.get(name, name)
            products.add(written)
            if layout == "outer":
                named |= {f"{module}.{written}.lora_A.weight": a, f"{module}.{written}.lora_B.weight": b}
                continue
            for expert in range(max(len(a), len(b))):
                factors = (factor[min(expert, len(factor) - 1)] for factor in (a, b))
                for letter, factor in zip("AB", factors, strict=True):
                    named[f"{module}.{expert}.{written}.lora_{letter}.weight"] = factor
    linears = [path for path in tensors if is_expert_path(path)]
    pattern = r".*\.experts\..*"
    ranks = {pattern: spec.rank_of_experts} if spec.rank_of_experts != spec.r else {}
    alphas = {pattern: spec.alpha_of_experts} if spec.alpha_of_experts != spec.default_alpha else {}
    return {name: tensor.contiguous() for name, tensor in named.items()}, {
        "target_parameters": None,
        "target_modules": sorted(products),
        "rank_pattern": {**ranks, **_of_linears(spec.rank_pattern, linears)},
        "alpha_pattern": {**alphas, **_of_linears(spec.alpha_pattern, linears)},
    }


def _gate_and_up(own: Mapping[str, Pair], *, in_turns: bool) -> dict[str, Pair]:
    """The factors of one layer's experts with gate and up apart."""
    if GATE_UP not in own:
        return dict(own)
    a, b = own[GATE_UP]
    half = b.shape[1] // 2
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if in_turns else (slice(0, half), slice(half, None))
    return {GATE: (a, b[:, gate]), UP: (a, b[:, up]), **{name: own[name] for name in own if name != GATE_UP}}
