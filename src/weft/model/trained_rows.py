"""Trained rows of the input embedding and of the output head, and the loss of jobs that have some.

In the logits of its own job alone a trained row replaces the frozen one:
    x[v] = s · (h · rows[k] + b[v]) where token v is its k-th,   drows[k] += s · Σ_n dx_n[v] h_n
The job's samples go through the head one by one, in blocks of a fixed size that begin with the sample, so that neither
neighbours nor the cut into microbatches change a bit of the logits or of that sum. All other rows go through the frozen
head as usual. Nothing waits for the device.

Shape suffixes: N supervised rows, B rows of a block, K tokens, D hidden size, V vocabulary; 2: losses, then hits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from weft.adapters.parts import INPUT_ROWS, OUTPUT_ROWS, RowsShape, TokenRows
from weft.adapters.routing import add_product
from weft.data.tokenise import new_token_ids, with_new_tokens
from weft.errors import ConfigError
from weft.kernels.device_event import sent
from weft.kernels.layers.cross_entropy import cross_entropy_rows
from weft.methods.lora.config import OwnRows
from weft.model.loss import BlockedLoss, Head
from weft.model.model_part import TIED, ModelPart
from weft.model.packed import PackedBatch
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Embeddings:
    def __init__(self, model: PreTrainedModel, tokenizer: Any, part: ModelPart | None = None) -> None:
        self._tokenizer = tokenizer
        inputs: Any = model.get_input_embeddings()
        outputs: Any = model.get_output_embeddings()
        named = {module: path for path, module in model.named_modules()}
        self.paths = {INPUT_ROWS: named[inputs], OUTPUT_ROWS: named[outputs]}
        self._modules = {INPUT_ROWS: inputs, OUTPUT_ROWS: outputs}
        self.is_tied: bool = getattr(model, TIED, inputs.weight is outputs.weight)
        is_here = {INPUT_ROWS: part is None or part.is_first, OUTPUT_ROWS: part is None or part.is_last}
        self._here = {name for name, here in is_here.items() if here}

    @property
    def input_scale(self) -> float:
        inputs = self._modules[INPUT_ROWS]
        scale = getattr(inputs, "embed_scale", None)
        return 1.0 if scale is None else float(torch.as_tensor(scale).to(inputs.weight.dtype))

    def shapes(self, spec: AdapterSpec) -> dict[str, RowsShape]:
        """The rows that an adapter trains, by name; ConfigError if the model has none; those of the whole for a
        part."""
        own = self._resolved(spec)
        self._check(own, spec)
        found = {}
        for name, ids, is_whole in (
            (INPUT_ROWS, own.inputs, own.all_inputs),
            (OUTPUT_ROWS, own.outputs, own.all_outputs),
        ):
            if ids is not None or is_whole:
                weight_VD = self._modules[name].weight
                num_known = len(self._tokenizer) if spec.new_tokens else weight_VD.shape[0]
                is_tied = self.is_tied and name == INPUT_ROWS and not is_whole and not own.all_outputs
                array = None if ids is None else np.array(ids, dtype=np.int64)
                ends = (INPUT_ROWS, OUTPUT_ROWS) if is_tied else (name,)
                found[name] = RowsShape(array, weight_VD, num_known, ends)
        return found

    def shapes_here(self, spec: AdapterSpec) -> dict[str, RowsShape]:
        """The rows in this part of the model; embedding and head of tied rows may be in two parts."""
        found = {}
        for name, shape in self.shapes(spec).items():
            ends = tuple(end for end in shape.ends if end in self._here)
            if ends:
                found[name] = dataclasses.replace(shape, ends=ends)
        return found

    def _resolved(self, spec: AdapterSpec) -> OwnRows:
        """The rows including those of new tokens; rows of a tied head are those of the embedding."""
        own, new = spec.own_rows, new_token_ids(self._tokenizer, spec.new_tokens)
        if self.is_tied and own.outputs is not None:
            if own.outputs != own.inputs:
                raise ConfigError(
                    "the output head is tied to the input embedding; name tokens of the embedding, which are its too.",
                    where="adapter.trainable_token_indices",
                )
            own = dataclasses.replace(own, outputs=None)
        if not new:
            return own
        inputs, outputs = (tuple(dict.fromkeys([*(ids or ()), *new])) for ids in (own.inputs, own.outputs))
        return dataclasses.replace(own, inputs=inputs, outputs=None if self.is_tied else outputs)

    def _check(self, own: OwnRows, spec: AdapterSpec) -> None:
        if own.all_outputs and getattr(self._modules[OUTPUT_ROWS], "bias", None) is not None:
            found = f"{self.paths[OUTPUT_ROWS]} of the backbone has a bias"
            raise ConfigError(
                f"{found}, which jobs cannot train; leave the output head out.", where="adapter.modules_to_save"
            )
        num_rows = self._modules[INPUT_ROWS].weight.shape[0]
        if spec.new_tokens and not self._tokenizer.is_fast:
            raise ConfigError(
                "the backbone's tokenizer has no tokenizer.json, in which new tokens are written.",
                where="adapter.new_tokens",
            )
        if spec.new_tokens and len(self._tokenizer) > num_rows:
            found = f"the tokenizer has {len(self._tokenizer):,} tokens and the backbone rows of {num_rows:,}"
            raise ConfigError(f"{found}, so new tokens have no free rows; leave them out.", where="adapter.new_tokens")
        new = new_token_ids(self._tokenizer, spec.new_tokens)
        for name, ids in ((INPUT_ROWS, own.inputs), (OUTPUT_ROWS, own.outputs)):
            beyond = [one for one in ids or () if one >= num_rows and one not in new]
            if beyond:
                raise ConfigError(
                    f"got token {beyond[0]}; {self.paths[name]} of the backbone has rows 0 to {num_rows - 1}.",
                    where="adapter.trainable_token_indices",
                    hint="New tokens are named by new_tokens.",
                )

    def tokenizer_for(self, spec: AdapterSpec) -> Any:
        """The tokenizer to write beside an adapter: one with its new tokens, or None if it has none."""
        return with_new_tokens(self._tokenizer, spec.new_tokens) if spec.new_tokens else None

    def named(self, spec: AdapterSpec) -> AdapterSpec:
        """The same adapter with this model's module names, as in its files."""
        own, shapes = spec.own_rows, self.shapes(spec)
        leaves = {name: path.rpartition(".")[2] for name, path in self.paths.items()}
        saved = [leaves[name] for name, whole in zip(leaves, (own.all_inputs, own.all_outputs), strict=True) if whole]
        ids = {leaves[name]: tuple(map(int, s.ids)) for name, s in shapes.items() if s.ids is not None}
        indices: Any = ids[leaves[INPUT_ROWS]] if list(ids) == [leaves[INPUT_ROWS]] else ids or None
        return dataclasses.replace(spec, trainable_token_indices=indices, modules_to_save=tuple(saved) or None)


class SampleHead:
    def __init__(self, frozen: Head, own: TokenRows, dtype: torch.dtype) -> None:
        self._own = own
        self._rows_KD = own.rows_KD.to(dtype)
        self._frozen = frozen if own.ids is not None else replace(frozen, weight_VD=self._rows_KD)
        self._ids_K = None if own.ids is None else sent(torch.from_numpy(own.ids), self._rows_KD.device)
        self.num_tokens = len(frozen.weight_VD)
        """V, the backbone's tokens and then the job's new tokens."""
        if own.ids is not None:
            self.num_tokens = max(self.num_tokens, int(own.ids.max()) + 1)
        self.softcap = frozen.softcap

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return self._frozen.capped(self.linear(hidden_BD))

    def linear(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) in the type of the hidden states, before the soft cap."""
        raw_BV = self._frozen.linear(hidden_BD)
        if self._ids_K is None:
            return raw_BV
        num_new = self.num_tokens - raw_BV.shape[1]
        raw_BV = F.pad(raw_BV, (0, num_new)) if num_new else raw_BV
        own_BK = hidden_BD @ self._rows_KD.t()
        if self._frozen.bias_V is not None:
            own_BK.add_(F.pad(self._frozen.bias_V, (0, num_new))[self._ids_K])
        if self._frozen.scale is not None:
            own_BK.mul_(self._frozen.scale)
        return raw_BV.index_copy_(1, self._ids_K, own_BK)

    def gradients(self, hidden_BD: torch.Tensor, grad_BV: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states (B, D) from that of `linear`; adds that of the trained rows."""
        scale = 1.0 if self._frozen.scale is None else self._frozen.scale
        if self._ids_K is None:
            add_product(self._own.grad_KD, grad_BV, hidden_BD, scale)
            return self._frozen.input_gradient(grad_BV)
        grad_BK = grad_BV[:, self._ids_K]
        add_product(self._own.grad_KD, grad_BK, hidden_BD, scale)
        of_others_BV = grad_BV.index_fill_(1, self._ids_K, 0)[:, : len(self._frozen.weight_VD)]
        grad_BD = self._frozen.input_gradient(of_others_BV)
        return grad_BD.add_(grad_BK @ self._rows_KD, alpha=scale)

    def end_sample(self) -> None:
        """Must be called once all blocks of a sample have added to the gradient of the trained rows."""
        if self._own.any_order_sums is not None:
            self._own.any_order_sums.take_sample()


@dataclass(frozen=True, eq=False)
class SampleHeadLoss:
    plain: BlockedLoss
    heads: Mapping[int, SampleHead]
    slots: tuple[int | None, ...]
    segments: np.ndarray

    def among(self, rows: np.ndarray) -> SampleHeadLoss:
        return replace(self, segments=self.segments[rows])

    @torch.no_grad()
    def __call__(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `BlockedLoss`; also adds the gradients of trained rows."""
        results_2N = torch.empty(2, len(hidden_ND), device=hidden_ND.device)
        grad_ND = None if weights_N is None else torch.empty_like(hidden_ND)
        has_own = np.array([slot in self.heads for slot in self.slots], dtype=np.bool_)[self.segments]
        others_N = sent(torch.from_numpy(np.flatnonzero(~has_own)), hidden_ND.device)
        weights = None if weights_N is None else weights_N[others_N]
        results_2N[:, others_N], found = self.plain(hidden_ND[others_N], targets_N[others_N], weights)
        if grad_ND is not None and found is not None:
            grad_ND[others_N] = found
        for head, own in self._samples():
            for start in range(own.start, own.stop, self.plain.block):
                rows = slice(start, min(start + self.plain.block, own.stop))
                weights = None if weights_N is None else weights_N[rows]
                results_2N[:, rows], found = self._block(head, hidden_ND[rows], targets_N[rows], weights)
                if grad_ND is not None and found is not None:
                    grad_ND[rows] = found
            if grad_ND is not None:
                head.end_sample()
        return results_2N, grad_ND

    def _samples(self) -> Iterator[tuple[SampleHead, slice]]:
        edges = [0, *(np.flatnonzero(np.diff(self.segments)) + 1).tolist(), len(self.segments)]
        for start, end in itertools.pairwise(edges):
            slot = self.slots[self.segments[start]] if end > start else None
            if slot is not None and slot in self.heads:
                yield self.heads[slot], slice(start, end)

    def _block(
        self, head: SampleHead, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        count, fill = len(hidden_ND), self.plain.block - len(hidden_ND)
        hidden_BD = F.pad(hidden_ND, (0, 0, 0, fill))
        logits_BV = head.linear(hidden_BD)
        weights_B = None if weights_N is None else F.pad(weights_N, (0, fill))
        results_2B = cross_entropy_rows(logits_BV, F.pad(targets_N, (0, fill)), weights_B, head.softcap)
        grad_BD = None if weights_N is None else head.gradients(hidden_BD, logits_BV)[:count]
        return results_2B[:, :count], grad_BD


def logits_of(
    head: Head, own: Mapping[int, TokenRows], hidden_ND: torch.Tensor, slots: Sequence[int | None]
) -> torch.Tensor:
    """Logits of rows (N, V), each by the head of its slot; -inf for new tokens of other slots."""
    logits = head.capped(head.raw_logits(hidden_ND))
    heads = _own_heads(head, slots, own, hidden_ND.dtype)
    num_tokens = max([logits.shape[1], *(found.num_tokens for found in heads.values())])
    if num_tokens > logits.shape[1]:
        logits = F.pad(logits, (0, num_tokens - logits.shape[1]), value=-torch.inf)
    for slot, found in heads.items():
        indices = [index for index, other in enumerate(slots) if other == slot]
        mine = found.logits(hidden_ND[indices])
        logits[indices, : mine.shape[1]] = mine
    return logits


def loss_of(
    plain: BlockedLoss, batch: PackedBatch, own: Mapping[int, TokenRows], dtype: torch.dtype
) -> BlockedLoss | SampleHeadLoss:
    """The loss of a microbatch, given the trained rows of jobs by slot."""
    heads = _own_heads(plain.head, batch.segment_slots, own, dtype)
    if not heads:
        return plain
    segments = np.repeat(np.arange(len(batch.counts)), batch.counts)
    return SampleHeadLoss(plain, heads, batch.segment_slots, segments)


def _own_heads(
    head: Head, slots: Collection[int | None], own: Mapping[int, TokenRows], dtype: torch.dtype
) -> dict[int, SampleHead]:
    return {slot: SampleHead(head, rows, dtype) for slot, rows in own.items() if slot in slots}
