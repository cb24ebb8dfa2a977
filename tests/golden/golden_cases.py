"""The golden runs: short, and between them every setting that may decide a bit."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_runs as runs
from golden_runs import Folders, at_step, job, train, write_model
from tiny_tokenizer import CHATML

import weft

sys.path.append(str(Path(__file__).parents[1] / "serve" / "worker"))
from worker_bench import Bench

BEGUN = Path(__file__).parent / "run_of_0_1_0"
"""A run that Weft 0.1.0 began and stopped, with its jobs file and data."""
Case = Callable[[], Folders]
"""Runs in an empty directory with the data of `golden_runs.write_data`; returns the files of each job."""
CASES: dict[str, Case] = {}

FUSED: dict[str, Any] = {"kernels": "fused"}
REPORTED = (
    "step",
    "train_loss",
    "train_mean_token_accuracy",
    "valid_loss",
    "valid_mean_token_accuracy",
    "trained_tokens",
)
"""What the service reports of a step, clocks aside."""
NEIGHBOURS = (
    {"name": "narrow", "adapter": {"r": 2, "lora_dropout": 0.1}, "global_batch_size": 3, "seed": 1},
    {"name": "wide", "data": "other", "adapter": {"r": 16, "lora_alpha": 8}, "global_batch_size": 5, "seed": 2},
)
"""Two jobs that differ, for runs in which something else is of interest."""


def case(name: str) -> Callable[[Case], Case]:
    """Adds a run under a name."""

    def add(run: Case) -> Case:
        assert name not in CASES
        CASES[name] = run
        return run

    return add


def simple(
    name: str, *jobs: dict[str, Any], family: str = "llama", model: dict[str, Any] | None = None, **how: Any
) -> None:
    """Adds a run of jobs that start together on a tiny random model and are left to end."""

    def run() -> Folders:
        write_model(family, **(model or {}))
        return train(*(job(**settings) for settings in jobs), **how)

    CASES[name] = run


# Adapters

RANKS = (1, 3, 8, 16, 64)
WIDE = {"hidden_size": 128, "intermediate_size": 160}
for rank in RANKS:
    simple(f"rank-{rank}", {"adapter": {"r": rank}, "seed": rank}, model=WIDE)
ranked = [{"name": f"r{rank}", "adapter": {"r": rank, "lora_dropout": 0.1}, "seed": rank} for rank in RANKS]
simple("ranks-together", *ranked, model=WIDE)
simple("ranks-together-fused", *ranked, model=WIDE, **FUSED)
simple(
    "scales",
    {"name": "rslora", "adapter": {"r": 8, "use_rslora": True}},
    {"name": "alpha", "adapter": {"lora_alpha": 3.5}},
    {"name": "no-alpha", "adapter": {"lora_alpha": 0, "init_lora_weights": False}},
)
simple(
    "patterns",
    {
        "adapter": {
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6, "down_proj": 3},
            "alpha_pattern": {"v_proj": 3.0, r"layers\.0\..*": 5.0},
        }
    },
)
simple("patterns-fused", {"adapter": {"rank_pattern": {"q_proj": 2, "down_proj": 9}, "lora_dropout": 0.1}}, **FUSED)
simple(
    "dropout",
    {"name": "some", "adapter": {"lora_dropout": 0.1}},
    {"name": "much", "adapter": {"lora_dropout": 0.5, "r": 8}, "data": "other", "seed": 3},
    {"name": "none"},
)
INITS = (True, False, "gaussian", "orthogonal")
for kernels in ("reference", "fused"):
    simple(
        f"inits-{kernels}",
        *({"name": str(init).lower(), "adapter": {"init_lora_weights": init}, "seed": 5} for init in INITS),
        kernels=kernels,
    )
simple(
    "targets",
    {"name": "list", "adapter": {"target_modules": ("q_proj", "v_proj")}},
    {"name": "regex", "adapter": {"target_modules": r".*layers\.1\.(mlp\.up_proj|self_attn\.o_proj)"}},
    {"name": "excluded", "adapter": {"exclude_modules": ("o_proj", "gate_proj")}},
    {"name": "excluded-regex", "adapter": {"exclude_modules": r".*layers\.0\.mlp.*"}},
    {"name": "layers", "adapter": {"layers_to_transform": (1,)}},
)
simple(
    "targets-fused",
    {"name": "list", "adapter": {"target_modules": ("q_proj", "v_proj")}},
    {"name": "layers", "adapter": {"layers_to_transform": (0,), "target_modules": ("down_proj",)}},
    {"name": "all"},
    **FUSED,
)


@case("init-adapter")
def continued() -> Folders:
    """One job begins with the weights of another, and sets nothing of its own adapter."""
    write_model()
    first = train(job("old", adapter={"r": 3, "lora_alpha": 5, "target_modules": ("q_proj", "down_proj")}), out="first")
    new = weft.Job("new", init_adapter="first/old/adapter", **{**runs.JOB, "learning_rate": 1e-3, "seed": 9})
    return first | train(new)


# Optimizer and schedule

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")
simple(
    "schedules",
    *(
        {
            "name": kind,
            "lr_scheduler_type": kind,
            "warmup_steps": 2 * (i % 3) / (1 + i % 2) / 2,
            "max_steps": 5,
            "seed": i,
        }
        for i, kind in enumerate(SCHEDULES)
    ),
)
simple(
    "adamw",
    {"name": "decayed", "weight_decay": 0.1, "adapter": {"init_lora_weights": False}},
    {"name": "betas", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    {"name": "loraplus", "loraplus_lr_ratio": 8.0, "weight_decay": 0.02},
)
simple(
    "clipping",
    {"name": "tight", "max_grad_norm": 0.05},
    {"name": "off", "max_grad_norm": 0, "learning_rate": 0.02},
    {"name": "loose", "max_grad_norm": 5.0},
)
simple("adamw-fused", {"name": "decayed", "weight_decay": 0.1}, {"name": "plus", "loraplus_lr_ratio": 4.0}, **FUSED)

# Batches and microbatches

simple(
    "batch-sizes",
    *({"name": f"b{size}", "global_batch_size": size, "seed": size, "data": data}
      for size, data in ((1, "other"), (2, "chat"), (5, "completion"), (9, "other"))),
)  # fmt: skip
simple("alone", {"global_batch_size": 9, "data": "completion other"})
simple("accumulated", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "global_batch_size": None})
simple(
    "epochs", {"max_steps": None, "num_train_epochs": 1.5, "global_batch_size": 4, "eval_data": 0.2, "shuffle": False}
)
simple("capacity-48", *NEIGHBOURS, capacity=48)
simple("capacity-300", *NEIGHBOURS, capacity=300)
simple("capacity-auto", *NEIGHBOURS, capacity="auto")
simple("capacity-48-fused", *NEIGHBOURS, capacity=48, **FUSED)
simple("capacity-300-fused", *NEIGHBOURS, capacity=300, **FUSED)

# Data

simple(
    "formats",
    {"name": "chat", "data": "chat"},
    {"name": "sharegpt", "data": "sharegpt"},
    {"name": "alpaca", "data": "alpaca"},
    {"name": "text", "data": "text"},
    {"name": "tokens", "data": "tokens"},
    {"name": "csv", "data": "table.csv"},
    {"name": "two", "data": "chat other"},
    capacity=200,
)
simple("no-template", {"name": "pairs"}, {"name": "alpaca", "data": "alpaca"}, model={"template": None})
simple(
    "samples",
    {"name": "cut", "max_length": 40},
    {"name": "dropped", "max_length": 45, "long_samples": "drop"},
    {"name": "inputs", "train_on_inputs": True},
    {"name": "template", "chat_template": CHATML.replace("im_start", "im_end"), "logging_steps": 3},
)

# Evaluation

simple(
    "evaluation",
    {"name": "count", "eval_data": 3, "eval_steps": 1},
    {"name": "share", "eval_data": 0.3, "eval_steps": 2, "seed": 4},
    {"name": "file", "eval_data": ("eval.jsonl",), "eval_steps": 3, "max_steps": 5},
)
STOPPED = {"eval_data": 4, "eval_steps": 1, "early_stopping_patience": 2, "max_steps": 12, "learning_rate": 0.1}
simple("early-stopping", {"name": "stopped", **STOPPED}, NEIGHBOURS[0])
simple("early-stopping-fused", {"name": "stopped", **STOPPED}, NEIGHBOURS[0], **FUSED)

# What goes wrong

for kernels in ("reference", "fused"):
    simple(
        f"not-finite-{kernels}",
        {"name": "healthy"},
        {"name": "skipping", "data": "spoiled", "global_batch_size": 2, "max_steps": 8, "seed": 6},
        {"name": "failing", "data": "rotten"},
        model={"spoil": "~"},
        kernels=kernels,
    )
    simple(
        f"diverging-{kernels}",
        {"name": "healthy", "adapter": {"lora_dropout": 0.1}},
        {"name": "wild", "learning_rate": 1e10, "max_grad_norm": 0, "max_steps": 9},
        kernels=kernels,
    )

# Models

REFERENCE = (
    "llama_bias", "llama_tied", "llama_odd", "llama_llama3", "llama_yarn", "mistral", "qwen2", "qwen2_sliding", "qwen3",
    "gemma2", "gemma3_text", "phi3", "opt", "gpt_neox",
)  # fmt: skip
for family in REFERENCE:
    simple(f"{family}", *NEIGHBOURS, family=family, kernels="reference")
for family in ("llama", "llama_bias", "llama_yarn", "mistral", "qwen2", "qwen3"):
    simple(f"{family}-fused", *NEIGHBOURS, family=family, **FUSED)


@case("embedded")
def embedded() -> Folders:
    return train(*(job(**{**settings, "max_steps": 2}) for settings in NEIGHBOURS), base_model="tiny")


# How the frozen model is stored and run

for kernels in ("reference", "fused"):
    simple(f"bf16-{kernels}", *NEIGHBOURS, dtype="bfloat16", kernels=kernels)
    for kind in ("fp8", "int8", "nf4"):
        simple(f"{kind}-{kernels}", *NEIGHBOURS, quantize=kind, kernels=kernels)
simple("nf4-bf16-fused", *NEIGHBOURS, quantize="nf4", dtype="bfloat16", **FUSED)
for recompute in ("mlp", "full"):
    simple(f"recompute-{recompute}", *NEIGHBOURS, recompute=recompute, **FUSED)
simple("offload", *NEIGHBOURS, offload=True, **FUSED)

# Jobs that come and go

simple(
    "waiting",
    {"name": "first", "max_steps": 3},
    {"name": "second", "tenant": "other", "seed": 1},
    {"name": "third", "priority": 5, "seed": 2},
    max_jobs=1,
)


@case("paused")
def paused() -> Folders:
    """One job pauses until another has ended."""
    write_model()

    def on_event(engine: Any, event: Any) -> None:
        pause(engine, event)
        if event.kind == "succeeded" and event.job == "other":
            engine.resume("late")

    pause = at_step("late", 2, lambda engine: engine.pause("late"))
    return train(job("late", max_steps=5, adapter={"lora_dropout": 0.1}), job("other", seed=1), on_event=on_event)


@case("joined")
def joined() -> Folders:
    """One job comes later, and one leaves; where exactly it left is not of interest."""
    write_model()

    def change(engine: Any) -> None:
        engine.cancel("leaving")
        engine.submit(job("joining", seed=3, data="chat"))

    found = train(job("staying", max_steps=6), job("leaving", max_steps=50), on_event=at_step("staying", 2, change))
    del found["leaving"]
    return found | runs.folders(runs.RUN, ["joining"])


@case("resumed")
def resumed() -> Folders:
    write_model()
    jobs = (
        job("long", max_steps=6, adapter={"lora_dropout": 0.1}, eval_data=3, eval_steps=2),
        job("short", max_steps=2, seed=1),
        job("stopped", **{**STOPPED, "data": "other"}),
    )
    return runs.train_in_two_lives(*jobs, stop_after=("long", 3))


@case("resumed-fused")
def resumed_fused() -> Folders:
    write_model()
    jobs = (job("long", max_steps=6, adapter={"lora_dropout": 0.1}, save_steps=5), job("other", max_steps=5, seed=1))
    return runs.train_in_two_lives(*jobs, stop_after=("other", 3), **FUSED)


# The command line, sweeps, the service

WRITTEN = (
    {"name": "shout", "train_data": "completion.jsonl", "adapter": {"r": 2, "lora_dropout": 0.1}, "eval_data": 3},
    {"name": "turn", "train_data": ["other.jsonl", "chat.jsonl"], "batch_size": 5, "lora": {"rank": 6}, "lr": 0.01},
)
DEFAULTS = {"max_steps": 4, "global_batch_size": 4, "max_length": 48, "learning_rate": 5e-3, "save_steps": 3}


@case("command")
def command() -> Folders:
    write_model()
    runs.write_jobs_file(WRITTEN, defaults=DEFAULTS)
    runs.weft_command("train", "jobs.yaml", "jobs.turn.seed=8", "--out", "run")
    return runs.folders("run", ["shout", "turn"])


@case("command-exact-planner")
def command_exact() -> Folders:
    write_model()
    runs.write_jobs_file(WRITTEN, defaults=DEFAULTS, planner="exact", kernels="fused", dtype="bfloat16")
    runs.weft_command("train", "jobs.yaml", "--out", "run")
    return runs.folders("run", ["shout", "turn"])


@case("run-of-0-1-0")
def run_of_0_1_0() -> Folders:
    """The run that lies beside this file, from its beginning to its end without a stop."""
    for path in BEGUN.glob("*.*"):
        shutil.copyfile(path, path.name)
    runs.weft_command("train", "jobs.yaml", "--out", "run")
    return runs.folders("run", ["shout", "turn", "done"])


@case("run-of-0-1-0-resumed")
def resume_run_of_0_1_0() -> Folders:
    """The same run, resumed from where Weft 0.1.0 left it. That part has the bits of an x86 machine."""
    shutil.copytree(BEGUN, ".", dirs_exist_ok=True)
    runs.weft_command("train", "jobs.yaml", "--out", "run", "--resume")
    return runs.folders("run", ["shout", "turn", "done"])


@case("merge")
def merge() -> Folders:
    """The weights of a merged model stand for those of an adapter."""
    write_model()
    found = train(job("merged"))
    runs.weft_command("merge", "run/merged/adapter", "--out", "whole")
    Path("whole/adapter").mkdir()
    shutil.move("whole/model.safetensors", "whole/adapter/adapter_model.safetensors")
    return found | {"whole": Path("whole")}


def swept(**changes: Any) -> Folders:
    """A sweep; its leaderboard and the best adapter count as one more job."""
    write_model()
    shared = {**DEFAULTS, "train_data": "completion.jsonl", "eval_data": 4, "global_batch_size": 2}
    settings = {
        "base_model": runs.MODEL, "device": "cpu", "capacity": 128, "output_dir": "sweep", "compare_speed": False,
        "early_stop": "none", "job": {**shared, "adapter": {"r": 2, "dropout": 0.1}},
        "space": {"lr": [1e-3, 8e-3], "r": [2, 4]},
    }  # fmt: skip
    result = weft.sweep({**settings, **changes})
    names = [trial.name for trial in result.trials]
    shutil.copytree("sweep/best", "best/adapter", ignore=shutil.ignore_patterns("jobs.yaml"))
    rows = json.loads(Path("sweep/leaderboard.json").read_text())["trials"]
    Path("best/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return runs.folders("sweep/trials", names) | {"best": Path("best")}


@case("sweep-grid")
def sweep_grid() -> Folders:
    return swept()


@case("sweep-random-halving")
def sweep_random() -> Folders:
    space = {"lr": {"min": 1e-4, "max": 1e-1, "log": True}, "lora_alpha": {"times_r": [1, 2]}}
    stop = {"rule": "halving", "factor": 2, "grace": 2, "unit": "steps", "min_trials": 2}
    return swept(space=space, trials=4, sampler="random", seed=3, early_stop=stop)


@case("service")
def service() -> Folders:
    """Jobs of two tenants through a worker of the service; what it hands out counts as their folders."""
    bench = Bench.at(Path.cwd())
    rows = b'{"prompt": "warp\\n", "completion": "WARP"}\n'
    ids = {tenant: bench.submit(tenant, seed=seed, validation=rows) for seed, tenant in enumerate(("ash", "birch"))}
    with bench.worker():
        bench.wait(*ids.values())
    for tenant, id in ids.items():
        folder = Path("out", tenant, "adapter")
        folder.mkdir(parents=True)
        for name, content in bench.adapter(id).items():
            (folder / name).write_bytes(content)
        metrics = [{name: event["data"].get(name) for name in REPORTED} for event in bench.events(id, "metrics")]
        (folder.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    bench.database.close()
    return runs.folders("out", list(ids))
