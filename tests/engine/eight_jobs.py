"""Eight jobs that differ in PEFT method, objective and optimizer, on one backbone; data beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from weft.spec import RunSpec, run_from_mapping

WORDS = ("warp", "weft", "loom", "yarn", "shed", "reed", "heddle", "shuttle", "selvage", "twill", "bobbin", "treadle")
JOBS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"r": 8, "lora_dropout": 0.1}},
    "lora-dpo": {"train_data": "pairs.jsonl", "adapter": {"r": 64}, "optim": "adamw_8bit"},
    "dora": {"adapter": {"method": "dora", "r": 4}, "optim": "lion", "learning_rate": 1e-3},
    "ia3-classes": {"train_data": "classes.jsonl", "objective": "classification", "adapter": {"method": "ia3"}},
    "bottleneck": {"adapter": {"method": "bottleneck", "bottleneck_size": 6}, "optim": "muon"},
    "diff-pruning": {"adapter": {"method": "diff_pruning"}},
    "vera-kto": {"train_data": "marks.jsonl", "adapter": {"method": "vera", "vera_rank": 16}},
    "prompt": {"adapter": {"method": "prompt_tuning", "num_virtual_tokens": 5}, "learning_rate": 0.05},
}


def run_spec(folder: Path, *names: str) -> RunSpec:
    """The jobs of these names, or all of them; writes their data into a folder."""
    _write(folder / "words.jsonl", [{"prompt": f"{word}\n", "completion": word.upper()} for word in WORDS])
    _write(
        folder / "pairs.jsonl",
        [{"prompt": f"{word}\n", "chosen": word.upper(), "rejected": word[::-1]} for word in WORDS],
    )
    _write(
        folder / "marks.jsonl",
        [
            {"prompt": f"{word}\n", "completion": word.upper() if good else word, "label": good}
            for word in WORDS
            for good in (True, False)
        ],
    )
    _write(folder / "classes.jsonl", [{"text": word, "label": "long" if len(word) > 5 else "short"} for word in WORDS])
    shared = {"train_data": "words.jsonl", "max_length": 48, "global_batch_size": 4, "learning_rate": 5e-3}
    shared |= {"max_steps": 6, "save_steps": 2}
    jobs = [{"name": name, **settings} for name, settings in JOBS.items() if not names or name in names]
    return run_from_mapping({"base_model": "tiny", "device": "cpu", "capacity": 256, "defaults": shared, "jobs": jobs})


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
