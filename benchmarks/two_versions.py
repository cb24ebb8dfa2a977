"""Measures two versions of Weft in turn on one machine: does a change cost speed?

    git worktree add ../before <commit>
    python benchmarks/two_versions.py ../before/src src --model llama-3.1-8b --regime overhead4 --turns 2

Each turn runs `weft bench step` once from each source tree, so that both meet the same clock rates and neighbours. The
table shows every figure's median for both and the second's ratio to the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHOWN = ("_tok_s", "_peak_gb", "_optimizer_ms")
"""Endings of the figures that are compared; ratios to peers would repeat them."""


def measure(source: Path, arguments: list[str]) -> dict[str, float]:
    """The figures of one run of `weft bench step` from a source tree."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "weft", "bench", "step", *arguments, "--json", str(found)]
        environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
        finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not found.exists():
            raise SystemExit(f"{source}: weft bench step wrote no figures.\n{finished.stdout[-2000:]}")
        values = json.loads(found.read_text())
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def main() -> None:
    """Runs the turns and prints the table after each of them."""
    parser = argparse.ArgumentParser(description="Measure two source trees of Weft in turn.")
    parser.add_argument("before", type=Path, help="source tree that is compared with")
    parser.add_argument("after", type=Path, help="source tree that is judged")
    parser.add_argument("--turns", type=int, default=2)
    own, passed_on = parser.parse_known_args()
    seen: dict[Path, list[dict[str, float]]] = {own.before: [], own.after: []}
    for turn in range(own.turns):
        # The order changes each time, so that a slow drift of the machine favours neither.
        for source in list(seen)[:: 1 if turn % 2 == 0 else -1]:
            seen[source].append(measure(source, passed_on))
        before, after = (
            {key: statistics.median(run[key] for run in runs if key in run) for key in runs[0]}
            for runs in seen.values()
        )
        print(f"after turn {turn + 1}", flush=True)
        for key in sorted(before.keys() & after.keys()):
            if key.endswith(SHOWN) or not key.count("_"):
                ratio = after[key] / before[key] if before[key] else float("nan")
                print(f"  {key:48} {before[key]:12,.4g} {after[key]:12,.4g} {ratio:8.4f}", flush=True)


if __name__ == "__main__":
    main()
