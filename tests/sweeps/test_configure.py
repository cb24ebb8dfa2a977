"""Trials share the data that they read alike, each with its own settings of what it learns by."""

from __future__ import annotations

import json
from pathlib import Path

from weft.engine.execute.local import executor_on
from weft.model.load import load_skeleton
from weft.model.resolve import resolve
from weft.objectives.preference import Dpo
from weft.spec.load_sweep import sweep_from_mapping
from weft.sweeps.configure import Configurations


def test_data_when_trials_differ_in_their_objective_then_share_samples_and_nothing_else(settings):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(12)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {"train_data": "pairs.jsonl", "eval_data": 2}
    space = {"beta": [0.1, 0.5], "num_virtual_tokens": [2, 4]}
    spec = sweep_from_mapping(
        settings(job={**job, "adapter": {"method": "prompt_tuning"}}, space=space), base_dir=Path()
    )
    made = Configurations(spec, executor_on(load_skeleton(resolve(spec.backbone))), Path())
    weak, strong, longer = (
        made.data(made.job(f"t{i}", {"beta": beta, "num_virtual_tokens": number}))
        for i, (beta, number) in enumerate([(0.1, 2), (0.5, 2), (0.5, 4)])
    )
    assert (weak.train.objective, strong.train.objective) == (Dpo(0.1), Dpo(0.5))
    assert weak.eval is not None and strong.eval is not None and strong.eval.objective == Dpo(0.5)
    assert weak.train.samples is strong.train.samples
    assert (strong.train.num_leading, longer.train.num_leading) == (2, 4)
