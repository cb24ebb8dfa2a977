"""Measures two versions of Weft in turn on one machine: does a change cost speed?

    git worktree add ../before <commit>
    python -m benchmarks two-versions ../before/src src --model llama-3.1-8b --regime overhead4 --turns 2

Each turn runs `step` once from each source tree, with the benchmarks beside it, so that both meet the same clock rates
and neighbours. The table shows every figure's median for both and the second's ratio to the first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import user_path
from weft.errors import WeftError

SHOWN = ("_tok_s", "_peak_gb", "_optimizer_ms")
"""Endings of the figures that are compared; ratios to peers would repeat them."""
Tree = Annotated[Path, typer.Argument(parser=user_path, metavar="SOURCE")]


def two_versions(
    before: Tree,
    after: Tree,
    model: Annotated[list[str] | None, typer.Option(help="Shape; may be repeated.")] = None,
    regime: Annotated[list[str] | None, typer.Option(help="Figure; may be repeated.")] = None,
    kernels: Annotated[str, typer.Option(help="Weft's path: auto, fused or reference.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats.")] = False,
    turns: Annotated[int, typer.Option(help="Of each version.", min=1)] = 2,
) -> None:
    """`step` with two versions of Weft in turn on one machine."""
    words = ["--kernels", kernels, *(["--quick"] if quick else [])]
    for option, values in (("--model", model), ("--regime", regime)):
        words += [word for value in values or () for word in (option, value)]
    seen: dict[Path, list[dict[str, float]]] = {before: [], after: []}
    for turn in range(turns):
        # The order changes each time, so that a slow drift of the machine favours neither.
        for source in list(seen)[:: 1 if turn % 2 == 0 else -1]:
            seen[source].append(measure(source.resolve(), words))
        print(f"after turn {turn + 1}", flush=True)
        show(*(_medians(runs) for runs in seen.values()))


def measure(source: Path, words: list[str]) -> dict[str, float]:
    """The figures of one run of `step` from a source tree."""
    program = ["benchmarks"] if (source.parent / "benchmarks" / "__main__.py").exists() else ["weft", "bench"]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "figures.json"
        command = [sys.executable, "-m", *program, "step", *words, "--json", str(found)]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(source.parent)])}
        done = subprocess.run(
            command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if not found.exists():
            raise WeftError(f"`step` wrote no figures: {done.stdout[-2000:]}", where=str(source))
        values = json.loads(found.read_text())
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def show(before: dict[str, float], after: dict[str, float]) -> None:
    """Prints the figures that both have."""
    for key in sorted(before.keys() & after.keys()):
        if key.endswith(SHOWN) or not key.count("_"):
            ratio = after[key] / before[key] if before[key] else float("nan")
            print(f"  {key:48} {before[key]:12,.4g} {after[key]:12,.4g} {ratio:8.4f}", flush=True)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs if key in run) for key in runs[0]}
