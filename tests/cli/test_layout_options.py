"""A layout that cannot be is refused in a sentence, before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_families import plain_model

from weft.cli.layout_options import LayoutOptions
from weft.errors import WeftError
from weft.model.resolve import resolve
from weft.parallel import auto_layout
from weft.parallel.auto_layout import Machine, machine_here, machine_of, predicted_on
from weft.plan.choose_layout import LayoutOption
from weft.plan.cost.hardware import find_hardware
from weft.plan.layout import DispatchRule
from weft.plan.pipeline.build import Schedule
from weft.spec import AdapterSpec, JobSpec, RunSpec

JOBS = (JobSpec("job", ("data.jsonl",)),)


def refusal(layout: str | None, schedule: str | None = None, flags: tuple[str, ...] = (), **settings: object) -> str:
    spec = RunSpec(**{"base_model": "tiny", "device": "cpu", "jobs": JOBS, **settings})  # type: ignore[arg-type]
    with pytest.raises(WeftError) as found:
        LayoutOptions(layout, schedule).check(spec, flags)
    return str(found.value)


def notes(layout: LayoutOptions, spec: RunSpec, machine: Machine | None = None) -> tuple[str, ...]:
    return layout.notes(spec, resolve(spec.backbone, None if machine is None else machine.elsewhere))


H100 = Machine(find_hardware("h100"), None, is_here=False)


def choose(
    spec: RunSpec, given: LayoutOptions, machine: Machine | None = None
) -> tuple[LayoutOptions, tuple[str, ...], bool, LayoutOption | None]:
    """The options in the place of auto, the reasons, whether the layout may change, and what is predicted of it."""
    machine = machine or machine_here(spec)
    model = resolve(spec.backbone, machine.elsewhere)
    options, found = given.choose(spec, model, Path(), machine)
    return options, found.lines, given.forecaster(spec, model, machine) is not None, found.predicted


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("stages:2", "--devices: are for GPUs, and this run is on a CPU; leave them out."),
        ("stages:1", "--devices: are for several devices, and stages:1 is one; leave them out."),
        ("auto", "--devices: are for a layout with a name; leave them out with auto."),
    ],
)
def test_devices_when_the_layout_has_no_use_for_them_then_refused(layout, message):
    spec = RunSpec(base_model="tiny", device="cpu", jobs=JOBS)
    with pytest.raises(WeftError) as found:
        LayoutOptions(layout, devices="0,0").check(spec, ())
    assert str(found.value) == message


@pytest.mark.parametrize("layout", ["stages", "rows:2", ""])
def test_layout_when_it_is_no_layout_then_refused(layout):
    assert refusal(layout).startswith(f"--layout: got {layout!r}; accepted are ")


def test_layout_when_devices_cannot_share_layers_then_refused(tmp_path):
    """With what would fit."""
    found = refusal("tensor:3")
    assert (
        found.startswith("base_model tiny: has ") and "which 3 devices cannot share evenly; tensor may be 1, " in found
    )
    plain_model("phi3").save_pretrained(tmp_path)
    assert "tensor parallel is for llama" in refusal("tensor:2", base_model=str(tmp_path))
    found = refusal("tensor:2", quantize="nf4")
    assert found.startswith(
        "base_model tiny: has weights of 192 inputs or outputs, of which nf4 keeps 64 together, so 2 "
    )
    assert "tensor:N and shards:N exclude each other" in refusal("tensor:2,shards:2")
    job = JobSpec("job", ("data.jsonl",), adapter=AdapterSpec(method="diff_pruning"))
    assert refusal("tensor:2", jobs=(job,)).startswith("jobs.0.adapter.method: diff_pruning chooses among the numbers")


def test_layout_when_several_replicas_would_be_planned_by_lorafusion_then_refused_and_not_chosen():
    found = refusal("spread:2", planner="lorafusion")
    assert found.startswith("planner: lorafusion plans one device or one replica in stages")
    spec = RunSpec(base_model="tiny", device="cpu", jobs=JOBS, planner="lorafusion")
    LayoutOptions("stages:2").check(spec, ())
    options, *_ = choose(spec, LayoutOptions("auto"))
    assert options.stages is None or len(options.stages.replica_sizes) == 1


def test_layout_when_devices_share_layers_then_reports_that_bits_belong_to_it():
    options = LayoutOptions("tensor:2,stages:2", "1f1b")
    spec = RunSpec(base_model="tiny", device="cpu", jobs=JOBS)
    options.check(spec, ())
    assert options.stages is not None
    assert (options.stages.replica_sizes, options.stages.tensor) == ((2,), (2,))
    note, alone = notes(options, spec)
    assert note.startswith("tensor:2 splits sums, so bits belong to this layout")
    assert note.endswith("about 1e-5 from one device's")
    assert alone == "every microbatch runs alone: the requested schedule has no pairs."
    assert [*notes(LayoutOptions("tensor:2"), spec)] == [*notes(LayoutOptions("tensor:2,stages:2"), spec)] == [note]
    _, alone = notes(LayoutOptions("tensor:2"), replace(spec, planner="greedy"))
    assert alone.endswith("the greedy planner makes no pairs.")
    assert len(notes(LayoutOptions("tensor:2"), spec, H100)) == 2
    *_, alone = notes(LayoutOptions("tensor:2"), replace(spec, kernels="reference"), H100)
    assert alone.endswith("on GPUs pairs are for the fused kernels.")
    (note,) = notes(LayoutOptions("tensor:2"), replace(spec, quantize="fp8"))
    assert note.endswith("about a rounding to 8-bit floats from one device's")
    assert LayoutOptions("tensor:1").stages is None


def test_layout_when_it_is_auto_then_one_is_chosen_that_can_be_trained_and_the_reason_is_shown():
    """On any machine; only `weft train` chooses."""
    spec = RunSpec(base_model="tiny", device="cpu", jobs=(JobSpec("job", ("data.jsonl",), gradient_sum="any_order"),))
    options, reasons, may_change, predicted = choose(spec, LayoutOptions("auto"))
    assert may_change and predicted is not None
    options.check(spec, ())
    assert not options.is_auto and "GiB a device" in reasons[0] and reasons[0].endswith("(chosen, predicted)")
    assert "auto is for weft train, sweep and plan" in refusal("auto")
    assert "leave --replicas out" in refusal("auto", flags=("--replicas", "2"))


@pytest.mark.parametrize(
    ("layout", "sizes", "shards", "held"),
    [
        ("spread:2,shards:2", (1, 1, 1, 1), (2, 2), "each of 2 devices holds about "),
        ("stages:1+shards:2", (1, 1, 1), (1, 2), "each of 2 devices holds about "),
        ("stages:2,shards:2", (2, 2), (2,), "each of 4 devices holds up to about "),
    ],
)
def test_layout_when_shards_are_combined_then_reports_what_each_holds(layout, sizes, shards, held):
    options, spec = LayoutOptions(layout), RunSpec(base_model="tiny", device="cpu", jobs=JOBS)
    options.check(spec, ())
    assert options.stages is not None and (options.stages.replica_sizes, options.stages.shards) == (sizes, shards)
    assert notes(options, spec)[0].startswith(held)
    assert refusal(layout, "gpipe").endswith(f"leave it out with {layout}.")


def test_layout_when_shards_cannot_be_then_refused(tmp_path):
    plain_model("gpt2").save_pretrained(tmp_path)
    assert "is a gpt2 model" in refusal("shards:2", base_model=str(tmp_path))
    assert "leave it out with shards:2" in refusal("shards:2", "gpipe")
    assert "leave --replicas out" in refusal("shards:2", flags=("--replicas", "2"))


def test_layout_when_it_is_shards_then_reports_what_a_device_holds_and_when_gathering_is_hidden():
    options = LayoutOptions("shards:4")
    spec = RunSpec(base_model="tiny", device="cpu", jobs=JOBS)
    options.check(spec, ())
    assert options.stages is not None
    assert (options.stages.replica_sizes, options.stages.shards) == ((1,) * 4, (4,))
    held, hidden = notes(options, spec)
    assert held.startswith("each of 4 devices holds about ")
    assert "links assumed" in hidden and "tokens a microbatch on" in hidden
    assert LayoutOptions("shards:1").stages is None
    assert notes(LayoutOptions("shards:1"), spec) == notes(LayoutOptions("stages:2"), spec) == ()


def test_layout_when_jobs_are_spread_over_replicas_in_stages_then_a_note_reports_that_they_are_not_grouped():
    alone = RunSpec(base_model="tiny", device="cpu", jobs=JOBS)
    two = replace(alone, jobs=(*JOBS, JobSpec("other", ("data.jsonl",), gradient_sum="any_order")))
    (note,) = notes(LayoutOptions("stages:1+stages:2"), two)
    assert note.endswith("groups are not tried with gradient_sum any_order")
    at_home = replace(alone, jobs=(*JOBS, JobSpec("other", ("data.jsonl",))))
    for layout, spec in (
        ("stages:1+stages:2", alone),
        ("stages:1+stages:2", at_home),
        ("spread:2", two),
        ("stages:2", two),
    ):
        assert notes(LayoutOptions(layout), spec) == ()
    assert notes(LayoutOptions("stages:1+stages:2"), replace(two, planner="greedy")) == ()


def test_jobs_when_they_compare_with_a_reference_then_its_passes_count_for_the_layout(tmp_path):
    """Each sample runs through it once, forward alone."""
    row = '{"prompt": "Say a.", "chosen": "a", "rejected": "b"}\n'
    (tmp_path / "pairs.jsonl").write_text(row * 8)
    jobs = [JobSpec(n, ("pairs.jsonl",), objective=n, global_batch_size=4, max_steps=2) for n in ("dpo", "orpo")]
    spec = RunSpec(base_model="tiny", device="cpu", jobs=tuple(jobs))
    model = resolve(spec.backbone)
    paired, alone = auto_layout._jobs(spec, model, auto_layout._train_data(spec, model, tmp_path))
    assert paired.tokens == pytest.approx(1.5 * alone.tokens, abs=1)


def test_layout_when_the_model_has_fewer_layers_then_refused():
    assert refusal("stages:99").startswith("--layout: got 99 stages; the model has ")


def test_layout_when_the_models_layers_are_unknown_then_refused(tmp_path):
    plain_model("gpt2").save_pretrained(tmp_path)
    assert "is a gpt2 model; stages and shards are for those of llama" in refusal("stages:2", base_model=str(tmp_path))


def test_layout_when_combined_with_what_stages_cannot_do_then_refused():
    assert "leave --replicas out" in refusal("stages:2", flags=("--replicas", "2"))
    assert "set kernels=fused too" in refusal("stages:2", recompute="mlp")
    assert refusal("stages:2", jobs=(JobSpec("job", ("data.jsonl",), optim="adamw_8bit"),)).startswith("jobs.0.optim:")
    rows = (JobSpec("job", ("data.jsonl",), adapter=AdapterSpec(trainable_token_indices=(3,))),)
    assert refusal("stages:2", jobs=rows, kernels="fused").startswith("jobs.0.adapter.method: an adapter with rows of")
    assert refusal(None, "gpipe") == "--schedule: is for stages; give --layout stages:N too."
    assert refusal("spread:2", "gpipe").startswith("--schedule: is for one replica in stages; leave it out")
    assert refusal("stages:2", "gpip").endswith("Did you mean gpipe?")
    assert refusal("auto", "gpip").endswith("Did you mean gpipe?")
    assert refusal("shards:1", "gpipe") == "--schedule: is for several stages, and shards:1 is one; leave it out."


@pytest.mark.parametrize(
    ("layout", "number"),
    [("spread:2", 2), ("stages:1+stages:2", 2), ("shards:2+stages:1", 2), ("stages:2", None), ("shards:2", None)],
)
def test_replicas_when_no_job_is_shared_then_each_has_an_engine_of_its_own(layout, number):
    model = resolve(RunSpec(base_model="tiny", device="cpu", jobs=JOBS).backbone)
    hosts = LayoutOptions(layout).hosts(model, JOBS)
    assert (None if hosts is None else hosts.number) == number
    shared = (*JOBS, JobSpec("shared", ("data.jsonl",), gradient_sum="any_order"))
    assert LayoutOptions(layout).hosts(model, shared) is None


def test_layout_when_its_processes_join_then_whole_replicas_are_ranks_and_divided_ones_have_one_engine(monkeypatch):
    """They have devices of their own, so that none is needed here; a layout must have a name."""
    monkeypatch.setenv("WEFT_RANK_KEY", "known")
    model = resolve(RunSpec(base_model="tiny", device="cpu", jobs=JOBS).backbone)
    hosts = LayoutOptions("spread:2", listen="a:1").hosts(model, JOBS)
    assert hosts is not None and hosts.invitation == "start 2 of them with: weft rank --connect a:1"
    for layout in ("stages:2", "spread:2,stages:2", "shards:2+stages:1"):
        assert LayoutOptions(layout, listen="a:1").hosts(model, JOBS) is None
    many = LayoutOptions("shards:1000", listen="a:1")
    many.check(RunSpec(base_model="tiny", device="cpu", jobs=JOBS), ())
    assert many.stages is not None and many.stages.is_joined and many.flags[-2:] == ["--listen", "a:1"]
    for layout, devices in (("auto", None), ("stages:1", None), ("stages:2", "0,1")):
        with pytest.raises(WeftError, match=r"with --listen(, name a layout such as stages:2)?\.$"):
            LayoutOptions(layout, devices=devices, listen="a:1").check_alone(())


def test_layout_when_it_fits_then_explains_how_to_go_on_with_it():
    options = LayoutOptions("stages:2", "lorapp")
    options.check(RunSpec(base_model="tiny", device="cpu", jobs=JOBS), ())
    assert options.stages is not None
    assert (options.stages.replica_sizes, options.stages.schedule) == ((2,), Schedule.LORAPP)
    assert options.flags == ["--layout", "stages:2", "--schedule", "lorapp"]
    assert LayoutOptions("stages:1").stages is None and LayoutOptions("spread:1").stages is None
    several = LayoutOptions("spread:2+stages:2").stages
    assert several is not None and several.replica_sizes == (1, 1, 2)


GPUS = Machine(find_hardware("h200"), 4, is_here=False)


def test_layout_when_it_is_auto_with_a_schedule_then_one_in_stages_is_taken_and_stays():
    """Whole replicas would be as fast or faster, and have no use for a schedule."""
    jobs = tuple(JobSpec(name, ("data.jsonl",), gradient_sum="any_order") for name in "ab")
    spec = RunSpec(base_model="tiny", device="cpu", jobs=jobs)
    cores = Machine(find_hardware("cpu"), 2)
    options, reasons, may_change, _ = choose(spec, LayoutOptions("auto", "1f1b"), cores)
    assert (options.layout, options.schedule, may_change) == ("stages:2", "1f1b", False)
    assert "spread:2 not possible: --schedule: is for one replica in stages; leave it out with spread:2." in reasons
    alone, reasons, _, _ = choose(spec, LayoutOptions("auto", "1f1b"), cores._replace(num_devices=1))
    assert (alone, reasons) == (LayoutOptions(), ("one device, because none in stages can be",))


def test_layout_when_jobs_keep_some_from_it_then_another_or_one_device_and_the_reason_once():
    jobs = tuple(JobSpec(name, ("data.jsonl",), optim="adamw_8bit", gradient_sum="any_order") for name in "ab")
    spec = RunSpec(base_model="tiny", device="cpu", jobs=jobs)
    options, reasons, _, _ = choose(spec, LayoutOptions("auto"), Machine(find_hardware("cpu"), 2))
    assert options.layout == "spread:2"
    options, reasons, _, _ = choose(spec, LayoutOptions("auto", "1f1b"), Machine(find_hardware("cpu"), 2))
    assert options == LayoutOptions()
    assert any("stages:2" in line and "adamw_8bit keeps blocks" in line for line in reasons)
    rows = tuple(JobSpec(name, ("data.jsonl",), adapter=AdapterSpec(trainable_token_indices=(3,))) for name in "ab")
    options, reasons, _, _ = choose(replace(spec, jobs=rows, device="auto"), LayoutOptions("auto"), GPUS)
    assert options == LayoutOptions() and any("rows of tokens has no kernels" in line for line in reasons)


def test_layout_when_sharing_every_layer_would_be_faster_then_is_proposed_to_jobs_that_allow_it():
    fast = replace(find_hardware("h200"), launch_s=0.0, link_rate=1e18)
    spec = RunSpec(base_model="tiny", device="cpu", jobs=(JobSpec("a", ("data.jsonl",), global_batch_size=1),))
    for method, num in (("lora", 1), ("diff_pruning", 0)):
        jobs = (replace(spec.jobs[0], adapter=AdapterSpec(method=method)),)
        options, reasons, _, _ = choose(
            replace(spec, jobs=jobs), LayoutOptions("auto"), Machine(fast, 2, is_here=False)
        )
        assert sum("since it changes bits: --layout tensor:2" in line for line in reasons) == num
        assert options.layout is None or "tensor" not in options.layout


def test_machine_when_devices_are_named_then_all_figures_are_theirs():
    """Nothing of this machine is left in them, and what would be refused there is refused here."""
    spec = RunSpec(base_model="tiny", device="cpu", jobs=JOBS)
    _, reasons, may_change, _ = choose(spec, LayoutOptions("auto"), GPUS)
    assert all("of 139.8 GiB a device" in line for line in reasons) and not may_change
    assert notes(LayoutOptions("stages:2"), spec, GPUS)[0].startswith("no layout has been run on several GPUs")
    assert "(h200, links assumed)" in notes(LayoutOptions("shards:2"), spec, GPUS)[2]
    LayoutOptions("tensor:2").check(spec, (), resolve(spec.backbone, GPUS.elsewhere))
    bits, untried = notes(LayoutOptions("tensor:2"), spec, GPUS)
    assert bits.endswith("about a rounding to bfloat16 from one device's") and untried.startswith(
        "no layout has been run"
    )
    with pytest.raises(WeftError, match="got 99 stages"):
        LayoutOptions("stages:99").check(spec, (), resolve(spec.backbone, GPUS.elsewhere))
    with pytest.raises(WeftError, match="spread:5 has 5 devices, and --gpus gives 4"):
        predicted_on(spec, resolve(spec.backbone), "spread:5", Path(), GPUS)
    with pytest.raises(WeftError, match="give the number of h200 with --gpus N"):
        choose(spec, LayoutOptions("auto"), machine_of(spec, "h200", None))
    assert machine_of(spec, "cpu", None) == machine_of(spec, "auto", None)
    assert machine_of(spec, "auto", 64).num_devices == 64


def test_prediction_when_a_layout_is_one_device_by_another_name_then_it_is_called_as_it_was():
    spec = RunSpec(base_model="tiny", device="cpu", jobs=JOBS)
    for layout in ("shards:1", "tensor:1", "spread:1"):
        (line,) = predicted_on(spec, resolve(spec.backbone), layout, Path(), Machine(find_hardware("cpu"), 2)).lines
        assert line.startswith(f"{layout}: up to ")


def test_machine_when_it_has_gpus_then_a_layout_over_them_is_chosen_that_stays(monkeypatch):
    """By the table and their memory within its limit; what the table does not have, or unlike ones, must be stated."""
    names = ["NVIDIA H200"] * 4
    gpus = [torch.device("meta", index) for index in range(4)]
    monkeypatch.setattr(auto_layout, "choose_device", lambda _: gpus[0])
    monkeypatch.setattr(auto_layout, "gpus", lambda: gpus)
    monkeypatch.setattr(auto_layout, "device_name", lambda gpu: names[gpu.index])
    monkeypatch.setattr(auto_layout, "total_bytes", lambda _: 100 * 2**30)
    jobs = tuple(JobSpec(name, ("data.jsonl",), gradient_sum="any_order") for name in "abcd")
    spec = RunSpec(base_model="tiny", jobs=jobs, memory_limit=0.5)
    machine = machine_of(spec, "auto", None)
    assert (machine.hardware.name, machine.num_devices, machine.hardware.memory_bytes) == ("h200", 4, 50 * 2**30)
    # What the run would get is queried from the machine, which has no GPUs here.
    options, reasons, may_change, _ = choose(spec, LayoutOptions("auto"), machine)
    assert options.layout == "spread:4" and "of 50.0 GiB a device" in reasons[0] and not may_change
    for others, message in ((["NVIDIA H100"], "has unlike GPUs"), (["Tesla T4"] * 4, "nothing is known of Tesla T4")):
        names[: len(others)] = others
        with pytest.raises(WeftError, match=f"--layout: .*{message}.*; give a layout"):
            machine_of(spec, "auto", None)


def test_dispatch_when_there_is_nothing_to_divide_or_no_such_rule_then_refused():
    def refused(options: LayoutOptions, gradient_sum: str = "any_order") -> str:
        jobs = tuple(replace(job, gradient_sum=gradient_sum) for job in JOBS)
        with pytest.raises(WeftError) as found:
            options.check(RunSpec(base_model="tiny", device="cpu", jobs=jobs), ())
        return str(found.value)

    wrong = refused(LayoutOptions("spread:2", dispatch="evenly"))
    assert wrong.startswith("--dispatch: got 'evenly'; accepted are balanced, length, even.")
    for options in (LayoutOptions(dispatch="even"), LayoutOptions("stages:2", dispatch="even")):
        assert refused(options) == "--dispatch: is for several replicas; give --layout spread:N too."
    assert "leave it out with auto" in refused(LayoutOptions("auto", dispatch="even"))
    in_order = refused(LayoutOptions("spread:2", dispatch="even"), "in_order")
    assert in_order.startswith("--dispatch: divides jobs with gradient_sum any_order, and there is none;")
    options = LayoutOptions("spread:2", dispatch="length")
    assert options.flags == ["--layout", "spread:2", "--dispatch", "length"]
    assert options.stages is not None and options.stages.dispatch is DispatchRule.LENGTH
