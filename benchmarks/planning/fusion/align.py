"""Aligns samples of several jobs to chunks of one length, so that a fused task's batch is a rectangle.

1. Within a global batch, each job's samples are laid end to end into packs, in the job's own order.
2. Packs are cut into chunks of `chunk_tokens`, a power of two; only a pack's last chunk is padded. Where a cut goes
   through a sample, the later chunk needs the keys and values of the earlier ones that hold the sample's beginning, and
   runs after them.

Chunk length: the greatest power of two that divides all sample lengths, but at least a floor below which chunks would
leave the device idle. Problem of step 1, for every job: min chunks (padding), then min chunks that wait for another,
subject to no pack being longer than `pack_tokens`. Method: dynamic programming over the job's cut points, O(n · k²) for
k samples in the fullest pack; tests prove it against all cut points, and that no token is lost. Padding is below one
chunk per pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.errors import PlanError

FLOOR_TOKENS = 64
"""Smallest chunk: below, kernels have too few rows and the keys and values of earlier chunks are read too often."""


@dataclass(frozen=True, slots=True)
class ChunkPiece:
    """A run of one sample's tokens inside a chunk."""

    sample: int
    """Place in the job's global batch."""
    start: int
    """First token of the sample that is in this chunk."""
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """`chunk_tokens` places for tokens of one job."""

    job: str
    pack: int
    pieces: tuple[ChunkPiece, ...]
    after: int | None
    """The chunk, by number, that holds the tokens before its first piece; None if a sample begins here."""
    context_chunks: int
    """Earlier chunks of which it reads keys and values; they follow each other up to this one."""

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(p.length for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Waste:
    """What a layout computes, and how much of that no sample needs."""

    rows: int
    """Tokens computed, padding included."""
    padding_tokens: int
    pairs: int
    """Query-key pairs computed by causal attention over the layout."""
    needless_pairs: int
    """Those of padding, and between different samples."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Samples of one global batch of several jobs in chunks of one length."""

    chunk_tokens: int
    pack_tokens: int
    """Longest pack."""
    chunks: tuple[Chunk, ...]
    """Job by job; a chunk comes after the one it needs."""
    chunked: Waste
    packed: Waste
    """If the same packs were rows of `pack_tokens`, each attended to as one sequence."""
    padded: Waste
    """If every sample were a row of the longest sample's length."""


def align(
    lengths: Mapping[str, Sequence[int]], *, floor_tokens: int = FLOOR_TOKENS, pack_tokens: int | None = None
) -> Alignment:
    """Chunks for these jobs' samples. Packs are at most as long as the longest sample, in whole chunks, if not said."""
    samples = [n for own in lengths.values() for n in own]
    chunk = chunk_length(samples, floor_tokens)
    longest = math.ceil(max(samples) / chunk) * chunk
    limit = longest if pack_tokens is None else pack_tokens
    if limit < longest or limit % chunk:
        raise PlanError(f"pack_tokens is {limit}; use a multiple of the chunk length {chunk} of at least {longest}.")
    chunks: list[Chunk] = []
    num_packs = 0
    for job in sorted(lengths):
        for first, end in _packs(lengths[job], chunk, limit):
            chunks += _cut(job, num_packs, len(chunks), range(first, end), lengths[job], chunk)
            num_packs += 1
    contexts = [c.context_chunks for c in chunks]
    chunked_pairs = sum(context * chunk * chunk + _causal(chunk) for context in contexts)
    return Alignment(
        chunk_tokens=chunk,
        pack_tokens=limit,
        chunks=tuple(chunks),
        chunked=_waste(samples, len(chunks) * chunk, chunked_pairs),
        packed=_waste(samples, num_packs * limit, num_packs * _causal(limit)),
        padded=_waste(samples, len(samples) * max(samples), len(samples) * _causal(max(samples))),
    )


def chunk_length(lengths: Iterable[int], floor_tokens: int = FLOOR_TOKENS) -> int:
    """The greatest power of two that divides all lengths, or the floor if that is more."""
    if floor_tokens < 1 or floor_tokens & (floor_tokens - 1):
        raise PlanError(f"floor_tokens is {floor_tokens}; use a power of two.")
    values = list(lengths)
    if not values or min(values) < 1:
        raise PlanError(f"sample lengths are {values}; use one or more, each at least 1.")
    divisor = math.gcd(*values)
    return max(divisor & -divisor, floor_tokens)


def _packs(lengths: Sequence[int], chunk: int, limit: int) -> list[tuple[int, int]]:
    """Cut points (first, end) with the fewest chunks, then the fewest that wait, then the fewest packs."""
    best: list[tuple[tuple[int, int, int], int]] = [((0, 0, 0), 0)]
    for end in range(1, len(lengths) + 1):
        options = []
        tokens = 0
        for first in range(end - 1, -1, -1):
            tokens += lengths[first]
            if tokens > limit:
                break
            (chunks, waits, packs), _ = best[first]
            inside = _num_waiting(lengths[first:end], chunk)
            options.append(((chunks + math.ceil(tokens / chunk), waits + inside, packs + 1), first))
        best.append(min(options))
    packs_back: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        first = best[end][1]
        packs_back.append((first, end))
        end = first
    return packs_back[::-1]


def _num_waiting(lengths: Sequence[int], chunk: int) -> int:
    """Chunk boundaries of one pack that go through a sample."""
    waiting = start = 0
    for length in lengths:
        # Multiples of the chunk strictly between the sample's start and end.
        waiting += (start + length - 1) // chunk - start // chunk
        start += length
    return waiting


def _cut(job: str, pack: int, base: int, members: range, lengths: Sequence[int], chunk: int) -> list[Chunk]:
    """The chunks of one pack; its first has the number `base`."""
    rows: list[list[ChunkPiece]] = [[]]
    begins: dict[int, int] = {}
    free = chunk
    for sample in members:
        done = 0
        while done < lengths[sample]:
            if not free:
                rows.append([])
                free = chunk
            begins.setdefault(sample, len(rows) - 1)
            take = min(free, lengths[sample] - done)
            rows[-1].append(ChunkPiece(sample, done, take))
            done, free = done + take, free - take
    chunks = []
    for place, pieces in enumerate(rows):
        context = place - begins[pieces[0].sample]
        chunks.append(Chunk(job, pack, tuple(pieces), base + place - 1 if context else None, context))
    return chunks


def _waste(samples: Sequence[int], rows: int, pairs: int) -> Waste:
    return Waste(rows, rows - sum(samples), pairs, pairs - sum(_causal(n) for n in samples))


def _causal(length: int) -> int:
    return length * (length + 1) // 2
