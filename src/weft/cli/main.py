"""The `weft` command: one verb per file, one clear sentence per mistake.

Exit codes: 0 done; 1 some jobs failed; 2 wrong input; 130 stopped by the user.
"""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console

from weft import __version__, faults
from weft.cli.adapters.chat import chat
from weft.cli.adapters.evaluate import evaluate
from weft.cli.adapters.export import export, merge
from weft.cli.adapters.generate import generate
from weft.cli.cache import cache
from weft.cli.config import config
from weft.cli.demo import demo
from weft.cli.doctor import doctor
from weft.cli.init import init
from weft.cli.measure.bench import bench
from weft.cli.measure.profile import profile
from weft.cli.measure.tune import tune
from weft.cli.plan import plan
from weft.cli.report import report
from weft.cli.service.keys import keys
from weft.cli.service.serve import serve
from weft.cli.service.worker import worker
from weft.cli.sweep import sweep
from weft.cli.train import train
from weft.errors import WeftError

app = typer.Typer(
    name="weft",
    help="Train many LoRA adapters at once on one frozen language model, each exactly as if alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for verb, name in (
    (demo, "demo"),
    (train, "train"),
    (sweep, "sweep"),
    (init, "init"),
    (config, "config"),
    (plan, "plan"),
    (report, "report"),
    (generate, "generate"),
    (chat, "chat"),
    (evaluate, "eval"),
    (export, "export"),
    (merge, "merge"),
    (doctor, "doctor"),
    (profile, "profile"),
    (worker, "worker"),
    (serve, "serve"),
    (tune, "tune"),
):
    # As its own short help, the sentence is wrapped and not cut.
    app.command(name, short_help=(verb.__doc__ or "").splitlines()[0])(verb)
app.add_typer(bench, name="bench")
app.add_typer(keys, name="keys")
app.add_typer(cache, name="cache")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Train many LoRA adapters at once on one frozen language model, each exactly as if alone."""


def main() -> None:
    """Runs the command line."""
    # Before any verb imports torch: threads that wait by spinning slow each other down tenfold as soon as anything else
    # runs on the machine. Processes that a verb starts inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        plan = os.environ.get("WEFT_FAULTS")
        if plan:
            faults.arm(faults.parse(plan))
        app()
    except WeftError as error:
        # One line even where a file name or a library's own words bring several.
        sentence = " ".join(str(error).split("\n"))
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {sentence}", markup=False, style="red")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away, e.g. `weft config | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
