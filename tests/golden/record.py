"""Records the bits of the golden runs on this machine: python tests/golden/record.py [CASE ...]

Use it only for a kind of machine that is not recorded yet, for a new case, or for a change that is meant to change bits
and states it; never to make a red test green. Commit the code first: the record names the commit that it was made with,
and machines without a record compare with runs of that commit. A case whose bits changed is dropped from the records of
all other kinds of machines.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers
from golden_cases import CASES
from golden_digests import FILE, Digests, Record, digests_of, environment
from golden_runs import in_golden_directory


def digests_of_case(name: str) -> Digests:
    """Runs a case in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder, in_golden_directory(Path(folder)):
        return digests_of(CASES[name]())


def committed_code() -> str:
    """The commit of this checkout, which must hold no other change than one of the record itself."""
    changed = subprocess.check_output(["git", "status", "--porcelain"], text=True, cwd=FILE.parent).splitlines()
    if others := [line for line in changed if not line.endswith(FILE.name)]:
        sys.exit(f"commit these changes first, since the record names the commit that made it: {', '.join(others)}")
    return subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=FILE.parent).strip()


def main(names: list[str]) -> None:
    """Records the named cases, or all."""
    transformers.utils.logging.disable_progress_bar()
    commit, before = committed_code(), Record.read()
    here = before.environments.get(environment(), {})
    found = dict(here)
    for name in names or CASES:
        start_s = time.perf_counter()
        found[name] = digests_of_case(name)
        print(f"{name} {time.perf_counter() - start_s:.2f} s", flush=True)
    changed = {name for name in here if found[name] != here[name]}
    others = {
        kind: {name: digests for name, digests in cases.items() if name in CASES and name not in changed}
        for kind, cases in before.environments.items()
    }
    Record(commit, {**others, environment(): {name: found[name] for name in CASES if name in found}}).write()
    print(
        f"recorded {len(names or CASES)} runs, {len(changed)} of them changed: {', '.join(sorted(changed)) or 'none'}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
