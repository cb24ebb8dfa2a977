"""`weft plan deploy`: a cluster file in, replicas out, and one sentence for what cannot be."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_train_verb import write_jobs
from tiny_families import plain_model

from weft.cli.deploy import PlannedRun
from weft.model.source import TINY
from weft.plan.cost.hardware import find_hardware
from weft.spec.cluster import load_cluster

CLUSTER = """\
base_model: llama-3.1-8b
machines:
  - {gpu: a100-40, gpus: 8}
jobs:
  - {name: short, global_batch_size: 64, lengths: {mean: 200, skewness: 5, longest: 2048}}
  - {name: long, global_batch_size: 8, lengths: {mean: 3000, skewness: 2, longest: 8192}}
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes cluster.yaml into the working directory, with some of it replaced."""
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "") -> str:
        assert old in CLUSTER
        (tmp_path / "cluster.yaml").write_text(CLUSTER.replace(old, new, 1) if old else CLUSTER)
        return "cluster.yaml"

    return write


def test_deploy_when_a_file_is_good_then_shows_replicas_and_reports_what_is_assumed(weft, cluster, tmp_path):
    result = weft("plan", "deploy", cluster(), "--plot", "plan.svg")
    assert result.code == 0, result
    for part in ("8 of 8 GPUs", "GPU-seconds", "links assumed", "nothing was run", "alike replicas, even shares", "█"):
        assert part in result.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.yaml", "plan.svg"]


def test_deploy_when_json_is_requested_then_every_sample_of_a_batch_is_on_a_replica(weft, cluster):
    result = weft("plan", "deploy", cluster("gpus: 8}", "gpus: 8, links: measured}"), "--json")
    plan = json.loads(result.out)
    assert plan["predicted"] is True and plan["source"] == "from the hardware table, links measured"
    assert sum(sum(replica["samples"]) for replica in plan["replicas"]) == 64 + 8
    assert all(len(replica["samples"]) == len(plan["bounds"]) for replica in plan["replicas"])
    names = [choice["name"] for choice in plan["choices"]]
    assert names == ["planned", "by length", "alike", "in turn, alike", "in turn, planned"]
    steps = {choice["name"]: choice["step_s"] for choice in plan["choices"]}
    assert steps["planned"] <= steps["by length"] and steps["planned"] <= steps["alike"]
    used = sum(replica["gpus"] for replica in plan["replicas"])
    assert used == plan["gpus_used"] <= 8


def test_deploy_when_jobs_train_experts_then_replicas_hold_fewer_tokens_by_their_parameters(weft, cluster, tmp_path):
    write_jobs(tmp_path, broken=False)
    plain_model("qwen3_moe", vocab_size=264, max_position_embeddings=512).save_pretrained("mixture")
    for file in Path(TINY).glob("*token*"):
        shutil.copy(file, "mixture")
    lines = (tmp_path / "jobs.yaml").read_text()
    spec = cluster("llama-3.1-8b", "mixture")
    found = []
    for experts in ("none", "full"):
        (tmp_path / "jobs.yaml").write_text(lines.replace("r: 2}", f"r: 8, experts: {experts}}}"))
        jobs, setup = PlannedRun.of(load_cluster(Path(spec)), Path(spec), Path("jobs.yaml")).jobs(None)
        memory = setup.cost(find_hardware("a100-40")).memory
        found.append(memory.total_bytes(0, setup.ranks))
    # Two jobs; two layers of 4 experts of 32 in, 24 wide.
    assert found[1] - found[0] == 2 * 18 * 2 * 4 * 8 * (64 + 72)
    assert memory.plain_row_bytes is not None and len(jobs) == 2


def test_deploy_when_given_a_jobs_file_and_unlike_gpus_then_plans_with_its_data(weft, cluster, tmp_path):
    write_jobs(tmp_path, broken=False)
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(jobs.read_text().replace("r: 2}}", "r: 2}, gradient_sum: any_order}"))
    (tmp_path / "cluster.yaml").write_text(
        "base_model: tiny\nmode: padded\njobs_file: jobs.yaml\n"
        "machines: [{gpu: l40s, gpus: 1}, {gpu: rtx-4090, gpus: 2}]\n"
    )
    plan = json.loads(weft("plan", "deploy", "cluster.yaml", "--json").out)
    assert plan["gpus"] == {"l40s": 1, "rtx-4090": 2} and plan["mode"] == "padded"
    assert {replica["pool"] for replica in plan["replicas"]} == {"l40s", "rtx-4090"}


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("gpus: 8", "gpus: 0", ("cluster.yaml line 3: machines.0.gpus: must be at least 1, got 0.",)),
        ("gpus: 8", "link_gb_s: -5", ("line 3: machines.0.link_gb_s: must be above 0, got -5.0.",)),
        ("gpus: 8", "network_gb_s: 0", ("line 3: machines.0.network_gb_s: must be above 0, got 0.0.",)),
        ("a100-40", "a100-41", ("cluster.yaml: machines.0.gpu: there is no device 'a100-41'", "Did you mean a100-40?")),
        ("gpu: a100-40", "gup: a100-40", ("line 3: machines.0.gup: unknown setting. Did you mean gpu?",)),
        (
            "base_model: llama-3.1-8b\nmachines:\n  - {gpu: a100-40, gpus: 8}",
            "base_model: llama-3.1-70b\nmachines:\n  - {gpu: a100-40, gpus: 2}",
            ("base_model llama-3.1-70b: fits on no layout of 2 a100-40: with stages:2 each GPU needs", "has 39.4 GiB;"),
        ),
        (
            "longest: 8192",
            "longest: 900000",
            (
                "cluster.yaml: job long: its longest sample has 900,000 tokens; the largest replica, tensor:8",
                "MiB; cut",
            ),
        ),
        ("mean: 200", "mean: 9000", ("line 5: jobs.0.lengths.mean: the mean 9000 is above the longest, 2,048.",)),
        ("name: long", "name: short", ("line 6: jobs.1.name: two jobs are called 'short'; use each name once.",)),
        ("jobs:", "jobs_file: x.yaml\njobs:", ("jobs: found both of jobs and jobs_file; write one of them.",)),
        ("machines:\n  - {gpu: a100-40, gpus: 8}", "machines: []", ("line 2: machines: there are no machines;",)),
        (CLUSTER, "- a\n", ("cluster.yaml: expected settings such as base_model and machines, got a list.",)),
    ],
)
def test_deploy_when_input_is_wrong_then_one_sentence_with_the_arithmetic(refused, cluster, old, new, parts):
    message = refused("plan", "deploy", cluster(old, new))
    assert all(part in message for part in parts), message


def test_deploy_when_files_are_wrong_then_refused_before_anything_is_planned(refused, cluster):
    assert refused("plan", "deploy", "gone.yaml").startswith("gone.yaml: there is no such file. docs/deploy.md")
    assert "the name must end in .svg or .png" in refused("plan", "deploy", cluster(), "--plot", "plan.gif")


def test_deploy_when_a_profile_is_of_another_backbone_or_gpu_then_refused(refused, cluster):
    profile = Path(__file__).parents[2] / "benchmarks" / "h200_profile.json"
    message = refused("plan", "deploy", cluster(), "--profile", profile)
    assert "is of NVIDIA H200; the cluster has a100-40." in message
    message = refused("plan", "deploy", cluster("llama-3.1-8b", "llama-3.2-1b"), "--profile", profile)
    assert "llama-3.2-1b has 16 of 2048" in message


def test_deploy_when_a_profile_fits_then_seconds_follow_it(weft, cluster):
    profile = Path(__file__).parents[2] / "benchmarks" / "h200_profile.json"
    file = cluster("{gpu: a100-40, gpus: 8}", "{gpu: h200, gpus: 2}")
    tabled, measured = (
        json.loads(weft("plan", "deploy", file, "--json", *more).out) for more in ((), ("--profile", profile))
    )
    assert measured["source"].startswith("from a profile of h200 and the hardware table")
    ratio = measured["choices"][0]["step_s"] / tabled["choices"][0]["step_s"]
    assert ratio != 1 and 0.7 < ratio < 1.4


@pytest.fixture
def executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster of two CPUs, and a jobs file for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    job = (
        "{name: a, train_data: rows.jsonl, max_steps: 1, global_batch_size: 2, max_length: 64, gradient_sum: any_order}"
    )
    (tmp_path / "jobs.yaml").write_text(f"base_model: tiny\njobs: [{job}]\n")
    (tmp_path / "cluster.yaml").write_text("base_model: tiny\nmachines: [{gpu: cpu, gpus: 2}]\njobs_file: jobs.yaml\n")
    return tmp_path


def test_deploy_when_jobs_stay_on_one_replica_then_shows_what_sharing_all_would_save(weft, refused, executable):
    """By one setting for all jobs, which the command takes as `weft train` does."""
    jobs = (executable / "jobs.yaml").read_text().replace(", gradient_sum: any_order", "")
    rows = ", ".join(f"{{name: {name}, train_data: rows.jsonl, max_length: 64, global_batch_size: 4}}" for name in "bc")
    (executable / "jobs.yaml").write_text(jobs.replace("}]", f"}}, {rows}]"))
    command = ("plan", "deploy", "cluster.yaml", "--jobs", "jobs.yaml")
    result = weft(*command)
    assert result.code == 0 and "jobs  3 of 3 with gradient_sum in_order" in result.out, result
    assert "sums  if replicas shared all jobs, a step would take" in result.out
    assert "defaults.gradient_sum=any_order" in result.out and "all jobs any_order" in result.out
    shared = weft(*command, "defaults.gradient_sum=any_order")
    assert shared.code == 0 and "in_order" not in shared.out and "sums " not in shared.out
    wrong = refused(*command[:3], "defaults.r=2", "--jobs", "jobs.yaml")
    assert "defaults.r" in wrong


@pytest.mark.slow
def test_deploy_when_executed_then_the_planned_replicas_train_the_jobs(weft, executable):
    """Every job that has one home where the plan has it, and the others on all replicas."""
    (executable / "long.jsonl").write_text('{"prompt": "a", "completion": "words and words"}\n' * 4)
    jobs = (executable / "jobs.yaml").read_text()
    own = "max_steps: 1, global_batch_size: 4, max_length: 64"
    longer = f"{{name: longer, train_data: long.jsonl, {own}}}"
    others = ", ".join(f"{{name: {name}, train_data: rows.jsonl, {own}}}" for name in ("c", "b"))
    (executable / "jobs.yaml").write_text(jobs.replace("}]", f"}}, {others}, {longer}]"))
    command = ("plan", "deploy", "cluster.yaml", "--jobs", "jobs.yaml")
    result = weft(*command, "--execute", "--out", "runs/a")
    assert result.code == 0, result
    assert "layout  spread:2" in result.out and "2 replicas" in result.out and "nothing was run" not in result.out
    printed = dict(re.findall(r"replica (\d) \(stages:1\): ([\w, ]+)", result.out))
    homes = {job: int(number) for number, jobs in printed.items() for job in jobs.split(", ")}
    assert homes.keys() == {"b", "c", "longer"} and {*homes.values()} == {0, 1}
    assert (executable / "runs/a/a/adapter/adapter_model.safetensors").is_file()
    ran: dict[str, set[int]] = {}
    for event in json.loads((executable / "runs/a/timeline.json").read_text())["traceEvents"]:
        for job in event["args"]["jobs"] if event["name"] == "forward" else ():
            ran.setdefault(job, set()).add(event["pid"] - 1)
    assert {job: own for job, own in ran.items() if job != "a"} == {job: {home} for job, home in homes.items()}


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "deploy", "cluster.yaml", "--jobs", "jobs.yaml", "--execute"),
        ("train", "jobs.yaml", "jobs.a.seed=2", "--layout", "auto"),
    ],
)
def test_run_when_its_layout_was_chosen_for_it_then_the_way_on_chooses_again(weft, executable, monkeypatch, command):
    """What goes on follows its jobs as the run did, and is not bound to what was chosen first."""
    events: list[str] = []
    record = lambda order, out, resume: events.append(order.invocation.resume_command(out))  # noqa: E731
    monkeypatch.setattr("weft.cli.train.train_order", record)
    result = weft(*command, "--out", "runs/a")
    assert result.code == 0, result
    words, flags = (command, ()) if command[0] == "plan" else (command[:3], command[3:])
    assert events == [" ".join(("weft", *words, "--out", "runs/a", "--resume", *flags))]


@pytest.mark.parametrize(("word", "layout"), [("", "spread:3"), ("tensor: true\n", "stages:1+tensor:2")])
def test_deploy_when_bits_may_change_then_replicas_of_unlike_degrees_are_executed(
    weft, executable, monkeypatch, word, layout
):
    """They stay as they are: other degrees would change bits, and a clock would decide when."""
    path = executable / "cluster.yaml"
    path.write_text(path.read_text().replace("gpus: 2", "gpus: 3") + word)
    orders: list[Any] = []
    monkeypatch.setattr("weft.cli.train.train_order", lambda order, out, resume: orders.append(order))
    jobs = (executable / "jobs.yaml").read_text()
    (executable / "jobs.yaml").write_text(jobs.replace("global_batch_size: 2", "global_batch_size: 4"))
    result = weft("plan", "deploy", "cluster.yaml", "--execute", "--out", "runs/a")
    assert result.code == 0 and f"layout  {layout}\n" in result.out, result
    assert (orders[0].forecast is None) == bool(word)


def test_deploy_when_it_cannot_be_executed_then_refused_before_planning(refused, executable):
    command = ("plan", "deploy", "cluster.yaml")
    assert "leave --json out" in refused(*command, "--jobs", "jobs.yaml", "--execute", "--json")
    assert "give --execute too" in refused(*command, "--out", "runs/a")
    assert "give --execute too" in refused(*command, "--resume")
    other = (executable / "jobs.yaml").read_text().replace("base_model: tiny", "base_model: other")
    (executable / "other.yaml").write_text(other)
    assert "other.yaml: base_model: is other there and tiny in cluster.yaml" in refused(
        *command, "--jobs", "other.yaml", "--execute"
    )
    cpus = (executable / "cluster.yaml").read_text()
    (executable / "cluster.yaml").write_text(cpus.replace("gpu: cpu", "gpu: h100"))
    assert "machines.0.gpu: plans for h100, and the run would be on a CPU" in refused(
        *command, "--jobs", "jobs.yaml", "--execute"
    )
    (executable / "cluster.yaml").write_text(cpus + "mode: padded\n")
    assert "mode: padded can only be planned" in refused(*command, "--jobs", "jobs.yaml", "--execute")
    many = cpus.replace("gpus: 2", "gpus: 2, count: 3")
    (executable / "cluster.yaml").write_text(many)
    assert "has 3 machines" in refused(*command, "--jobs", "jobs.yaml", "--execute")
    by_length = "jobs: [{name: a, lengths: {mean: 20, longest: 64}}]\n"
    (executable / "cluster.yaml").write_text(cpus.replace("jobs_file: jobs.yaml\n", by_length))
    assert "--execute: cluster.yaml: jobs are known by their lengths only; name a jobs" in refused(
        *command, "--execute"
    )
    (executable / "cluster.yaml").write_text("machines: [{gpu: cpu, gpus: 2}]\n")
    assert "cluster.yaml: jobs: there are no jobs to plan for; name a jobs file by --jobs" in refused(*command)
    (executable / "cluster.yaml").write_text("machines: [{gpu: cpu, gpus: 2}]\n" + by_length)
    assert "cluster.yaml: base_model: is missing; jobs without a jobs file need it." in refused(*command)
    assert not (executable / "runs").exists()
