"""The API process stays light: it never imports torch, nor what torch comes with."""

from __future__ import annotations

import subprocess
import sys


def test_api_when_imported_then_without_torch():
    code = (
        "import sys\n"
        "import weft.serve.api.app, weft.serve.api.app, weft.serve.db.files, weft.serve.supervise\n"
        "import weft.cli.service.keys\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
