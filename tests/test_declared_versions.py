"""The lowest versions that pyproject.toml declares are the ones that `make test-lowest` installs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_INSTALLED = {"torch", "wandb", "ray"}
"""torch 2.11 has no small CPU build, GPU machines test with it; the others are services or clusters of their own."""


def declared() -> dict[str, str]:
    """By package: the lowest version that some dependency list allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", requirement) for named in lists for requirement in named]
    return {match[1]: match[2] for match in found if match}


def test_lowest_constraints_then_hold_every_declared_lower_bound():
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    installed = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for package, version in declared().items():
        if package in NOT_INSTALLED:
            continue
        assert package in installed, f"{package}>={version} has no line in constraints-lowest.txt"
        parts = version.split(".")
        assert installed[package].split(".")[: len(parts)] == parts, package
