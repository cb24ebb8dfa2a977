"""`weft workers`: the workers of a service on all machines; drain them, or send them away, without losing a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.measure import Measurement

from weft.cli.service.keys import DATA_DIR, open_service, plain_table
from weft.cli.service.serve import DataDir, DbUrl
from weft.report.readable import PIPE_COLUMNS, output_console
from weft.wording import size

workers = typer.Typer(help="Workers of the service, on all machines.", no_args_is_help=True, rich_markup_mode=None)
Target = Annotated[str, typer.Argument(metavar="WORKER|MACHINE", help="A worker, or a machine with all its workers.")]


@workers.command("list")
def list_(data_dir: DataDir = DATA_DIR, db: DbUrl = "") -> None:
    """Show the workers by machine: what they run on, how many jobs they hold, and how they are."""
    database = open_service(data_dir, db)
    from weft.serve.db.engine import now
    from weft.serve.records.workers import all_workers, held_by_worker, worker_state

    table = plain_table("machine", "worker", "model", "device", "memory", "jobs", "tokens/s", "seen", "state")
    for column in table.columns:
        # A name that goes over two lines can be neither found nor copied.
        column.no_wrap = True
    with database.read() as tx:
        held, at = held_by_worker(tx), now(tx)
        for row in all_workers(tx):
            info, num_held = row["info"], held.get(row["id"], 0)
            memory = f"{_size(info.get('memory_bytes'))} of {_size(info.get('memory_total_bytes'))}"
            speed = f"{info.get('tokens_per_s') or 0:,.0f}"
            seen = f"{max(0, at - row['seen_at']):,.0f} s ago"
            device = info.get("device_name") or info.get("device") or "?"
            state = worker_state(row, num_held, at)
            machine = row["machine"] or "?"
            table.add_row(machine, row["id"], row["base_model"], device, memory, str(num_held), speed, seen, state)
    console = output_console()
    whole = Measurement.get(console, console.options.update(max_width=PIPE_COLUMNS), table)
    console.width = max(console.width, whole.maximum)
    console.print(table)


@workers.command()
def drain(target: Target, data_dir: DataDir = DATA_DIR, db: DbUrl = "") -> None:
    """Have jobs saved at their next step and given to other workers; nothing new is claimed."""
    _steer(target, "drain", data_dir, db)


@workers.command()
def undrain(target: Target, data_dir: DataDir = DATA_DIR, db: DbUrl = "") -> None:
    """Let drained workers claim jobs again."""
    _steer(target, "undrain", data_dir, db)


@workers.command()
def remove(target: Target, data_dir: DataDir = DATA_DIR, db: DbUrl = "") -> None:
    """Have workers give their jobs to others and end for good; forget those that are lost."""
    _steer(target, "remove", data_dir, db)


def _steer(target: str, wish: str, data_dir: Path, db: str) -> None:
    database = open_service(data_dir, db)
    from weft.serve.db.engine import now
    from weft.serve.jobs.drain import steer_workers
    from weft.serve.records.workers import is_lost

    with database.begin() as tx:
        asked, at = steer_workers(tx, target, wish), now(tx)
    for row in asked:
        done = {"drain": "drains", "undrain": "takes jobs again", "remove": "gives its jobs back and ends"}[wish]
        if is_lost(row, at):
            done = "was lost and is forgotten" if wish == "remove" else "is lost"
        typer.echo(f"{row['id']} on {row['machine'] or '?'} {done}")
    if wish != "undrain":
        typer.echo("weft workers list shows how far they are")


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else size(num_bytes)
