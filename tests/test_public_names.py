"""What `import weft` offers: every name there, nothing heavy loaded for it, and functions that are just functions."""

import inspect
import subprocess
import sys

import weft
from weft.engine import events


def test_weft_when_a_public_name_is_asked_for_then_it_is_there():
    assert all(getattr(weft, name) is not None for name in weft.__all__)


def test_weft_then_every_event_is_public():
    """Readers of `Engine.events` tell events apart by their types."""
    found = {name for name, value in vars(events).items() if inspect.isclass(value) and issubclass(value, events.Event)}
    assert found <= set(weft.__all__)
    assert all(getattr(weft, name) is getattr(events, name) for name in found)


def test_sweep_then_it_is_a_plain_function_and_no_module_hides_it():
    """Importing the package behind it must not put something else in its place."""
    import weft.sweeps.api

    assert inspect.isfunction(weft.sweep)
    assert weft.sweep is weft.sweeps.api.sweep


def test_events_when_asked_for_then_torch_is_not_imported():
    code = "import sys, weft; weft.StepDone, weft.Reason, weft.Job; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
