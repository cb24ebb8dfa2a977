"""A program that would train anything else, block, or run out of memory is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_streams import streams

from weft.plan.check import violations
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import Schedule, build
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Receive, Send, Step
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Microbatch, Segment

Position = tuple[int, int]
COST = LinearCost(send_s=0.1)


@st.composite
def programs(draw: st.DrawFn, min_stages: int = 1) -> Program:
    """A valid program of any schedule."""
    schedule = draw(st.sampled_from(list(Schedule)))
    return build(schedule, draw(streams(schedule)), draw(st.integers(min_stages, 4)))


def positions(program: Program, *kinds: type) -> list[Position]:
    return [(s, i) for s, own in enumerate(program.stages) for i, each in enumerate(own) if isinstance(each, kinds)]


def at(program: Program, position: Position) -> Instruction:
    return program.stages[position[0]][position[1]]


def edited(program: Program, stage: int, instructions: list[Instruction]) -> Program:
    stages = [tuple(instructions) if s == stage else own for s, own in enumerate(program.stages)]
    return dataclasses.replace(program, stages=tuple(stages))


def replaced(program: Program, position: Position, *instead: Instruction) -> Program:
    own = list(program.stages[position[0]])
    own[position[1] : position[1] + 1] = instead
    return edited(program, position[0], own)


def moved(program: Program, position: Position, to: int) -> Program:
    own = list(program.stages[position[0]])
    own.insert(to, own.pop(position[1]))
    return edited(program, position[0], own)


@settings(max_examples=80, deadline=None)
@given(program=programs(), data=st.data())
def test_program_with_an_instruction_dropped_is_refused(program: Program, data: st.DataObject) -> None:
    """Nothing in a program is superfluous."""
    position = data.draw(st.sampled_from(positions(program, object)))
    assert any("is missing" in problem for problem in violations(replaced(program, position)))


@settings(max_examples=80, deadline=None)
@given(program=programs(), data=st.data())
def test_program_with_an_instruction_repeated_is_refused(program: Program, data: st.DataObject) -> None:
    """Anywhere after the first."""
    stage, i = data.draw(st.sampled_from(positions(program, object)))
    own = list(program.stages[stage])
    own.insert(data.draw(st.integers(i + 1, len(own))), own[i])
    assert any("comes again" in problem for problem in violations(edited(program, stage, own)))


@settings(max_examples=80, deadline=None)
@given(program=programs(min_stages=2), data=st.data())
def test_program_with_an_instruction_on_another_stage_is_refused(program: Program, data: st.DataObject) -> None:
    """It is missing there and too much here."""
    position = data.draw(st.sampled_from(positions(program, object)))
    other = data.draw(st.integers(0, program.num_stages - 1).filter(lambda s: s != position[0]))
    instruction = at(program, position)
    own = list(program.stages[other])
    own.insert(data.draw(st.integers(0, len(own))), instruction)
    assert violations(edited(replaced(program, position), other, own))


@settings(max_examples=80, deadline=None)
@given(program=programs(min_stages=2), data=st.data())
def test_transfer_with_another_partner_is_refused(program: Program, data: st.DataObject) -> None:
    """A stage that is not the neighbour, or not there at all."""
    position = data.draw(st.sampled_from(positions(program, Send, Receive)))
    transfer = at(program, position)
    field = "to_stage" if isinstance(transfer, Send) else "from_stage"
    partner = data.draw(st.integers(-1, program.num_stages).filter(lambda s: s != getattr(transfer, field)))
    assert violations(replaced(program, position, dataclasses.replace(transfer, **{field: partner})))


@settings(max_examples=80, deadline=None)
@given(program=programs(), data=st.data())
def test_instruction_for_another_microbatch_is_refused(program: Program, data: st.DataObject) -> None:
    """Whether that exists or not."""
    position = data.draw(st.sampled_from(positions(program, Forward, Backward, Send, Receive)))
    instruction = at(program, position)
    assert not isinstance(instruction, Step)
    other = data.draw(st.integers(-1, len(program.microbatches)).filter(lambda k: k != instruction.microbatch))
    assert violations(replaced(program, position, dataclasses.replace(instruction, microbatch=other)))


@settings(max_examples=80, deadline=None)
@given(program=programs(), data=st.data())
def test_step_before_its_last_backward_is_refused(program: Program, data: st.DataObject) -> None:
    """An early step would miss gradients."""
    stage, i = position = data.draw(st.sampled_from(positions(program, Step)))
    step = at(program, position)
    assert isinstance(step, Step)
    last = max(
        j
        for j, each in enumerate(program.stages[stage])
        if isinstance(each, Backward)
        and (step.job, step.step) in {(s.job, s.step) for s in program.microbatches[each.microbatch].segments}
    )
    assert last < i
    to = data.draw(st.integers(0, last))
    assert any("early" in problem for problem in violations(moved(program, position, to)))


@settings(max_examples=80, deadline=None)
@given(program=programs(), data=st.data())
def test_forward_before_the_step_it_waits_for_is_refused(program: Program, data: st.DataObject) -> None:
    """A late step would train batch b + 1 on the adapter of batch b."""
    steps = {at(program, position): position for position in positions(program, Step) if position[0] == 0}
    late = [
        (steps[Step(s.job, s.step - 1)], i)
        for i, each in enumerate(program.stages[0])
        if isinstance(each, Forward)
        for s in program.microbatches[each.microbatch].segments
        if Step(s.job, s.step - 1) in steps
    ]
    assume(late)
    position, forward = data.draw(st.sampled_from(late))
    assert any("comes before step" in problem for problem in violations(moved(program, position, forward)))


@settings(max_examples=60, deadline=None)
@given(program=programs(min_stages=2), data=st.data())
def test_compute_before_its_input_and_send_before_its_result_are_refused(program: Program, data: st.DataObject) -> None:
    """Data only flows forward in time."""
    stage, i = data.draw(st.sampled_from(positions(program, Send, Receive)))
    transfer = program.stages[stage][i]
    assert isinstance(transfer, Send | Receive)
    kind = Backward if transfer.is_gradient else Forward
    compute = program.stages[stage].index(kind(transfer.microbatch))
    assert violations(moved(program, (stage, i), compute))


@settings(max_examples=60, deadline=None)
@given(program=programs(), data=st.data())
def test_backward_before_its_forward_is_refused(program: Program, data: st.DataObject) -> None:
    """Also on the last stage, where no transfer separates them."""
    stage, i = data.draw(st.sampled_from(positions(program, Backward)))
    backward = program.stages[stage][i]
    assert isinstance(backward, Backward)
    forward = program.stages[stage].index(Forward(backward.microbatch))
    assert violations(moved(program, (stage, i), forward))


@settings(max_examples=150, deadline=None)
@given(program=programs(), data=st.data())
def test_any_two_instructions_exchanged_either_change_nothing_that_matters_or_are_refused(
    program: Program, data: st.DataObject
) -> None:
    """What passes runs to its end, and its timeline keeps every dependency."""
    stage, i = data.draw(st.sampled_from(positions(program, object)))
    own = list(program.stages[stage])
    j = data.draw(st.integers(0, len(own) - 1))
    own[i], own[j] = own[j], own[i]
    exchanged = edited(program, stage, own)
    if violations(exchanged):
        return
    spans = simulate(exchanged, LinearCost(fixed_s=1.0, optimizer_s=1.0)).spans
    when = {(s.name, s.stage, s.args["microbatch"]): s for s in spans if s.name != "step"}
    steps = {(s.stage, *s.args["jobs"], s.args["step"]): s for s in spans if s.name == "step"}
    for (name, position, k), span in when.items():
        source = when.get((name, position + (-1 if name == "forward" else 1), k))
        assert source is None or source.end_s <= span.start_s
        for segment in program.microbatches[k].segments:
            own_step = steps[position, segment.job, segment.step]
            before = steps.get((position, segment.job, segment.step - 1))
            assert span.end_s <= own_step.start_s and (before is None or before.end_s <= span.start_s)
        assert name == "forward" or when["forward", position, k].end_s <= span.start_s


def test_stages_that_wait_for_each_other_are_refused() -> None:
    """The last stage wants a second forward before it gives back the first; the first stage does not send it."""
    stream = [Microbatch((Segment("a", 0, i, 1),)) for i in range(2)]
    one = build(Schedule.ONE_F_ONE_B, stream, 2, memory_bytes=[1, 1])
    all_first = build(Schedule.GPIPE, stream, 2)
    assert not violations(one) and not violations(all_first)
    stuck = dataclasses.replace(one, stages=(one.stages[0], all_first.stages[1]))
    assert any("waits for ever" in problem for problem in violations(stuck))


def test_transfers_received_in_another_order_than_sent_are_refused() -> None:
    """A channel delivers in order, so a swap would hand over the wrong activations."""
    program = build(Schedule.GPIPE, [Microbatch((Segment("a", 0, i, 1),)) for i in range(2)], 2)
    own = list(program.stages[1])
    first, second = (own.index(Receive(k, False, 0)) for k in range(2))
    own.insert(first, own.pop(second))
    assert violations(edited(program, 1, own)) == [
        "stage 1 receives activations in another order than stage 0 sends them"
    ]


def test_sample_in_two_microbatches_is_refused() -> None:
    """It would count twice in its job's gradient."""
    stream = [Microbatch((Segment("a", 0, 0, 1),)), Microbatch((Segment("a", 0, 0, 1),))]
    assert violations(build(Schedule.GPIPE, stream, 1)) == ["sample 0 of step 0 of a is in 2 places"]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_memory_one_byte_below_the_peak_is_refused(schedule: Schedule) -> None:
    """At the peak it passes."""
    stream = [Microbatch((Segment("a", 0, i, i + 1),)) for i in range(5)]
    program = build(schedule, stream, 3)
    peaks = [simulate(program, COST).peak_bytes(stage) for stage in range(3)]
    assert violations(program, cost=COST, memory_bytes=peaks) == []
    for stage in range(3):
        less = [peak - (s == stage) for s, peak in enumerate(peaks)]
        found = violations(program, cost=COST, memory_bytes=less)
        assert found and all(f"stage {stage}" in problem and "bytes" in problem for problem in found)


@settings(max_examples=60, deadline=None)
@given(program=programs(min_stages=2), data=st.data())
def test_transfer_that_is_not_needed_is_refused(program: Program, data: st.DataObject) -> None:
    """Beside all the right ones, at the end of a stage's list."""
    stage = data.draw(st.integers(0, program.num_stages - 1))
    kind, other = data.draw(st.sampled_from([Send, Receive])), data.draw(st.integers(0, program.num_stages - 1))
    extra = kind(0, data.draw(st.booleans()), other)
    assume(extra not in program.stages[stage])
    found = violations(edited(program, stage, [*program.stages[stage], extra]))
    assert len(found) == 1 and "has nothing to" in found[0]


def test_step_of_a_global_batch_that_is_not_there_is_refused() -> None:
    """A job's optimizer would step on nothing."""
    program = build(Schedule.GPIPE, [Microbatch((Segment("a", 0, 0, 1),))], 1)
    found = violations(edited(program, 0, [*program.stages[0], Step("a", 1)]))
    assert len(found) == 1 and "not there" in found[0]


ONE_SAMPLE = [Microbatch((Segment("a", 0, 0, 1),))]


@pytest.mark.parametrize("stage", [0, 1])
def test_step_before_its_gradient_is_measured_is_refused(stage: int) -> None:
    """A stage would clip by a norm that is not known yet."""
    program = build(Schedule.GPIPE, ONE_SAMPLE, 2)
    own = [i for i in program.stages[stage] if i != Step("a", 0)]
    own.insert(own.index(Measure("a", 0)), Step("a", 0))
    found = violations(edited(program, stage, own))
    assert len(found) == 1 and "before its gradient is measured" in found[0]


def test_measure_before_the_last_backward_or_on_one_device_is_refused() -> None:
    """It would miss a part of the gradient, or there are no parts."""
    program = build(Schedule.GPIPE, ONE_SAMPLE, 2)
    position = program.stages[1].index(Measure("a", 0))
    assert "1 backwards early" in violations(moved(program, (1, position), position - 1))[0]
    alone = build(Schedule.GPIPE, ONE_SAMPLE, 1)
    assert "is for several stages" in violations(edited(alone, 0, [*alone.stages[0], Measure("a", 0)]))[0]


def test_stages_that_wait_for_each_others_measures_are_refused() -> None:
    """The first stage wants a part before it sends what the second does before it measures."""
    stream = [Microbatch((Segment(job, 0, 0, 1),)) for job in "ab"]
    program = build(Schedule.ONE_F_ONE_B, stream, 2)
    own = list(program.stages[1])
    own.remove(Measure("a", 0))
    own.insert(own.index(Measure("b", 0)), Measure("a", 0))
    assert "waits for ever" in violations(edited(program, 1, own))[0]
