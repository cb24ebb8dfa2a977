"""The cost model of a profile: what was measured on one device in one piece, shared out over stages.

A stage's share of rows is its share of the products' weights, the head's counted on the last stage; of all else, its
share of layers. Transfers were not measured: they come from the hardware table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.plan.cost.fit import Fit, MicrobatchLoad
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.profile import Profile
from weft.plan.cost.shape import ModelShape, stage_layers

PLAIN_LINK = 25e9
"""Bytes per second to a neighbour on a device the table does not know: sixteen lanes of PCIe 4."""

KEPT_TERMS = ("rows", "pairs", "rank_tokens", "rank_rows")
"""Of memory: what a microbatch brings and, all but one layer's working space, leaves until its way back."""


def check_profile(profile: Profile, shape: ModelShape, quantize: str, recompute: str, where: str) -> None:
    """ConfigError for a profile of another backbone, or of one that is stored or run in another way."""
    setup = profile.setup
    if (setup.hidden, setup.num_layers, setup.head_weights) != (shape.hidden, shape.num_layers, shape.head_weights):
        raise ConfigError(
            f"is of {setup.model}, {setup.num_layers} layers of {setup.hidden} and a head of {setup.head_weights:,}; "
            f"{shape.name} has {shape.num_layers} of {shape.hidden} and {shape.head_weights:,}.",
            where=where,
        )
    for name, asked in (("quantize", quantize), ("recompute", recompute)):
        if getattr(setup, name) != asked:
            raise ConfigError(f"was measured with {name} {getattr(setup, name)}; this run has {asked}.", where=where)


@dataclass(frozen=True)
class ProfiledCost:
    """A `CostModel` from measurements."""

    profile: Profile
    num_stages: int = 1
    rank: int = 16
    """Of the adapters in a microbatch."""
    num_jobs: int = 1
    """Adapters in a microbatch."""
    split: tuple[int, ...] | None = None
    """Layers of every stage; None: as equal as can be."""

    def __post_init__(self) -> None:
        stage_layers(self.profile.setup.num_layers, self.num_stages, self.split)

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        """One microbatch forward through one stage; an empty one takes no time."""
        return self._share_s("forward_s", lengths, stage)

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        """The same, backward."""
        return self._share_s("backward_s", lengths, stage)

    def transfer_s(self, num_tokens: int) -> float:
        """Activations, or their gradients, of so many tokens from one stage to the next in the same machine."""
        setup = self.profile.setup
        return num_tokens * setup.hidden * setup.activation_bytes / self._link_rate

    def step_s(self, stage: int) -> float:
        """One job's optimizer step on one stage."""
        setup = self.profile.setup
        parameters = self.rank * setup.layer_adapter_width * self._layers(stage)
        return self.profile.fits["step_s"].predict(replace(MicrobatchLoad.of([], parameters), jobs=1))

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        """What a stage keeps of a microbatch between its forward and its backward."""
        load = self._load(lengths)
        prices = self.profile.fits["peak_bytes"].prices
        kept = sum(prices[term] * float(getattr(load, term)) for term in KEPT_TERMS)
        return round(kept * self._layers(stage) / self.profile.setup.num_layers)

    def total_bytes(self, microbatch: Sequence[tuple[int, Sequence[int]]], ranks: Sequence[int]) -> int:
        """What training takes on one device, with the margin of the fit's own error.

        The microbatch is each job's rank and the lengths of its samples; `ranks` are those of all adapters.
        """
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
        own = [lengths[job::jobs] for job in range(jobs)]
        return MicrobatchLoad.of([(self.rank, samples) for samples in own], 0, self.profile.setup.row_tile)

    def _layers(self, stage: int) -> int:
        return stage_layers(self.profile.setup.num_layers, self.num_stages, self.split)[stage]

    @property
    def _link_rate(self) -> float:
        try:
            return find_hardware(self.profile.setup.device).link_rate
        except ConfigError:
            return PLAIN_LINK
