"""Keys and values of sequences in pages, and the table of whose they are.

Pages and lines of the table are taken when a sequence grows and free again when nothing refers to it any more.
Sequences that begin with the same rows share the pages that these fill. There are as many pages as have been needed at
once, but a GPU keeps the margin that admission keeps; if memory is wanted for something else, all can be given up.

Shape suffixes: T rows, S lines of the table, N pages of a line, E keys and values of a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.kernels.device import (
    allocated_bytes,
    empty_cache,
    free_and_total_bytes,
    is_gpu,
    memory_errors,
    reserved_bytes,
)
from weft.kernels.device_event import sent
from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.layers.paged_attention import PAGE
from weft.model.fused.model import FusedModel
from weft.plan.admit import MARGIN

LEAST_PAGES, LEAST_LINES, LEAST_WIDTH = 64, 128, 16
FORESEEN = 256
"""Number of future rows for which a sequence's pages are allocated in advance, because allocating makes graphs
stale."""


@dataclass(eq=False)
class CachedSequence:
    """A sequence of one slot, as far as it has been read."""

    slot: int | None
    line: int
    """Its line in the page table."""
    pages: list[int]
    generation: int
    """That of the pages it was read into; earlier ones are gone."""
    length: int = 0
    """Rows in its pages, leading ones included."""


class KeyPages:
    """Keys and values of all layers, in pages of PAGE rows. Page 0 and line 0 are no sequence's: padding uses them."""

    def __init__(self, model: FusedModel) -> None:
        self._num_layers, self._device = len(model.layers), model.device
        self._sizes = model.heads.sizes[1:]
        self._size, self._dtype = model.heads.size, model.dtype
        self.generation = 0
        """Changes when what the pages hold is lost."""
        self.version = 0
        """Changes when tensors are allocated again: captured graphs are then stale."""
        self.clear()

    def clear(self) -> None:
        self.generation += 1
        self.version += 1
        self._rows = [torch.empty(0, sum(self._sizes), dtype=self._dtype, device=self._device)] * self._num_layers
        self._lines = np.zeros((1, 1), dtype=np.int32)
        self._num_pages, self._free_pages, self._free_lines = 0, list[int](), list[int]()
        self._num_users: dict[int, int] = {}
        """Sequences of each page that is not free."""
        self.pages_SN = torch.zeros((1, 1), dtype=torch.int32, device=self._device)
        self._is_changed = False
        self._expected = 0

    @property
    def is_empty(self) -> bool:
        return self._num_pages == 0

    @property
    def num_used(self) -> int:
        return max(0, self._num_pages - 1 - len(self._free_pages))

    def open(self, slot: int | None) -> CachedSequence:
        """A new sequence; its pages are free again as soon as nothing refers to it."""
        if not self._free_lines:
            self._grow_lines(2 * len(self._lines), self._lines.shape[1])
        sequence = CachedSequence(slot, self._free_lines.pop(), [], self.generation)
        weakref.finalize(sequence, self._close, sequence.line, sequence.pages, self.generation).atexit = False
        return sequence

    def _close(self, line: int, pages: list[int], generation: int) -> None:
        if generation != self.generation:
            return
        self._free_lines.append(line)
        for page in pages:
            self._num_users[page] -= 1
            if not self._num_users[page]:
                del self._num_users[page]
                self._free_pages.append(page)

    def share(self, source: CachedSequence, sequence: CachedSequence, num_rows: int) -> None:
        """Gives a new sequence those pages of another that its first rows fill; they must be the same rows."""
        self._hold(sequence, source.pages[: num_rows // PAGE])

    def copy_last(self, source: CachedSequence, sequences: Sequence[CachedSequence], num_rows: int) -> None:
        """Copies the rows that `share` left out, in a page that they do not fill."""
        index = num_rows // PAGE
        if num_rows % PAGE == 0:
            return
        to_P = torch.tensor([sequence.pages[index] for sequence in sequences], device=self._device)
        for rows in self._rows:
            pages = rows.view(-1, PAGE, rows.shape[1])
            pages[to_P] = pages[source.pages[index]].clone()

    def _hold(self, sequence: CachedSequence, pages: Sequence[int]) -> None:
        held = len(sequence.pages)
        for page in pages:
            self._num_users[page] = self._num_users.get(page, 0) + 1
        sequence.pages.extend(pages)
        if len(sequence.pages) > self._lines.shape[1]:
            self._grow_lines(len(self._lines), next_power_of_2(len(sequence.pages)))
        self._lines[sequence.line, held : len(sequence.pages)] = pages
        self._is_changed = True

    def expect(self, num_rows: Iterable[tuple[int, int]]) -> None:
        """Sets the numbers of rows, now and at most, that sequences will soon have; a growing cache allocates pages for
        these too."""
        self._expected = sum(cdiv(now + min(to_come, FORESEEN), PAGE) for now, to_come in num_rows)

    def make_room(self, wanted: Sequence[tuple[CachedSequence, int]]) -> None:
        """Gives each sequence the pages for its number of rows. Running out of memory changes no sequence."""
        missing = [(sequence, cdiv(num_rows, PAGE) - len(sequence.pages)) for sequence, num_rows in wanted]
        missing = [(sequence, number) for sequence, number in missing if number > 0]
        total = sum(number for _, number in missing)
        if total > len(self._free_pages):
            self._grow(total - len(self._free_pages))
        for sequence, number in missing:
            self._hold(sequence, [self._free_pages.pop() for _ in range(number)])

    def publish(self) -> None:
        """Sends the page table to the device if it has changed."""
        if self._is_changed:
            self.pages_SN.copy_(sent(torch.from_numpy(self._lines), self._device))
            self._is_changed = False

    def keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (part.unflatten(1, (-1, self._size)) for part in self._rows[layer].split(self._sizes, dim=1))
        return k, v

    def write(self, layer: int, rows_T: torch.Tensor, kv_TE: torch.Tensor) -> None:
        self._rows[layer].index_copy_(0, rows_T, kv_TE)

    def _grow(self, missing: int) -> None:
        """Twice as many pages or those expected, or as many as are needed if there is no memory for that."""
        least = max(1, self._num_pages) + missing
        more = max(least, 2 * self._num_pages, LEAST_PAGES)
        for number in dict.fromkeys((max(more, 1 + self._expected), more, least)):
            try:
                self._allocate(number)
                return
            except torch.OutOfMemoryError:
                empty_cache(self._device)
                if number == least:
                    raise

    @memory_errors()
    def _allocate(self, number: int) -> None:
        size = sum(max(0, number * PAGE - len(rows)) * rows.shape[1] for rows in self._rows) * self._dtype.itemsize
        if is_gpu(self._device):
            free_bytes, total_bytes = free_and_total_bytes(self._device)
            unused_bytes = free_bytes + reserved_bytes(self._device) - allocated_bytes(self._device)
            if size > unused_bytes - MARGIN * total_bytes:
                raise torch.OutOfMemoryError(f"no memory for {number} pages of keys and values")
        self.version += 1
        # Layer by layer: what was allocated before memory ran out is used at the next try.
        for layer, rows in enumerate(self._rows):
            if len(rows) < number * PAGE:
                self._rows[layer] = rows.new_empty(number * PAGE, rows.shape[1])
                self._rows[layer][: len(rows)] = rows
                del rows
        self._free_pages.extend(range(max(1, self._num_pages), number))
        self._num_pages = number

    def _grow_lines(self, number: int, width: int) -> None:
        number, width = max(number, LEAST_LINES), max(width, LEAST_WIDTH)
        lines = np.zeros((number, width), dtype=np.int32)
        held = self._lines
        lines[: len(held), : held.shape[1]] = held
        self.pages_SN = torch.zeros(lines.shape, dtype=torch.int32, device=self._device)
        self.version += 1
        self._free_lines.extend(range(len(held), number))
        self._lines, self._is_changed = lines, True
