"""Made-up leaderboards as a sweep writes them: one trial, a dozen, a hundred and more; with every kind of end."""

from __future__ import annotations

import math
import random
from typing import Any

MODULES = (["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], ["up_proj", "down_proj", "gate_proj"])
TOTAL_STEPS = 120
EVAL_EVERY = 15
SLOTS = 8
STEP_S = 0.42


def sweep_board(num_trials: int, *, is_calm: bool = False) -> dict[str, Any]:
    """A finished random search; the learning rate matters most, the rank some, the dropout not at all.

    When it is calm, all trials train to their end.
    """
    chance = random.Random(3)
    free_at = [0.0] * SLOTS
    trials = []
    for number in range(num_trials):
        slot = min(range(SLOTS), key=free_at.__getitem__)
        trial = _trial(number, chance, free_at[slot], is_calm)
        free_at[slot] = trial.pop("until")
        trials.append(trial)
    trials.sort(key=lambda t: (t["value"] is None, t["state"] == "stopped", t["value"] or 0.0))
    for rank, trial in enumerate(trials, start=1):
        trial["rank"] = rank
    seconds = max(free_at)
    board = {"metric": "eval_loss", "mode": "min", "sampler": "random", "trials": trials, "seconds": seconds}
    return board | {"tokens": sum(t["tokens"] for t in trials), "one_by_one_seconds": 4.7 * seconds}


def _params(chance: random.Random) -> dict[str, Any]:
    return {
        "learning_rate": float(f"{10 ** chance.uniform(-5, -2):.3g}"),
        "adapter.r": chance.choice([4, 8, 16, 32, 64]),
        "adapter.lora_alpha": chance.choice(["1r", "2r"]),
        "dropout": round(chance.uniform(0.0, 0.3), 3),
        "adapter.target_modules": chance.choice(MODULES),
        "global_batch_size": 8,
    }


def _trial(number: int, chance: random.Random, start_s: float, is_calm: bool) -> dict[str, Any]:
    params = _params(chance)
    off = abs(math.log10(params["learning_rate"]) + 3.4)
    final = 0.9 + 0.35 * off**2 + 0.06 * abs(math.log2(params["adapter.r"]) - 4) + chance.gauss(0, 0.03)
    is_hot = params["learning_rate"] > 7e-3 and not is_calm
    end = TOTAL_STEPS
    if is_hot:
        end = chance.choice([9, 22, 37])
    elif final > 1.25 and not is_calm:
        end = chance.choice([15, 30, 45])
    tokens_per_step = chance.randint(900, 1100)
    points, losses = [], []
    for step in range(1, end + 1):
        clean = final + (3.9 - final) * math.exp(-5.5 * step / TOTAL_STEPS * (0.4 + 1 / (1 + off)))
        losses.append([step, clean * chance.uniform(0.9, 1.1) + (step / 6 if is_hot else 0.0)])
        if step % EVAL_EVERY == 0:
            value = clean * chance.uniform(0.99, 1.01) + (step / 3 if is_hot else 0.0)
            point = {"step": step, "tokens": step * tokens_per_step, "value": value}
            points.append(point | {"at_s": start_s + step * STEP_S})
    state, reason = "done", ""
    if is_hot:
        state, reason = "failed", f"the loss was not finite for 3 steps in a row (step {end})"
        losses[-1][1] = math.nan
    elif end < TOTAL_STEPS:
        seen = points[-1]["value"]
        state = "stopped"
        reason = f"at step {end} its eval_loss {seen:.2f} was not among the best 1/3 of 9 trials (≤ {seen * 0.8:.2f})"
    return {
        "number": number,
        "name": f"trial-{number:03d}",
        "state": state,
        "reason": reason,
        "value": points[-1]["value"] if points and state != "failed" else None,
        "params": params,
        "steps": end,
        "total_steps": TOTAL_STEPS,
        "tokens": end * tokens_per_step,
        "seconds": end * STEP_S / SLOTS,
        "started_s": start_s,
        "ended_s": start_s + end * STEP_S,
        "points": points,
        "losses": losses,
        "until": start_s + end * STEP_S + 0.3,
    }
