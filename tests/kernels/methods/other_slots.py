"""The microbatch of `tables_fixture`, whose slots change something else than LoRA does."""

from __future__ import annotations

import torch
from tables_fixture import NUM_ROWS, SPANS

from weft.kernels.lora.tables import Entry, RowTables, Site, SlotTable, TableSizes, row_tables
from weft.kernels.methods.parts import OtherParts


def table_of(
    sites: tuple[Site, ...],
    slots: list[OtherParts[int]],
    entries: list[dict[int, Entry]] | None = None,
    row_sites: dict[int, str] | None = None,
) -> SlotTable:
    """A table with these slots, from 1 on."""
    table = SlotTable(sites, torch.device("cpu"), row_sites)
    for own, others in zip(entries or [{}] * len(slots), slots, strict=True):
        table.put(own, others)
    return table


def all_rows() -> RowTables:
    """Who owns which rows."""
    return row_tables(SPANS, TableSizes(NUM_ROWS, len(SPANS) + 2), torch.zeros(NUM_ROWS, dtype=torch.int32))
