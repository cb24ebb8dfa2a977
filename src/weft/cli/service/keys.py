"""`weft keys` and `weft workers`: who may use the service and how much, and its workers on all machines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.measure import Measurement
from rich.table import Table

from weft.cli.service.serve import DataDir, DbUrl, check_home, need_serve, open_home
from weft.errors import ConfigError, size
from weft.report.readable import PIPE_COLUMNS, output_console

if TYPE_CHECKING:
    from weft.serve.db.engine import Database

keys = typer.Typer(help="Keys and tenants of the service.", no_args_is_help=True, rich_markup_mode=None)
tenants = typer.Typer(help="Tenants: whose files, jobs and models they are.", no_args_is_help=True)
keys.add_typer(tenants, name="tenants")

DATA_DIR = Path("weft-data")
NO_LIMIT = "none"
Tenant = Annotated[str, typer.Option(help="Tenant of the key.")]
Limit = Annotated[str | None, typer.Option(help="A number, or `none` for no limit.", show_default=False)]


@keys.command()
def create(
    tenant: Tenant = "default",
    name: Annotated[str, typer.Option(help="Name of the key, for people.")] = "",
    scopes: Annotated[str, typer.Option(help="Of files, jobs, models, chat, usage, admin; comma-separated.")] = "",
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Make a key; it is shown this once."""
    database = open_service(data_dir, db)
    from weft.serve.db import tenants as records
    from weft.serve.db.tenants import DEFAULT_SCOPES, create_key, get_tenant, key_id

    chosen = tuple(word.strip() for word in scopes.split(",") if word.strip()) or DEFAULT_SCOPES
    with database.begin() as tx:
        get_tenant(tx, tenant)
        key = create_key(tx, tenant, name, chosen)
        records.add_audit(tx, tenant, "key.create", key_id(key), data={"name": name, "scopes": list(chosen)})
    typer.echo(key)


@keys.command("list")
def list_keys_(
    tenant: Annotated[str | None, typer.Option(help="Only the keys of this tenant.", show_default=False)] = None,
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Show the keys, without their secrets."""
    database = open_service(data_dir, db)
    from weft.serve.db.tenants import list_keys

    table = plain_table("id", "tenant", "name", "scopes", "made", "used", "state")
    with database.read() as tx:
        for key in list_keys(tx, tenant):
            state = "revoked" if key["revoked_at"] else "good"
            times = [_time(key["created_at"]), _time(key["last_used_at"])]
            table.add_row(key["id"], key["tenant"], key["name"], ",".join(key["scopes"]), *times, state)
    output_console().print(table)


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key or its id.")], data_dir: DataDir = DATA_DIR, db: DbUrl = ""
) -> None:
    """Make a key open nothing from now on."""
    database = open_service(data_dir, db)
    from weft.serve.db import tenants as records
    from weft.serve.db.tenants import key_id, revoke_key

    with database.begin() as tx:
        row = revoke_key(tx, None, key_id(key))
        records.add_audit(tx, row["tenant"], "key.revoke", row["id"])
    typer.echo(f"{row['id']} is revoked")


@tenants.command("create")
def create_tenant(
    tenant: Annotated[str, typer.Argument(help="Lower-case letters, digits and '-'; part of its models' names.")],
    name: Annotated[str, typer.Option(help="Name of the tenant, for people.")] = "",
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Make a tenant without limits."""
    database = open_service(data_dir, db)
    from weft.serve.db import tenants as records

    with database.begin() as tx:
        records.create_tenant(tx, tenant, name)
        records.add_audit(tx, tenant, "tenant.create", tenant)
    typer.echo(f"{tenant} is there; make it a key: weft keys create --tenant {tenant}")


@tenants.command("limits")
def limits(
    tenant: Annotated[str, typer.Argument(help="Tenant to limit.")],
    weight: Annotated[
        float | None, typer.Option(help="Share of the seats relative to other tenants.", show_default=False)
    ] = None,
    max_priority: Annotated[int | None, typer.Option(help="Highest priority of a job.", show_default=False)] = None,
    max_active_jobs: Limit = None,
    max_trained_tokens: Limit = None,
    max_stored_bytes: Limit = None,
    max_requests_per_minute: Limit = None,
    disable: Annotated[
        bool | None,
        typer.Option(
            "--disable/--enable", help="Refuse all requests of the tenant, or accept them again.", show_default=False
        ),
    ] = None,
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Set limits, and show them."""
    database = open_service(data_dir, db)
    from weft.serve.db import tenants as records
    from weft.serve.db.tenants import update_tenant

    texts = {
        "max_active_jobs": max_active_jobs,
        "max_trained_tokens": max_trained_tokens,
        "max_stored_bytes": max_stored_bytes,
        "max_requests_per_minute": max_requests_per_minute,
    }
    changes: dict[str, float | None] = {name: _number(text, name) for name, text in texts.items() if text is not None}
    shares = {"weight": weight, "max_priority": max_priority}
    changes |= {name: value for name, value in shares.items() if value is not None}
    with database.begin() as tx:
        row = update_tenant(tx, tenant, is_disabled=disable, **changes)
        if changes or disable is not None:
            records.add_audit(tx, tenant, "tenant.limits", tenant, data={**changes, "disable": disable})
    for name in ("weight", "max_priority", *texts):
        typer.echo(f"{name:25}{NO_LIMIT if row[name] is None else format(row[name], ',')}")
    typer.echo(f"{'state':25}{'disabled' if row['is_disabled'] else 'enabled'}")


@tenants.command("list")
def list_tenants(data_dir: DataDir = DATA_DIR, db: DbUrl = "") -> None:
    """Show the tenants and what they used."""
    database = open_service(data_dir, db)
    from weft.serve.db import files, jobs
    from weft.serve.db import tenants as records
    from weft.serve.db.usage import token_usage

    table = plain_table("id", "name", "active jobs", "trained tokens", "stored bytes", "state")
    with database.read() as tx:
        for row in records.list_tenants(tx):
            used = (
                jobs.count_active(tx, row["id"]),
                token_usage(tx, row["id"]).trained,
                files.stored_bytes(tx, row["id"]),
            )
            state = "disabled" if row["is_disabled"] else "enabled"
            table.add_row(row["id"], row["name"], *(f"{n:,}" for n in used), state)
    output_console().print(table)


def open_service(data_dir: Path, db: str) -> Database:
    """Opens the database of an existing service and brings it up to date."""
    need_serve()
    from weft.serve.db.engine import migrate
    from weft.serve.settings import Settings

    check_home(data_dir, db)
    database = open_home(Settings(data_dir=data_dir, db=db))
    migrate(database)
    return database


def _number(text: str, name: str) -> int | None:
    if text == NO_LIMIT:
        return None
    if not text.replace("_", "").isdecimal():
        raise ConfigError(f"got {text!r}; use a whole number or `{NO_LIMIT}`.", where=f"--{name.replace('_', '-')}")
    return int(text.replace("_", ""))


def plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _time(seconds: int | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


workers = typer.Typer(help="Workers of the service, on all machines.", no_args_is_help=True, rich_markup_mode=None)
Target = Annotated[str, typer.Argument(metavar="WORKER|MACHINE", help="A worker, or a machine with all its workers.")]


@workers.command("list")
def list_workers(data_dir: DataDir = DATA_DIR, db: DbUrl = "") -> None:
    """Show the workers by machine: what they run on, how many jobs they hold, and how they are."""
    database = open_service(data_dir, db)
    from weft.serve.db.engine import now
    from weft.serve.db.workers import all_workers, held_by_worker, worker_state

    table = plain_table("machine", "worker", "model", "device", "memory", "jobs", "tokens/s", "seen", "state")
    for column in table.columns:
        # A name on two lines can be neither found nor copied.
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
    from weft.serve.db.leases import steer_workers
    from weft.serve.db.workers import is_lost

    with database.begin() as tx:
        steered, at = steer_workers(tx, target, wish), now(tx)
    for row in steered:
        done = {"drain": "drains", "undrain": "takes jobs again", "remove": "gives its jobs back and ends"}[wish]
        if is_lost(row, at):
            done = "was lost and is forgotten" if wish == "remove" else "is lost"
        typer.echo(f"{row['id']} on {row['machine'] or '?'} {done}")
    if wish != "undrain":
        typer.echo("weft workers list shows how far they are")


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else size(num_bytes)
