"""The golden runs made with the code of the recorded commit, for machines whose bits are not in the record."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
from golden_digests import Digests, Record, environment

ROOT = Path(__file__).parents[2]


class NoBaselineError(Exception):
    """The recorded commit is not in this checkout's history, or its code does not run here."""


def baseline(commit: str, names: list[str], cache: Path) -> dict[str, Digests]:
    """The digests of the named cases with the code of a commit, from a work tree of it.

    They are kept in `cache`, so only the first test session on a machine pays for them.
    """
    key = hashlib.sha256(f"{commit} {environment()} {numpy.__version__}".encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / f"{key}.json"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known: dict[str, Digests] = json.loads(kept.read_text()) if kept.exists() else {}
        if missing := [name for name in names if name not in known]:
            known |= _run(commit, missing, cache / f"{key}.tree")
            kept.write_text(json.dumps(known))
    return {name: known[name] for name in names}


def _run(commit: str, names: list[str], tree: Path) -> dict[str, Digests]:
    """`record.py` of that commit writes into the record of its own work tree."""
    _command(["git", "worktree", "add", "--force", "--detach", str(tree), commit], ROOT)
    try:
        record = tree / "tests" / "golden" / "digests.json"
        paths = os.pathsep.join(str(tree / name) for name in ("src", "."))
        _command([sys.executable, "tests/golden/record.py", *names], tree, PYTHONPATH=paths, WEFT_CACHE="off")
        found: dict[str, Digests] = json.loads(record.read_text())["environments"][environment()]
        return {name: found[name] for name in names}
    finally:
        _command(["git", "worktree", "remove", "--force", str(tree)], ROOT)


def _command(command: list[str], folder: Path, **variables: str) -> None:
    ended = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    if ended.returncode:
        raise NoBaselineError(f"{' '.join(command[:3])} failed: {(ended.stderr or ended.stdout).strip()[-2000:]}")


def expected_digests(names: list[str], cache: Path) -> dict[str, Digests]:
    """The digests of the cases as recorded for this kind of machine, else as the recorded commit makes them here."""
    record = Record.read()
    here = {name: found for name, found in record.environments.get(environment(), {}).items() if name in names}
    missing = [name for name in names if name not in here]
    return here | (baseline(record.commit, missing, cache) if missing else {})
