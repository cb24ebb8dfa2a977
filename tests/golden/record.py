"""Records the bits of all golden runs on this machine: python tests/golden/record.py [CASE ...]

To be used only when a change of bits is intended and the change says so, when a case is new, or on a kind of machine
that is not recorded yet; then from a version whose bits are known to be right. Never to make a red test green.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers
from golden_cases import CASES
from golden_digests import FILE, Digests, digests_of, environment, recorded
from golden_runs import at_place


def digests_of_case(name: str) -> Digests:
    """Runs a case in a directory of its own."""
    with tempfile.TemporaryDirectory() as place, at_place(Path(place)):
        return digests_of(CASES[name]())


def main(names: list[str]) -> None:
    """Records the named cases, or all and nothing else."""
    transformers.utils.logging.disable_progress_bar()
    known = recorded() if FILE.exists() else {}
    here = known.setdefault(environment(), {})
    if not names:
        here.clear()
    for name in names or CASES:
        start_s = time.perf_counter()
        here[name] = digests_of_case(name)
        print(f"{name} {time.perf_counter() - start_s:.2f} s", flush=True)
    known[environment()] = {name: here[name] for name in CASES if name in here}
    FILE.write_text(json.dumps({"environments": known}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
