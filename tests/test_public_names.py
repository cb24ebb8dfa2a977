"""What `import weft` offers: every name there, nothing heavy loaded for it, and functions that are just functions."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest

import weft
from weft.engine import events


def test_weft_when_a_public_name_is_used_then_it_is_there():
    assert all(getattr(weft, name) is not None for name in weft.__all__)


def test_weft_then_every_event_is_public():
    """Readers of `Engine.events` distinguish events by their types."""
    found = {name for name, value in vars(events).items() if inspect.isclass(value) and issubclass(value, events.Event)}
    assert found <= set(weft.__all__)
    assert all(getattr(weft, name) is getattr(events, name) for name in found)


def test_sweep_then_it_is_a_plain_function_and_no_module_hides_it():
    """Importing the package of that name must not put something else in its place."""
    import weft.sweeps.api

    assert inspect.isfunction(weft.sweep)
    assert weft.sweep is weft.sweeps.api.sweep


def test_events_when_used_then_torch_is_not_imported():
    code = "import sys, weft; weft.StepDone, weft.Reason, weft.Job; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


MISTAKES = [
    (lambda: weft.Job("a", "rows.jsonl", max_step=3), "max_step: unknown setting. Did you mean max_steps?"),
    (lambda: weft.Job("a", "rows.jsonl", lr=1), "lr: unknown setting. Did you mean learning_rate?"),
    (lambda: weft.Job("a"), "train_data is missing."),
    (lambda: weft.Job(train_data="rows.jsonl"), "name is missing."),
    (lambda: weft.Adapter(ranks=3), "ranks: unknown setting. `weft config` lists all settings."),
    (lambda: weft.sweep({"base_model": "tiny"}, trails=3), "trails: unknown setting. Did you mean trials?"),
    (lambda: weft.sweep(3), "expected a sweep file or a mapping of its settings, got 3."),
    (lambda: weft.sweep("none.yaml"), "none.yaml: there is no such file. `weft config --sweep` lists the settings"),
]


@pytest.mark.parametrize(("call", "sentence"), MISTAKES)
def test_call_when_an_argument_is_wrong_then_one_sentence_names_what_was_meant(call, sentence):
    with pytest.raises(weft.WeftError) as refused:
        call()
    assert str(refused.value).startswith(sentence)


def test_job_when_copied_or_pickled_then_it_is_the_same():
    """What refuses keywords is not in the way of what makes a job without any."""
    job = weft.Job("a", "rows.jsonl", adapter=weft.Adapter(r=3))
    assert copy.copy(job) == copy.deepcopy(job) == pickle.loads(pickle.dumps(job)) == job
