"""Starts an adapter by EVA: A becomes the directions in which its modules' inputs vary most on the job's own data.

The job's first samples, in its own order, run alone through the bare backbone, forward only. So the start is a function
of the job and the backbone: neighbours, other capacities and the time of its seat change no bit. It always runs on the
reference path, whose modules can be observed. Where the model is divided, each part observes its own modules
(`stages/shares.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.adapters.adapter import Adapter
from weft.data.dataset import GlobalBatches
from weft.data.samples import Sample
from weft.kernels.dropout import mix, module_key
from weft.methods.lora.config import EvaSpec
from weft.methods.lora.principal import PrincipalInputs
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples

PASS_TOKENS = 4096
"""Maximum number of tokens of one pass, unless a sample is longer."""
MOST_PASSES = 16
"""Maximum number of passes, converged or not; of text they read 65,536 tokens."""


def start_from_inputs(backbone: Backbone, adapter: Adapter, batches: GlobalBatches, seed: int) -> None:
    """Sets A to its directions; rows without a direction, and B, stay as they are."""
    assert adapter.spec.eva is not None
    ranks = {path: adapter.spec.rank_for(path) for path in adapter.modules}
    set_initial_directions(
        adapter, principal_inputs(backbone, passes(batches.samples_from(0)), ranks, adapter.spec.eva, seed)
    )


def set_initial_directions(adapter: Adapter, found: Mapping[str, torch.Tensor]) -> None:
    tensors = adapter.tensors()
    for path, directions_RD in found.items():
        tensors[path][0][: len(directions_RD)] = directions_RD
    adapter.load(tensors, "eva")


def passes(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Samples in order, split into at most `MOST_PASSES` passes."""
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
    """Leading directions (R, D) of the inputs of linears, by path; R is at most the path's rank in `ranks`."""
    inputs = LinearInputs(backbone, ranks, eva, seed)
    for samples in passes:
        inputs.run(samples)
        if inputs.are_enough:
            break
    return inputs.directions()


class LinearInputs:
    """Inputs of linears of a backbone, or of a part of one, pass by pass."""

    def __init__(self, backbone: Backbone, ranks: Mapping[str, int], eva: EvaSpec, seed: int) -> None:
        self._backbone, self._eva = backbone, eva
        self._paths, self._listener = list(ranks), _Listener(ranks, eva, seed)
        self._row_tile = backbone.reference.row_tile(PASS_TOKENS)

    @torch.no_grad()
    def run(self, samples: list[Sample], entering_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Runs a pass forward and returns the hidden states; `entering_TD`: those of the part of the model before."""
        batch = pack_samples([SlotSample(sample) for sample in samples], self._row_tile, self._backbone.device)
        self._listener.rows_N = _rows(batch, samples, self._eva)
        with ExitStack() as hooks:
            for path in self._paths:
                hook = partial(self._listener.observe, path)
                hooks.callback(self._backbone.linears[path].register_forward_pre_hook(hook).remove)
            left_TD = self._backbone.reference.hidden(batch, self._row_tile, entering_TD=entering_TD)
        self._listener.take_in()
        return left_TD

    @property
    def are_enough(self) -> bool:
        """True if further passes would change nothing that matters."""
        return self._listener.has_converged

    def directions(self) -> dict[str, torch.Tensor]:
        return self._listener.directions()


def _rows(batch: PackedBatch, samples: list[Sample], eva: EvaSpec) -> torch.Tensor:
    if not eva.use_label_mask:
        return torch.arange(batch.num_tokens, device=batch.device)
    own = zip(batch.segments, samples, strict=True)
    rows = np.concatenate([segment.start + np.flatnonzero(sample.supervised) for segment, sample in own])
    return torch.from_numpy(rows).to(batch.device)


class _Listener:
    def __init__(self, ranks: Mapping[str, int], eva: EvaSpec, seed: int) -> None:
        self._ranks, self._eva, self._seed = ranks, eva, seed
        self._known: dict[tuple[str, ...], PrincipalInputs] = {}
        self._input: torch.Tensor | None = None
        self._sharers: list[str] = []
        self.rows_N = torch.zeros(0, dtype=torch.int64)

    def observe(self, path: str, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        (x,) = inputs
        if x is not self._input:
            self.take_in()
        self._input = x
        self._sharers.append(path)

    def take_in(self) -> None:
        """Learns from the last input, once it has entered all its linears."""
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
    def has_converged(self) -> bool:
        return all(known.cosine >= self._eva.tau for known in self._known.values())

    def directions(self) -> dict[str, torch.Tensor]:
        found = [(path, known) for sharers, known in self._known.items() for path in sharers]
        return {path: known.directions_RD[: self._ranks[path]].cpu() for path, known in found}
