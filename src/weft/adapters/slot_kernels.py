"""LoRA at single linears by kernels: the adapters of all slots in a few launches.

`slots.py` visits slot after slot and sample after sample. On a GPU the host then takes longer than the device. Models
that the fused path does not know keep their own modules, but their linears can use its kernels: those of
`kernels/lora/` read from tables which rows are whose. Adapters of other methods, and other sites, stay as they are.

Shape suffixes: T rows of the microbatch, D in, O out, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.sites import SlotLinear
from weft.kernels.lora.linears import KernelRows
from weft.kernels.lora.tables import SampleRows, Site, SlotTable, TableSizes, row_tables

_WHOLE_VECTOR = 16
"""Kernels read rows in whole vectors."""


class SlotKernels:
    def __init__(self, linears: Mapping[str, SlotLinear], device: torch.device, dtype: torch.dtype) -> None:
        fitting = {path: linear for path, linear in linears.items() if _fits(linear)}
        self._modules = {path: number for number, path in enumerate(fitting)}
        for path, linear in fitting.items():
            linear.kernel_site = Site(self._modules[path], (linear.out_features,), linear.in_features, "linear")
        sites = [linear.kernel_site for linear in fitting.values() if linear.kernel_site is not None]
        self._table = SlotTable(sites, device)
        self._adapters: dict[int, Adapter] = {}
        self._dtype = dtype

    def take_slot(self, adapter: Adapter) -> int | None:
        """The number of a slot whose adapter kernels run from now on; None if they cannot."""
        if not adapter.method.has_kernels(adapter.spec):
            return None
        copy = adapter.method.kernel_copy(adapter, self._dtype)
        if any(vars(copy.others).values()):
            return None
        entries = {self._modules[path]: entry for path, entry in copy.entries.items() if path in self._modules}
        slot = self._table.put(entries)
        adapter.kernel_copy, self._adapters[slot] = copy, adapter
        return slot

    def free_slot(self, slot: int) -> None:
        """Frees a slot, if it is one of these."""
        if slot in self._adapters:
            self._table.remove(slot)
            self._adapters.pop(slot).kernel_copy = None

    def rows(
        self, spans: Sequence[SampleRows], num_rows: int, keys_T: torch.Tensor, *, drops: bool
    ) -> KernelRows | None:
        """The rows of a microbatch for kernels; None if none of its adapters is theirs."""
        slots = tuple(dict.fromkeys(span.slot for span in spans if span.slot in self._adapters))
        for slot in slots:
            copy = self._adapters[slot].kernel_copy
            assert copy is not None
            copy.follow()
        if not slots:
            return None
        own = [span for span in spans if span.slot in self._adapters]
        tables = row_tables(own, TableSizes(num_rows, len(own)), keys_T, drops=drops)
        return KernelRows(self._table, tables, slots)


def _fits(linear: SlotLinear) -> bool:
    is_whole = linear.out_features % _WHOLE_VECTOR == 0 and linear.in_features % _WHOLE_VECTOR == 0
    return is_whole and linear.share.devices is None
