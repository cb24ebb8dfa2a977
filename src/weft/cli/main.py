"""The `weft` command: one verb per file, one clear sentence per mistake.

Exit codes: 0 done; 1 some jobs failed; 2 wrong input; 130 stopped by the user.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from weft import __version__
from weft.errors import ConfigError, WeftError
from weft.store import faults


class Verb(NamedTuple):
    """A verb's implementation, `module:function` in the package of its command line, imported on use."""

    location: str
    sentence: str
    """The first line of its documentation."""

    def command(self, name: str, package: str) -> Any:
        module, attribute = self.location.split(":")
        verb = getattr(importlib.import_module(f"{package}.{module}"), attribute)
        if not isinstance(verb, typer.Typer):
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            alone.command(name)(verb)
            return typer.main.get_command(alone)
        return typer.main.get_group(verb)


VERBS = {
    "demo": Verb("demo:demo", "Train several adapters together on a small backbone and see what they learnt."),
    "train": Verb("train:train", "Train all jobs of a file together on one backbone."),
    "sweep": Verb("sweep:sweep", "Try many configurations together on one backbone and keep the best."),
    "import": Verb("service.import_jobs:imports", "Bring fine-tuning jobs from elsewhere, such as OpenAI."),
    "init": Verb("files:init", "Write a commented jobs file that runs as it is, and two small data files for it."),
    "config": Verb("files:config", "List all settings, or check a jobs file and show every value it leads to."),
    "plan": Verb("plan:plan", "Show what will train with what, how full, how long and in how much memory."),
    "plan deploy": Verb("deploy:deploy", "Show which replicas a cluster should have for its jobs, and what they save."),
    "report": Verb(
        "files:report",
        "Write report.html of a run or a sweep again, also of one that is still going on or was killed.",
    ),
    "generate": Verb(
        "adapters.generate:generate",
        "Answer prompts with one or several adapters, all in one batch on the shared model.",
    ),
    "chat": Verb("adapters.generate:chat", "Talk to an adapter; switch between several with /adapter NAME."),
    "eval": Verb("adapters.evaluate:evaluate", "Measure adapters on data, beside the bare model."),
    "export": Verb(
        "adapters.export:export", "Check that a server takes an adapter, copy it, and show how to serve it."
    ),
    "merge": Verb("adapters.export:merge", "Add an adapter to its base weights and write an ordinary model directory."),
    "doctor": Verb("doctor:doctor", "Show what is installed, what it runs on, and whether training works here."),
    "profile": Verb(
        "measure:profile",
        "Measure this device's time and memory for planning, and check the fits on shapes they have not seen.",
    ),
    "rank": Verb(
        "service.rank:rank", "Be one replica of a run that another process controls, and train the jobs it is given."
    ),
    "worker": Verb("service.worker:worker", "Train the jobs of a service and answer its prompts, until stopped."),
    "serve": Verb("service.serve:serve", "Serve fine-tuning to many tenants with OpenAI's API."),
    "tune": Verb(
        "measure:tune",
        "Measure this GPU's best launches of the adapter kernels, "
        "or with --jobs the best capacity and layout of a run.",
    ),
    "workers": Verb("service.keys:workers", "Workers of the service, on all machines."),
    "keys": Verb("service.keys:keys", "Keys and tenants of the service."),
    "cache": Verb("files:cache", "Prepared data that is kept for the next run."),
}


class Verbs(TyperGroup):
    """The verbs of a command line."""

    verbs: ClassVar[Mapping[str, Verb]] = VERBS
    package: ClassVar[str] = "weft.cli"
    moved: ClassVar[Mapping[str, str]] = {"bench": "python -m benchmarks"}
    """Commands that replace the verbs of earlier releases."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # typer suggests one of these names for a mistyped verb.
        self.commands: Any = dict.fromkeys(self.verbs)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.verbs[cmd_name].command(cmd_name, self.package) if cmd_name in self.verbs else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb at the beginning of the arguments, of one or two words."""
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.verbs:
            return name, self.get_command(ctx, name), args[2:]
        if args and args[0] in self.moved:
            command = " ".join([self.moved[args[0]], *args[1:]])
            raise ConfigError(f"is no verb any more; in the repository, run `{command}`.", where=f"weft {args[0]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb; ConfigError for an option's wrong value."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if type(error) is not typer.BadParameter:
                # A missing parameter: the usage shows it.
                raise
            raise ConfigError(_reason(error), where=_name(error.param)) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.sentence) for name, verb in self.verbs.items()])


app = typer.Typer(
    cls=Verbs,
    name="weft",
    help="Train many adapters at once on one frozen language model, each exactly as if alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    """Train many adapters at once on one frozen language model, each exactly as if alone."""


PINNED_MEMORY = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def main(command: typer.Typer = app) -> None:
    """Runs a command line; a mistake is one sentence and exit code 2."""
    # Before any verb imports torch: spinning threads slow each other down tenfold when anything else runs on the
    # machine. Child processes inherit it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Allocating pinned memory for a snapshot blocks all launches, ten times as long with CUDA's own allocator.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", PINNED_MEMORY)
    # By default, a sixth of the time of importing torch and transformers is a search for garbage among them.
    gc.set_threshold(50_000)
    try:
        plan = os.environ.get("WEFT_FAULTS")
        if plan:
            faults.arm(faults.parse(plan))
        command()
    except WeftError as error:
        from rich.console import Console

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


def run() -> None:
    """Is the process of a command line: runs `main`, and ends without freeing what torch and transformers have
    imported object by object, which takes a second."""
    exit_code = 1  # of an error that nothing catches

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the reader is gone
                stream.flush()
        os._exit(exit_code)

    # Registered first, called last: when threads have ended and everything else is closed.
    atexit.register(end)
    try:
        main()
        exit_code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            exit_code = error.code or 0
        raise


_ACCEPTED = {
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "finite_number": "a number",
}
"""Accepted values, by the type of typer's validation error."""


def _reason(error: typer.BadParameter) -> str:
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    accepted = _ACCEPTED.get(found[0]["type"]) if found else None
    if accepted is None:
        return error.message
    return f"must be {accepted.format(**found[0].get('ctx', {}))}, got {found[0]['input']}."


def _name(param: Any) -> str | None:
    if param is None:
        return None
    is_option = param.param_type_name == "option"
    return " / ".join(param.opts) if is_option else param.metavar or param.name
