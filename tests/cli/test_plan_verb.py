"""`weft plan` and the planners of `weft train`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_verb import write_jobs
from tiny_families import plain_model
from tiny_models import submit

from weft.cli.deploy import PlannedRun
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.engine.execute.local import executor_on
from weft.engine.execute.memory import weight_bytes
from weft.errors import size
from weft.model.load import build, load_backbone, load_skeleton
from weft.model.resolve import resolve
from weft.model.source import TINY
from weft.parallel.auto_layout import outlines
from weft.plan.choose_layout import LayoutJob, price_layout
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.profile import load_profile
from weft.plan.cost.shape import GPU_ROW_TILE, SHAPES
from weft.plan.layout import Layout
from weft.plan.simulate.forecast import outline_bytes
from weft.plan.simulate.layout_forecast import forecast_layout
from weft.plan.sweep.cost import PackOption, SweepSetting
from weft.spec import AdapterSpec, BackboneSpec, load_run
from weft.spec.cluster import load_cluster
from weft.spec.load_sweep import sweep_from_mapping
from weft.store.peft_files import read_adapter
from weft.sweeps.configure import Configurations
from weft.sweeps.planned_packs import plan_elsewhere, sampled


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two small jobs, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_jobs(tmp_path, broken=False)
    return tmp_path


@pytest.fixture
def mixture(here: Path) -> str:
    """The same jobs on a tiny mixture of experts."""
    plain_model("qwen3_moe", vocab_size=264, max_position_embeddings=512).save_pretrained(here / "mixture")
    for file in Path(TINY).glob("*token*"):
        shutil.copy(file, here / "mixture")
    return "base_model=mixture"


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model directory smaller than the embedded one, and where its profile goes."""
    folder = tmp_path_factory.mktemp("profiled")
    model = build(SHAPES["tiny"], torch.float32, torch.device("cpu"), "sdpa")
    model.save_pretrained(folder / "small")
    for file in Path(TINY).glob("*token*"):
        shutil.copy(file, folder / "small")
    return folder / "small", folder / "small.json"


@pytest.fixture
def profile(weft, profiled, here) -> tuple[Path, Path]:
    """The same, measured."""
    model, file = profiled
    if not file.exists():
        made = weft("profile", "--model", model, "--capacity", 256, "--quick", "--out", file)
        assert made.code == 0, made
    return model, file


def test_plan_when_jobs_train_rows_of_their_own_then_reports_whose_and_how_many(weft, here):
    rows = "jobs.0.adapter.modules_to_save=[lm_head]", "jobs.1.adapter.new_tokens=[<a>]"
    result = weft("plan", "jobs.yaml", "--steps", "2", "--device", "cpu", *rows)
    assert "rows of embedding and head: shout 264, reverse 2" in result.out


def test_plan_when_a_file_is_good_then_shows_the_plan_and_writes_nothing(weft, here):
    before = sorted(here.rglob("*"))
    result = weft("plan", "jobs.yaml", "--steps", "4", "--device", "h200", "--stages", "2")
    assert result.code == 0
    for part in ("shout", "reverse", "microbatches of up to", "bubbles", "tokens/s", "GiB", "layers", "stage 1"):
        assert part in result.out
    assert sorted(here.rglob("*")) == before


def test_plan_when_jobs_train_experts_then_it_costs_them_as_the_dry_run_does(weft, mixture):
    experts = "jobs.0.adapter={r: 4, experts: full}", "jobs.1.adapter={r: 4, experts: shared, expert_r: 2}"
    words = "jobs.yaml", mixture, *experts
    dry, *plans = weft("train", *words, "--dry-run"), *(weft("plan", *words, "--device", d) for d in ("h200", "cpu"))
    assert all(result.code == 0 for result in (dry, *plans)), dry
    pattern = r"^experts   (\w+): (.*) parameters, (.*) KiB with gradients and optimizer(.*)$"
    planned, here, real = (re.findall(pattern, result.out, re.MULTILINE) for result in (*plans, dry))
    # Two layers of 4 experts of 32 in, 24 wide: 4 · r · (2 · 32 + 3 · 24), and r · (3 · 32 + 3 · 4 · 24).
    attention = 4 * 2 * (32 * 4 + (4 + 2 * 2 + 4) * 12)
    numbers = [2 * 4 * 4 * (64 + 72) + attention, 2 * 2 * (96 + 288) + attention]
    assert [text[:2] for text in planned] == [text[:2] for text in real]
    assert [text[:3] for text in here] == [text[:3] for text in real]
    assert [name for name, *_ in planned] == ["shout", "reverse"]
    for (_, text, planned_size, fit), (*_, real_size, real_fit), num in zip(planned, real, numbers, strict=True):
        assert text.rpartition(": ")[2] == f"{num / 1e3:.2f} k"
        assert planned_size == f"{18 * num / 1024:,.1f}" and real_size == f"{16 * num / 1024:,.1f}"
        assert all(re.fullmatch(r", [\d,]+ such jobs fit", text) for text in (fit, real_fit))


@pytest.mark.parametrize("experts", ["full", "shared"])
def test_bytes_of_a_job_that_trains_experts_when_anything_plans_it_then_are_those_of_admission(experts, mixture):
    device, adapter = find_hardware("cpu"), {"r": 4, "experts": experts}
    overrides = [mixture, f"defaults.adapter={{r: 4, experts: {experts}}}"]
    run = load_run(Path("jobs.yaml"), overrides)
    model = resolve(run.backbone)
    engine = Engine(load_backbone(model), capacity=128)
    jobs = [(job, load_job_data(job, engine.executor.tokenizer, Path())) for job in run.jobs]
    submit(engine, *jobs)
    admitted = engine.bytes_of(engine.jobs["shout"])

    outline, *_ = outlines(model, run.jobs, Path(), 2)
    cost = model.setup([4], [outline.num_parameters], [run.jobs[0].adapter]).cost(device)
    assert outline_bytes(outline, cost) == admitted
    layout = LayoutJob(10, 4, num_parameters=outline.num_parameters)
    more, none = (price_layout(cost, given, 128, Layout()).device_bytes for given in ([layout] * 3, [layout] * 2))
    assert more - none == admitted

    Path("cluster.yaml").write_text("machines: [{gpu: cpu, gpus: 2}]\njobs_file: jobs.yaml\n")
    cluster = load_cluster(Path("cluster.yaml"))
    _, setup = PlannedRun.of(cluster, Path("cluster.yaml"), None, overrides).jobs(cluster)
    memory = setup.cost(device).memory
    assert memory.total_bytes(128, setup.ranks) - memory.total_bytes(128, setup.ranks[1:]) == admitted

    job = {"train_data": "shout.jsonl", "max_steps": 2, "global_batch_size": 2, "eval_data": 2, "adapter": adapter}
    given = {"base_model": "mixture", "space": {"max_length": [64]}, "capacity": 128, "device": "cpu", "job": job}
    sweep = sweep_from_mapping(given, base_dir=Path())
    (trial,) = sampled(sweep, Configurations(sweep, executor_on(load_skeleton(model)), Path()))
    setting = SweepSetting(model.shape, device, plain_row_bytes=model.plain_row_bytes([run.jobs[0].adapter]))
    assert setting.adapter_bytes(trial, 1) == admitted
    assert setting.step_cost(PackOption(1, 128, "none"), trial).step_s(0) == cost.step_s(0)
    (pack,) = plan_elsewhere(sweep, Path(), "cpu", 1).packs
    assert pack.gpu_bytes == memory.total_bytes(128, [4])


def test_plan_when_targets_choose_experts_then_refused_with_the_setting_and_the_remedy(refused, mixture):
    setting = "jobs.1.adapter={target_modules: [gate_up_proj]}"
    message = refused("plan", "jobs.yaml", mixture, "--device", "h200", setting)
    assert message.startswith(f"{setting}: jobs.1.adapter.target_modules: model.layers.")
    assert message.endswith("set experts: shared, separate or full to train them too.")
    message = refused("plan", "jobs.yaml", mixture, "--device", "h200", "jobs.1.adapter={target_modules: [experts]}")
    assert message.endswith("v_proj. Set experts: shared, separate or full to train routed experts.")


def test_memory_of_a_mixture_when_planned_then_is_what_admission_counts(mixture):
    spec = BackboneSpec(mixture.partition("=")[2], device="cpu")
    memory = resolve(spec).setup([4], [None], []).cost(find_hardware("cpu")).memory
    backbone = load_backbone(spec)
    assert memory.kept_bytes(512) == backbone.activation_bytes(512, [AdapterSpec(r=4)])
    assert memory.trained_bytes_each == weight_bytes(backbone)
    assert memory.weight_bytes() == pytest.approx(backbone.num_bytes, rel=0.02)


def test_plan_when_an_adapter_trains_experts_then_its_steps_and_memory_are_those_of_its_parameters(weft, mixture):
    words = "plan", "jobs.yaml", mixture, "--device", "h200", "--steps", "2", "--json"
    frozen, trained = (
        json.loads(weft(*words, *(f"jobs.{at}.adapter={{r: 4, experts: {experts}}}" for at in (0, 1))).out)
        for experts in ("none", "full")
    )
    more = trained["jobs"][0]["num_parameters"] - frozen["jobs"][0]["num_parameters"]
    assert more == 2 * 4 * 4 * (64 + 72)
    # One tile of rows, of which two layers keep what enters both products of each row's two choices.
    kept = GPU_ROW_TILE * 2 * 2 * (32 + 24) * 2
    assert trained["stage_bytes"][0] - frozen["stage_bytes"][0] == 2 * 18 * more + kept
    # Both jobs step at once.
    before_s, after_s = (
        next(span["duration_s"] for span in found["timeline"] if span["name"] == "step") for found in (frozen, trained)
    )
    assert after_s - before_s == pytest.approx(2 * 42 * more / find_hardware("h200").memory_rate)


def test_plan_when_a_layout_is_named_then_reports_what_a_dry_run_does(weft, here):
    planned = weft("plan", "jobs.yaml", "--steps", "2", "device=cpu", "--layout", "spread:2")
    line = planned.out.splitlines()[0]
    assert line.startswith("layout    spread:2: up to ") and line.endswith("x as fast as one (predicted)")
    assert planned.out.count(" a step") == 1 and "2 replicas on 2 cpu" in planned.out and "replica 1 " in planned.out
    dry = weft("train", "jobs.yaml", "device=cpu", "--layout", "spread:2", "--dry-run")
    assert line in dry.out.splitlines()
    assert re.search(r"time .* s of training in spread:2, which is predicted to be [\d.]+x as fast as one dev", dry.out)
    assert re.search(r"memory .* on one device; with full microbatches up to .* a device of spread:2", dry.out)
    many = weft("plan", "jobs.yaml", "--steps", "2", "device=cpu", "--layout", "spread:16")
    assert "16 processes would share the" in many.out


def test_plan_when_the_layout_is_auto_then_all_are_listed_and_lengths_are_those_of_the_data(weft, here):
    found = weft("plan", "jobs.yaml", "--steps", "2", "device=cpu", "--layout", "auto", "--json")
    options = json.loads(found.out)["layout"]
    assert options[0].endswith("(chosen, predicted)")
    longer = weft(
        "plan", "jobs.yaml", "jobs.0.max_length=2048", "--steps", "2", "device=cpu", "--layout", "auto", "--json"
    )
    assert json.loads(longer.out)["layout"] == options


def test_plan_when_stages_are_requested_then_they_are_the_layout_of_as_many(weft, here):
    """Another spelling, which a note reports."""
    arguments = ("plan", "jobs.yaml", "--steps", "2", "--device", "h200", "--json")
    stages, layout = (
        json.loads(weft(*arguments, *words).out) for words in (("--stages", 2), ("--layout", "stages:2", "--gpus", 2))
    )
    assert stages.pop("notes") == ["--stages 2 is another spelling of --layout stages:2.", *layout.pop("notes")]
    assert stages == layout


def test_plan_when_a_layout_has_stages_then_jobs_keep_the_order_that_the_run_keeps(weft, here):
    """Unlike a pipeline that is only planned, which may reorder samples."""
    planned = json.loads(weft("plan", "jobs.yaml", "--steps", "2", "device=cpu", "--layout", "stages:2", "--json").out)
    assert planned["keeps_order"] and planned["schedule"] == "eager"
    order = [tuple(s[:3]) for m in planned["program"]["microbatches"] for s in m]
    for job in planned["jobs"]:
        own = [index for index in order if index[0] == job["name"]]
        assert own == sorted(own) and own


def test_plan_when_devices_share_layers_then_reports_whether_microbatches_run_side_by_side_and_why(weft, here):
    arguments = ("plan", "jobs.yaml", "--steps", "2", "device=cpu", "--layout")
    (line,) = [line for line in weft(*arguments, "tensor:2").out.splitlines() if line.startswith("pairs ")]
    assert "every microbatch runs alone" in line
    found = json.loads(weft(*arguments, "tensor:2", "--json").out)
    assert found["pairs"]["num_pairs"] == len(found["program"]["pairs"]) == 0
    staged = weft(*arguments, "tensor:2,stages:2").out
    assert staged.count("runs alone") == 1 and "2 to a stage" in staged
    assert "\npairs     every microbatch runs alone" in staged


def test_plan_when_devices_share_layers_of_stages_then_the_memory_of_every_stage_is_reported(weft, here):
    found = weft("plan", "jobs.yaml", "--steps", "2", "device=cpu", "--layout", "tensor:2,stages:2", "--json")
    planned = json.loads(found.out)
    assert planned["schedule"] == "eager" and len(planned["stage_bytes"]) == planned["num_stages"] == 2


def test_plan_when_a_layout_has_notes_then_they_are_labelled_as_the_run_labels_them(weft, here):
    """What is predicted is under `layout`, and names the microbatches that its memory is for."""
    arguments = ("jobs.yaml", "device=cpu", "--layout", "tensor:2")
    for words in (("plan", "--steps", "2"), ("train", "--dry-run")):
        verb, *more = words
        lines = weft(verb, *arguments, *more).out.splitlines()
        (predicted,) = [line for line in lines if line.startswith("layout ")]
        assert "a device with full microbatches, " in predicted
        assert sum(line.startswith("note      tensor:2 splits sums") for line in lines) == 1
    found = weft("plan", *arguments, "--steps", "2").out
    assert re.search(r"\nmemory    [\d.]+ MiB of .* a device with the planned microbatches; those of up to", found)
    shown = json.loads(weft("plan", *arguments, "--steps", "2", "--json").out)
    assert [len(shown["layout"]), len(shown["notes"])] == [1, 1]


def test_plan_when_a_layout_cannot_be_then_one_sentence(refused, here):
    assert "leave --stages out" in refused("plan", "jobs.yaml", "--layout", "stages:2", "--stages", "2")
    assert "--profile or --layout" in refused("plan", "jobs.yaml", "--layout", "stages:2", "--profile", "none.json")
    assert "--gpus: is for --layout" in refused("plan", "jobs.yaml", "--gpus", "2")
    assert "got 99 stages" in refused("plan", "jobs.yaml", "device=cpu", "--layout", "stages:99")


def test_plan_when_ranks_follow_a_pattern_then_counts_the_widest(weft, here):
    first = "jobs.0.adapter"
    widest, wide = (
        json.loads(weft("plan", "jobs.yaml", change, "--steps", "2", "--json").out)
        for change in (f"{first}.rank_pattern={{q_proj: 48}}", f"{first}.r=48")
    )
    assert [job["rank"] for job in widest["jobs"]] == [2, 2]
    assert widest["stage_bytes"] == wide["stage_bytes"] and widest["total_s"] == wide["total_s"]


def test_plan_when_a_method_costs_more_than_its_rank_or_has_none_then_shows_the_adapters_own(weft, here):
    """DoRA costs one more, pissa twice its rank, IA³ as if it had one."""
    file = here / "jobs.yaml"
    file.write_text(file.read_text().replace(", adapter: {r: 2}", ""))
    for methods, shown, ranks in (
        (("{method: dora, r: 4}", "{method: ia3}"), ("4", "–"), [4, None]),
        (("{init_lora_weights: pissa, r: 4}", "{method: vera, vera_rank: 64}"), ("4", "64"), [4, 64]),
    ):
        words = ("plan", "jobs.yaml", *(f"jobs.{at}.adapter={method}" for at, method in enumerate(methods)))
        rows = weft(*words, "--steps", "2").out.splitlines()[1:3]
        assert [row.split()[-1] for row in rows] == list(shown)
        found = json.loads(weft(*words, "--steps", "2", "--json").out)
        assert [job["rank"] for job in found["jobs"]] == ranks


@pytest.mark.parametrize("stages", [1, 2])
def test_plan_when_json_is_requested_then_it_holds_what_the_text_shows(weft, here, stages):
    """Every number of the text is one of the JSON's, and standard output is JSON and nothing else."""
    words = ("plan", "jobs.yaml", "--steps", "2", "--stages", str(stages), "--device", "h200")
    found, text = json.loads(weft(*words, "--json").out), weft(*words).out
    for job in found["jobs"]:
        row = [job["name"], *(f"{job[key]:,}" for key in ("group", "num_steps", "num_tokens", "rank"))]
        assert re.search(r"\s+".join(map(re.escape, row)), text)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    for value in ("planned_tokens", "num_microbatches", "capacity", "fewest_microbatches"):
        assert f"{found[value]:,}" in lines["planned"]
    assert f"on average {found['fill']:.0%} of that" in lines["planned"]
    assert ("own order" in lines["planned"]) is found["keeps_order"]
    schedule = f"{found['schedule']} on {found['num_stages']} {found['device']}"
    assert schedule in lines["schedule"] and f"bubbles {found['bubble_ratio']:.1%}" in lines["schedule"]
    assert stages == 1 or ", ".join(map(str, found["stage_layers"])) in lines["schedule"]
    for number in (f"{found['tokens_per_s']:,.0f} tokens/s", f"{found['total_tokens']:,} tokens"):
        assert number in lines["speed"]
    assert f"{found['round_s'] * 1e3:,.3g} ms a step" in lines["speed"]
    assert f"{found['total_s'] * 1e3:,.3g} ms" in lines["speed"]
    memory = ", ".join(size(num_bytes) for num_bytes in found["stage_bytes"])
    assert f"{memory} of {size(found['device_bytes'])}" in lines["memory"]
    assert lines["memory"].endswith(f"up to {found['largest_capacity']:,} tokens would fit") and found["fits"]
    assert {span["stage"] for span in found["timeline"]} == set(range(stages))
    assert len(found["program"]["stages"]) == stages
    assert sum(bool(m) for m in found["program"]["microbatches"]) == found["num_microbatches"]


def test_plan_when_only_some_steps_are_planned_then_tokens_are_counted_as_in_a_dry_run(weft, here):
    """Of all steps, not of the planned ones times how many there are; and evaluations take their time."""
    more = ("defaults.max_steps=9", "defaults.eval_data=3", "device=cpu")
    plain = json.loads(weft("plan", "jobs.yaml", more[0], "--steps", "1", "--json").out)
    planned = json.loads(weft("plan", "jobs.yaml", *more, "--steps", "1", "--json").out)
    dry = weft("train", "jobs.yaml", *more, "--dry-run").out
    for job in planned["jobs"]:
        assert re.search(rf"{job['name']}\s+9\s+{job['num_tokens']:,}\s", dry)
    assert planned["total_tokens"] == sum(job["num_tokens"] for job in planned["jobs"])
    assert plain["eval_s"] == 0 < planned["eval_s"] < planned["total_s"]
    assert "tokens with its evaluations and references about" in weft("plan", "jobs.yaml", *more, "--steps", "1").out


def test_plan_when_a_planner_is_named_then_it_is_the_one_that_plans(weft, here):
    """Seven and eight tokens short of the capacity: only a search lets the jobs' samples meet."""
    (here / "a.jsonl").write_text(json.dumps({"text": "a" * 6}) + "\n")
    (here / "b.jsonl").write_text("".join(json.dumps({"text": "b" * n}) + "\n" for n in (8, 2)))
    (here / "jobs.yaml").write_text(
        "base_model: tiny\ncapacity: 20\n"
        "defaults: {max_steps: 1, shuffle: false, max_length: 20, adapter: {r: 2}}\n"
        "jobs:\n"
        "  - {name: a, train_data: a.jsonl, global_batch_size: 1}\n"
        "  - {name: b, train_data: b.jsonl, global_batch_size: 2}\n"
    )
    lengths = json.loads(weft("plan", "jobs.yaml", "--json").out)["program"]["microbatches"]
    (a,), (long, short) = (sorted((s[3] for m in lengths for s in m if s[0] == job), reverse=True) for job in "ab")
    # Just so large that the long one needs a microbatch of its own and the short one fits beside `a`.
    capacity = f"capacity={long + short - 1 if long + short - 1 >= a + short else a + short}"
    longest = f"defaults.max_length={long}"
    counts = {
        name: json.loads(weft("plan", "jobs.yaml", capacity, longest, f"planner={name}", "--json").out)
        for name in ("greedy", "auto", "exact", "lorafusion")
    }
    assert counts["greedy"]["num_microbatches"] == 3
    assert {counts[name]["num_microbatches"] for name in ("auto", "exact", "lorafusion")} == {2}


def test_plan_when_the_request_is_impossible_then_refused_in_one_sentence(refused, here):
    for options, part in (
        (("--stages", "99"), "got 99 stages; the model has 6 layers"),
        (("--device", "h300"), "Did you mean h200"),
        (("capacity=1",), "capacity"),
        (("planner=best",), "accepted are auto, greedy, exact, lorafusion"),
    ):
        assert part in refused("plan", "jobs.yaml", *options)


def test_plan_when_a_profile_was_measured_then_plans_with_it(weft, profile):
    model, file = profile
    known = load_profile(file)
    plain = json.loads(weft("plan", "jobs.yaml", f"base_model={model}", "--json").out)
    result = weft("plan", "jobs.yaml", f"base_model={model}", "--profile", file)
    found = json.loads(weft("plan", "jobs.yaml", f"base_model={model}", "--profile", file, "--json").out)
    assert result.code == 0 and "predicted from a profile" in result.out
    assert found["planned_s"] != plain["planned_s"] and found["stage_bytes"] != plain["stage_bytes"]
    assert found["device"] == "cpu" == known.setup.device
    assert found["program"] == plain["program"], "what a microbatch takes does not change one stage's plan"
    staged = json.loads(
        weft("plan", "jobs.yaml", f"base_model={model}", "--profile", file, "--stages", 2, "--json").out
    )
    assert sum(staged["stage_layers"]) == known.setup.num_layers


def test_plan_when_a_profile_is_wrong_then_refused_in_one_sentence(refused, profile):
    model, file = profile
    tree = json.loads(file.read_text())
    Path("text.json").write_text("no profile\n")
    Path("other.json").write_text("{}\n")
    Path("old.json").write_text(json.dumps(tree | {"version": 0}))
    Path("cut.json").write_text(json.dumps({name: tree[name] for name in tree if name != "fits"}))
    small = f"base_model={model}"
    for words, sentence in (
        ((small, "--profile", "gone.json"), "--profile gone.json: cannot be read (No such file or directory)."),
        ((small, "--profile", "."), "--profile .: cannot be read (Is a directory)."),
        ((small, "--profile", "text.json"), "--profile text.json: is not JSON"),
        (
            (small, "--profile", "other.json"),
            "--profile other.json: is no profile; `weft profile --out FILE` writes one",
        ),
        ((small, "--profile", "old.json"), "--profile old.json: has version 0; this Weft reads version 1."),
        ((small, "--profile", "cut.json"), "--profile cut.json: is damaged: KeyError 'fits'; measure again"),
        (("--profile", file), f"--profile {file}: is of {model}, 2 layers of 64"),
        ((small, "quantize=int8", "--profile", file), "was measured with quantize none; this run has int8."),
        ((small, "--profile", file, "--device", "h200"), f"--profile {file}: is of cpu; --device is h200."),
    ):
        assert sentence in refused("plan", "jobs.yaml", *words)


def test_train_when_planners_differ_then_every_adapter_is_the_same_to_the_bit(weft, here):
    found = {}
    for name in ("greedy", "auto", "exact", "lorafusion"):
        result = weft("train", "jobs.yaml", "capacity=80", "--planner", name, "--out", name)
        assert result.code == 0, result
        found[name] = [read_adapter(Path(name, job, "adapter"))[1] for job in ("shout", "reverse")]
    for name in ("auto", "exact", "lorafusion"):
        for mine, greedy in zip(found[name], found["greedy"], strict=True):
            assert mine.keys() == greedy.keys()
            assert all(torch.equal(a, b) for key in mine for a, b in zip(mine[key], greedy[key], strict=True))


def test_train_when_the_planner_is_unknown_then_one_sentence_and_nothing_written(refused, here):
    sentence = refused("train", "jobs.yaml", "--planner", "best", "--out", "out")
    assert sentence == "planner=best: got 'best'; accepted are auto, greedy, exact, lorafusion."
    assert not Path("out").exists()


def test_plan_when_capacity_is_auto_then_it_is_that_of_the_device_that_is_planned_for(weft, here, monkeypatch):
    def capacity(*words: str) -> int:
        found = weft("plan", "jobs.yaml", "--steps", "1", "--json", *words)
        assert found.code == 0, found.err
        return json.loads(found.out)["capacity"]

    assert capacity() == capacity("--device", "cpu") == 2048
    assert capacity("--device", "h200") == 8192
    assert capacity("--device", "h200", "defaults.max_length=10000") == 16384
    assert capacity("--device", "h200", "capacity=100") == 100
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert capacity() == 8192 and capacity("device=cpu") == 2048


def test_plan_when_a_device_has_too_little_memory_for_auto_then_takes_less_and_keeps_a_number(weft, here, monkeypatch):
    """As training would there."""
    capacities: list[int] = []

    def planned(jobs, capacity, *others, **options):
        capacities.append(capacity)
        found = forecast_layout(jobs, capacity, *others, **options)
        return replace(found, device_bytes=max(found.stage_bytes) - (capacity > 5000))

    monkeypatch.setattr("weft.plan.simulate.layout_forecast.forecast_layout", planned)
    words = ("plan", "jobs.yaml", "--steps", "1", "--json", "--device", "h200")
    found = json.loads(weft(*words).out)
    assert found["capacity"] == 4096 and found["fits"] and capacities == [8192, 4096]
    assert json.loads(weft(*words, "capacity=8192").out)["capacity"] == 8192 and capacities[2:] == [8192]


def test_plan_when_a_method_has_no_kernels_then_its_jobs_are_in_a_group_apart_where_the_fast_path_runs(weft, here):
    """As the engine packs them there; on a CPU all share microbatches."""
    file = here / "jobs.yaml"
    file.write_text(file.read_text().replace(", adapter: {r: 2}", ""))

    def groups(*words: str) -> list[int]:
        adapter = "jobs.1.adapter={method: dora, lora_dropout: 0.1}"
        found = weft("plan", "jobs.yaml", adapter, "--steps", "2", "--json", *words)
        assert found.code == 0, found.err
        return [job["group"] for job in json.loads(found.out)["jobs"]]

    assert groups("--device", "cpu") == [1, 1]
    assert groups("--device", "h200") == [1, 2]
    assert groups("--device", "h200", "kernels=reference") == groups("--device", "h200", "dtype=float32") == [1, 1]
