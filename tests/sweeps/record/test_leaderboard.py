"""The leaderboard puts the best first, whichever way is better, and the stopped after those that were not."""

from __future__ import annotations

from pathlib import Path

from weft.store.json_text import read_object
from weft.sweeps.leaderboard import BOARD, MAX_LOSSES, Totals, best_of, board_of, ranked, write_board
from weft.sweeps.trials_file import Observation, Trial, TrialState


def trial(number: int, value: float | None, state: TrialState = TrialState.DONE) -> Trial:
    points = [] if value is None else [Observation(1, 10, value, 0.0)]
    return Trial(number, f"t{number}", {"target_modules": ["q_proj"], "r": number}, state, points=points)


TRIALS = [
    trial(0, 0.5),
    trial(1, 0.9),
    trial(2, 0.7, TrialState.TRAINING),
    trial(3, 0.1, TrialState.STOPPED),
    trial(4, None, TrialState.WAITING),
    trial(5, 0.0, TrialState.FAILED),
    trial(6, None, TrialState.TRAINING),
]


def test_trials_when_ranked_then_the_best_come_first_and_the_failed_last():
    assert [t.number for t in ranked(TRIALS, is_max=False)] == [0, 2, 1, 6, 3, 4, 5]
    assert [t.number for t in ranked(TRIALS, is_max=True)] == [1, 2, 0, 6, 3, 4, 5]


def test_best_when_adapters_are_missing_then_is_the_best_that_has_one(tmp_path):
    assert best_of(TRIALS, False, tmp_path) is None
    (tmp_path / "trials" / "t3" / "adapter").mkdir(parents=True)
    assert best_of(TRIALS, False, tmp_path) is TRIALS[3]
    (tmp_path / "trials" / "t1" / "adapter").mkdir(parents=True)
    assert best_of(TRIALS, False, tmp_path) is TRIALS[1]


def test_board_when_written_then_is_read_back_and_is_a_table_too(tmp_path):
    from weft.spec.load_sweep import sweep_from_mapping

    job = {"train_data": "rows.jsonl", "eval_data": 2}
    space = {
        "r": [1],
        "lr": {"min": 1e-4, "max": 2e-4, "log": True},
        "adapter": {"lora_dropout": {"min": 0, "max": 0.5}},
    }
    spec = sweep_from_mapping({"base_model": "tiny", "job": job, "trials": 9, "space": space}, base_dir=Path())
    long = trial(7, 0.3)
    long.losses = [(step, 1.0 / step) for step in range(1, 1202)]
    board = board_of(spec, [*TRIALS, long], Totals("grid", 1.5, 70))
    write_board(tmp_path, board)
    assert read_object(tmp_path / BOARD) == board
    assert board["scales"] == {"lr": "log", "adapter.lora_dropout": "linear"}
    rows = {row["name"]: row for row in board["trials"]}
    assert rows["t5"]["value"] is None and rows["t7"]["rank"] == 1
    thinned = rows["t7"]["losses"]
    assert len(thinned) <= MAX_LOSSES and thinned[-1] == [1201, 1.0 / 1201]
    lines = (tmp_path / "leaderboard.csv").read_text().splitlines()
    assert lines[0] == "rank,name,state,value,target_modules,r,steps,total_steps,tokens,seconds,reason"
    assert lines[1] == '1,t7,done,0.3,"[""q_proj""]",7,0,0,0,0.0,'
    assert board_of(spec, [long], Totals("grid", 1.5, 70), with_curves=False)["trials"][0]["losses"] == []


def test_board_when_it_is_not_there_then_is_empty(tmp_path):
    assert read_object(tmp_path / BOARD) == {}
    (tmp_path / "leaderboard.json").write_text("{torn")
    assert read_object(tmp_path / BOARD) == {}
