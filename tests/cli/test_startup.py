"""The command starts quickly: whoever only asks for help does not wait for torch."""

import subprocess
import sys


def test_help_when_shown_then_nothing_heavy_is_imported():
    code = (
        "import sys\n"
        "sys.argv = ['weft', '--help']\n"
        "from weft.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'torch', 'transformers', 'numpy', 'plotly'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == "[]\n"
    for verb in ("demo", "train", "init", "config", "generate", "chat", "eval", "export", "merge", "doctor"):
        assert f"  {verb} " in done.stdout
