"""The engine lets go of jobs that have ended, and writes adapters to the given directory."""

import pytest
from tiny_models import finish, job_spec, random_data, shallow_backbone, submit

from weft.engine.engine import Engine
from weft.errors import ConfigError
from weft.store.peft_files import read_adapter


def engine_with(*names: str) -> Engine:
    engine = Engine(shallow_backbone(), capacity=64)
    submit(engine, *((job_spec(name, max_steps=2), random_data(1)) for name in names))
    return engine


def test_job_when_forgotten_at_its_end_then_the_others_go_on_and_its_name_is_free():
    engine = engine_with("one", "two")
    seen = []

    def on_event(engine, event):
        if event.kind == "succeeded":
            # A command that comes too late has no effect.
            engine.pause(event.job)
            engine.forget(event.job)
            seen.append(event.job)
            if seen == ["one", "two"]:
                submit(engine, (job_spec("one", max_steps=1), random_data(2)))

    finish(engine, on_event)
    assert seen == ["one", "two", "one"] and not engine.jobs


def test_job_when_it_has_not_ended_then_it_cannot_be_forgotten():
    engine = engine_with("one")
    with pytest.raises(ConfigError, match="'one' has not ended; cancel it first"):
        engine.forget("one")
    with pytest.raises(ConfigError, match="there is no job 'none'"):
        engine.forget("none")


def test_adapter_when_exported_then_is_what_the_job_has_now(tmp_path):
    engine = engine_with("one")
    engine.run()
    engine.export_adapter("one", tmp_path / "here")
    _, tensors, _ = read_adapter(tmp_path / "here")
    mine = engine.adapter_of("one")
    assert all((tensors[path][1] == b).all() for path, (_, b) in mine.items())
