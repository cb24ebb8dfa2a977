"""`weft report`."""

import json
from pathlib import Path

from weft.store.wall_clock import Activity, TimeSplit


def write_run(folder: Path) -> None:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_name": "first", "jobs": ["tuned", "scaled"]}))
    for name, adapter in (("tuned", {"method": "lora", "r": 8}), ("scaled", {"method": "ia3", "r": 16})):
        (folder / name).mkdir()
        (folder / name / "job.json").write_text(json.dumps({"name": name, "adapter": adapter}))
        (folder / name / "status.json").write_text(json.dumps({"state": "running", "step": 2, "num_steps": 4}))


def test_report_when_a_run_was_killed_then_its_page_is_made_from_what_is_there(weft, tmp_path: Path):
    """Also: a method without ranks is called by its name, and settings of other methods are not shown for it."""
    write_run(tmp_path / "run")
    done = weft("report", tmp_path / "run")
    assert done.code == 0 and str(tmp_path / "run" / "report.html") in done.out
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert ">8<" in page.replace(" ", "") and ">ia3<" in page.replace(" ", "")
    assert "adapter.r" in page and page.count("adapter.r<") == 1
    assert "time " not in done.out


def test_report_when_the_time_of_the_run_was_recorded_then_reports_where_it_went(weft, tmp_path: Path):
    write_run(tmp_path / "run")
    spent = TimeSplit({Activity.COMPUTING: 11_240_000_000, Activity.IDLE: 2_500_000_000})
    (tmp_path / "run" / "time.json").write_text(json.dumps(spent.to_json()))
    assert weft("report", tmp_path / "run").out.endswith("time      13.7 s: 11.2 computing, 2.5 idle\n")


def test_report_when_the_run_was_divided_then_it_and_its_page_name_the_layouts(weft, tmp_path: Path):
    write_run(tmp_path / "run")
    for layouts, name in ((["stages:1"], None), (["stages:2", "stages:1"], "stages:2, then one device"), ("odd", None)):
        (tmp_path / "run" / "run.json").write_text(json.dumps({"jobs": ["tuned"], "layouts": layouts}))
        out, page = weft("report", tmp_path / "run").out, (tmp_path / "run" / "report.html").read_text("utf-8")
        assert ("layout    " in out) == ("<dt>layout</dt>" in page) == (name is not None)
        assert name is None or (f"layout    {name}\n" in out and f"<dd>{name}</dd>" in page)


def test_report_when_the_directory_is_a_sweeps_then_its_leaderboard_is_drawn(weft, tmp_path: Path):
    (tmp_path / "leaderboard.json").write_text(json.dumps({"metric": "eval_loss", "trials": []}))
    assert weft("report", tmp_path).code == 0
    assert "weft sweep" in (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "leaderboard.json").write_text("{")
    assert "leaderboard.json: is not JSON" in weft("report", tmp_path).err


def test_report_when_a_sweep_was_divided_then_it_and_its_page_name_the_layout(weft, tmp_path: Path):
    """As those of a run do; a sweep that never had such a file has a page too."""
    (tmp_path / "leaderboard.json").write_text(json.dumps({"metric": "eval_loss", "trials": []}))
    (tmp_path / "trials").mkdir()
    made = {"base_model": "<tiny>", "quantize": "none", "kernels": "fused", "layouts": ["stages:2"], "capacity": 64}
    (tmp_path / "trials" / "run.json").write_text(json.dumps(made))
    done = weft("report", tmp_path)
    assert "layout    stages:2\n" in done.out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = {"backbone": "&lt;tiny&gt;", "kernels": "fused", "layout": "stages:2", "capacity": "64 tokens"}
    for label, value in shown.items():
        assert f"<dt>{label}</dt><dd>{value}</dd>" in page
    assert "<dt>quantize</dt>" not in page


def test_report_when_there_is_no_run_then_refused_in_one_sentence(weft, tmp_path: Path):
    done = weft("report", tmp_path)
    assert done.code == 2 and "is not a run directory" in done.err
