"""`weft tune --jobs`: tries capacities and layouts of a run, and says which to take."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.table import Table

from weft.cli.layout_options import LayoutOptions
from weft.cli.measure.trials import (
    ONE_DEVICE,
    Found,
    RememberedTrials,
    Trial,
    TrialResult,
    capacities_around,
    measure_trial,
    run_facts,
    search,
    shown_layout,
)
from weft.data.load import load_job_data
from weft.engine.train import OpenEngine, load_engine
from weft.errors import ConfigError, WeftError
from weft.kernels.device import device_name
from weft.kernels.tuning import tuning_file
from weft.model.resolve import ResolvedModel, resolve
from weft.model.source import load_tokenizer
from weft.parallel.load_staged import load_staged
from weft.plan.cost.rows import choose_capacity
from weft.report.readable import output_console
from weft.spec import RunSpec, load_run


def tune_run(
    jobs_file: Path, overrides: Sequence[str], steps: int, layouts: Sequence[str] | None, *, again: bool
) -> None:
    """Measures trials of so many global batches of every job, and shows them; results known before are taken over."""
    spec = load_run(jobs_file, overrides)
    model = resolve(spec.backbone)
    if layouts is not None:
        for asked in layouts:
            _options(asked).check(spec, (), model)
    now = Trial(choose_capacity(spec.capacity, "cpu" if model.is_cpu else "gpu", spec.longest))
    known = _remembered(spec, model, jobs_file, steps)

    def measure(trial: Trial) -> TrialResult:
        before = None if again else known.get(trial)
        result = before or measure_trial(spec, jobs_file.parent, trial, steps, _opener(model, trial.layout))
        if before is None:
            known.put(result)
        told = result.problem or f"{result.tokens_per_s:,.0f} tokens/s"
        typer.echo(f"{trial.layout}, capacity {trial.capacity:,}: {told}{' (measured before)' if before else ''}")
        return result

    tried = layouts if layouts is not None else _possible_layouts(spec, model)
    _show(search(now, capacities_around(now.capacity, spec.longest), tried, measure), jobs_file, overrides)


def _remembered(spec: RunSpec, model: ResolvedModel, jobs_file: Path, steps: int) -> RememberedTrials:
    """Where results are kept, under all that they depend on; refuses data that cannot be read."""
    tokenizer = load_tokenizer(model.source)
    lengths = {
        job.name: [int(n) for n in load_job_data(job, tokenizer, jobs_file.parent).train.samples.lengths]
        for job in spec.jobs
    }
    facts = run_facts(spec, lengths, steps, f"{device_name(model.device)}, {os.cpu_count()} cores")
    return RememberedTrials(tuning_file().with_name("trials.json"), facts)


def _possible_layouts(spec: RunSpec, model: ResolvedModel) -> list[str]:
    """Stages that the model and this machine allow."""
    found = []
    for number in (2, 4):
        try:
            if number <= (os.cpu_count() or 1):
                _options(f"stages:{number}").check(spec, (), model)
                found.append(f"stages:{number}")
        except WeftError:
            pass
    return found


def _options(layout: str) -> LayoutOptions:
    return LayoutOptions(None if layout == ONE_DEVICE else layout, may_be_auto=False)


def _opener(model: ResolvedModel, layout: str) -> OpenEngine:
    stages = _options(layout).stages
    if stages is None:
        return load_engine
    return lambda spec, jobs, wall: load_staged(spec, model, jobs, stages, wall)


def _show(found: Found, jobs_file: Path, overrides: Sequence[str]) -> None:
    console = output_console()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layout", "capacity", "rows", "filled", "row tile", "tokens/s", "against now"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    measured = sorted((result for result in found.results if not result.problem), key=lambda r: -r.tokens_per_s)
    if not measured:
        raise ConfigError(f"nothing could be measured: {found.now.problem}", where=f"weft tune --jobs {jobs_file}")
    for result in measured:
        change = result.tokens_per_s / found.now.tokens_per_s - 1 if found.now.tokens_per_s else None
        table.add_row(
            result.trial.layout,
            f"{result.trial.capacity:,}",
            f"{result.microbatch_rows:,.0f}",
            f"{result.fill:.0%}",
            f"{result.row_tile:,}",
            f"{result.tokens_per_s:,.0f}",
            "now" if result is found.now else "" if change is None else f"{change:+.0%}",
        )
    console.print()
    console.print(table)
    best = found.best
    if best is found.now:
        lines = ["nothing is clearly faster than what the file says now"]
    else:
        others = [text for text in overrides if not text.startswith("capacity=")]
        command = shlex.join(["weft", "train", str(jobs_file), *others]) + shown_layout(best.trial.layout)
        lines = [f"put into {jobs_file}: capacity: {best.trial.capacity}", f"and train with: {command}"]
    if len({result.row_tile for result in measured}) > 1:
        lines.append("bits: the row tile decides them; adapters trained with another one are equal to about 1e-5")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
