"""The adapters of slots and the owners of a microbatch's rows, as small device tensors that kernels read.

Kernels are launched for a fixed number of rows; they read from these tables which adapter owns each row and where its A
and B are. So jobs come and go by rewriting tables, and a captured graph serves every mix of jobs.

Shape suffixes: S slots, M adapted modules of the backbone, T rows, D in, O out, R rank, P rank padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.kernels.device_event import sent
from weft.kernels.dropout import drop, keep_mask, module_seed
from weft.kernels.fixed_point import Words
from weft.kernels.launch import cdiv, next_power_of_2
from weft.kernels.methods.parts import NO_OTHERS, ColumnChange, OtherParts

ROW_TILE = 64
"""Rows of one tile: a tile has one owner. Smaller tiles waste less at the ends of short samples, larger ones read an
adapter's weights less often."""
ROW_BLOCK = 128
"""Rows of one block of a frozen product, of any owners."""
NUM_FIELDS = 23
"""Numbers per (slot, module): the module's rank and, above 32 bits, the slot's widest; first column in S; addresses of
A, B and their gradients; the scale's bits; dropout. Then addresses of what changes outputs (8 to 11) and inputs or rank
space (12 to 15), each a factor, a shift and their gradients; the number of a non-linearity in rank space, or the
address of a sparse difference's description; addresses of the words of order-independent sums of A (17 to 19) and B.
Where rows of samples are replaced: how many (1), and the addresses of these (2) and of their gradient (4)."""
OUTPUTS, INPUTS, MORE, SUMS = 8, 12, 16, 17
"""First fields of kernels of other methods."""
ANY_ORDER = ("sums", "any order")
"""The launch that adapters with order-independent sums need."""
BARE = 0
"""The table's slot of rows without an adapter; all its ranks are 0."""
SPARE_SLOTS = 32


@dataclass(frozen=True)
class Site:
    """Linears that read the same input, computed as one product: (q, k, v), (o), (gate, up) or (down)."""

    module: int
    """Index of the first of them among the backbone's modules; the others follow."""
    sizes: tuple[int, ...]
    num_in: int
    role: str = ""
    """Name that is the same in every layer; the launches that are needed are looked up by it."""

    @property
    def num_out(self) -> int:
        return sum(self.sizes)

    @property
    def three_sizes(self) -> tuple[int, int, int]:
        return (*self.sizes, 0, 0)[:3]  # type: ignore[return-value]

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.sizes, initial=0))[:-1]


@dataclass(frozen=True)
class Entry:
    rank: int
    """R; A and B are padded with zeros to P, the next multiple of 8, so that kernels read them in whole vectors."""
    a_PD: torch.Tensor
    """In the type of the activations, like B; both contiguous."""
    b_OP: torch.Tensor
    """scale · B, so that forward and input gradient do not need the scale."""
    grad_a_RD: torch.Tensor
    """fp32, like the gradient of B; empty where A is frozen, in all modules of the adapter."""
    grad_b_OR: torch.Tensor
    scale: float
    dropout: float
    key: int
    """Stable number of the module, part of every dropout key."""
    words_a: Words | None = None
    """Sums of the gradient of A whose order does not matter (`fixed_point.Words`), instead of a trained A's
    gradient."""
    words_b: Words | None = None
    first_input: int = 0
    """Index of the first of A's columns among all inputs of the module, which may be divided over devices."""

    @property
    def threshold(self) -> int:
        return int(self.dropout * 2**31)


def padded(rank: int) -> int:
    """P: the columns a rank takes in S."""
    return (rank + 7) // 8 * 8


def rank_classes(ranks: Collection[int]) -> tuple[int, ...]:
    """Rank classes that some rank needs: up to 16, up to 64, and the power of two above a wider one."""
    narrow = (16,) if not ranks or min(ranks) <= 16 else ()
    middle = (64,) if any(16 < rank <= 64 for rank in ranks) else ()
    widest = next_power_of_2(max(ranks, default=0))
    return (*narrow, *middle, *((widest,) if widest > 64 else ()))


@dataclass(frozen=True)
class RankLaunch:
    """A launch for the rows whose adapter's widest rank lies within bounds; it leaves all other rows alone.

    So what computes a row depends on its own adapter, never on how wide a neighbour is: block sizes of another class
    would round otherwise. And a row costs what its rank costs: a program that could also serve a rank of 256 would take
    half a multiprocessor's registers in any case.
    """

    above: int
    upto: int

    @property
    def bounds(self) -> dict[str, int]:
        return {"ABOVE": self.above, "UPTO": self.upto}


@dataclass(frozen=True)
class Needs:
    """The launches that the adapters on the slots need. Launches captured for some needs serve all adapters with the
    same ones; what they compute in a row does not depend on them."""

    rank_class: int
    """A power of two that no rank is above: the room of a part in S."""
    classes: tuple[int, ...]
    """Upper bounds of the classes of ranks; each class has a launch of its own."""
    drops: bool
    """True if any adapter has dropout; kernels without it are leaner."""
    others: tuple[tuple[str, str], ...] = ()
    """Changes by other methods than LoRA, each with the role of its site; in order."""

    @classmethod
    def of(cls, ranks: Collection[int], *, drops: bool, others: Iterable[tuple[str, str]] = ()) -> Needs:
        room = max(16, next_power_of_2(max(ranks, default=0)))
        return cls(room, rank_classes(ranks), drops, tuple(sorted(set(others))))


class SlotTable:
    def __init__(self, sites: Sequence[Site], device: torch.device, row_sites: Mapping[int, str] | None = None) -> None:
        """`row_sites`: modules numbered after those of the sites where rows of samples are replaced, by role."""
        self._roles = {site.module + part: site.role for site in sites for part in range(len(site.sizes))}
        self._roles |= row_sites or {}
        self.num_modules = len(self._roles)
        self.entries: dict[int, Mapping[int, Entry]] = {}
        self.others: dict[int, OtherParts[int]] = {}
        self._sites = sites
        self._fields = np.zeros((SPARE_SLOTS, self.num_modules, NUM_FIELDS), dtype=np.int64)
        self.device_SMF = torch.from_numpy(self._fields.copy()).to(device)
        self._needs_of: dict[int, tuple[int, bool, set[tuple[str, str]]]] = {}
        """By slot: the widest rank, whether it has dropout, and what else it changes."""
        self.needs = Needs.of((), drops=False)
        """Needs of the adapters on the slots now; those of a wide adapter end when it leaves."""
        self.version = 0
        """Changes when `device_SMF` is allocated again: captured graphs are then stale."""

    @property
    def rank_class(self) -> int:
        return self.needs.rank_class

    @property
    def drops(self) -> bool:
        return self.needs.drops

    @property
    def launches(self) -> tuple[RankLaunch, ...]:
        classes = self.needs.classes
        return tuple(RankLaunch(above, upto) for above, upto in zip((-1, *classes), classes, strict=False))

    def entry(self, slot: int, module: int) -> Entry | None:
        return self.entries.get(slot, {}).get(module)

    def columns(self, slot: int, site: Site) -> list[tuple[int, int, Entry | None]]:
        """Per part of the site: its first column in S, its rank (0 without adapter), its entry."""
        columns, column = [], 0
        for module in range(site.module, site.module + len(site.sizes)):
            entry = self.entry(slot, module)
            rank = entry.rank if entry else 0
            columns.append((column, rank, entry))
            column += padded(rank)
        return columns

    def changes(self, slot: int, site: Site, field: int) -> list[tuple[int, int, ColumnChange]]:
        """The changes of a slot at the parts of a site: first column, size, and the change."""
        others = self.others.get(slot, NO_OTHERS)
        changes = others.outputs if field == OUTPUTS else others.inputs
        widths = site.sizes if field == OUTPUTS else (site.num_in,)
        parts = zip(itertools.accumulate(widths, initial=0), widths, strict=False)
        columns = ((start, size, changes.get(site.module + part)) for part, (start, size) in enumerate(parts))
        return [(start, size, change) for start, size, change in columns if change is not None]

    def has_change(self, kind: str, role: str) -> bool:
        return (kind, role) in self.needs.others

    @property
    def has_any_order(self) -> bool:
        return ANY_ORDER in self.needs.others

    def put(self, entries: Mapping[int, Entry], others: OtherParts[int] = NO_OTHERS) -> int:
        """Takes a free slot; returns its number, above 0."""
        slot = next(i for i in itertools.count(BARE + 1) if i not in self.entries)
        if slot >= len(self._fields):
            # The device first: if it has no room, nothing has changed.
            fields = np.concatenate([self._fields, np.zeros_like(self._fields)])
            device_SMF = torch.zeros(fields.shape, dtype=torch.int64, device=self.device_SMF.device)
            device_SMF[: len(self._fields)] = self.device_SMF
            self._fields, self.device_SMF = fields, device_SMF
            self.version += 1
        self.entries[slot], self.others[slot] = entries, others
        widest = max((entry.rank for entry in entries.values()), default=0)
        any_order = {ANY_ORDER} if any(entry.words_b is not None for entry in entries.values()) else set()
        has_dropout = any(entry.dropout for entry in entries.values())
        self._needs_of[slot] = (widest, has_dropout, self._changed(others) | any_order)
        self._see_needs()
        for site in self._sites:
            for part, (column, rank, entry) in enumerate(self.columns(slot, site)):
                addresses = _addresses(entry) if entry else (0, 0, 0, 0, 0, 0)
                fields = self._fields[slot, site.module + part]
                fields[:OUTPUTS] = (rank | widest << 32, column, *addresses)
                words = () if entry is None else (entry.words_a, entry.words_b)
                fields[SUMS : SUMS + 3 * len(words)] = [
                    address for each in words for address in ((0, 0, 0) if each is None else each.addresses)
                ]
        self._put_others(slot, others)
        self.device_SMF[slot].copy_(torch.from_numpy(self._fields[slot]))
        return slot

    def remove(self, slot: int) -> None:
        """Frees a slot; rows that still name it get the bare backbone."""
        del self.entries[slot], self.others[slot]
        self._fields[slot] = 0
        del self._needs_of[slot]
        self._see_needs()
        self.device_SMF[slot].copy_(torch.from_numpy(self._fields[slot]))

    def _see_needs(self) -> None:
        widest, drops, others = zip(*self._needs_of.values(), strict=True) if self._needs_of else ((), (), ())
        self.needs = Needs.of(widest, drops=any(drops), others=set().union(*others))

    def _changed(self, others: OtherParts[int]) -> set[tuple[str, str]]:
        return {(kind, self._roles[module]) for kind, changes in vars(others).items() for module in changes}

    def _put_others(self, slot: int, others: OtherParts[int]) -> None:
        for base, changes in ((OUTPUTS, others.outputs), (INPUTS, others.inputs)):
            for module, change in changes.items():
                addresses = [0 if tensor is None else tensor.data_ptr() for tensor in change.tensors]
                self._fields[slot, module, base : base + len(addresses)] = addresses
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
    num_rows: int
    spans: tuple[SampleRows, ...]
    """Every sample, in buffer order; rows outside are padding."""
    tiles_N4: torch.Tensor
    """int32 (start, end, slot, 0) per tile; together they cover all rows, those without owner under slot 0."""
    owners_J4: torch.Tensor
    """int32 (first, last, slot, 0): each slot's range in `owned_G2`, one line per slot; its first line is (number of
    owners, 0, 0, 0)."""
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

    def dropped(self, entry: Entry, x_LD: torch.Tensor, row_slice: slice) -> torch.Tensor:
        """The rows `row_slice` of x with dropped inputs at zero and kept ones scaled; its own backward."""
        if entry.dropout == 0 or not self.drops:
            return x_LD
        keys_L, num_features = self.keys_T[row_slice], x_LD.shape[1]
        keep_LD = keep_mask(keys_L, entry.key, num_features, entry.dropout, first=entry.first_input)
        return drop(x_LD, keep_LD, entry.dropout)

    def by_slot(self) -> dict[int, list[SampleRows]]:
        """The samples of each slot with an adapter, in the job's order."""
        by_slot: dict[int, list[SampleRows]] = {}
        for span in self.spans:
            if span.slot != BARE:
                by_slot.setdefault(span.slot, []).append(span)
        return by_slot


@dataclass(frozen=True)
class Delta:
    """What the adapters of a microbatch add at one site, still in rank space: S in forward, dS in backward."""

    s_TR: torch.Tensor
    site: Site
    rows: RowTables
    table: SlotTable


@dataclass(frozen=True)
class TableSizes:
    num_rows: int
    num_spans: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
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
    for line, slot in enumerate(slots, start=1):
        samples = [(span.start, span.end) for span in spans if span.slot == slot]
        owned[first : first + len(samples)] = samples
        tables["first_tiles_G1"][first : first + len(samples), 0] = [numbers[start] for start, _ in samples]
        owners[line] = (first, first + len(samples), slot, 0)
        first += len(samples)
    runs = np.array(_joined(pieces), dtype=np.int32)
    tables["runs_G4"][: len(runs), :3] = runs
    begins = np.arange(0, sizes.num_rows, ROW_BLOCK)
    tables["blocks_B2"][:, 0] = np.searchsorted(runs[:, 1], begins, side="right")
    tables["blocks_B2"][:, 1] = np.searchsorted(runs[:, 0], begins + ROW_BLOCK, side="left")
    return tables


def row_tables(
    spans: Sequence[SampleRows], sizes: TableSizes, keys_T: torch.Tensor, *, drops: bool = True
) -> RowTables:
    arrays = table_arrays(spans, sizes)
    tables = {name: sent(torch.from_numpy(array), keys_T.device) for name, array in arrays.items()}
    return RowTables(sizes.num_rows, tuple(spans), **tables, keys_T=keys_T, drops=drops)


def _pieces(spans: Sequence[SampleRows], num_rows: int) -> list[tuple[int, int, int]]:
    """(start, end, slot) of every sample and of the gaps, covering all rows."""
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
    runs: list[tuple[int, int, int]] = []
    for start, end, slot in pieces:
        if runs and runs[-1][2] == slot:
            runs[-1] = (runs[-1][0], end, slot)
        else:
            runs.append((start, end, slot))
    return runs
