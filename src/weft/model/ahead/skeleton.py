"""A fused model with shapes and no numbers, made of config.json alone: enough to know every kernel it launches.

Its tensors are on the meta device. Biases are left out: no kernel of ours sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.adapters.frozen import FrozenWeight, join, quantise
from weft.kernels.layers.rms_norm import RmsNorm
from weft.kernels.layers.rotary import HeadNorms, Heads
from weft.kernels.lora.tables import Site
from weft.model.fused.model import ROLES, SIDES, FusedLayer, FusedModel, LayerSites, Product, RotaryTable
from weft.model.load import fp8_copies
from weft.model.loss import Head
from weft.plan.families.description import Decoder
from weft.plan.families.kept import moved_names
from weft.plan.families.registry import describe

META = torch.device("meta")


def skeleton(config: Mapping[str, Any], dtype: torch.dtype, quantize: str, tensor: int = 1) -> FusedModel:
    """The model of a configuration, with one layer of each kind instead of all.

    `tensor`: devices that share every layer; what one of them has.
    """
    decoder = describe(with_rotary(config))
    sizes = decoder.sizes
    assert sizes.form.activation is not None
    maker = _Maker(decoder, dtype, quantize, tensor)
    telling = _distinct_layers(decoder)
    layers = tuple(maker.layer(place, index, len(telling)) for place, index in enumerate(telling))
    return FusedModel(
        device=META,
        dtype=dtype,
        hidden=sizes.hidden,
        embedding_VD=maker.empty(sizes.vocabulary, sizes.hidden),
        embedding_scale=decoder.embedding_scale,
        layers=layers,
        norm=maker.norm(sizes.hidden),
        post=maker.norm(sizes.hidden) if sizes.form.norms.after_mlp else None,
        heads=Heads(sizes.num_heads // tensor, sizes.num_kv_heads // tensor, sizes.head_size),
        rotaries=tuple(maker.rotary(rotary.share) for rotary in decoder.rotaries),
        attention_scale=decoder.attention_scale,
        activation=sizes.form.activation,
        moved=moved_names(sizes),
    )


def skeleton_head(config: Mapping[str, Any], dtype: torch.dtype) -> Head:
    """The output head of a configuration."""
    sizes = describe(config).sizes
    weight_VD = torch.empty(sizes.vocabulary, sizes.hidden, dtype=dtype, device=META)
    return Head(weight_VD, softcap=config.get("final_logit_softcapping"))


def with_rotary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration in which the share of a head that is turned stands where transformers 5 keeps it."""
    if config.get("rope_parameters") or "partial_rotary_factor" not in config:
        return config
    return {**config, "rope_parameters": {"partial_rotary_factor": config["partial_rotary_factor"]}}


def _distinct_layers(decoder: Decoder) -> list[int]:
    """The first layer and the second, which differ in what comes before them, and the first of each other kind."""
    first = {decoder.layers[index]: index for index in reversed(range(1, len(decoder.layers)))}
    return sorted({0, *first.values()})


class _Maker:
    """Makes the parts of one model."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, quantize: str, tensor: int) -> None:
        self._decoder, self._tensor = decoder, tensor
        self._dtype = dtype
        self._quantize = quantize
        linears = decoder.sizes.linears.values()
        self._copies = fp8_copies(decoder.sizes.num_layers * sum(out * size for out, size in linears), META)

    def empty(self, *shape: int) -> torch.Tensor:
        """A tensor of the model's type."""
        return torch.empty(shape, dtype=self._dtype, device=META)

    def norm(self, size: int) -> RmsNorm:
        """As `fuse` makes it; its epsilon is no part of a kernel."""
        if self._decoder.sizes.form.norm_weight == "factor":
            return RmsNorm(self.empty(size), 1e-6)
        return RmsNorm(self.empty(size).float(), 1e-6, rounds_first=False)

    def rotary(self, share: float) -> RotaryTable:
        """For a share of a head's numbers."""
        number = int(self._decoder.sizes.head_size * share) // 2
        return RotaryTable(torch.empty(number, device=META), 1.0)

    def layer(self, place: int, index: int, number: int) -> FusedLayer:
        """A layer of the model, and its place among the `number` that are made."""
        sizes, kind = self._decoder.sizes, self._decoder.layers[index]
        names, module = sizes.form.norms, place * len(sizes.linears)
        products = []
        for role, site in zip(ROLES, sizes.sites, strict=True):
            products.append(self._product(role, module, [sizes.linears[name] for name in site]))
            module += len(site)
        qkv, out, gate_up, down = products
        head_norms = None
        if sizes.form.has_head_norms:
            q_norm, k_norm = self.norm(sizes.head_size), self.norm(sizes.head_size)
            head_norms = HeadNorms(q_norm.weight_D, *k_norm)
        return FusedLayer(
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
            norm_in=self.norm(sizes.hidden),
            norm_mid=self.norm(sizes.hidden),
            post_in=self.norm(sizes.hidden) if names.after_mlp and index else None,
            post_mid=self.norm(sizes.hidden) if names.after_attention else None,
            head_norms=head_norms,
            places=LayerSites.of(place, number, number * len(sizes.linears), sizes.hidden),
            window=kind.window,
            rotary=kind.rotary,
        )

    def _product(self, role: str, module: int, linears: list[tuple[int, int]]) -> Product:
        """A site of linears with these outputs and inputs, or what one device has of it."""
        weights = [self._weight(role, *shape) for shape in linears]
        site = Site(module, tuple(weight.shape[0] for weight in weights), weights[0].shape[1], role)
        return Product(site, weights[0] if len(weights) == 1 else join(weights), None)

    def _weight(self, role: str, num_out: int, num_in: int) -> FrozenWeight:
        """Stored as it is loaded: first as a whole."""
        whole = quantise(self.empty(num_out, num_in), self._quantize, copies=self._copies)
        if SIDES[role] == "outputs":
            num_out //= self._tensor
        else:
            num_in //= self._tensor
        return whole.cut(slice(0, num_out), slice(0, num_in))
