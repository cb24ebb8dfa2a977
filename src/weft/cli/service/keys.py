"""`weft keys`: who may use the service, and how much."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from weft.cli.service.serve import DataDir, DbUrl, need_serve, open_home
from weft.errors import ConfigError
from weft.report.readable import output_console

if TYPE_CHECKING:
    from weft.serve.db.engine import Database

keys = typer.Typer(help="Keys and tenants of the service.", no_args_is_help=True, rich_markup_mode=None)
tenants = typer.Typer(help="Tenants: whose files, jobs and models they are.", no_args_is_help=True)
keys.add_typer(tenants, name="tenants")

DATA_DIR = Path("weft-data")
NO_LIMIT = "none"
Tenant = Annotated[str, typer.Option(help="Whose key it is.")]
Limit = Annotated[str | None, typer.Option(help="A number, or `none` for no limit.", show_default=False)]


@keys.command()
def create(
    tenant: Tenant = "default",
    name: Annotated[str, typer.Option(help="A word to know it by.")] = "",
    scopes: Annotated[str, typer.Option(help="Of files, jobs, models, chat, usage, admin; comma-separated.")] = "",
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Make a key; it is shown this once."""
    database = open_service(data_dir, db)
    from weft.serve.records import audit
    from weft.serve.records.keys import DEFAULT_SCOPES, create_key, key_id
    from weft.serve.records.tenants import get_tenant

    chosen = tuple(word.strip() for word in scopes.split(",") if word.strip()) or DEFAULT_SCOPES
    with database.begin() as tx:
        get_tenant(tx, tenant)
        key = create_key(tx, tenant, name, chosen)
        audit.note(tx, tenant, "key.create", key_id(key), data={"name": name, "scopes": list(chosen)})
    typer.echo(key)


@keys.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.", show_default=False)] = None,
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Show the keys, without their secrets."""
    database = open_service(data_dir, db)
    from weft.serve.records.keys import list_keys

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
    from weft.serve.records import audit
    from weft.serve.records.keys import key_id, revoke_key

    with database.begin() as tx:
        row = revoke_key(tx, None, key_id(key))
        audit.note(tx, row["tenant"], "key.revoke", row["id"])
    typer.echo(f"{row['id']} is revoked")


@tenants.command("create")
def create_tenant(
    tenant: Annotated[str, typer.Argument(help="Lower-case letters, digits and '-'; part of its models' names.")],
    name: Annotated[str, typer.Option(help="What people call it.")] = "",
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Make a tenant without limits."""
    database = open_service(data_dir, db)
    from weft.serve.records import audit
    from weft.serve.records import tenants as records

    with database.begin() as tx:
        records.create_tenant(tx, tenant, name)
        audit.note(tx, tenant, "tenant.create", tenant)
    typer.echo(f"{tenant} is there; make it a key: weft keys create --tenant {tenant}")


@tenants.command("limits")
def limits(
    tenant: Annotated[str, typer.Argument(help="Whose limits.")],
    weight: Annotated[float | None, typer.Option(help="Its share beside others.", show_default=False)] = None,
    max_priority: Annotated[int | None, typer.Option(help="Highest priority of a job.", show_default=False)] = None,
    max_active_jobs: Limit = None,
    max_trained_tokens: Limit = None,
    max_stored_bytes: Limit = None,
    max_requests_per_minute: Limit = None,
    disable: Annotated[
        bool | None, typer.Option("--disable/--enable", help="Shut it out, or let it in again.", show_default=False)
    ] = None,
    data_dir: DataDir = DATA_DIR,
    db: DbUrl = "",
) -> None:
    """Set limits, and show them."""
    database = open_service(data_dir, db)
    from weft.serve.records import audit
    from weft.serve.records.tenants import update_tenant

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
            audit.note(tx, tenant, "tenant.limits", tenant, data={**changes, "disable": disable})
    for name in ("weight", "max_priority", *texts):
        typer.echo(f"{name:25}{NO_LIMIT if row[name] is None else format(row[name], ',')}")
    typer.echo(f"{'state':25}{'disabled' if row['is_disabled'] else 'enabled'}")


@tenants.command("list")
def list_tenants(data_dir: DataDir = DATA_DIR, db: DbUrl = "") -> None:
    """Show the tenants and what they used."""
    database = open_service(data_dir, db)
    from weft.serve.jobs.quota import token_usage
    from weft.serve.records import files, jobs
    from weft.serve.records import tenants as records

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
    """Opens the database of a service that is there, and brings it up to date."""
    need_serve()
    from weft.serve.db.engine import migrate
    from weft.serve.settings import Settings

    if not db and not data_dir.is_dir():
        raise ConfigError("there is no such directory; name the one of `weft serve`.", where=f"--data-dir {data_dir}")
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
    """Makes a table without lines."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _time(seconds: int | None) -> str:
    return "never" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
