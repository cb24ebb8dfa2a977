"""`step`: measures what the chosen figures need, model by model, and reports every result as soon as it is there.

The roofline is the speed that matrix products alone allow: every product weight once forward in FP8 and once backward
in bf16.

Per token and weight: 2 FLOP at the FP8 rate + 2 FLOP at the bf16 rate, both as this device reaches them on one large
square product. Attention, norms, loss and adapters are free here, so no step is faster.

Order: peers first (their model is built once), then Weft per kind of storage. Memory is given back in between. One
failing run costs only the figures that need it.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import torch
import typer

from benchmarks.clock import QUICK, THOROUGH, Effort, Measured, release
from benchmarks.figures import Figure, Kind
from benchmarks.report import (
    JsonFile,
    PlotFile,
    Quick,
    Regimes,
    check_files,
    check_kernels,
    conclude,
    measured_device,
    show,
    write_json,
)
from benchmarks.steps.peers import Missing, measure_peers, need_peft
from benchmarks.steps.regimes import MAIN_SHAPE, OURS, PEFT_PROGRAMS, BenchProgram, BenchRun, Regime, Workload, choose
from benchmarks.steps.step import measure
from weft.kernels.device import is_cpu
from weft.kernels.device_event import median_s
from weft.model.load import make_backbone
from weft.plan.cost.shape import Shape, find_shape

SIDE = 8192


def measure_roofline(shape: Shape, workload: Workload, device: torch.device) -> Measured:
    """What a step of the workload would take at the rates measured now."""
    bf16, fp8 = product_rates(device)
    seconds = workload.capacity * seconds_per_token(shape, fp8, bf16)
    detail = f"products at {fp8 / 1e12:,.0f} TFLOP/s in FP8 and {bf16 / 1e12:,.0f} in bf16"
    return Measured(workload.capacity, workload.capacity, seconds, 0.0, detail)


def seconds_per_token(shape: Shape, forward_rate: float, backward_rate: float) -> float:
    """Seconds of one token's products at the given FLOP/s."""
    return 2 * shape.num_product_weights * (1 / forward_rate + 1 / backward_rate)


def product_rates(device: torch.device) -> tuple[float, float]:
    """FLOP/s of a bf16 and of an FP8 product with row-wise scales."""
    left = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    right = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    ones = torch.ones(SIDE, 1, device=device)

    def in_bf16() -> object:
        return left @ right.t()

    def in_fp8() -> object:
        return torch._scaled_mm(left8, right8.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    flop = 2.0 * SIDE**3
    times = [median_s(work, device, warmups=5, repeats=15) for work in (in_bf16, in_fp8)]
    return flop / times[0], flop / times[1]


def figure(regime: Regime, results: Mapping[BenchRun, Measured]) -> Figure | None:
    """The figure of a regime, once its runs are there."""
    if any(run not in results for run in regime.runs):
        return None
    ours = results[regime.ours]
    peer = None if regime.peer is None else results[regime.peer]
    target = regime.target
    if regime.kind is Kind.PEAK_GB:
        value = ours.peak_gb
    elif regime.kind is Kind.DIFFERENCES:
        return Figure(regime.key, ours.extra["differing"], regime.kind, target, detail=ours.detail)
    elif regime.kind is Kind.TOKENS_PER_S:
        value = ours.tokens_per_s
        if target is not None and peer is not None:
            target *= peer.tokens_per_s
    else:
        assert peer is not None, "a comparison has two sides"
        value = ours.tokens_per_s / peer.tokens_per_s if regime.kind is Kind.SPEEDUP else peer.extra["overhead"]
    peer_speed = None if peer is None else peer.tokens_per_s
    return Figure(regime.key, value, regime.kind, target, ours.tokens_per_s, peer_speed)


@dataclass
class Session:
    """One `python -m benchmarks step`: what was chosen, what was measured, what failed."""

    chosen: Mapping[str, tuple[Regime, ...]]
    device: torch.device
    effort: Effort
    kernels: str
    """Which of Weft's paths: auto, fused or reference."""
    show: Callable[[str], None]
    """Shows one line of progress."""
    keep: Callable[[Session], None]
    """Called after every result, to write down what is there."""
    figures: list[Figure] = field(default_factory=list)
    runs: dict[str, float] = field(default_factory=dict)
    """Speed and peak of every run, by flat name."""
    failures: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, float]:
        """Everything found, by flat name."""
        return {**self.runs, **{found.key: found.value for found in self.figures}}

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return torch.float32 if is_cpu(self.device) else torch.bfloat16

    def measure(self) -> None:
        """Measures everything that was chosen."""
        for name, regimes in self.chosen.items():
            shape = find_shape(name)
            needed = list(dict.fromkeys(run for regime in regimes for run in regime.runs))
            results: dict[BenchRun, Measured] = {}
            waiting = list(regimes)
            begun = time.perf_counter()
            for run, measured in self._runs(shape, needed):
                self._note(shape, run, measured, time.perf_counter() - begun)
                results[run] = measured
                done = [(regime, found) for regime in waiting if (found := figure(regime, results))]
                for regime, found in done:
                    waiting.remove(regime)
                    self.figures.append(found)
                    self.show(f"  {found.line}")
                self.keep(self)
                begun = time.perf_counter()
            self.failures += [f"{regime.key} was not measured" for regime in waiting]

    def _runs(self, shape: Shape, needed: list[BenchRun]) -> Iterator[tuple[BenchRun, Measured]]:
        for run in needed:
            if run.program is BenchProgram.ROOFLINE:
                yield run, measure_roofline(shape, run.workload, self.device)
        peers = [run for run in needed if run.program not in (*OURS, BenchProgram.ROOFLINE)]
        with self._surviving(f"the peers of {shape.name}"):
            for run, found in measure_peers(shape, peers, self.dtype, self.device, self.effort):
                if isinstance(found, Missing):
                    self.show(f"{shape.name}  {run.key} is left out: {found.reason}")
                else:
                    yield run, found
        ours = [run for run in needed if run.program in OURS]
        for storage in dict.fromkeys(run.storage for run in ours):
            with self._surviving(f"a backbone of {shape.name} ({storage.quantize})"):
                backbone = make_backbone(shape, storage, self.dtype, self.device, self.kernels)
                self.show(f"{shape.name}  kernels {backbone.kernels}; weights {storage.quantize}")
                for run in ours:
                    if run.storage == storage:
                        with self._surviving(f"{shape.name} {run.key}"):
                            yield run, measure(backbone, run, self.effort)
                del backbone
            release(self.device)

    def _note(self, shape: Shape, run: BenchRun, measured: Measured, taken_s: float) -> None:
        """Shows a run and writes its figures down; those of the main shape have the short names."""
        name = run.key if shape.name == MAIN_SHAPE else f"{shape.name}.{run.key}"
        if run.program is BenchProgram.WEFT_BITS:
            # Compared, not timed.
            self.runs.update({f"{name}_{extra}": value for extra, value in measured.extra.items()})
            return
        self.runs[f"{name}_tok_s"] = measured.tokens_per_s
        self.runs[f"{name}_rows_s"] = measured.rows / measured.seconds
        self.runs[f"{name}_peak_gb"] = measured.peak_gb
        self.runs.update({f"{name}_{extra}": value for extra, value in measured.extra.items()})
        self.show(
            f"{shape.name}  {run.key}: {measured.tokens_per_s:,.0f} tokens/s ({measured.seconds * 1e3:,.1f} ms, "
            f"{measured.tokens:,} tokens in {measured.rows:,} rows, peak {measured.peak_gb:.1f} GB; {measured.detail}) "
            f"[{taken_s:.0f} s]"
        )

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside is reported, and the other measurements go on: a GPU's hour is dear."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failures.append(f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self.show(self.failures[-1])


def step(
    model: Annotated[
        list[str] | None, typer.Option(help="Shape to build with random weights; may be repeated. Default: all tabled.")
    ] = None,
    regime: Regimes = None,
    kernels: Annotated[str, typer.Option(help="Weft's path: auto, fused or reference.")] = "auto",
    json: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    """Whole training steps: Weft beside PEFT, PEFT with Liger's kernels and the frozen model."""
    for name in model or []:
        find_shape(name)
    chosen = choose(model or [], regime or [])
    device = measured_device(needs_gpu=any(name != "tiny" for name in chosen))
    check_kernels(kernels)
    check_files(json, plot)
    if any(run.program in PEFT_PROGRAMS for regimes in chosen.values() for each in regimes for run in each.runs):
        need_peft()

    def keep(found: Session) -> None:
        if json is not None:
            write_json(json, found.values, device)

    run = Session(chosen, device, QUICK if quick else THOROUGH, kernels, show=show, keep=keep)
    run.measure()
    raise typer.Exit(conclude(run.figures, run.failures, device, plot))
