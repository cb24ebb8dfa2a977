"""The command starts quickly: whoever only asks for help does not wait for torch."""

import os
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


def test_weft_when_imported_then_waiting_threads_do_not_spin_unless_the_user_said_so():
    """Spinning threads starve each other as soon as anything else runs on the machine; the API is no exception."""
    code = "import os, weft; print(os.environ['OMP_WAIT_POLICY'])"
    for asked, found in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        env |= {} if asked is None else {"OMP_WAIT_POLICY": asked}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == found
