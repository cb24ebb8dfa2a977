"""`weft import openai`: fine-tuning jobs of OpenAI's as a jobs file with its data, or sent to a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import path_argument, path_option
from weft.errors import ConfigError, WeftError, counted

if TYPE_CHECKING:
    from weft.serve.openai_import import ExportedJob, MovedJob

imports = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Bring fine-tuning jobs from elsewhere, such as OpenAI.",
)


@imports.callback()
def from_elsewhere() -> None:
    """Bring fine-tuning jobs from elsewhere, such as OpenAI."""


@imports.command("openai")
def from_openai(
    export: Annotated[
        Path,
        path_argument(
            "What GET /v1/fine_tuning/jobs answered, or a folder with it; files lie beside it as FILE-ID.jsonl."
        ),
    ],
    base_model: Annotated[str | None, typer.Option(help="Open model for all of OpenAI's models.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="THERE=HERE", help="Open model for one of OpenAI's models; repeatable.")
    ] = None,
    out: Annotated[Path, path_option("The folder to write jobs.yaml and data/ to.")] = Path("from-openai"),
    to: Annotated[str | None, typer.Option(metavar="URL", help="Send the jobs to this service, .../v1.")] = None,
    key: Annotated[str, typer.Option(envvar="WEFT_API_KEY", help="A key of that service.")] = "",
) -> None:
    """Turn OpenAI's fine-tuning jobs into a jobs file with its data, or send them to a running service.

    Jobs that cannot be carried over are named with the reason, and the others go on (exit code 1).
    """
    from weft.serve.openai_import import move_job, read_export, with_unique_names

    models = _models(model or [])
    exported = read_export(export)
    _note_idle_models(models, exported)
    moved: list[MovedJob] = []
    problems: list[WeftError] = []
    for job in exported:
        try:
            moved.append(move_job(job, models, base_model))
        except WeftError as error:
            problems.append(error)
    if len(exported) == 1 and problems:
        raise problems[0]
    for problem in problems:
        typer.echo(f"left out {problem}", err=True)
    if not moved:
        raise ConfigError(f"none of its {counted(len(problems), 'job')} can be carried over.", where=str(export))
    moved = with_unique_names(moved)
    for mine in moved:
        for note in mine.notes:
            typer.echo(f"note {mine.id}: {note}", err=True)
    if to is None:
        _write(moved, out)
    else:
        _send(moved, to, key)
    if problems:
        raise typer.Exit(1)


def _models(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        there, equals, here = pair.partition("=")
        if not (there and equals and here):
            raise ConfigError(f"got {pair!r}; write THERE=HERE, such as gpt-4o-mini=tiny.", where="--model")
        found[there] = here
    return found


def _note_idle_models(models: Mapping[str, str], exported: Sequence[ExportedJob]) -> None:
    there = sorted({str(job.values.get("model")) for job in exported})
    for model in models:
        if model not in there:
            typer.echo(f"note --model: no job there is on {model}; they are on {', '.join(there)}.", err=True)


def _write(jobs: Sequence[MovedJob], out: Path) -> None:
    from weft.serve.openai_import import write_jobs

    for file in write_jobs(jobs, out):
        typer.echo(f"wrote {file}; next: weft train {file}")


def _send(jobs: Sequence[MovedJob], url: str, key: str) -> None:
    from weft.serve.openai_import import send_jobs, service_client

    if not key:
        raise ConfigError("--to needs a key of the service; give it in WEFT_API_KEY.", where="--key")
    with service_client(url, key) as client:
        for job, made in send_jobs(jobs, client):
            typer.echo(f"{job.id} is {made} on {job.base_model}")
