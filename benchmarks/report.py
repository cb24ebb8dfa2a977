"""What benchmarks share: options, and results as lines, as a table, as a JSON file that several fill, as a picture."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.figures import Figure, Kind, Parts, Targets, measure_parts
from weft.cli.options import user_path
from weft.errors import ConfigError, ModelError, StorageError
from weft.kernels.device import default_device, device_name, has_gpu, is_gpu
from weft.report.figure import check_plot
from weft.report.readable import output_console
from weft.store.atomic import storage_error, storage_errors, write_file
from weft.store.json_text import dump, parse

MET, MISSED, FREE = "#4b9b78", "#d98a3d", "#97a3b0"
PATHS = ("auto", "fused", "reference")
JsonFile = Annotated[
    Path | None, typer.Option("--json", parser=user_path, metavar="PATH", help="Add the figures to this JSON file.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", parser=user_path, metavar="PATH", help="Draw the figures into this .svg or .png file."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer repeats: for a first look, not for publishing.")]
Regimes = Annotated[list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all.")]


def check_kernels(kernels: str) -> None:
    """ConfigError for a path that Weft does not have."""
    if kernels not in PATHS:
        raise ConfigError(f"got {kernels!r}; accepted are {', '.join(PATHS)}.", where="--kernels")


def measured_device(*, needs_gpu: bool) -> torch.device:
    """The GPU, or the CPU for what also runs there."""
    if needs_gpu and not has_gpu():
        raise ModelError(
            "these measurements need a CUDA GPU and torch sees none; `step --model tiny` runs anywhere.",
            where="benchmarks",
        )
    return default_device()


def machine(device: torch.device) -> dict[str, str]:
    """What the figures were measured on."""
    import transformers

    name = device_name(device) if is_gpu(device) else f"CPU ({platform.machine()})"
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def read_json(path: Path) -> dict[str, Any]:
    """What an earlier command wrote there; nothing if the file is new."""
    where = f"--json {path}"
    if not path.exists():
        if not path.parent.is_dir():
            raise StorageError(f"there is no directory {path.parent}.", where=where)
        return {}
    try:
        found = parse(path.read_bytes())
    except OSError as error:
        raise storage_error(error, path) from None
    except ValueError as error:
        raise StorageError(f"is not JSON ({error}); name another file.", where=where) from None
    if not isinstance(found, dict):
        raise StorageError("holds no JSON object; name another file.", where=where)
    return found


def write_json(path: Path, values: Mapping[str, float], device: torch.device, *, key: str = "machine") -> None:
    """Adds the values to the file, and under `key` what they were measured on; those of other commands stay."""
    rounded = {name: _rounded(value) for name, value in values.items()}
    write_file(path, dump({**read_json(path), **rounded, key: machine(device)}))


def _rounded(value: float) -> float:
    """Four digits at least: more is noise."""
    return round(value) if abs(value) >= 1e4 else float(f"{value:.4g}")


def table(figures: Sequence[Figure]) -> Table:
    """One row per figure."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    made.add_column("figure")
    for heading in ("tokens/s", "beside", "result", "target"):
        made.add_column(heading, justify="right")
    made.add_column("")
    for figure in figures:
        mark = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[figure.is_met]
        speeds = [_speed(speed) for speed in (figure.tokens_per_s, figure.peer_tokens_per_s)]
        made.add_row(figure.key, *speeds, figure.shown, figure.shown_target, mark)
    return made


def _speed(tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def draw(path: Path, figures: Sequence[Figure], title: str) -> None:
    """A bar per figure, as a part of its target where it has one; a longer bar is always better."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(8, 0.9 + 0.38 * len(figures)), layout="constrained")
    axes = picture.subplots()
    lengths = [bar_length(figure) for figure in figures]
    colours = [{True: MET, False: MISSED, None: FREE}[figure.is_met] for figure in figures]
    bars = axes.barh(range(len(figures)), lengths, color=colours, height=0.62)
    labels = [f"{f.shown}   ({f.shown_target})" if f.shown_target else f.shown for f in figures]
    # The box keeps the target's line out of the text.
    axes.bar_label(bars, labels, padding=5, fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.axvline(1.0, color="#808890", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(figures)), [figure.key for figure in figures])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max([1.0, *lengths]))
    axes.set_xlabel("1 = the target; without a target, 1 = the peer")
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with storage_errors(path):
        picture.savefig(path, dpi=160)


def bar_length(figure: Figure) -> float:
    """How far a figure goes: its share of the target, turned round where less is better."""
    if figure.kind is Kind.DIFFERENCES:
        return 1.0 if figure.value == 0 else 0.0
    if figure.kind in (Kind.PEAK_GB, Kind.TOKENS_PER_S) and figure.target is None:
        return 0.0  # nothing to compare with: the number alone speaks
    if figure.kind is Kind.OVERHEAD:
        # The whole step counts, not the small difference of two steps.
        value, target = 1 + figure.value, 1 + (figure.target or 0.0)
    else:
        value, target = figure.value, figure.target or 1.0
    return target / value if figure.kind.less_is_better else value / target


def show(line: str) -> None:
    """Prints one line at once, so that a run that is cut short still shows what it had."""
    print(line, flush=True)


def check_files(json: Path | None, plot: Path | None) -> None:
    """Refuses files that could not be written, before anything is measured."""
    if json is not None:
        read_json(json)
    if plot is not None:
        check_plot(plot)


def run_parts(parts: Parts, targets: Targets, json: Path | None, *, on_gpu: Collection[str] = ()) -> int:
    """Measures part by part and keeps each as soon as it is there; returns the exit code.

    All is measured on the CPU but the parts `on_gpu`, beside which the file names their machine as `machine_gpu`.
    """
    check_files(json, None)
    cpu = torch.device("cpu")
    figures: list[Figure] = []
    for name, values, found in measure_parts(parts, targets):
        show(name)
        for figure in found:
            show(f"  {figure.line}")
        figures += found
        if json is not None:
            is_cpu = name not in on_gpu
            write_json(json, values, cpu if is_cpu else default_device(), key="machine" if is_cpu else "machine_gpu")
    return conclude(figures, [], default_device() if set(parts) <= set(on_gpu) else cpu, None)


def conclude(figures: Sequence[Figure], failures: Sequence[str], device: torch.device, plot: Path | None) -> int:
    """Prints the table and what failed; returns the exit code."""
    console = output_console()
    found = machine(device)
    title = f"{found['device']}, torch {found['torch']}, {found['date']}"
    if figures:
        console.print()
        console.print(table(figures))
        console.print(title, highlight=False, style="dim")
        if plot is not None:
            draw(plot, figures, title)
    for failure in failures:
        console.print(failure, style="yellow", highlight=False, markup=False, soft_wrap=True)
    return 1 if failures else 0
