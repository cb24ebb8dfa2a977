"""What the project's benchmarks share: their command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from weft.bench.figures import Parts, Targets
from weft.bench.output import run_parts
from weft.errors import WeftError


def run_command(parts: Parts, targets: Targets) -> None:
    """Measures all parts, as the command line asks, and exits; a mistake is one sentence and exit code 2."""
    parser = argparse.ArgumentParser(description="Measure and compare with the targets.")
    parser.add_argument("--json", type=Path, help="add the figures to this JSON file")
    arguments = parser.parse_args()
    try:
        sys.exit(run_parts(parts, targets, arguments.json))
    except WeftError as error:
        sys.exit(f"error: {error}")
