import pytest
from tiny_models import assert_same_bits, finish, job_spec, random_backbone, random_data, train

from weft.engine.engine import Engine
from weft.engine.events import MicrobatchDone, StepDone
from weft.engine.preview import preview


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("llama_odd")


def jobs():
    return [
        (job_spec("a", adapter={"lora_dropout": 0.2}, max_steps=5), random_data(1)),
        (job_spec("b", adapter={"r": 2}, max_steps=None, num_train_epochs=1.5, priority=1), random_data(2)),
    ]


def prepared(backbone) -> Engine:
    engine = Engine(backbone, capacity=48)
    for spec, data in jobs():
        engine.submit(spec, data)
    return engine


def test_preview_when_taken_before_training_then_every_bit_is_as_without(backbone):
    engine = prepared(backbone)
    preview(engine)
    preview(engine)
    assert not any(linear.slots for linear in backbone.linears.values())
    outcomes = finish(engine)
    without = train(backbone, jobs(), capacity=48)
    for name in "ab":
        assert_same_bits(outcomes[name], without[name])


def test_preview_when_read_then_its_figures_are_those_of_the_run(backbone):
    engine = prepared(backbone)
    plan = preview(engine)
    events = list(engine.events())
    microbatches = [event for event in events if isinstance(event, MicrobatchDone)]
    last = {event.job: event for event in events if isinstance(event, StepDone)}
    assert plan.num_tokens == sum(event.tokens for event in microbatches)
    assert {job.name: (job.num_steps, job.num_tokens) for job in plan.jobs} == {
        name: (event.num_steps, event.num_tokens) for name, event in last.items()
    }
    assert [job.num_parameters for job in plan.jobs] == [j.adapter.num_parameters for j in engine.jobs.values()]
    assert plan.num_microbatches == pytest.approx(len(microbatches), abs=2)
    assert plan.capacity == 48 and 0.5 < plan.fill <= 1
    assert plan.seconds > 0 and plan.activation_bytes > 0
    assert plan.total_bytes == plan.backbone_bytes + plan.adapter_bytes + plan.activation_bytes


@pytest.mark.parametrize("state", ["running", "done"])
def test_preview_when_taken_during_or_after_training_then_no_job_changes(state):
    """A preview changes no job, whatever state the job is in."""
    backbone = random_backbone("llama_odd")
    engine = prepared(backbone)
    if state == "done":
        engine.run()
        before = {name: (job.state, job.step, job.slot) for name, job in engine.jobs.items()}
        preview(engine)
        assert {name: (job.state, job.step, job.slot) for name, job in engine.jobs.items()} == before
        return

    def look(engine: Engine, event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("a", 2):
            preview(engine)

    outcomes = finish(engine, look)
    without = train(backbone, jobs(), capacity=48)
    for name in "ab":
        assert_same_bits(outcomes[name], without[name])
