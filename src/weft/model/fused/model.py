"""What the fused step needs of a model, or of a part of it: its layers as four products each, and the numbers around
them.

q, k, v share one frozen product, and so do gate and up: their weights are stored as one, of which the model's own
linears then are parts. Nothing is held twice. The family's description names these modules and what surrounds
them.

A frozen product may run over all rows at once where that gives the bits it gives over a tile of them. At one row count
a row's result does not depend on its neighbours, but a GPU's library may choose another way of summing for another
count. So each shape of product is tried once per row count, on random numbers: where the bits agree, all rows go in one
product; where they do not, in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft.adapters.devices import Devices, Side
from weft.adapters.frozen import FrozenWeight, join
from weft.adapters.sites import SlotLinear
from weft.kernels.device import is_gpu
from weft.kernels.layers.rms_norm import RmsNorm
from weft.kernels.layers.rotary import HeadNorms, Heads, Turns
from weft.kernels.lora.tables import Site, SlotTable
from weft.model.model_part import ModelPart
from weft.model.packing.attention import needs_bounds
from weft.model.shards import LayerRing
from weft.plan.decoder import Activation, Decoder, LayerForm, Rotary, moved_names
from weft.plan.families import describe, why_unsupported


@dataclass(frozen=True)
class Product:
    site: Site
    weight: FrozenWeight
    bias_O: torch.Tensor | None


SIDES: dict[str, Side] = {"qkv": "outputs", "out": "inputs", "gate_up": "outputs", "down": "inputs"}
"""The sites of a layer, and the dimension by which they are divided over devices."""
ROLES = tuple(SIDES)


class LayerSites(NamedTuple):
    """The sites of a layer other than linears; numbered after all linears."""

    attention_end: Site
    """Output of attention, added to the residual stream; it has no weight."""
    mlp_end: Site
    keys_and_values: int

    @classmethod
    def of(cls, layer: int, num_layers: int, num_linears: int, hidden: int) -> LayerSites:
        first = num_linears + 2 * layer
        ends = [Site(first + i, (hidden,), hidden, role) for i, role in enumerate(("attention", "mlp"))]
        return cls(ends[0], ends[1], num_linears + 2 * num_layers + layer)


@dataclass(frozen=True)
class FusedLayer:
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    norm_in: RmsNorm | None
    norm_mid: RmsNorm | None
    post_in: RmsNorm | None
    post_mid: RmsNorm | None
    head_norms: HeadNorms | None
    sites: LayerSites
    window: int | None
    """Number of keys that a query sees; None: all before it."""
    rotary: int


class RotaryTable(NamedTuple):
    frequencies_F: torch.Tensor
    """Half as many frequencies as rotated numbers of a head; zeros where nothing is rotated."""
    scale: float
    stretch: tuple[float, int] | None = None
    """As in `Rotary`."""

    def turns(self, positions_T: torch.Tensor, dtype: torch.dtype) -> Turns:
        """The angles of rows at these positions; `dtype`: that of the activations."""
        angles_TF = positions_T.float()[:, None] * self.frequencies_F
        stretch_T = None
        if self.stretch is not None:
            beta, size = self.stretch
            # Rounded as transformers rounds it.
            stretch_T = (1 + beta * torch.log(1 + torch.floor(positions_T / size))).to(dtype).float()
        return Turns(angles_TF.cos() * self.scale, angles_TF.sin() * self.scale, stretch_T)


@dataclass(frozen=True, eq=False)
class FusedModel:
    device: torch.device
    dtype: torch.dtype
    hidden: int
    embedding_VD: torch.Tensor | None
    """None if an earlier part of the model has it."""
    embedding_scale: float | None
    """Factor on embeddings, rounded to their type."""
    input_scale: float | None
    """Factor on the first layer's input, replaced rows included."""
    residual_scale: float | None
    """Factor on a block's output before it is added to the residual stream."""
    layers: tuple[FusedLayer, ...]
    norm: RmsNorm | None
    """None if a later part of the model has it."""
    post: RmsNorm | None
    """Norm of the last layer's output, in families that have it."""
    heads: Heads
    rotaries: tuple[RotaryTable, ...]
    attention_scale: float
    activation: Activation
    moved: tuple[str, ...]
    ring: LayerRing | None = None
    """The ring through which the layers' weights come and go, if they are spread over several devices."""
    devices: Devices | None = None
    """Devices with the other parts of every layer; sites, heads and weights are those here."""

    @property
    def is_first(self) -> bool:
        return self.embedding_VD is not None

    @property
    def is_last(self) -> bool:
        return self.norm is not None

    @property
    def sites(self) -> list[Site]:
        linears = [p.site for layer in self.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return linears + [site for layer in self.layers for site in layer.sites[:2]]

    @property
    def input_rows(self) -> int:
        return self.layers[-1].sites.keys_and_values + 1

    @property
    def row_sites(self) -> dict[int, str]:
        return {**{layer.sites.keys_and_values: "kv" for layer in self.layers}, self.input_rows: "input"}

    def added_up(self, part_TD: torch.Tensor) -> torch.Tensor:
        """The sum of a result or a gradient over the devices that share the layers."""
        return part_TD if self.devices is None else self.devices.add_up(part_TD)

    def table(self) -> SlotTable:
        return SlotTable(self.sites, self.device, self.row_sites)


def why_not(model: Any, linears: Mapping[str, SlotLinear], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a model cannot take the fused step on a device; None if it can."""
    if len({type(linear.frozen) for linear in linears.values()}) > 1:
        return "some of its weights could not be quantised"
    config = model.config.to_dict()
    if obstacle := why_unsupported(config):
        return obstacle
    size = describe(config).sizes.head_size
    if is_gpu(device) and dtype == torch.float32:
        return "its weights are float32, and a GPU's kernels take bfloat16 or float16"
    if is_gpu(device) and (size > 256 or (needs_bounds(device) and size % 8)):
        return f"attention on this GPU does not take heads of {size}"
    return None


def fuse(
    model: Any, linears: Mapping[str, SlotLinear], part: ModelPart | None = None, devices: Devices | None = None
) -> FusedModel:
    """The model's layers, or those of a part, with joined weights; its own linears become parts of them. `devices`: the
    devices over which the linears are divided."""
    decoder, modules = describe(model.config.to_dict()), model.base_model
    sizes = decoder.sizes
    assert sizes.form.activation is not None
    part = part or ModelPart(0, sizes.num_layers, sizes.num_layers)
    layers = tuple(_layer(i, part, decoder, modules.layers, linears) for i in range(part.first, part.end))
    # Not the embedding's, which may be elsewhere, nor a linear's, which may be quantised.
    like = getattr(modules.layers[part.first], sizes.form.norms.names[0]).weight
    scale, count = decoder.embedding_scale, 1 if devices is None else devices.count
    return FusedModel(
        device=like.device,
        dtype=like.dtype,
        hidden=sizes.hidden,
        embedding_VD=model.get_input_embeddings().weight if part.is_first else None,
        embedding_scale=None if scale is None else float(torch.tensor(scale).to(like.dtype)),
        input_scale=decoder.input_scale,
        residual_scale=decoder.residual_scale,
        layers=layers,
        norm=_norm(modules.norm, sizes.form) if part.is_last else None,
        post=_norm_of(modules.layers[part.end - 1], sizes.form.norms.after_mlp, sizes.form),
        heads=Heads(sizes.num_heads // count, sizes.num_kv_heads // count, sizes.head_size),
        rotaries=tuple(_rotary_table(modules.rotary_emb, rotary, sizes.head_size, like) for rotary in decoder.rotaries),
        attention_scale=decoder.attention_scale,
        activation=sizes.form.activation,
        moved=moved_names(sizes),
        devices=devices,
    )


def _layer(index: int, part: ModelPart, decoder: Decoder, blocks: Any, linears: Mapping[str, SlotLinear]) -> FusedLayer:
    block, form, paths = blocks[index], decoder.sizes.form, list(linears)
    prefix = next(path for path in paths if f"layers.{index}." in path).partition(f"layers.{index}.")[0]
    named = ([f"{prefix}layers.{index}.{name}" for name in names] for names in form.sites)
    qkv, out, gate_up, down = (_product(role, names, linears, paths) for role, names in zip(ROLES, named, strict=True))
    head_norms = None
    if form.has_head_norms:
        q_norm, k_norm = (_norm(norm, form) for norm in (block.self_attn.q_norm, block.self_attn.k_norm))
        head_norms = HeadNorms(q_norm.weight_D, *k_norm, is_wide=form.head_norm == "all")
    return FusedLayer(
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        norm_in=_norm_of(block, form.norms.before_attention, form),
        norm_mid=_norm_of(block, form.norms.before_mlp, form),
        post_in=_norm_of(blocks[index - 1], form.norms.after_mlp, form) if index > part.first else None,
        post_mid=_norm_of(block, form.norms.after_attention, form),
        head_norms=head_norms,
        sites=LayerSites.of(index - part.first, part.end - part.first, len(paths), decoder.sizes.hidden),
        window=decoder.layers[index].window,
        rotary=decoder.layers[index].rotary,
    )


def _norm_of(block: Any, name: str | None, form: LayerForm) -> RmsNorm | None:
    return None if name is None else _norm(getattr(block, name), form)


def _norm(module: Any, form: LayerForm) -> RmsNorm:
    eps = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)
    if form.norm_weight == "one_plus":
        return RmsNorm(1.0 + module.weight.float(), eps, rounds_first=False)
    return RmsNorm(module.weight, eps, rounds_first=form.norm_weight == "factor")


def _rotary_table(module: Any, rotary: Rotary, head_size: int, like: torch.Tensor) -> RotaryTable:
    if rotary.is_none:
        return RotaryTable(torch.zeros(head_size // 2, device=like.device), 1.0)
    prefix = f"{rotary.kind}_" if rotary.kind else ""
    frequencies_F = getattr(module, f"{prefix}inv_freq").float()
    return RotaryTable(frequencies_F, float(getattr(module, f"{prefix}attention_scaling")), rotary.stretch)


def _product(role: str, names: list[str], linears: Mapping[str, SlotLinear], paths: list[str]) -> Product:
    parts = [linears[name] for name in names]
    first = paths.index(names[0])
    assert paths[first : first + len(names)] == names, "linears of a site follow one another"
    site = Site(first, tuple(part.frozen.shape[0] for part in parts), parts[0].frozen.shape[1], role)
    weight = parts[0].frozen if len(parts) == 1 else join([part.frozen for part in parts])
    if len(parts) > 1:
        for part, start, size in zip(parts, site.starts, site.sizes, strict=True):
            part.frozen = weight.part(start, start + size)
    biases = [part.bias_O for part in parts]
    if all(bias is None for bias in biases):
        return Product(site, weight, None)
    zeros = [torch.zeros(size, device=weight_device(weight), dtype=weight.dtype) for size in site.sizes]
    joined = torch.cat([zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)])
    return Product(site, weight, joined)


def weight_device(weight: FrozenWeight) -> torch.device:
    return next(iter(weight.stored.values())).device


def tile_for(model: FusedModel, num_rows: int, row_tile: int | None) -> int | None:
    """`row_tile` if any product of the model needs tiles at this row count, else None: all rows at once."""
    if row_tile is None or num_rows == row_tile:
        return None
    if not is_gpu(model.device):
        return row_tile
    layer = model.layers[0]
    weights = {p.weight.shape: p.weight for p in (layer.qkv, layer.out, layer.gate_up, layer.down)}
    agree = all(_bits_agree(weight, num_rows, row_tile) for weight in weights.values())
    return None if agree else row_tile


@torch.no_grad()
def _bits_agree(weight: FrozenWeight, num_rows: int, row_tile: int) -> bool:
    device = next(iter(weight.stored.values())).device
    generator = torch.Generator(device).manual_seed(0)
    for size, run in ((weight.shape[1], weight.product), (weight.shape[0], weight.input_gradient)):
        x = torch.randn(num_rows, size, dtype=weight.dtype, device=device, generator=generator)
        y = run(x, row_tile)
        if not torch.equal(run(x), y):
            return False
        if weight.adds_up and not torch.equal(run(x, None, y.clone()), run(x, row_tile, y)):
            return False
    return True
