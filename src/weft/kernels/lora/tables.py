"""What a kernel needs to know, as small device tensors: the slots' adapters, and who owns which row of a microbatch.

Kernels are launched for a fixed number of rows; whose rows they are, and where that owner's A and B lie, they read from
these tables. So jobs come and go by rewriting tables, and a captured graph serves every mix of jobs.

Shape suffixes: S slots, M adapted modules of the backbone, T rows, D in, O out, R rank, P rank padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.kernels.dropout import drop, keep_mask, module_seed
from weft.kernels.fixed_words import Words
from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.methods.parts import NO_OTHERS, ColumnChange, OtherParts

ROW_TILE = 64
"""Rows of one tile: a tile has one owner. Smaller tiles waste less at the ends of short samples, larger ones read an
adapter's weights less often."""
ROW_BLOCK = 128
"""Rows of one block of a frozen product, whoever owns them."""
NUM_FIELDS = 23
"""Numbers per (slot, module): the module's rank and, above 32 bits, the slot's widest; first column in S; addresses of
A, B and their gradients; the scale's bits; dropout. Then addresses of what changes outputs (8 to 11) and inputs or rank
space (12 to 15), each a factor, a shift and their gradients; the number of a non-linearity in rank space, or the
address of what is known of a sparse difference; addresses of the words of free sums of A (17 to 19) and B. Where rows
of samples are replaced: how many (1), and the addresses of these (2) and of their gradient (4)."""
OUTPUTS, INPUTS, MORE, SUMS = 8, 12, 16, 17
"""Fields that kernels of other methods begin at."""
FREE = ("sums", "free")
"""What adapters with free sums ask for."""
BARE = 0
"""The table's slot of rows without an adapter; all its ranks are 0."""
SPARE_SLOTS = 32


@dataclass(frozen=True)
class Site:
    """Linears that read the same input, computed as one product: (q, k, v), (o), (gate, up) or (down)."""

    module: int
    """Index of the first of them among the backbone's modules; the others follow."""
    sizes: tuple[int, ...]
    """O of each."""
    num_in: int
    """D, the same for all."""
    role: str = ""
    """The same in every layer: what a launch is needed for is asked by it."""

    @property
    def num_out(self) -> int:
        """O of the whole site."""
        return sum(self.sizes)

    @property
    def three_sizes(self) -> tuple[int, int, int]:
        """The sizes of three parts, absent ones 0, as kernels take them."""
        return (*self.sizes, 0, 0)[:3]  # type: ignore[return-value]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each part's outputs begin among the site's."""
        return tuple(itertools.accumulate(self.sizes, initial=0))[:-1]


@dataclass(frozen=True)
class Entry:
    """One adapter on one module, as kernels see it."""

    rank: int
    """R; A and B are padded with zeros to P, the next multiple of 8, so that kernels read them in whole vectors."""
    a_PD: torch.Tensor
    """In the type of the activations, like B; both contiguous."""
    b_OP: torch.Tensor
    """scale · B: the scale then needs no place in forward and input gradient."""
    grad_a_RD: torch.Tensor
    """fp32, like the gradient of B; empty where A is frozen, in all modules of the adapter."""
    grad_b_OR: torch.Tensor
    scale: float
    dropout: float
    key: int
    """Stable number of the module, part of every dropout key."""
    words_a: Words | None = None
    """Where gradients of samples are added so that their order does not matter (`fixed_words.py`), instead of to the
    gradient; of A, if that is trained."""
    words_b: Words | None = None
    first_input: int = 0
    """The place of the first of A's columns among all of the module's inputs, where other devices have others."""

    @property
    def threshold(self) -> int:
        """An input is dropped where the first 31 of its random bits are below this."""
        return int(self.dropout * 2**31)


def padded(rank: int) -> int:
    """P: the columns a rank takes in S."""
    return (rank + 7) // 8 * 8


def rank_classes(ranks: Collection[int]) -> tuple[int, ...]:
    """Those that some rank needs: up to 16, up to 64, and the power of two above the widest where that is more."""
    narrow = (16,) if not ranks or min(ranks) <= 16 else ()
    middle = (64,) if any(16 < rank <= 64 for rank in ranks) else ()
    widest = next_power_of_2(max(ranks, default=0))
    return (*narrow, *middle, *((widest,) if widest > 64 else ()))


@dataclass(frozen=True)
class RankLaunch:
    """A launch for the rows whose adapter's widest rank lies within bounds; it leaves all other rows alone.

    So what computes a row depends on its own adapter, never on how wide a neighbour is: block sizes of another class
    would round otherwise. And a row costs what its rank costs: a program that could also serve a rank of 256 would have
    half a multiprocessor's registers for itself, whatever it does.
    """

    above: int
    upto: int

    @property
    def bounds(self) -> dict[str, int]:
        """As kernels take them."""
        return {"ABOVE": self.above, "UPTO": self.upto}


@dataclass(frozen=True)
class Needs:
    """What the adapters on the slots ask of the kernels. Launches captured for some needs serve all adapters with the
    same ones; what they compute in a row does not depend on them."""

    rank_class: int
    """A power of two that no rank is above: the room of a part in S."""
    classes: tuple[int, ...]
    """Of ranks, each with its own launch."""
    drops: bool
    """Whether any adapter has dropout; kernels that never meet it are leaner."""
    others: tuple[tuple[str, str], ...] = ()
    """What other methods change, and the role of the site; in order."""

    @classmethod
    def of(cls, ranks: Collection[int], *, drops: bool, others: Iterable[tuple[str, str]] = ()) -> Needs:
        """Of adapters with these widest ranks."""
        room = max(16, next_power_of_2(max(ranks, default=0)))
        return cls(room, rank_classes(ranks), drops, tuple(sorted(set(others))))


class SlotTable:
    """The adapters on a backbone's slots, on the host and, as addresses, on the device."""

    def __init__(
        self, sites: Sequence[Site], device: torch.device, row_places: Mapping[int, str] | None = None
    ) -> None:
        """`row_places`: modules behind those of the sites at which rows of samples are replaced, with their roles."""
        self._roles = {site.module + part: site.role for site in sites for part in range(len(site.sizes))}
        self._roles |= row_places or {}
        self.num_modules = len(self._roles)
        self.entries: dict[int, Mapping[int, Entry]] = {}
        """By slot of the table, then by module."""
        self.others: dict[int, OtherParts[int]] = {}
        """What other methods have, by slot."""
        self._sites = sites
        self._fields = np.zeros((SPARE_SLOTS, self.num_modules, NUM_FIELDS), dtype=np.int64)
        self.device_SMF = torch.from_numpy(self._fields.copy()).to(device)
        self._asked: dict[int, tuple[int, bool, set[tuple[str, str]]]] = {}
        """By slot: the widest rank, whether it has dropout, and what else it changes."""
        self.needs = Needs.of((), drops=False)
        """Of those on the slots now: a wide neighbour that has left costs nobody anything."""
        self.version = 0
        """Changes with the place of `device_SMF`: what was captured is stale."""

    @property
    def rank_class(self) -> int:
        """The room of a part in S."""
        return self.needs.rank_class

    @property
    def drops(self) -> bool:
        """Whether any adapter has dropout."""
        return self.needs.drops

    @property
    def launches(self) -> tuple[RankLaunch, ...]:
        """One launch for each class of ranks."""
        classes = self.needs.classes
        return tuple(RankLaunch(above, upto) for above, upto in zip((-1, *classes), classes, strict=False))

    def entry(self, slot: int, module: int) -> Entry | None:
        """The adapter of a slot on a module."""
        return self.entries.get(slot, {}).get(module)

    def columns(self, slot: int, site: Site) -> list[tuple[int, int, Entry | None]]:
        """Per part of the site: its first column in S, its rank (0 without adapter), its entry."""
        found, column = [], 0
        for module in range(site.module, site.module + len(site.sizes)):
            entry = self.entry(slot, module)
            rank = entry.rank if entry else 0
            found.append((column, rank, entry))
            column += padded(rank)
        return found

    def changes(self, slot: int, site: Site, field: int) -> list[tuple[int, int, ColumnChange]]:
        """Of each part of the site that a slot changes: its first column, its size, and the change."""
        others = self.others.get(slot, NO_OTHERS)
        found = others.outputs if field == OUTPUTS else others.inputs
        widths = site.sizes if field == OUTPUTS else (site.num_in,)
        parts = zip(itertools.accumulate(widths, initial=0), widths, strict=False)
        places = ((start, size, found.get(site.module + part)) for part, (start, size) in enumerate(parts))
        return [(start, size, change) for start, size, change in places if change is not None]

    def asks(self, kind: str, role: str) -> bool:
        """Whether some adapter changes that at the sites of a role."""
        return (kind, role) in self.needs.others

    @property
    def has_free(self) -> bool:
        """Whether some adapter has free sums."""
        return FREE in self.needs.others

    def put(self, entries: Mapping[int, Entry], others: OtherParts[int] = NO_OTHERS) -> int:
        """Takes a free slot; returns its number, above 0."""
        slot = next(i for i in itertools.count(BARE + 1) if i not in self.entries)
        if slot >= len(self._fields):
            # The device first: if it has no room, nothing has changed.
            fields = np.concatenate([self._fields, np.zeros_like(self._fields)])
            self.device_SMF = torch.zeros(fields.shape, dtype=torch.int64, device=self.device_SMF.device)
            self._fields = fields
            self.version += 1
        self.entries[slot], self.others[slot] = entries, others
        widest = max((entry.rank for entry in entries.values()), default=0)
        free = {FREE} if any(entry.words_b is not None for entry in entries.values()) else set()
        self._asked[slot] = (widest, any(entry.dropout for entry in entries.values()), self._changed(others) | free)
        self._see_needs()
        for site in self._sites:
            for part, (column, rank, entry) in enumerate(self.columns(slot, site)):
                addresses = _addresses(entry) if entry else (0, 0, 0, 0, 0, 0)
                self._fields[slot, site.module + part, :OUTPUTS] = (rank | widest << 32, column, *addresses)
                words = () if entry is None else (entry.words_a, entry.words_b)
                found = [(0, 0, 0) if each is None else each.addresses for each in words]
                self._fields[slot, site.module + part, SUMS : SUMS + 3 * len(found)] = [*itertools.chain(*found)]
        self._put_others(slot, others)
        self.device_SMF.copy_(torch.from_numpy(self._fields))
        return slot

    def remove(self, slot: int) -> None:
        """Frees a slot; rows that still name it see the bare backbone."""
        del self.entries[slot], self.others[slot]
        self._fields[slot] = 0
        del self._asked[slot]
        self._see_needs()
        self.device_SMF.copy_(torch.from_numpy(self._fields))

    def _see_needs(self) -> None:
        widest, drops, others = zip(*self._asked.values(), strict=True) if self._asked else ((), (), ())
        self.needs = Needs.of(widest, drops=any(drops), others=set().union(*others))

    def _changed(self, others: OtherParts[int]) -> set[tuple[str, str]]:
        """What is changed at which roles."""
        return {(kind, self._roles[module]) for kind, places in vars(others).items() for module in places}

    def _put_others(self, slot: int, others: OtherParts[int]) -> None:
        for base, places in ((OUTPUTS, others.outputs), (INPUTS, others.inputs)):
            for module, change in places.items():
                found = [0 if tensor is None else tensor.data_ptr() for tensor in change.tensors]
                self._fields[slot, module, base : base + len(found)] = found
        for module, inner in others.inner.items():
            self._fields[slot, module, INPUTS + 1] = inner.bias_W.data_ptr()
            self._fields[slot, module, INPUTS + 3] = inner.grad_bias_W.data_ptr()
            self._fields[slot, module, MORE] = inner.activation.number
        for module, part in others.sparse.items():
            self._fields[slot, module, MORE] = part.about.data_ptr()
        for module, rows in others.rows.items():
            self._fields[slot, module, 1:5] = (len(rows.rows_VN), rows.rows_VN.data_ptr(), 0, rows.grad_VN.data_ptr())


def _addresses(entry: Entry) -> tuple[int, ...]:
    bits = int(np.float32(entry.scale).view(np.int32))
    seed = int(np.uint32(module_seed(entry.key, entry.first_input)).view(np.int32))
    tensors = (entry.a_PD, entry.b_OP, entry.grad_a_RD, entry.grad_b_OR)
    return (*(t.data_ptr() for t in tensors), bits, entry.threshold | seed << 32)


@dataclass(frozen=True)
class SampleRows:
    """Rows [start, end) of one sample, and their slot in the table."""

    start: int
    end: int
    slot: int


@dataclass(frozen=True)
class RowTables:
    """Who owns which rows of a microbatch."""

    num_rows: int
    spans: tuple[SampleRows, ...]
    """Every sample, in buffer order; rows outside are padding."""
    tiles_N4: torch.Tensor
    """int32 (start, end, slot, 0) per tile; together they cover all rows, those without owner under slot 0."""
    owners_J4: torch.Tensor
    """int32 (first, last, slot, 0): each slot's place in `owned_G2`, one line per slot; its first line is
    (number of owners, 0, 0, 0)."""
    owned_G2: torch.Tensor
    """int32 (start, end) of every owned sample, slot by slot, within a slot in the job's order."""
    first_tiles_G1: torch.Tensor
    """int32, the first tile of every sample in `owned_G2`; its others follow."""
    runs_G4: torch.Tensor
    """int32 (start, end, slot, 0) of neighbouring rows with one owner; together they cover all rows."""
    blocks_B2: torch.Tensor
    """int32 (first, last) per block of `ROW_BLOCK` rows: the runs that have rows there."""
    keys_T: torch.Tensor
    """int32 dropout keys of the rows."""
    drops: bool
    """Whether dropout applies at all: it does not in evaluation."""

    def dropped(self, entry: Entry, x_LD: torch.Tensor, own: slice) -> torch.Tensor:
        """The rows `own` of x with dropped inputs at zero and kept ones scaled; its own backward."""
        if entry.dropout == 0 or not self.drops:
            return x_LD
        keys_L, num_features = self.keys_T[own], x_LD.shape[1]
        keep_LD = keep_mask(keys_L, entry.key, num_features, entry.dropout, first=entry.first_input)
        return drop(x_LD, keep_LD, entry.dropout)

    def by_slot(self) -> dict[int, list[SampleRows]]:
        """The samples of each slot with an adapter, in the job's order."""
        found: dict[int, list[SampleRows]] = {}
        for span in self.spans:
            if span.slot != BARE:
                found.setdefault(span.slot, []).append(span)
        return found


@dataclass(frozen=True)
class Delta:
    """What the adapters of a microbatch add at one site, still in rank space: S in forward, dS in backward."""

    s_TR: torch.Tensor
    site: Site
    rows: RowTables
    table: SlotTable


@dataclass(frozen=True)
class TableSizes:
    """Fixed sizes of the tables, so that one captured graph serves many microbatches."""

    num_rows: int
    num_spans: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of each table, by its name in `RowTables`."""
        # Each sample may end in a part of a tile, and so may what lies between two.
        return {
            "tiles_N4": (cdiv(self.num_rows, ROW_TILE) + 2 * self.num_spans, 4),
            "owners_J4": (self.num_spans + 1, 4),
            "owned_G2": (self.num_spans, 2),
            "first_tiles_G1": (self.num_spans, 1),
            "runs_G4": (2 * self.num_spans + 1, 4),
            "blocks_B2": (cdiv(self.num_rows, ROW_BLOCK), 2),
        }


def table_arrays(spans: Sequence[SampleRows], sizes: TableSizes) -> dict[str, np.ndarray]:
    """The tables of a microbatch by name, filled up to their sizes with empty lines."""
    tables = {name: np.zeros(shape, dtype=np.int32) for name, shape in sizes.shapes.items()}
    pieces = _pieces(spans, sizes.num_rows)
    lines = [
        (start, min(start + ROW_TILE, end), slot, 0)
        for begin, end, slot in pieces
        for start in range(begin, end, ROW_TILE)
    ]
    tables["tiles_N4"][: len(lines)] = lines
    numbers = {start: number for number, (start, *_) in enumerate(lines)}
    slots = sorted({span.slot for span in spans} - {BARE})
    owners, owned, first = tables["owners_J4"], tables["owned_G2"], 0
    owners[0, 0] = len(slots)
    for place, slot in enumerate(slots, start=1):
        own = [(span.start, span.end) for span in spans if span.slot == slot]
        owned[first : first + len(own)] = own
        tables["first_tiles_G1"][first : first + len(own), 0] = [numbers[start] for start, _ in own]
        owners[place] = (first, first + len(own), slot, 0)
        first += len(own)
    runs = np.array(_joined(pieces), dtype=np.int32)
    tables["runs_G4"][: len(runs), :3] = runs
    begins = np.arange(0, sizes.num_rows, ROW_BLOCK)
    tables["blocks_B2"][:, 0] = np.searchsorted(runs[:, 1], begins, side="right")
    tables["blocks_B2"][:, 1] = np.searchsorted(runs[:, 0], begins + ROW_BLOCK, side="left")
    return tables


def row_tables(spans: Sequence[SampleRows], sizes: TableSizes, keys_T: torch.Tensor) -> RowTables:
    """The tables on the device of `keys_T`."""
    tables = {name: torch.from_numpy(array).to(keys_T.device) for name, array in table_arrays(spans, sizes).items()}
    return RowTables(sizes.num_rows, tuple(spans), **tables, keys_T=keys_T, drops=True)


def _pieces(spans: Sequence[SampleRows], num_rows: int) -> list[tuple[int, int, int]]:
    """(start, end, slot) of every sample and of what lies between, covering all rows."""
    pieces: list[tuple[int, int, int]] = []
    edge = 0
    for span in [*spans, SampleRows(num_rows, num_rows, BARE)]:
        if span.start > edge:
            pieces.append((edge, span.start, BARE))
        if span.end > span.start:
            pieces.append((span.start, span.end, span.slot))
        edge = span.end
    return pieces


def _joined(pieces: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The pieces, those of one owner that lie side by side as one."""
    runs: list[tuple[int, int, int]] = []
    for start, end, slot in pieces:
        if runs and runs[-1][2] == slot:
            runs[-1] = (runs[-1][0], end, slot)
        else:
            runs.append((start, end, slot))
    return runs
