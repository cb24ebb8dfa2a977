import json
from pathlib import Path

import pytest

from weft.errors import StorageError
from weft.report.read_run import read_run
from weft.report.run_data import JobReport, number


def write_metrics(run_dir: Path, *lines: str) -> None:
    (run_dir / "solo").mkdir(parents=True, exist_ok=True)
    (run_dir / "solo" / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")


def train_line(step: int, **fields: float) -> str:
    return json.dumps({"step": step, "loss": 1.0, "time": float(step), "num_tokens": 10 * step} | fields)


def test_read_run_when_complete_then_every_job_is_known_in_order(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert [job.name for job in run.jobs] == ["reverse-words", "capitals", "roman-numerals", "too-hot", "sorting"]
    assert [job.state for job in run.jobs] == ["succeeded", "succeeded", "succeeded", "failed", "cancelled"]
    first = run.jobs[0]
    assert (first.rank, first.learning_rate, first.num_steps) == (16, 2e-4, 180)
    assert first.adapter_path == "reverse-words/adapter"
    assert run.jobs[3].adapter_path is None
    assert len(first.train) == 180
    assert len(first.evals) == 6
    assert run.trained_tokens == sum(job.trained_tokens for job in run.jobs)
    assert len(run.microbatches) == 360


def test_read_run_when_accuracy_was_measured_or_not_then_points_have_it_or_none(tmp_path: Path) -> None:
    evaluated = {"step": 2, "eval_loss": 1.0}
    lines = [train_line(1), train_line(2, mean_token_accuracy=0.25), json.dumps(evaluated)]
    write_metrics(tmp_path, *lines, json.dumps(evaluated | {"step": 4, "eval_mean_token_accuracy": 0.5}))
    job = read_run(tmp_path).jobs[0]
    assert [p.accuracy for p in job.train] == [None, 0.25]
    assert [p.accuracy for p in job.evals] == [None, 0.5]


def test_read_run_when_an_objective_measures_more_then_its_last_evaluation_is_the_short_account(tmp_path: Path) -> None:
    trained = train_line(1, epoch=0.5, **{"rewards/margins": 0.5, "nll_loss": 2.0})
    evaluated = {"step": 2, "eval_loss": 1.0, "eval_runtime": 1.0, "time": 3.0}
    evaluated |= {"eval_rewards/margins": 0.25, "eval_rewards/accuracies": 1.0, "eval_nll_loss": None}
    write_metrics(tmp_path, trained)
    assert read_run(tmp_path).jobs[0].measured == {"rewards/margins": 0.5}
    write_metrics(tmp_path, trained, json.dumps(evaluated))
    job = read_run(tmp_path).jobs[0]
    assert job.train[0].further == {"rewards/margins": 0.5, "nll_loss": 2.0}
    assert list(job.measured.items()) == [("rewards/accuracies", 1.0), ("rewards/margins", 0.25)]


def test_read_run_when_the_loss_became_nan_then_the_last_finite_one_counts(run_dir: Path) -> None:
    failed = read_run(run_dir).jobs[3]
    assert failed.train[-1].loss is None
    assert failed.final_loss is not None
    assert failed.remarks == ("the loss was not finite for 3 steps in a row (step 61)",)


def test_remarks_then_they_report_what_was_not_as_planned() -> None:
    assert JobReport("a", {}, {"state": "cancelled", "reason": "cancelled"}).remarks == ()
    assert JobReport("a", {}, {"early_stopped": True, "skipped_steps": 2}).remarks == (
        "stopped early: the evaluation loss got no better",
        "2 steps skipped: loss or gradient not finite",
    )


def test_tokens_per_s_when_a_job_started_late_then_its_waiting_does_not_count(tmp_path: Path) -> None:
    write_metrics(tmp_path, *(train_line(i, time=100.0 + i) for i in (1, 2, 3)))
    job = read_run(tmp_path).jobs[0]
    assert job.start_s == 100.0
    assert job.tokens_per_s == pytest.approx(10.0)


def test_read_run_when_lines_are_torn_or_odd_then_the_good_ones_stay(tmp_path: Path) -> None:
    huge = '{"step": 4, "loss": 1' + "0" * 400 + "}"
    write_metrics(tmp_path, train_line(1), "[1]", "nonsense", '{"loss": 2}', "", train_line(3), huge, '{"step": 5, "lo')
    (tmp_path / "solo" / "status.json").write_text('{"state": "runn')
    (tmp_path / "timeline.json").write_text('{"traceEvents": [{"name": "step"}, 7, {"ph": "X", "ts": "x"}]}')
    job = read_run(tmp_path).jobs[0]
    assert [p.step for p in job.train] == [1, 3, 4]
    assert job.train[-1].loss is None
    assert job.state == "unknown"
    assert job.step == 4


def test_read_run_when_run_json_is_gone_then_jobs_are_found_by_their_files(tmp_path: Path) -> None:
    write_metrics(tmp_path, train_line(1))
    (tmp_path / "tensorboard").mkdir()
    run = read_run(tmp_path)
    assert [job.name for job in run.jobs] == ["solo"]
    assert run.name == tmp_path.name


def test_read_run_when_a_job_was_resumed_then_repeated_steps_count_once_and_time_goes_on(tmp_path: Path) -> None:
    again = train_line(3, time=0.5, loss=9.0)
    write_metrics(tmp_path, train_line(1), train_line(2), train_line(3), train_line(4), again, train_line(4, time=1.5))
    points = read_run(tmp_path).jobs[0].train
    assert [p.step for p in points] == [1, 2, 3, 4]
    assert points[2].loss == 9.0
    assert [p.time for p in points] == [1.0, 2.0, 4.5, 5.5]


def test_read_run_when_a_job_name_leads_elsewhere_then_nothing_is_read_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write_metrics(outside, train_line(1))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"jobs": ["../outside/solo"]}))
    assert read_run(run_dir).jobs[0].train == ()


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_read_run_when_there_is_no_run_then_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=name):
        read_run(tmp_path / name)


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), 10**400, [1]])
def test_number_when_not_a_finite_number_then_none(value: object) -> None:
    assert number(value) is None


def test_read_run_when_microbatches_ran_side_by_side_then_they_are_one_span(tmp_path: Path) -> None:
    """Drawn one over the other, the first could not be seen."""

    def event(name: str, start: int, length: int, microbatch: int, **more: int) -> dict[str, object]:
        args = {"microbatch": microbatch, "tokens": 6, "rows": 8, "jobs": {f"job{microbatch}": 6}, **more}
        return {"name": name, "ph": "X", "ts": start, "dur": length, "pid": 1, "args": args}

    pairs = [event("forward", 10, 20, 0, beside=1), event("forward", 12, 24, 1, beside=0)]
    alone = [event("backward", 50, 20, 0), event("backward", 70, 20, 1, beside=2), event("step", 80, 9, 1)]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": [*pairs, *pairs, *alone]}))
    write_metrics(tmp_path, train_line(1))
    first, second, *others = read_run(tmp_path).spans
    assert first == second
    assert (first.start_s, first.duration_s) == (1e-5, pytest.approx(2.6e-5))
    assert (first.tokens, first.rows, first.jobs) == (12, 16, {"job0": 6, "job1": 6})
    assert [span.name for span in others] == ["backward", "backward", "step"]
