"""Starts an adapter by EVA: A becomes the directions in which its modules' inputs vary most on the job's own data.

The job's first samples, in its own order, run through the bare backbone, forward only and with nobody beside them. So
what is found is a function of the job and the backbone: neighbours, other capacities and when the job gets its place
change no bit. It takes the reference path, whose modules can be listened to, also on a fused backbone. Where the model
is divided, each part hears its own modules (`stages/stage_start.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.adapters.adapter import Adapter
from weft.data.global_batch import GlobalBatches
from weft.data.sample import Sample
from weft.kernels.dropout import mix, module_key
from weft.methods.lora.config import EvaSpec
from weft.methods.lora.principal_inputs import PrincipalInputs
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, PlacedSample, pack_samples

PASS_TOKENS = 4096
"""Most tokens of one pass, unless a sample is longer."""
MOST_PASSES = 16
"""Then it is enough, converged or not: of text that is 65,536 tokens."""


def start_from_inputs(backbone: Backbone, adapter: Adapter, batches: GlobalBatches, seed: int) -> None:
    """Gives A its start; rows for which the data has no direction, and B, stay as they are."""
    assert adapter.spec.eva is not None
    ranks = {path: adapter.spec.rank_for(path) for path in adapter.modules}
    set_initial_directions(
        adapter, principal_inputs(backbone, passes(batches.samples_from(0)), ranks, adapter.spec.eva, seed)
    )


def set_initial_directions(adapter: Adapter, found: Mapping[str, torch.Tensor]) -> None:
    """Puts directions, by path, into A."""
    tensors = adapter.tensors()
    for path, directions_RD in found.items():
        tensors[path][0][: len(directions_RD)] = directions_RD
    adapter.load(tensors, "eva")


def passes(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples in their order, cut into passes, of which there are not too many."""
    own: list[Sample] = []
    done = 0
    for sample in samples:
        if own and sum(each.length for each in own) + sample.length > PASS_TOKENS:
            yield own
            own, done = [], done + 1
            if done == MOST_PASSES:
                return
        own.append(sample)
    if own:
        yield own


def principal_inputs(
    backbone: Backbone, passes: Iterable[list[Sample]], ranks: Mapping[str, int], eva: EvaSpec, seed: int
) -> dict[str, torch.Tensor]:
    """The leading directions (R, D) of the inputs of some linears, by path; R is at most what `ranks` says."""
    inputs = LinearInputs(backbone, ranks, eva, seed)
    for samples in passes:
        inputs.run(samples)
        if inputs.are_enough:
            break
    return inputs.directions()


class LinearInputs:
    """What has entered some linears of a backbone, or of a part of one, pass by pass."""

    def __init__(self, backbone: Backbone, ranks: Mapping[str, int], eva: EvaSpec, seed: int) -> None:
        self._backbone, self._eva = backbone, eva
        self._paths, self._listener = list(ranks), _Listener(ranks, eva, seed)
        self._row_tile = backbone.reference.row_tile(PASS_TOKENS)

    @torch.no_grad()
    def run(self, samples: list[Sample], entering_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Runs a pass forward, which leaves as what is returned; it enters a later part of a model as the one before
        has left it."""
        batch = pack_samples([PlacedSample(sample) for sample in samples], self._row_tile, self._backbone.device)
        self._listener.rows_N = _rows(batch, samples, self._eva)
        with ExitStack() as hooks:
            for path in self._paths:
                heard = partial(self._listener.hear, path)
                hooks.callback(self._backbone.linears[path].register_forward_pre_hook(heard).remove)
            left_TD = self._backbone.reference.hidden(batch, self._row_tile, entering_TD=entering_TD)
        self._listener.take_in()
        return left_TD

    @property
    def are_enough(self) -> bool:
        """Whether more would change nothing that matters."""
        return self._listener.has_heard_enough

    def directions(self) -> dict[str, torch.Tensor]:
        """The leading ones of each linear, by path."""
        return self._listener.directions()


def _rows(batch: PackedBatch, samples: list[Sample], eva: EvaSpec) -> torch.Tensor:
    """The rows that are looked at: those of tokens that count, or all that hold one."""
    if not eva.use_label_mask:
        return torch.arange(batch.num_tokens, device=batch.device)
    own = zip(batch.segments, samples, strict=True)
    rows = np.concatenate([segment.start + np.flatnonzero(sample.supervised) for segment, sample in own])
    return torch.from_numpy(rows).to(batch.device)


class _Listener:
    """Hears the inputs of linears; those that share an input share what is known of it."""

    def __init__(self, ranks: Mapping[str, int], eva: EvaSpec, seed: int) -> None:
        self._ranks, self._eva, self._seed = ranks, eva, seed
        self._known: dict[tuple[str, ...], PrincipalInputs] = {}
        self._input: torch.Tensor | None = None
        self._sharers: list[str] = []
        """Those that this input has come to so far."""
        self.rows_N = torch.zeros(0, dtype=torch.int64)

    def hear(self, path: str, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Is called with what enters a linear."""
        (x,) = inputs
        if x is not self._input:
            self.take_in()
        self._input = x
        self._sharers.append(path)

    def take_in(self) -> None:
        """Learns from the last input, once all that share it have had it."""
        x, sharers = self._input, tuple(self._sharers)
        self._input, self._sharers = None, []
        if x is None:
            return
        if sharers not in self._known:
            generator = torch.Generator().manual_seed(mix(self._seed, module_key(sharers[0]), 0xE7A))
            self._known[sharers] = PrincipalInputs(max(self._ranks[path] for path in sharers), generator)
        known = self._known[sharers]
        if known.cosine < self._eva.tau:
            known.add(x.reshape(-1, x.shape[-1])[self.rows_N].float())

    @property
    def has_heard_enough(self) -> bool:
        """Whether more would change nothing that matters."""
        return all(known.cosine >= self._eva.tau for known in self._known.values())

    def directions(self) -> dict[str, torch.Tensor]:
        """Those of each linear, on the CPU."""
        found = [(path, known) for sharers, known in self._known.items() for path in sharers]
        return {path: known.directions_RD[: self._ranks[path]].cpu() for path, known in found}
