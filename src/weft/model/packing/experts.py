"""Experts on packed samples: a row's result depends on that row and its own job's adapter alone.

A router sends each row to K experts, so how many rows an expert multiplies depends on the neighbours, and with the
number of rows the last bits of a product; `kernels/grouped.py` has products that do not. A row's K results are added
one after the other, in the router's order, and so are the K gradients of its input. Where two experts have the same
score, the one with the lower index comes first. Adapters on the products of experts are those of `adapters/experts.py`.

Shape suffixes: T rows of the microbatch, K choices of a row, S = T · K, D hidden size, J width of an expert, E experts,
O outputs.

Frozen weights of experts are dense or 8-bit floats that lose nothing (`ExpertWeight`):

    w[e, d, o] = w8[e, d, o] · 2 ** k[e, o]        k such that the largest number of a column is 256 or 384 in w8

Numbers of MXFP4 are 0, ½, 1, 1½, 2, 3, 4 or 6 times a power of two for each block of 32. They are numbers of w8 if
those powers span at most 14 octaves in a column: 384 is 6 · 2 ** 6, and 2 ** -9, the smallest of w8, is ½ · 2 ** -8.
A product makes its weights dense, and again on the way back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.adapters.experts import Dispatch, ExpertRows, ExpertSite, sites_of
from weft.adapters.routing import Routing
from weft.adapters.slots import Active, apply_slots
from weft.errors import ModelError
from weft.kernels.grouped import grouped_product
from weft.settings import DOWN, GATE_UP, UP

_SCALE = "weft_scale"
_TOP = 8
"""Exponent of the largest number of a column in w8."""


@dataclass(frozen=True)
class ExpertWeight:
    stored: torch.Tensor
    scale_EO: torch.Tensor | None
    """Powers of two, in the type of the activations; None: stored dense."""
    is_transposed: bool
    """True if it is stored (E, D, O), not (E, O, D)."""

    @classmethod
    def of(cls, module: Any, name: str) -> ExpertWeight:
        return cls(getattr(module, name), getattr(module, f"{name}_{_SCALE}", None), module.is_transposed)

    def dense(self) -> torch.Tensor:
        """(E, D, O)"""
        w_EDO = self.stored if self.is_transposed else self.stored.transpose(1, 2)
        return w_EDO if self.scale_EO is None else w_EDO.to(self.scale_EO.dtype) * self.scale_EO[:, None]


def store_experts(model: nn.Module, where: str) -> None:
    """Stores the experts of a model as 8-bit floats; ModelError if a number would change."""
    for path, module in model.named_modules():
        if not (hasattr(module, "has_gate") and hasattr(module, "is_transposed")):
            continue
        for name in (GATE_UP, UP, DOWN):
            weight = getattr(module, name, None)
            if not isinstance(weight, nn.Parameter) or weight.ndim != 3:
                continue
            dense_EDO = ExpertWeight.of(module, name).dense()
            w8, scale_EO = _in_eight_bits(weight.detach(), module.is_transposed)
            setattr(module, name, nn.Parameter(w8, requires_grad=False))
            module.register_buffer(f"{name}_{_SCALE}", scale_EO, persistent=False)
            if not torch.equal(ExpertWeight.of(module, name).dense(), dense_EDO):
                raise ModelError(
                    f"{path}.{name} spans more than 14 octaves for one output, which fp8 cannot hold; set quantize to "
                    "none.",
                    where=where,
                )


def _in_eight_bits(weight: torch.Tensor, is_transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dim = 1 if is_transposed else 2
    largest_EO = weight.abs().amax(dim).float()
    exponents_EO = torch.frexp(torch.where(largest_EO > 0, largest_EO, 1.0)).exponent - 1 - _TOP
    scale_EO = torch.ldexp(torch.ones_like(largest_EO), exponents_EO)
    return (weight.float() / scale_EO.unsqueeze(dim)).to(torch.float8_e4m3fn), scale_EO.to(weight.dtype)


NAME = "weft_packed"
_IN_FILES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names of one expert's linears in files and in other trainers."""


def choose(model: Any, implementation: str) -> None:
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, packed_experts)
    if any(_are_experts(module) for module in model.modules()):
        model.set_experts_implementation(implementation)


def prepare(model: Any, routing: Routing) -> dict[str, ExpertSite]:
    """Makes a model use the experts here, and gives its routers the rows of one tile at a time; the experts' sites."""
    choose(model, NAME)
    found: dict[str, ExpertSite] = {}
    for path, module in experts_of(model).items():
        products = sites_of(module)
        object.__setattr__(module, "weft_sites", products)
        found |= {f"{path}.{name}": site for sites in products.values() for name, site in sites.items()}
        for router in model.get_submodule(path.rpartition(".")[0]).children():
            is_other = isinstance(router, nn.Linear) or _are_experts(router)
            if not is_other and any(parameter.ndim == 2 for parameter in router.parameters(recurse=False)):
                object.__setattr__(router, "forward", functools.partial(_by_tiles, router.forward, routing))
            elif "Router" in type(router).__name__:
                # Its product is a linear of its own, whose rows come in tiles already.
                object.__setattr__(router, "forward", functools.partial(_in_order, router.forward))
    return found


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The modules with the weights of a layer's experts, by path."""
    return {path: module for path, module in model.named_modules() if _are_experts(module)}


def expert_products_of(model: nn.Module) -> dict[str, tuple[ExpertSite, torch.Tensor]]:
    """The products of experts that adapters sit on, each with the weight (E, O, D) that has its columns, by path."""
    found: dict[str, tuple[ExpertSite, torch.Tensor]] = {}
    for path, module in experts_of(model).items():
        for product, sites in sites_of(module).items():
            weight = getattr(module, product)
            weight_EOD = weight.transpose(1, 2) if module.is_transposed else weight
            found |= {f"{path}.{name}": (site, weight_EOD) for name, site in sites.items()}
    return found


def in_model_order(model: nn.Module, linears: Iterable[str], products: Iterable[str]) -> list[str]:
    """Paths of linears and of products of experts, layer by layer, as stages divide them."""
    by_module = {path: [path] for path in linears}
    for path in products:
        by_module.setdefault(path.rpartition(".")[0], []).append(path)
    return [own for path, _ in model.named_modules() for own in by_module.get(path, ())]


def expert_weights(model: nn.Module) -> list[str]:
    """Paths of all weights of experts, in the model and in its files."""
    found = experts_of(model)
    own = [f"{path}.{name}" for path, module in found.items() for name, _ in module.named_parameters(recurse=False)]
    return [*own, *(f"{path}.0.{name}" for path in found for name in _IN_FILES)]


def _are_experts(module: nn.Module) -> bool:
    has_experts_code = hasattr(module, "has_gate") and hasattr(module, "is_transposed")
    return has_experts_code and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _in_order(forward: Callable[..., Any], *given: Any) -> Any:
    with _LowerIndexFirst():
        return forward(*given)


def _by_tiles(forward: Callable[..., Any], routing: Routing, hidden: torch.Tensor, *rest: Any) -> Any:
    rows_TD = hidden.reshape(-1, hidden.shape[-1])
    with _LowerIndexFirst():
        if routing.row_tile is None or len(rows_TD) == routing.row_tile:
            return forward(hidden, *rest)
        answers = [forward(tile_LD, *rest) for tile_LD in rows_TD.split(routing.row_tile)]
    if isinstance(answers[0], torch.Tensor):
        return torch.cat(answers)
    return tuple(torch.cat(parts) for parts in zip(*answers, strict=True))


class _LowerIndexFirst(TorchFunctionMode):
    """Makes `topk` order its results by value, and equal values by index; torch leaves both open."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        return _topk(*args, **(kwargs or {}))


def _topk(input: torch.Tensor, k: int, dim: int = -1, sorted: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.sort(input, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def packed_experts(
    module: Any, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the outputs of each row's experts, (T, D)."""
    num_rows, num_choices = index_TK.shape
    dispatch = Dispatch.of(index_TK, module.num_experts)
    x_SD = _to_experts(hidden_TD, dispatch)
    owned = _owned(module, dispatch)
    h_SJ = _product(module, GATE_UP if module.has_gate else UP, x_SD, dispatch, owned)
    h_SJ = module._apply_gate(h_SJ) if module.has_gate else module.act_fn(h_SJ)
    y_SD = _product(module, DOWN, h_SJ, dispatch, owned)
    # transformers 5.17 knows no norms of experts.
    y_SD = module.post_expert_norm(y_SD) if getattr(module, "has_post_expert_norm", False) else y_SD
    y_TKD = _moved(y_SD, dispatch.inverse_S, dispatch.order_S).view(num_rows, num_choices, -1) * weights_TK[..., None]
    return _in_turn(y_TKD).to(hidden_TD.dtype)


def _owned(module: Any, dispatch: Dispatch) -> list[ExpertRows]:
    """The rows of the slots that have adapters on the module's products."""
    slots = {slot for sites in module.weft_sites.values() for site in sites.values() for slot in site.slots}
    return [dispatch.rows_of(rows) for rows in module.weft_routing.slots if rows.slot in slots]


def _product(module: Any, name: str, x_SD: torch.Tensor, dispatch: Dispatch, owned: list[ExpertRows]) -> torch.Tensor:
    """Each expert's rows through its product of that name, with the adapters on it."""
    weight, bias_EO = ExpertWeight.of(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    sites: Mapping[str, ExpertSite] = module.weft_sites[name]
    active: Active = [
        (rows, site.slots[rows.slot]) for rows in owned for site in sites.values() if rows.slot in site.slots
    ]
    # Autograd visits the slots even where the rows need no gradient.
    anchor = torch.zeros((), device=x_SD.device, requires_grad=bool(active))
    return apply_slots(x_SD, anchor, _FrozenExperts(weight, bias_EO, dispatch), None, active, module.weft_routing)


@dataclass(frozen=True)
class _FrozenExperts:
    """One product of all experts, as a map of the sorted choices."""

    weight: ExpertWeight
    bias_EO: torch.Tensor | None
    dispatch: Dispatch

    @property
    def stored(self) -> Mapping[str, torch.Tensor]:
        return {"weight": self.weight.stored}

    def product(self, x_TD: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        y_SO = grouped_product(x_TD, self.weight.dense(), self.dispatch.ends_E)
        return y_SO if self.bias_EO is None else y_SO.add_(self.bias_EO[self.dispatch.expert_S])

    def input_gradient(self, dy_TO: torch.Tensor, row_tile: int | None = None) -> torch.Tensor:
        return grouped_product(dy_TO, self.weight.dense().transpose(1, 2), self.dispatch.ends_E)


def _in_turn(y_TKD: torch.Tensor) -> torch.Tensor:
    """The sum of each row's choices, added one after the other."""
    first, *others = y_TKD.unbind(1)
    for y_TD in others:
        first = first + y_TD
    return first


def _to_experts(x_TD: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Each row once for each of its choices, sorted by expert."""
    x_SD: torch.Tensor = _ToExperts.apply(x_TD, dispatch)  # type: ignore[no-untyped-call]
    return x_SD


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        ctx.dispatch = dispatch
        return x_TD[dispatch.order_S // dispatch.num_choices]

    @staticmethod
    def backward(ctx: Any, dx_SD: torch.Tensor) -> tuple[torch.Tensor, None]:
        dx_TKD = dx_SD[ctx.dispatch.inverse_S].unflatten(0, (-1, ctx.dispatch.num_choices))
        return _in_turn(dx_TKD), None


def _moved(x_SD: torch.Tensor, order_S: torch.Tensor, inverse_S: torch.Tensor) -> torch.Tensor:
    """Rows in another order; `inverse_S` is its inverse, by which gradients return."""
    moved: torch.Tensor = _Moved.apply(x_SD, order_S, inverse_S)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: torch.Tensor, order_S: torch.Tensor, inverse_S: torch.Tensor) -> torch.Tensor:
        ctx.inverse_S = inverse_S
        return x_SD[order_S]

    @staticmethod
    def backward(ctx: Any, dy_SD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy_SD[ctx.inverse_S], None, None
