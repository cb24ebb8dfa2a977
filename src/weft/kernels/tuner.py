"""Measures the choices of `kernels/tuning.py` on this GPU: every candidate that gives the same bits, the fastest kept.

Each key is timed over all sites of one layer of a shape, with four jobs of the class's rank, once without dropout and
once with it: kernels that drop want other launches, and there is one choice for both. A candidate that does not
compile, runs out of registers or shared memory, or differs in one bit from the choice in use is left out.

There are some hundreds of candidates, and to compile them one after another would take most of the time. So processes
beside this one launch each of them once, on few rows, and leave what they compiled in Triton's cache.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from weft.kernels.device_event import median_s, replayable
from weft.kernels.dropout import row_keys
from weft.kernels.lora.expand import expand_grad_kernel, expand_kernel
from weft.kernels.lora.shrink import shrink_grad_kernel, shrink_kernel
from weft.kernels.lora.tables import Entry, RowTables, SampleRows, Site, SlotTable, TableSizes, padded, row_tables
from weft.kernels.lora.weight_grad import weight_grad_kernel
from weft.kernels.tuning import Choice, Table, candidates, table_of, trying
from weft.plan.cost.shape import Shape

NUM_JOBS = 4
RANKS = {"16": 16, "64": 64, "more": 256}
DROPOUTS = (0.0, 0.1)
WORTH = 0.98
"""A candidate is kept if it takes less than this of what is in use: timings differ by a per cent from run to run."""

MOST_PROCESSES = 8
"""That compile side by side: each holds a context and a layer in the GPU's memory, about a gigabyte."""
FEW_ROWS = 256

Outputs = list[torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """One layer's sites with their adapters, and activations to run them on."""

    sites: dict[str, Site]
    table: SlotTable
    rows: RowTables
    wide: dict[int, torch.Tensor]
    """Random activations by their width; kernels that add to them get a copy."""

    def rank_space(self, site: Site) -> torch.Tensor:
        return _normal(self.rows.num_rows, len(site.sizes) * self.table.rank_class, like=next(iter(self.wide.values())))


def make_layer(
    shape: Shape, rank: int, dropout: float, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Layer:
    """A layer of the shape with jobs of one rank and dropout on equal runs of rows."""
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sites = {
        "qkv": Site(0, (query, key, key), shape.hidden),
        "out": Site(3, (shape.hidden,), query),
        "gate_up": Site(4, (shape.ffn, shape.ffn), shape.hidden),
        "down": Site(6, (shape.hidden,), shape.ffn),
    }
    table = SlotTable(list(sites.values()), device)
    like = torch.empty(0, dtype=dtype, device=device)
    spans = []
    for job in range(NUM_JOBS):
        entries = {}
        for site in sites.values():
            a_MPD = _normal(len(site.sizes), padded(rank), site.num_in, like=like)
            grad_a_MRD = torch.zeros(len(site.sizes), rank, site.num_in, device=device)
            for part, size in enumerate(site.sizes):
                b_OP, grad_b_OR = _normal(size, padded(rank), like=like), torch.zeros(size, rank, device=device)
                grads = (grad_a_MRD[part], grad_b_OR)
                entries[site.module + part] = Entry(rank, a_MPD[part], b_OP, *grads, 2.0, dropout, site.module + part)
        start, end = num_rows * job // NUM_JOBS, num_rows * (job + 1) // NUM_JOBS
        spans.append(SampleRows(start, end, table.put(entries)))
    keys_T = torch.from_numpy(row_keys(1, num_rows).copy()).to(device)
    rows = row_tables(spans, TableSizes(num_rows, len(spans)), keys_T)
    widths = {width for site in sites.values() for width in (site.num_in, site.num_out)}
    return Layer(sites, table, rows, {width: _normal(num_rows, width, like=like) for width in widths})


def _normal(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=like.device).mul_(0.05).to(like.dtype)


def operations(layer: Layer) -> dict[str, Callable[[], Outputs]]:
    """By operation: runs it on every site, and returns what it wrote."""
    table, rows = layer.table, layer.rows
    spaces = {name: layer.rank_space(site) for name, site in layer.sites.items()}

    def shrinks() -> Iterator[torch.Tensor]:
        for name, site in layer.sites.items():
            out_TR = torch.zeros_like(spaces[name])
            shrink_kernel(layer.wide[site.num_in], out_TR, site, rows, table)
            yield out_TR

    def shrink_grads() -> Iterator[torch.Tensor]:
        for name, site in layer.sites.items():
            out_TR = torch.zeros_like(spaces[name])
            shrink_grad_kernel(layer.wide[site.num_out], out_TR, site, rows, table)
            yield out_TR

    def expands() -> Iterator[torch.Tensor]:
        for name, site in layer.sites.items():
            out_TO = layer.wide[site.num_out].clone()
            expand_kernel(out_TO, spaces[name], site, rows, table)
            yield out_TO

    def expand_grads() -> Iterator[torch.Tensor]:
        for name, site in layer.sites.items():
            out_TD = layer.wide[site.num_in].clone()
            expand_grad_kernel(out_TD, spaces[name], site, rows, table)
            yield out_TD

    def weight_grads() -> Iterator[torch.Tensor]:
        entries = [entry for own in table.entries.values() for entry in own.values()]
        for entry in entries:
            entry.grad_a_RD.zero_()
            entry.grad_b_OR.zero_()
        for name, site in layer.sites.items():
            x_TD, dy_TO, s_TR = layer.wide[site.num_in], layer.wide[site.num_out], spaces[name]
            weight_grad_kernel(x_TD, s_TR, dy_TO, s_TR, site, rows, table)
        for entry in entries:
            yield from (entry.grad_a_RD.clone(), entry.grad_b_OR.clone())

    work = {
        "shrink": shrinks,
        "shrink_grad": shrink_grads,
        "weight_grad": weight_grads,
        "expand": expands,
        "expand_grad": expand_grads,
    }
    return {name: lambda run=run: list(run()) for name, run in work.items()}  # type: ignore[misc]


def runs_of(
    kind: str, shape: Shape, num_rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], Outputs]]:
    """The operations on the layers that a class of ranks is measured on."""
    rank = min(RANKS[kind], shape.kv_heads * shape.head_size, shape.hidden)
    layers = [operations(make_layer(shape, rank, dropout, num_rows, dtype, device)) for dropout in DROPOUTS]
    return {name: lambda name=name: [out for runs in layers for out in runs[name]()] for name in layers[0]}  # type: ignore[misc]


@contextmanager
def trying_quietly(key: str, choice: Choice) -> Iterator[None]:
    """Within it, launches of this key use the choice; the compiler's message about an impossible one is not shown."""
    with trying(key, choice), redirect_stdout(io.StringIO()):
        yield


def compile_ahead(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """Fills Triton's cache with all candidates, on as many cores as there are."""
    num = min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(num, get_context("spawn")) as pool:
        turns = [(kind, turn, num, shape, dtype, device) for kind in RANKS for turn in range(num)]
        for done in [pool.submit(compile_some, *turn) for turn in turns]:
            done.result()


def compile_some(kind: str, turn: int, num: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """Launches every `num`-th candidate of a class of ranks once."""
    runs = runs_of(kind, shape, FEW_ROWS, dtype, device)
    tried = [(run, f"{name}/{kind}", choice) for name, run in runs.items() for choice in candidates(f"{name}/{kind}")]
    for run, key, choice in tried[turn::num]:
        # A candidate that cannot be launched is left out when it is measured.
        with trying_quietly(key, choice), suppress(Exception):
            run()


def tune(
    shape: Shape, num_rows: int, dtype: torch.dtype, device: torch.device, report: Callable[[str], None]
) -> dict[str, Choice]:
    """The fastest choice for every key, where it is not the one in use."""
    in_use, fastest = table_of(device)[0], dict[str, Choice]()
    for kind in RANKS:
        for operation, run in runs_of(kind, shape, num_rows, dtype, device).items():
            key = f"{operation}/{kind}"
            best = _fastest(key, run, in_use, device, report)
            if best is not None:
                fastest[key] = best
    return fastest


def _fastest(
    key: str, run: Callable[[], Outputs], in_use: Table, device: torch.device, report: Callable[[str], None]
) -> Choice | None:
    expected = run()
    usual_s = _seconds(run, device)
    best, best_s, wrong = None, usual_s * WORTH, 0
    for choice in candidates(key):
        if choice == in_use[key]:
            continue
        with trying_quietly(key, choice):
            try:
                if not all(torch.equal(one, other) for one, other in zip(run(), expected, strict=True)):
                    wrong += 1
                    continue
                seconds = _seconds(run, device)
            except Exception:  # this candidate does not compile or launch
                continue
        if seconds < best_s:
            best, best_s = choice, seconds
    result = f"{best_s / usual_s:.0%} of the time with {dict(best)}" if best else "as it is"
    differ = f"; {wrong} candidates gave other bits" if wrong else ""
    report(f"{key}: {usual_s * 1e6:,.0f} us, {result}{differ}")
    return best


def _seconds(run: Callable[[], Outputs], device: torch.device) -> float:
    return median_s(replayable(run, device), device, warmups=1, repeats=5)
