"""Decoding on the fused path: sequences whose keys and values stay in pages, read on by any number of tokens each.

New sequences are read as training reads samples, packed side by side, and leave their keys and values in pages. After
that every new token is one row: a pass takes rows of any sequences, writes their keys and values and attends to the
pages. Rows know their sequence and position from small tables, so on a GPU one captured graph serves every pass of up
to as many rows. Products, norms and attention compute a row as training does, to the bit where
`FusedDecoder.has_training_bits` is true.

Shape suffixes: T rows, N sequences of a call, D hidden size, S lines of the page table, E keys and values of a row.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.data.samples import Sample
from weft.kernels.device import Graph, beside, graph_pool, is_gpu, memory_errors, record, synchronise
from weft.kernels.device_event import sent
from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.layers.paged_attention import PAGE, KeyTable, attend_pages
from weft.kernels.lora.tables import BARE, ROW_BLOCK, Needs, SampleRows, SlotTable, table_arrays
from weft.model.fused.graphs import capture_stream
from weft.model.fused.inputs import MIN_SPANS, Inputs, InputShape, attention, input_array, qkv_parts
from weft.model.fused.layer import KeyCache
from weft.model.fused.model import FusedLayer, FusedModel
from weft.model.fused.pages import CachedSequence, KeyPages
from weft.model.fused.step import run_forward
from weft.model.packed import SlotSample, pack_samples
from weft.model.path import Memory
from weft.plan.cost.shape import CPU_ROW_TILE

LOG = logging.getLogger("weft.decoding")
LEAST_ROWS, MOST_ROWS = 64, 512
"""Rows of the smallest and the largest pass over pages."""
MAX_GRAPHS = 12
PROMPT_ROWS = 8192
"""Rows of new sequences that are read together; a longer one is read alone."""
Follow = Callable[[Iterable[int | None]], None]


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a sequence has not read, and where it remembers what it has."""

    tokens: Sequence[int]
    """Those below 0 are on the device: -1 is the first of `chosen_R`."""
    slot: int | None
    cache: dict[Any, Any]
    num_read: int = 0
    num_to_come: int = 0
    """How many more it may have later, at most."""


@dataclass(frozen=True)
class Prompts(KeyCache):
    """Sequences from their first token on, side by side; their keys and values stay in pages."""

    begins = True
    pages: KeyPages
    rows_T: torch.Tensor
    """Rows of the pages for the microbatch's rows; 0 for padding."""

    def attend(self, index: int, layer: FusedLayer, qkv_TE: torch.Tensor, inputs: Inputs, model: FusedModel) -> Any:
        self.pages.write(index, self.rows_T, qkv_TE[:, model.heads.sizes[0] :])
        return attention(qkv_TE, model.heads, inputs, model.attention_scale, layer.window, needs_grad=False).output_THC


@dataclass(frozen=True)
class Continued(KeyCache):
    """Rows that continue sequences."""

    begins = False
    pages: KeyPages
    table: KeyTable
    rows_T: torch.Tensor

    @classmethod
    def at(cls, pages: KeyPages, sequences_T: torch.Tensor, positions_T: torch.Tensor) -> Continued:
        lengths_T = torch.where(sequences_T > 0, positions_T + 1, 0)
        pages_T = pages.pages_SN[sequences_T.long(), positions_T.long() // PAGE]
        return cls(pages, KeyTable(pages.pages_SN, sequences_T, lengths_T), pages_T.long() * PAGE + positions_T % PAGE)

    def attend(self, index: int, layer: FusedLayer, qkv_TE: torch.Tensor, inputs: Inputs, model: FusedModel) -> Any:
        self.pages.write(index, self.rows_T, qkv_TE[:, model.heads.sizes[0] :])
        q_THC, _, _ = qkv_parts(qkv_TE, model.heads)
        keys = self.pages.keys_and_values(index)
        return attend_pages(q_THC, *keys, self.table, model.attention_scale, layer.window)


class StepKey(NamedTuple):
    shape: InputShape
    needs: Needs
    table_version: int
    pages_version: int


@dataclass(frozen=True)
class CapturedStep:
    inputs: Inputs
    sequences_T: torch.Tensor
    left_TD: torch.Tensor
    graph: Graph


@dataclass
class RowOrder:
    """Rows of a pass over pages: sequences of one slot side by side. Kept while the same ones go on."""

    sequences: tuple[tuple[int, int | None, int], ...] = ()
    """(line, slot, number of rows) of each, as they came. A line is soon another sequence's, of another slot."""
    shape: InputShape | None = None
    spans: tuple[SampleRows, ...] = ()
    order: list[int] = field(default_factory=list)
    """Index of each sequence, in the order of its rows."""
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    buffer: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))


def _alike(new: Sequence[NewTokens]) -> dict[int, list[int]]:
    """Indices of those that begin with the same tokens and slot as an earlier one, by the index of the first such."""
    firsts: dict[tuple[int | None, tuple[int, ...]], int] = {}
    found: dict[int, list[int]] = {}
    for index, item in enumerate(new):
        if item.num_read == 0:
            first = firsts.setdefault((item.slot, tuple(item.tokens)), index)
            if first != index:
                found.setdefault(first, []).append(index)
    return found


def _groups(indices: list[int], counts: Sequence[int]) -> list[list[int]]:
    """Sequences in order, in groups of up to PROMPT_ROWS rows."""
    groups: list[list[int]] = []
    room = 0
    for index in indices:
        if counts[index] > room:
            groups.append([])
            room = PROMPT_ROWS
        groups[-1].append(index)
        room -= counts[index]
    return groups


def _put_chosen(ids_T: torch.Tensor, chosen_R: torch.Tensor | None) -> None:
    """Replaces ids below 0 by the tokens they stand for."""
    if chosen_R is not None:
        # A row that failed has chosen no token; what follows it is dropped.
        tokens_T = chosen_R.clamp(min=0)[(-1 - ids_T).clamp(min=0)]
        ids_T.copy_(torch.where(ids_T < 0, tokens_T, ids_T))


class FusedDecoder:
    def __init__(self, model: FusedModel, table: SlotTable, follow: Follow, tile: int, *, has_kernels: bool) -> None:
        """`follow` updates the kernels' copies of adapters by slot. `tile`: rows of a block of frozen products
        in training. `has_kernels`: whether the adapters' part is added within the products, which then need no
        tile."""
        self._model, self._table, self._follow = model, table, follow
        self._tile, self._has_kernels = tile, has_kernels
        self.pages = KeyPages(model)
        self._graphs: dict[StepKey, CapturedStep] = {}
        self._agreeing: dict[int, bool] = {}
        """By the number of rows of a pass: whether it gives them the bits that training gives them."""
        self._pool: Any = None
        self._last = RowOrder()

    @property
    def has_training_bits(self) -> bool:
        """Whether all that was read so far has the bits that training gives it; compared once for each size of pass."""
        return all(self._agreeing.values())

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass may start before the tokens of the one before are on the host; on a CPU nothing is gained."""
        return is_gpu(self._model.device)

    def forget(self) -> None:
        """Frees the pages and graphs; sequences must be read again."""
        self._graphs.clear()
        self._pool, self._last = None, RowOrder()
        if not self.pages.is_empty:
            self.pages.clear()

    def has_lost(self, new: NewTokens, num_leading: int) -> bool:
        """True if pages do not hold just what a sequence has read: they were given up, or a pass failed halfway."""
        held: CachedSequence | None = new.cache.get(CachedSequence)
        if held is None or held.generation != self.pages.generation:
            return new.num_read > 0
        return held.length != (num_leading + new.num_read if new.num_read else 0)

    @torch.no_grad()
    def read(
        self, new: Sequence[NewTokens], leading: Sequence[int], chosen_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The last hidden state after each sequence's tokens (N, D); `leading`: rows in front that adapters fill.
        `chosen_R`: the tokens that a pass before has chosen."""
        alike = _alike(new)
        sequences, counts = self._prepare(new, leading, alike)
        hidden_ND = torch.empty(len(new), self._model.hidden, dtype=self._model.dtype, device=self._model.device)
        later = {index for indices in alike.values() for index in indices}
        starting = [index for index, each in enumerate(sequences) if each.length == 0 and index not in later]
        going = [index for index, each in enumerate(sequences) if each.length > 0]
        for indices in _groups(starting, counts):
            own = [(sequences[index], new[index], leading[index]) for index in indices]
            left_TD, ends = self._start(own)
            hidden_ND.index_copy_(0, self._sent(indices), left_TD[self._sent(ends)])
        for first, indices in alike.items():
            self.pages.copy_last(sequences[first], [sequences[index] for index in indices], counts[first])
            hidden_ND[self._sent(indices)] = hidden_ND[first].clone()
            for index in indices:
                sequences[index].length = counts[first]
        for indices, tokens in self._passes(going, [new[index].tokens for index in going]):
            left_TD, ends = self._go_on([sequences[index] for index in indices], tokens, chosen_R)
            read_ND = left_TD[self._sent(ends)]
            if len(indices) == len(new):
                hidden_ND = read_ND
            else:
                hidden_ND.index_copy_(0, self._sent(indices), read_ND)
        return hidden_ND

    @torch.no_grad()
    def read_every(self, new: NewTokens, num_leading: int) -> torch.Tensor:
        """The last hidden states of one sequence's tokens (L, D)."""
        (sequence,), _ = self._prepare([new], [num_leading], {})
        if sequence.length == 0:
            left_TD, (end,) = self._start([(sequence, new, num_leading)])
            return left_TD[end + 1 - len(new.tokens) : end + 1]
        parts = []
        for _, tokens in self._passes([0], [new.tokens]):
            left_TD, _ = self._go_on([sequence], tokens)
            parts.append(left_TD[: len(tokens[0])].clone())
        return torch.cat(parts)

    @torch.no_grad()
    def read_as_training(self, samples: Sequence[SlotSample]) -> torch.Tensor:
        """The last hidden states before the supervised tokens of whole samples, with the bits of training (N, D)."""
        self._follow(each.slot for each in samples)
        batch = pack_samples(samples, self._tile, self._model.device)
        shape = InputShape(batch.num_rows, max(MIN_SPANS, next_power_of_2(len(samples))), 0, True, False)
        inputs = Inputs(shape, sent(torch.from_numpy(input_array(batch, shape)), self._model.device), batch.spans)
        left_TD = run_forward(self._model, inputs, self._table, self._tile, Memory(), needs_grad=False).left_TD
        return left_TD[batch.supervised_N]

    def _prepare(
        self, new: Sequence[NewTokens], leading: Sequence[int], alike: Mapping[int, Sequence[int]]
    ) -> tuple[list[CachedSequence], list[int]]:
        """Each one's sequence, with pages for its new rows, and the number of these."""
        self._follow(item.slot for item in new)
        sequences = []
        for item in new:
            held: CachedSequence | None = item.cache.get(CachedSequence)
            # Pages of a sequence that nothing was read into may be those of one that it resembled.
            if held is None or held.generation != self.pages.generation or held.length == 0:
                held = item.cache[CachedSequence] = self.pages.open(item.slot)
            sequences.append(held)
        counts = [
            len(item.tokens) + (0 if sequence.length else num_leading)
            for item, sequence, num_leading in zip(new, sequences, leading, strict=True)
        ]
        wanted = [(each, each.length + count) for each, count in zip(sequences, counts, strict=True)]
        later = {index for indices in alike.values() for index in indices}
        self.pages.expect((number, item.num_to_come) for (_, number), item in zip(wanted, new, strict=True))
        self.pages.make_room([each for index, each in enumerate(wanted) if index not in later])
        for first, indices in alike.items():
            for index in indices:
                self.pages.share(sequences[first], *wanted[index])
        self.pages.make_room([wanted[index] for index in later])
        self.pages.publish()
        return sequences, counts

    def _sent(self, indices: Sequence[int]) -> torch.Tensor:
        return sent(torch.tensor(indices, dtype=torch.int64), self._model.device)

    def _start(self, own: Sequence[tuple[CachedSequence, NewTokens, int]]) -> tuple[torch.Tensor, list[int]]:
        """The last hidden states of sequences from their first tokens on, and the last row of each."""
        samples = []
        for _, item, num_leading in own:
            tokens = np.array(item.tokens, dtype=np.int32)
            sample = Sample(tokens, np.zeros(len(tokens), dtype=bool)).led_by(num_leading)
            samples.append(SlotSample(sample, item.slot))
        tile = ROW_BLOCK if self._has_kernels else self._tile
        batch = pack_samples(samples, tile, self._model.device)
        shape = InputShape(batch.num_rows, max(MIN_SPANS, next_power_of_2(len(samples))), 0, True, False)
        inputs = Inputs(shape, sent(torch.from_numpy(input_array(batch, shape)), self._model.device), batch.spans)
        rows = np.zeros(batch.num_rows, dtype=np.int64)
        for (sequence, _, _), segment in zip(own, batch.segments, strict=True):
            offsets = np.arange(segment.end - segment.start)
            rows[segment.start : segment.end] = np.array(sequence.pages)[offsets // PAGE] * PAGE + offsets % PAGE
        cache = Prompts(self.pages, sent(torch.from_numpy(rows), self._model.device))
        left_TD = self._run(inputs, cache)
        for (sequence, _, _), segment in zip(own, batch.segments, strict=True):
            sequence.length = segment.end - segment.start
        return left_TD, [segment.end - 1 for segment in batch.segments]

    def _passes(self, going: list[int], tokens: list[Sequence[int]]) -> list[tuple[list[int], list[Sequence[int]]]]:
        """Sequences and their tokens, pass by pass: a sequence's tokens in order, no more than MOST_ROWS together."""
        passes: list[tuple[list[int], list[Sequence[int]]]] = []
        room = 0
        for index, own in zip(going, tokens, strict=True):
            for start in range(0, len(own), MOST_ROWS):
                piece = own[start : start + MOST_ROWS]
                if len(piece) > room or start:
                    passes.append(([], []))
                    room = MOST_ROWS
                passes[-1][0].append(index)
                passes[-1][1].append(piece)
                room -= len(piece)
        return passes

    def _go_on(
        self,
        sequences: Sequence[CachedSequence],
        tokens: Sequence[Sequence[int]],
        chosen_R: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[int]]:
        """The last hidden states of one pass over pages, and the last row of each sequence."""
        layout = self._layout(sequences, tokens)
        shape = layout.shape
        assert shape is not None
        ids, positions = (shape.layout[name][0] for name in ("ids", "positions"))
        at = 0
        ends = [0] * len(sequences)
        for index in layout.order:
            count, length = len(tokens[index]), sequences[index].length
            layout.buffer[ids + at : ids + at + count] = tokens[index]
            layout.buffer[positions + at : positions + at + count] = np.arange(length, length + count)
            at += count
            ends[index] = at - 1
        numbers = torch.from_numpy(np.concatenate([layout.buffer, layout.lines]))
        if not is_gpu(self._model.device):
            inputs = Inputs(shape, numbers[: len(layout.buffer)], layout.spans, is_step=True)
            _put_chosen(inputs.part("ids"), chosen_R)
            left_TD = self._step(inputs, numbers[len(layout.buffer) :])
        else:
            captured = self._captured(shape)
            captured.inputs.buffer.copy_(numbers.pin_memory(), non_blocking=True)
            _put_chosen(captured.inputs.part("ids"), chosen_R)
            captured.graph.replay()
            left_TD = captured.left_TD
        for sequence, own in zip(sequences, tokens, strict=True):
            sequence.length += len(own)
        return left_TD, ends

    def _layout(self, sequences: Sequence[CachedSequence], tokens: Sequence[Sequence[int]]) -> RowOrder:
        key = tuple((each.line, each.slot, len(own)) for each, own in zip(sequences, tokens, strict=True))
        if key == self._last.sequences:
            return self._last
        slots = [BARE if sequence.slot is None else sequence.slot for sequence in sequences]
        order = sorted(range(len(sequences)), key=slots.__getitem__)
        num_rows = sum(len(own) for own in tokens)
        spans, end = [], 0
        for slot, group in itertools.groupby(order, key=slots.__getitem__):
            start, end = end, end + sum(len(tokens[index]) for index in group)
            spans.append(SampleRows(start, end, slot))
        capacity = max(LEAST_ROWS, next_power_of_2(num_rows))
        if not is_gpu(self._model.device):
            capacity = cdiv(num_rows, CPU_ROW_TILE) * CPU_ROW_TILE
        shape = InputShape(capacity, max(MIN_SPANS, next_power_of_2(len(spans))), 0, True, False)
        buffer = np.zeros(shape.layout["end"][0], dtype=np.int32)
        for name, array in table_arrays(spans, shape.sizes).items():
            start = shape.layout[name][0]
            buffer[start : start + array.size] = array.reshape(-1)
        lines = np.zeros(capacity, dtype=np.int32)
        own_lines = [np.full(len(tokens[index]), sequences[index].line) for index in order]
        lines[:num_rows] = np.concatenate(own_lines)
        self._last = RowOrder(key, shape, tuple(spans), order, lines, buffer)
        return self._last

    def _step(self, inputs: Inputs, sequences_T: torch.Tensor) -> torch.Tensor:
        return self._run(inputs, Continued.at(self.pages, sequences_T, inputs.part("positions")))

    def _run(self, inputs: Inputs, cache: KeyCache) -> torch.Tensor:
        num_rows = inputs.shape.num_rows
        tile = self._tile if not self._has_kernels and self._tile and num_rows % self._tile == 0 else None
        return run_forward(self._model, inputs, self._table, tile, Memory(), needs_grad=False, cache=cache).left_TD

    def _captured(self, shape: InputShape) -> CapturedStep:
        if shape.num_rows not in self._agreeing:
            self._compare(shape.num_rows)
        needs = replace(self._table.needs, drops=False)
        key = StepKey(shape, needs, self._table.version, self.pages.version)
        if key not in self._graphs:
            stale = [old for old in self._graphs if (old.table_version, old.pages_version) != (key[2], key[3])]
            for old in [*stale, *list(self._graphs)[: max(0, len(self._graphs) + 1 - MAX_GRAPHS)]]:
                self._graphs.pop(old, None)
            self._graphs[key] = self._capture(shape)
        return self._graphs[key]

    def _compare(self, num_rows: int) -> None:
        """Notes once whether passes of as many rows agree with training, and warns where they do not."""
        # While the two are compared, passes of the comparison are not compared themselves.
        self._agreeing[num_rows] = True
        try:
            self._agreeing[num_rows] = self._agrees(num_rows)
        except Exception:
            del self._agreeing[num_rows]
            raise
        if not self._agreeing[num_rows]:
            LOG.warning(
                "decoding %d rows at once adds up otherwise than training on this GPU: log-probabilities come from a "
                "training pass over each finished answer.",
                num_rows,
            )

    def _agrees(self, num_rows: int) -> bool:
        """Reads a sequence of the bare model as training does, then its first token and the others in one pass."""
        assert self._model.embedding_VD is not None
        tokens = (np.arange(num_rows + 2) % len(self._model.embedding_VD)).astype(np.int32)
        expected_LD = self.read_as_training([SlotSample(Sample(tokens, np.arange(len(tokens)) > 1))])
        cache: dict[Any, Any] = {}
        self.read([NewTokens(tokens[:1].tolist(), None, cache)], [0])
        read_LD = self.read_every(NewTokens(tokens[1:-1].tolist(), None, cache, num_read=1), 0)
        return torch.equal(read_LD, expected_LD)

    @memory_errors()
    def _capture(self, shape: InputShape) -> CapturedStep:
        device = self._model.device
        self._pool = self._pool or graph_pool()
        size = shape.layout["end"][0]
        # With empty tables no row is of a sequence: what is captured is run on nothing.
        numbers = torch.zeros(size + shape.num_rows, dtype=torch.int32, device=device)
        inputs, sequences_T = Inputs(shape, numbers, is_step=True), numbers[size:]
        stream = capture_stream(device)
        with beside(device, stream):
            self._step(inputs, sequences_T)
        synchronise(device)
        with record(pool=self._pool, stream=stream) as graph:
            left_TD = self._step(inputs, sequences_T)
        return CapturedStep(inputs, sequences_T, left_TD, graph)
