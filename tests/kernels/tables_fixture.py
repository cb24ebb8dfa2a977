"""A small microbatch with everything in it, for the tests of kernels that serve all adapters at once.

Sites of three, one and two parts and a fused one; slots of many ranks, some with dropout, some on a few modules only;
samples of one row, of more than a tile, without adapter, and rows without an owner.

Shape suffixes: T rows, D in, O out, R rank, P rank padded; L rows of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from weft.kernels.dropout import keep_mask, row_keys
from weft.kernels.lora.tables import (
    BARE,
    Delta,
    Entry,
    RowTables,
    SampleRows,
    Site,
    SlotTable,
    TableSizes,
    padded,
    row_tables,
)

NUM_ROWS = 128
NAN_SLOT = 2
"""The slot of `SPANS` that tests poison."""
SPANS = (
    SampleRows(0, 1, 1),
    SampleRows(1, 71, 2),
    SampleRows(71, 75, BARE),
    SampleRows(80, 97, 3),
    SampleRows(97, 104, 1),
    SampleRows(104, 105, 4),
)
"""70 rows of slot 2 make a tile and a bit; rows 75 to 80 and from 105 on are padding."""


@dataclass(frozen=True)
class Slot:
    """What an adapter looks like: the rank it has on each module in turn, 0 for a module it leaves alone."""

    ranks: tuple[int, ...]
    dropout: float = 0.0


SLOTS = (Slot((3,)), Slot((8, 0, 20), 0.25), Slot((16, 8)), Slot((0, 5), 0.5))
WIDE_SLOTS = (Slot((72,)), Slot((8, 0, 70), 0.25), Slot((3, 130, 16)), Slot((0, 5)))
"""Ranks of more than one block of rank space."""


@dataclass(frozen=True)
class Setting:
    """Sites, adapters and rows that fit together."""

    sites: tuple[Site, ...]
    table: SlotTable
    rows: RowTables
    dtype: torch.dtype

    def delta(self, site: Site) -> Delta:
        """Random numbers in rank space, NaN wherever nothing may read."""
        width = max(sum(padded(rank) for _, rank, _ in self.table.columns(slot, site)) for slot in self.table.entries)
        s_TR = torch.full((self.rows.num_rows, width + 8), torch.nan, dtype=self.dtype)
        for span in self.rows.spans:
            for column, rank, _ in self.table.columns(span.slot, site):
                s_TR[span.start : span.end, column : column + padded(rank)] = 0.0
                s_TR[span.start : span.end, column : column + rank] = torch.randn(span.end - span.start, rank)
        return Delta(s_TR, site, self.rows, self.table)

    def empty_ranks(self, site: Site) -> torch.Tensor:
        """Room for S of a site, NaN so far."""
        return torch.full_like(self.delta(site).s_TR, torch.nan)

    def random(self, *shape: int) -> torch.Tensor:
        """Random activations."""
        return torch.randn(shape).to(self.dtype)


def rows_of(slot: int) -> torch.Tensor:
    """bool (T): the rows a slot owns."""
    own_T = torch.zeros(NUM_ROWS, dtype=torch.bool)
    for span in SPANS:
        own_T[span.start : span.end] |= span.slot == slot
    return own_T


def one_site(sizes: tuple[int, ...], num_in: int, **options: object) -> Setting:
    """A setting of one site."""
    return build((Site(0, sizes, num_in),), **options)  # type: ignore[arg-type]


def build(
    sites: tuple[Site, ...],
    slots: tuple[Slot, ...] = SLOTS,
    dtype: torch.dtype = torch.float32,
    nan_slot: int = BARE,
    drops: bool = True,
) -> Setting:
    """The microbatch of `SPANS` on these sites; the weights of `nan_slot` are NaN."""
    table = SlotTable(sites, torch.device("cpu"))
    for i, slot in enumerate(slots, start=1):
        entries: dict[int, Entry] = {}
        for site in sites:
            entries |= _entries(site, slot, dtype, torch.nan if i == nan_slot else 1.0)
        assert table.put(entries) == i
    keys_T = torch.zeros(NUM_ROWS, dtype=torch.int32)
    for i, span in enumerate(SPANS):
        keys_T[span.start : span.end] = torch.from_numpy(row_keys(1000 + i, span.end - span.start))
    rows = row_tables(SPANS, TableSizes(NUM_ROWS, len(SPANS) + 2), keys_T)
    return Setting(sites, table, replace(rows, drops=drops), dtype)


def _entries(site: Site, slot: Slot, dtype: torch.dtype, factor: float) -> Mapping[int, Entry]:
    """The adapter's part on one site; the A of its modules lie one after another, and so do their gradients."""
    ranks = [slot.ranks[module % len(slot.ranks)] for module in range(site.module, site.module + len(site.sizes))]
    a_PD = torch.zeros(sum(padded(rank) for rank in ranks), site.num_in, dtype=dtype)
    grad_RD = torch.randn(sum(ranks), site.num_in)
    entries, first, row = {}, 0, 0
    for part, (rank, size) in enumerate(zip(ranks, site.sizes, strict=True)):
        if rank:
            own_PD = a_PD[first : first + padded(rank)]
            own_PD[:rank] = torch.randn(rank, site.num_in) / site.num_in**0.5 * factor
            b_OP = torch.zeros(size, padded(rank), dtype=dtype)
            b_OP[:, :rank] = torch.randn(size, rank) / rank**0.5 * factor
            entries[site.module + part] = Entry(
                rank=rank,
                a_PD=own_PD,
                b_OP=b_OP,
                grad_a_RD=grad_RD[row : row + rank],
                grad_b_OR=torch.randn(size, rank),
                scale=0.5 + part,
                dropout=slot.dropout,
                key=77 + site.module + part,
                first_input=5 * part,
            )
            first, row = first + padded(rank), row + rank
    return entries


def plain_out(delta: Delta) -> torch.Tensor:
    """S Bᵀ of every row (T, O), fp64, row by row from the definition."""
    out_TO = torch.zeros(delta.rows.num_rows, delta.site.num_out, dtype=torch.float64)
    for span in delta.rows.spans:
        for t in range(span.start, span.end):
            found = delta.table.columns(span.slot, delta.site)
            for begin, size, (column, rank, entry) in zip(delta.site.starts, delta.site.sizes, found, strict=True):
                if entry is not None:
                    s_R = delta.s_TR[t, column : column + rank].double()
                    out_TO[t, begin : begin + size] = entry.b_OP[:, :rank].double() @ s_R
    return out_TO


def plain_in(delta: Delta) -> torch.Tensor:
    """Σ drop(dS A) of every row (T, D), fp64: the gradient of <dS, drop(x) Aᵀ> by x."""
    x_TD = torch.zeros(delta.rows.num_rows, delta.site.num_in, dtype=torch.float64, requires_grad=True)
    total = x_TD.sum() * 0
    for span in delta.rows.spans:
        own = slice(span.start, span.end)
        for column, rank, entry in delta.table.columns(span.slot, delta.site):
            if entry is not None:
                s_LR = plain_drop(x_TD[own], entry, delta.rows.keys_T[own]) @ entry.a_PD[:rank].double().t()
                total = total + (s_LR * delta.s_TR[own, column : column + rank].double()).sum()
    return torch.autograd.grad(total, x_TD)[0]


def plain_drop(x_LD: torch.Tensor, entry: Entry, keys_L: torch.Tensor) -> torch.Tensor:
    """x after an adapter's dropout."""
    keep_LD = keep_mask(keys_L, entry.key, x_LD.shape[1], entry.dropout, first=entry.first_input)
    return torch.where(keep_LD, x_LD / (1 - entry.dropout), torch.zeros_like(x_LD))
