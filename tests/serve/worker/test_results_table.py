"""The table of results has OpenAI's columns first."""

import json

from weft.serve.worker.checkpoint_uploads import results_table


def test_results_table_when_an_objective_measures_more_then_its_columns_follow():
    lines = [
        {"step": 1, "epoch": 0.5, "loss": 0.5, "mean_token_accuracy": 0.25, "time": 1.0, "rewards/margins": 2.0},
        {"step": 1, "epoch": 0.5, "eval_loss": 0.75, "eval_rewards/margins": None, "eval_runtime": 0.1, "time": 2.0},
        {"step": 2, "epoch": 1.0, "loss": None, "skipped": True, "time": 3.0, "rewards/margins": None},
    ]
    table = results_table("\n".join(json.dumps(line) for line in lines).encode()).decode()
    columns = "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    assert table.splitlines() == [
        f"{columns},train_rewards/margins,valid_rewards/margins",
        "1,0.5,0.25,0.75,,2.0,",
        "2,,,,,,",
    ]
