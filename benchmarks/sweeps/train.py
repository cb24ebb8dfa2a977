"""Sweeps that are really trained, on the embedded backbone and the CPU: together beside one by one, and stopped early.

cpu16              wall time of 16 configurations of batch 1 one by one over that of the same sweep as it is: whole
                   sweeps in this process, from reading the files to the report, the least of `ROUNDS` rounds each. One
                   by one is a sweep with one place: torch, backbone and data are loaded once for all 16. Both must find
                   the same best and the same values.
cpu16_processes    the same against 16 calls of `weft train`, each a process of its own. One is measured and counted 16
                   times: all have as many steps and tokens.
cpu16_batch4       like cpu16 with batches of 4, where even alone half of the computed rows are used.
early_stop_tokens  tokens trained without early stopping over those with the default rule; the mean over `HELD_OUT`,
                   tasks that had no part in choosing the rule. How often the best is the same stands beside it.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.cli.demo import SKILLS
from weft.sweeps.api import SweepResult, sweep

SPACE16: dict[str, list[Any]] = {"learning_rate": [5e-4, 1e-3, 2e-3, 4e-3], "r": [4, 8, 16, 32]}
STEPS16 = {1: 60, 4: 20}
"""By batch size."""
ROUNDS = 2
"""Of together and one by one in turn; other programs on the machine can only add to a time."""
HELD_OUT = (("reverse", 41), ("next_letter", 43), ("acronym", 33), ("drop_vowels", 34), ("pig_latin", 35), ("sort", 36))
"""Skill and seed: of the data, and of the configurations that are drawn. The rule was chosen on seeds below 33."""
SPACE27 = {"learning_rate": {"min": 1e-4, "max": 2e-2, "log": True}, "r": [4, 8, 16], "lora_alpha": {"times_r": [1, 2]}}
NUM_TRIALS, STEPS27 = 27, 90
NUM_TRAIN, NUM_EVAL = 240, 24


def measure_sweep_together(steps: Mapping[int, int] = STEPS16, rounds: int = ROUNDS) -> dict[str, float]:
    """Speed-ups, times and the largest difference of any value, under the keys of the JSON file."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = _write_rows(Path(folder), "reverse", 0)
        _train(data, "warm", space=SPACE16, job={"max_steps": 2})
        for batch, num_steps in steps.items():
            key = "cpu16" if batch == 1 else f"cpu16_batch{batch}"
            job = {"global_batch_size": batch, "max_steps": num_steps}
            figures |= {f"{key}{name}": value for name, value in _side_by_side(data, key, job, rounds).items()}
        process_s = _train_best_again(data / "cpu16_together0")
        figures["cpu16_process_s"] = process_s
        num_trials = math.prod(len(values) for values in SPACE16.values())
        figures["cpu16_processes"] = num_trials * process_s / figures["cpu16_together_s"]
    return figures


def _side_by_side(data: Path, key: str, job: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """The same sweep together and one by one, in turn."""
    times: dict[str, list[float]] = {"together": [], "alone": []}
    for number in range(rounds):
        together, together_s = _train(data, f"{key}_together{number}", space=SPACE16, job=job)
        alone, alone_s = _train(data, f"{key}_alone{number}", space=SPACE16, job=job, max_jobs=1)
        times["together"].append(together_s)
        times["alone"].append(alone_s)
    pairs = zip(_values(together), _values(alone), strict=True)
    return {
        "": min(times["alone"]) / min(times["together"]),
        "_together_s": min(times["together"]),
        "_one_by_one_s": min(times["alone"]),
        "_largest_difference": max(abs(mine - other) for mine, other in pairs),
        "_same_best": float(_best(together) == _best(alone)),
    }


def _train_best_again(folder: Path) -> float:
    """Seconds of one `weft train` of a sweep's best configuration, as a process of its own."""
    jobs_file, out = folder / "best" / "jobs.yaml", folder / "again"
    command = [sys.executable, "-m", "weft", "train", str(jobs_file), "--out", str(out)]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def measure_early_stop(tasks: Sequence[tuple[str, int]] = HELD_OUT, steps: int = STEPS27) -> dict[str, float]:
    """Tokens saved, how often the best is the same, and what is lost where it is not."""
    ratios, same, losses = [], [], []
    # As often as the default rule looks, with or without it.
    job = {"global_batch_size": 2, "max_steps": steps, "eval_steps": -(-steps // 8)}
    for skill, seed in tasks:
        with tempfile.TemporaryDirectory() as folder:
            data = _write_rows(Path(folder), skill, seed)
            settings: dict[str, Any] = {"space": SPACE27, "trials": NUM_TRIALS, "seed": seed, "job": job}
            whole, _ = _train(data, "whole", **settings)
            stopped, _ = _train(data, "stopped", early_stop="asha", **settings)
        ratios.append(sum(t.tokens for t in whole.trials) / sum(t.tokens for t in stopped.trials))
        same.append(_best(whole) == _best(stopped))
        losses.append(_value(stopped) / _value(whole) - 1)
    return {
        "early_stop_tokens": statistics.mean(ratios),
        "early_stop_tokens_least": min(ratios),
        "early_stop_same_best": statistics.mean(same),
        "early_stop_worst_value": max(losses),
    }


def _write_rows(folder: Path, skill: str, seed: int) -> Path:
    for split, count in (("train", NUM_TRAIN), ("eval", NUM_EVAL)):
        rows = SKILLS[skill].rows(seed, count, split=split)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def _train(
    folder: Path, name: str, *, job: Mapping[str, Any], early_stop: str = "none", **settings: Any
) -> tuple[SweepResult, float]:
    """One sweep and its wall time."""
    files = {"train_data": str(folder / "train.jsonl"), "eval_data": [str(folder / "eval.jsonl")], "max_length": 64}
    shared = {"base_model": "tiny", "device": "cpu", "capacity": 1024, "compare_speed": False}
    own = {"output_dir": str(folder / name), "early_stop": early_stop, "job": {**files, **job}}
    began = time.perf_counter()
    result = sweep({**shared, **own, **settings})
    return result, time.perf_counter() - began


def _values(result: SweepResult) -> list[float]:
    """The value of every trial; all are trained to their end."""
    return [trial.value for trial in result.trials if trial.value is not None]


def _best(result: SweepResult) -> dict[str, Any]:
    assert result.best is not None, "some configuration learns"
    return result.best.params


def _value(result: SweepResult) -> float:
    assert result.best is not None and result.best.value is not None, "some configuration learns"
    return result.best.value
