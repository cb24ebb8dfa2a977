"""`weft demo`: several adapters learn different skills together on the embedded backbone."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from weft.cli.user_path import user_path
from weft.errors import ConfigError
from weft.report.readable import output_console
from weft.wall_clock import Activity, WallClock, process_start_s


def demo(
    model: Annotated[
        str, typer.Option(help="tiny (embedded) or smollm2 (135 M parameters, about five minutes).")
    ] = "tiny",
    out: Annotated[
        Path,
        typer.Option(parser=user_path, metavar="PATH", help="Where results go; an earlier demo there is replaced."),
    ] = Path("runs/demo"),
) -> None:
    """Train several adapters together on a small backbone and see what they learnt."""
    from weft.cli.demo import demo_run as steps
    from weft.cli.watch import conclude, follow, print_time, settle
    from weft.engine.train import prepare_run
    from weft.model.source import find_source
    from weft.report.page import ReportExtra, SkillGain

    if model not in steps.MODELS:
        raise ConfigError(f"got {model!r}; accepted are {' and '.join(steps.MODELS)}.", where="--model")
    find_source(model)
    console, wall = output_console(), WallClock(process_start_s())
    num_skills = len(steps.MODELS[model].skills)
    with steps.open_demo(out) as directory:
        with console.status(f"loading {model} and writing {num_skills} small data sets"):
            spec = steps.write_jobs(out, model)
            run = prepare_run(spec, base_dir=out, wall=wall)
            with wall.spending(Activity.EVALUATING):
                before = steps.ask(run, out, trained=False)
        console.print(f"{num_skills} adapters learn {num_skills} skills together on one frozen {model}")
        states, stopped = follow(run, directory, console)
        time = partial(settle, wall, directory)
        if stopped or set(states.values()) != {"succeeded"}:
            with wall.spending(Activity.WRITING):
                conclude(out, console, time=time)
            print_time(wall, console)
            raise typer.Exit(130 if stopped else 1)
        with console.status("asking the adapters, then training each alone for a few steps to compare"):
            with wall.spending(Activity.EVALUATING):
                after = steps.ask(run, out, trained=True)
            with wall.spending(Activity.COMPUTING):
                speed = steps.measure_speed(run)
        console.print(_skills(before, after))
        console.print()
        extra = ReportExtra(
            title="What the adapters learnt",
            paragraph="Exact match on prompts held out from training, of the bare backbone and of each adapter.",
            skills=[SkillGain(name, before[name], after[name]) for name in before],
            facts=[("speed-up over one by one", f"{speed.factor:.1f}x")],
            speeds=[("together", speed.together), ("one by one", speed.one_by_one)],
        )
        with wall.spending(Activity.WRITING):
            conclude(out, console, extra, time=time)
    print_time(wall, console)
    console.print(
        f"speed     {speed.together:,.0f} tokens/s together, {speed.one_by_one:,.0f} one by one: "
        f"{speed.factor:.1f}x (each job alone for {steps.SOLO_STEPS} steps)",
        highlight=False,
    )
    weft = "weft" if shutil.which("weft") else sys.argv[0]
    console.print(f"try       {weft} chat --adapter {out}/{next(iter(before))}", highlight=False)


def _skills(before: dict[str, float], after: dict[str, float]) -> Table:
    from weft.cli.demo.skills import SKILLS

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("skill")
    table.add_column("exact match before", justify="right")
    table.add_column("after", justify="right")
    table.add_column("what it learnt", style="dim")
    for name in before:
        table.add_row(name, f"{before[name]:.0%}", f"{after[name]:.0%}", SKILLS[name].description)
    return table
