"""The command starts quickly: help does not wait for torch."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from weft.cli.main import VERBS, app


def test_help_when_shown_then_nothing_heavy_is_imported():
    code = (
        "import sys\n"
        "sys.argv = ['weft', '--help']\n"
        "from weft.cli.main import main\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'yaml'}\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == "[]\n"
    assert "..." not in done.stdout.partition("Commands:")[2], "a description is cut"
    for verb in VERBS:
        assert f"  {verb} " in done.stdout


@pytest.mark.parametrize("name", VERBS)
def test_verb_when_listed_then_by_the_first_sentence_of_its_own_help(name: str):
    """Help is shown without importing any verb, so it repeats their own docstrings."""
    docstring = VERBS[name].command(name, "weft.cli").help
    assert docstring.splitlines()[0] == VERBS[name].sentence


def test_verb_when_mistyped_then_the_nearest_is_named():
    done = CliRunner().invoke(app, ["tran"])
    assert done.exit_code == 2
    assert "Did you mean 'train'" in done.output


def python(code: str, **environment: str) -> str:
    """What a Python without an OMP_WAIT_POLICY of its own prints."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout


def test_weft_when_imported_then_the_environment_of_the_process_is_left_alone():
    """A library must not decide how its users' threads wait."""
    code = (
        "import os; before = dict(os.environ); import weft; weft.Engine, weft.sweep; print(before == dict(os.environ))"
    )
    assert python(code) == "True\n"


def test_command_when_it_imports_torch_then_waiting_threads_do_not_spin_unless_the_user_set_it():
    """Spinning threads starve each other as soon as anything else runs on the machine."""
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('OMP_WAIT_POLICY'), flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "sys.argv = ['weft', 'doctor']\n"
        "from weft.cli.main import main\n"
        "main()\n"
    )
    assert python(code).splitlines()[-1] == "PASSIVE"
    assert python(code, OMP_WAIT_POLICY="ACTIVE").splitlines()[-1] == "ACTIVE"


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["train", "absent.yaml"], 2), (["raises"], 1)], ids=str
)
def test_process_when_its_command_is_over_then_it_ends_without_freeing_what_it_imported(
    arguments: list[str], code: int
):
    """Output is complete, exit handlers are called; freeing torch and transformers takes a second."""
    program = (
        "import atexit, sys\n"
        "from weft.cli import main\n"
        "class Imported:\n"
        "    def __del__(self): print('freed')\n"
        "imported = Imported()\n"
        "def command():\n"
        "    atexit.register(print, 'closed')\n"
        "    if sys.argv[1] == 'raises': raise RuntimeError('not caught')\n"
        "    original()\n"
        "original, main.main = main.main, command\n"
        "main.run()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "closed"
    assert ("Traceback" in done.stderr) == (code == 1)


def test_command_when_it_imports_torch_then_garbage_is_searched_for_seldom():
    code = (
        "import gc, sys\n"
        "from weft.cli.main import main\n"
        "sys.argv = ['weft', '--version']\n"
        "try: main()\n"
        "finally: print(gc.get_threshold()[0])"
    )
    assert int(python(code).splitlines()[-1]) == 50_000
