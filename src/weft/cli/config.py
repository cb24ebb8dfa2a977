"""`weft config`: every setting with its meaning, or a jobs or sweep file with every value it leads to."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from weft.cli.user_path import user_path
from weft.errors import ConfigError
from weft.report.readable import output_console
from weft.settings.fields import without_foreign
from weft.spec import AdapterSpec, RunSpec, load_run
from weft.spec.load_sweep import load_sweep
from weft.spec.sweep import resolved_sweep

if TYPE_CHECKING:
    from weft.spec.reference import Section


def config(
    jobs_file: Annotated[
        Path | None, typer.Argument(parser=user_path, metavar="PATH", help="A file to check.", show_default=False)
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change: jobs.0.adapter.r=32")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON Schema of the files.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="The same for sweep files.")] = False,
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
    """Every value of a run as plain data: itself a jobs file, with nothing left to defaults."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(run)))
    del values["defaults"]
    for job, spec in zip(values["jobs"], run.jobs, strict=True):
        job["global_batch_size"] = spec.batch_size
        job["adapter"] = without_foreign(AdapterSpec, job["adapter"], spec.adapter.method)
        job["adapter"] |= spec.adapter.config.followed(spec.adapter)
    # The jobs are by far the longest part; the short settings read better above them.
    return {key: values[key] for key in sorted(values, key=lambda key: key == "jobs")}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _show(console: Console, sections: Sequence[Section]) -> None:
    for section in sections:
        console.print(Text(f"{section.title.upper()}  {section.place.replace('`', '')}", style="bold"))
        for setting in section.settings:
            default = "required" if setting.is_required else f"default {setting.default}"
            default = "optional" if setting.default == "null" else default
            also = f" Also: {', '.join(setting.aliases)}." if setting.aliases else ""
            text = f"{setting.values}; {default}. {setting.description}{also}"
            console.print(Text(f"  {setting.name}", style="cyan"))
            for line in textwrap.wrap(text, max(40, min(console.width, 100) - 6)):
                console.print(f"      {line}", markup=False, highlight=False, soft_wrap=True)
        console.print()
