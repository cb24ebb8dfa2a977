from __future__ import annotations

import subprocess
import sys


def test_data_when_imported_then_neither_torch_nor_an_extra_is():
    code = (
        "import sys, weft.data; "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
