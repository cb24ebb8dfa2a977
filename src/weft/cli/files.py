"""`weft init`, `config`, `report` and `cache`: verbs that write, check or show files, and train nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.options import open_for_reading, path_argument, run_location
from weft.errors import ConfigError, StorageError
from weft.report.readable import output_console, print_line
from weft.settings import without_foreign
from weft.spec import AdapterSpec, RunSpec, load_run
from weft.spec.load_sweep import load_sweep
from weft.spec.sweep import resolved_sweep

if TYPE_CHECKING:
    from weft.data.prepared.cache import PreparedCache
    from weft.spec.reference import Section
    from weft.store.wall_clock import TimeSplit

SKILLS = ("shout", "reverse")
"""The example jobs; each has a data file of its own."""
NUM_ROWS = 1000

JOBS_FILE = """\
# Adapters that learn together on one frozen model. Check this file, then train:
#
#   weft train {file} --dry-run
#   weft train {file}
#
# `weft config` explains every setting. Lines that start with #: are examples to switch on.

# The frozen model: tiny (embedded, to try things out), a model directory, or a name on the Hugging Face Hub.
base_model: tiny

# Where results go: one directory per job, and report.html.
output_dir: runs/first

#: device: cpu
#: report_to: [tensorboard]

# Settings of every job that does not set its own.
defaults:
  max_steps: 60
  global_batch_size: 8
  learning_rate: 4e-3
  max_length: 128
  # A fraction or a number of samples to split off for evaluation, or a file.
  eval_data: 32
  adapter:
    r: 8
    #: lora_dropout: 0.05
    #: target_modules: [q_proj, k_proj, v_proj, o_proj]

# One adapter each. Data may be chats, prompt and completion, Alpaca, ShareGPT or text, as jsonl, ndjson, json,
# csv, tsv, parquet or txt.
jobs:
  - name: shout
    train_data: data/shout.jsonl

  - name: reverse
    train_data: data/reverse.jsonl
    # Anything set here is this job's own.
    learning_rate: 3e-3
    #: seed: 7
"""


def init(
    file: Annotated[Path, path_argument("The jobs file to write.")] = Path("jobs.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a commented jobs file that runs as it is, and two small data files for it."""
    from weft.store.atomic import forget, make_directories, storage_errors, write_file

    data = {file.parent / "data" / f"{name}.jsonl": _rows(name) for name in SKILLS}
    shown = shlex.quote(str(file))
    texts = {**data, file: JOBS_FILE.format(file=shown)}
    with storage_errors(file):
        if file.is_dir():
            raise StorageError("is a directory; name a file.", where=str(file), hint=f"{file / 'jobs.yaml'} would do.")
        existing = [path for path in texts if path.exists()]
    if existing and not force:
        raise StorageError("already exists.", where=str(existing[0]), hint="Use --force to replace it.")
    with contextlib.ExitStack() as undo:
        for path, text in texts.items():
            make_directories(path.parent, undo)
            if path not in existing:
                undo.callback(forget, path.unlink)
            write_file(path, text)
        undo.pop_all()
    examples = " and ".join(str(path) for path in data)
    typer.echo(f"wrote {file}, and example data for it: {examples}")
    typer.echo(f"next: weft train {shown}")


def _rows(skill: str) -> str:
    from weft.cli.demo import SKILLS as ALL

    return "".join(json.dumps(row) + "\n" for row in ALL[skill].rows(0, NUM_ROWS))


def config(
    jobs_file: Annotated[Path | None, path_argument("A file to check.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: jobs.0.adapter.r=32")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON Schema of the files.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Describe sweep files instead of jobs files.")] = False,
) -> None:
    """List all settings, or check a jobs file and show every value it leads to."""
    from weft.spec.reference import json_schema, sections, sweep_schema, sweep_sections

    listed_sections = [*sections(), *sweep_sections()] if sweep else sections()
    if jobs_file is not None and schema:
        raise ConfigError(f"describes all {'sweep' if sweep else 'jobs'} files; leave out the file.", where="--schema")
    if jobs_file is not None:
        given = overrides or ()
        values = resolved_sweep(load_sweep(jobs_file, given)) if sweep else resolved(load_run(jobs_file, given))
        typer.echo(_json(values) if as_json else yaml.safe_dump(values, sort_keys=False, width=120), nl=False)
    elif schema:
        typer.echo(_json(sweep_schema() if sweep else json_schema()), nl=False)
    elif as_json:
        listed = {part.title.lower(): [dataclasses.asdict(s) for s in part.settings] for part in listed_sections}
        typer.echo(_json(listed), nl=False)
    else:
        _show(output_console(), listed_sections)


def resolved(run: RunSpec) -> dict[str, Any]:
    """Every value of a run as plain data, which is a complete jobs file."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(run)))
    del values["defaults"]
    for job, spec in zip(values["jobs"], run.jobs, strict=True):
        job["global_batch_size"] = spec.batch_size
        job["adapter"] = without_foreign(AdapterSpec, job["adapter"], "methods", spec.adapter.method)
        job["adapter"] |= spec.adapter.config.followed(spec.adapter)
    # The jobs, by far the longest part, come last.
    return {key: values[key] for key in sorted(values, key=lambda key: key == "jobs")}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _show(console: Console, sections: Sequence[Section]) -> None:
    for section in sections:
        console.print(Text(f"{section.title.upper()}  {section.location.replace('`', '')}", style="bold"))
        for setting in section.settings:
            default = "required" if setting.is_required else f"default {setting.default}"
            default = "optional" if setting.default == "null" else default
            also = f" Also: {', '.join(setting.aliases)}." if setting.aliases else ""
            text = f"{setting.values}; {default}. {setting.description}{also}"
            console.print(Text(f"  {setting.name}", style="cyan"))
            for line in textwrap.wrap(text, max(40, min(console.width, 100) - 6)):
                print_line(console, f"      {line}")
        console.print()


def _reported_location(text: str) -> Any:
    # A function and no `partial`: click takes the name of a parser, which older ones require it to have.
    return run_location(text, option="PATH")


def report(
    location: Annotated[
        Any,
        typer.Argument(
            parser=_reported_location,
            metavar="PATH",
            help="A run's or a sweep's directory or URL, such as runs/first.",
        ),
    ],
) -> None:
    """Write report.html of a run or a sweep again, also of one that is still going on or was killed."""
    from weft.report import readable

    with open_for_reading(location) as directory:
        path, layout, split = _write(directory)
        shown = path if isinstance(location, Path) else location.upload(path)
    typer.echo(f"report    {shown}")
    if layout is not None:
        typer.echo(f"layout    {layout}")
    if split is not None:
        typer.echo(f"time      {readable.time_split(split)}")


def _write(directory: Path) -> tuple[Path, str | None, TimeSplit | None]:
    from weft.report.page import write_report
    from weft.report.read_run import read_info, read_run
    from weft.report.run_data import layout_of
    from weft.report.sweep_board import read_board
    from weft.report.sweep_page import write_sweep_report
    from weft.store.json_text import parse
    from weft.sweeps.leaderboard import BOARD, TRIALS

    board = directory / BOARD
    if board.is_file():
        path = directory / "report.html"
        try:
            found = parse(board.read_bytes())
        except ValueError as error:
            raise StorageError(f"is not JSON ({error}).", where=str(board)) from None
        info = read_info(directory / TRIALS)
        write_sweep_report(path, found, info)
        return path, layout_of(info), read_board(found).time
    run = read_run(directory)
    return write_report(directory), run.layout, run.time


cache = typer.Typer(help="Prepared data that is kept for the next run.", rich_markup_mode=None)
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@cache.callback(invoke_without_command=True)
def show(context: typer.Context) -> None:
    """Show the prepared data sets: their files, sizes and last use."""
    if context.invoked_subcommand is not None:
        return
    kept = _open()
    if kept is None:
        return
    entries = kept.entries()
    total = sum(entry.num_bytes for entry in entries)
    typer.echo(f"{kept.root}: {_counted(len(entries))}, {_size(total)} of at most {_size(kept.limit_bytes)}")
    if not entries:
        return
    table = Table(box=None, pad_edge=False)
    for title in ("sources", "samples", "size", "used", "key"):
        table.add_column(title, justify="left" if title in ("sources", "key") else "right", overflow="fold")
    now = time.time()
    for entry in entries:
        row = (f"{entry.num_samples:,}", _size(entry.num_bytes), f"{_age(now - entry.used)} ago", entry.key[:12])
        table.add_row(", ".join(entry.sources), *row)
    output_console(markup=False).print(table, highlight=False)


@cache.command()
def clear() -> None:
    """Remove all prepared data; runs that use some of it continue."""
    kept = _open()
    if kept is not None:
        typer.echo(f"removed {_counted(kept.clear())} from {kept.root}")


def _open() -> PreparedCache | None:
    from weft.data.prepared.cache import CACHE_VARIABLE, default_cache

    kept = default_cache()
    if kept is None:
        typer.echo(f"{CACHE_VARIABLE} is off: nothing is kept")
    return kept


def _counted(number: int) -> str:
    return f"{number:,} {'entry' if number == 1 else 'entries'}"


def _size(num_bytes: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= unit), (1e3, "kB"))
    return f"{num_bytes / unit:,.1f} {name}"


def _age(seconds: float) -> str:
    return next((f"{seconds // unit:,.0f} {name}" for unit, name in UNITS if seconds >= unit), f"{seconds:.0f} s")
