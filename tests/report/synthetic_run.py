"""A made-up run directory as the engine writes it: five jobs, one failed by NaN, one cancelled."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from weft.store.wall_clock import Activity

# name, state, reason, steps done, steps planned, first loss, last loss, rank, learning rate, samples per step
JOBS: list[tuple[str, str, str | None, int, int, float, float, int, float, int]] = [
    ("reverse-words", "succeeded", None, 180, 180, 4.8, 0.21, 16, 2e-4, 8),
    ("capitals", "succeeded", None, 140, 140, 3.9, 0.45, 8, 3e-4, 8),
    ("roman-numerals", "succeeded", None, 180, 180, 5.1, 0.9, 32, 1e-4, 16),
    ("too-hot", "failed", "the loss was not finite for 3 steps in a row (step 61)", 61, 160, 4.4, 3.2, 16, 5e-2, 8),
    ("sorting", "cancelled", "cancelled by the user", 90, 200, 4.2, 1.4, 4, 2e-4, 4),
]
CAPACITY = 1024
STEP_S = 0.32


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_run(run_dir: Path, num_copies: int = 1, stretch: int = 1) -> Path:
    """Writes the run; `num_copies` repeats the jobs under other names, `stretch` makes them that many times longer."""
    chance = random.Random(7)
    names = []
    for copy in range(num_copies):
        for job in JOBS:
            name = job[0] if copy == 0 else f"{job[0]}-{copy}"
            names.append(name)
            _write_job(run_dir / name, name, job, stretch, chance)
    _write_timeline(run_dir / "timeline.json", stretch, chance)
    time = dict.fromkeys((activity.key for activity in Activity), 0.0)
    time |= {"computing_s": 50.0, "evaluating_s": 1.5, "loading_s": 18.0, "writing_s": 0.01, "idle_s": 4.5}
    write_json(run_dir / "time.json", time)
    versions = {"weft": "0.1.0", "torch": "2.13.0", "transformers": "5.22.0", "python": "3.11.2"}
    info = {"run_name": "evening sweep", "base_model": "tiny", "device": "cpu", "dtype": "float32", "jobs": names}
    info |= {"capacity": CAPACITY, "versions": versions, "started_at": "2026-11-14T21:04:11+00:00"}
    write_json(run_dir / "run.json", info)
    return run_dir


def _write_job(job_dir: Path, name: str, job: tuple[Any, ...], stretch: int, chance: random.Random) -> None:
    _, state, reason, done, planned, first, last, rank, rate, batch = job
    done, planned = done * stretch, planned * stretch
    adapter = {"method": "lora", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    settings = {"name": name, "train_data": [f"data/{name}.jsonl"], "learning_rate": rate, "adapter": adapter}
    write_json(job_dir / "job.json", settings | {"global_batch_size": batch, "seed": 42, "max_length": 256})
    lines, tokens = [], 0
    for step in range(1, done + 1):
        tokens += batch * chance.randint(30, 60)
        decayed = last + (first - last) * math.exp(-4.2 * step / planned)
        loss = math.nan if state == "failed" and step > done - 3 else decayed * chance.uniform(0.85, 1.15)
        train = {
            "step": step,
            "epoch": 3 * step / planned,
            "loss": loss,
            "mean_token_accuracy": math.exp(-decayed),
            "grad_norm": chance.uniform(0.4, 1.6) * decayed,
        }
        train |= {"learning_rate": rate * (1 - step / planned), "num_tokens": tokens, "time": STEP_S * step}
        lines.append(json.dumps(train))
        if step % (30 * stretch) == 0:
            evaluated = {"step": step, "epoch": 3 * step / planned, "eval_loss": decayed * 1.08, "eval_runtime": 0.2}
            evaluated |= {"eval_mean_token_accuracy": math.exp(-1.08 * decayed), "time": STEP_S * step + 0.01}
            lines.append(json.dumps(evaluated))
    torn = '{"step": 9999, "lo'  # what kill -9 leaves
    (job_dir / "metrics.jsonl").write_text("\n".join([*lines, torn]), encoding="utf-8")
    status = {"state": state, "reason": reason, "step": done, "num_steps": planned}
    write_json(job_dir / "status.json", status | {"trained_tokens": tokens, "seconds": STEP_S * done})
    if state == "succeeded":
        write_json(job_dir / "adapter" / "adapter_config.json", {"peft_type": "LORA"})


def _write_timeline(path: Path, stretch: int, chance: random.Random) -> None:
    events: list[dict[str, Any]] = [_event("plan", 0.0, 0.05)]
    clock = 0.06
    for step in range(1, 180 * stretch + 1):
        live = [job for job in JOBS if step <= job[3] * stretch]
        for _ in range(2):
            left, shares = CAPACITY, {}
            for job in chance.sample(live, len(live)):
                shares[job[0]] = min(left, job[9] * chance.randint(15, 30))
                left -= shares[job[0]]
            args = {"tokens": CAPACITY - left, "rows": CAPACITY, "jobs": {k: v for k, v in shares.items() if v}}
            took = chance.uniform(0.12, 0.15)
            events.append(_event("forward_backward", clock, took, args))
            clock += took + 0.002
        events.append(_event("step", clock, 0.008))
        clock += 0.01
        if step % 30 == 0:
            events += [_event("eval", clock, 0.2), _event("checkpoint", clock + 0.21, 0.05)]
            clock += 0.27
    write_json(path, {"traceEvents": events})


def _event(name: str, start_s: float, duration_s: float, args: dict[str, Any] | None = None) -> dict[str, Any]:
    times = {"ts": start_s * 1e6, "dur": duration_s * 1e6}
    return {"name": name, "ph": "X", **times, "pid": 0, "tid": 0, "args": args or {}}
