import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic_sweep import sweep_board

from weft.errors import StorageError
from weft.report.sweep_board import read_board
from weft.report.sweep_page import render_sweep, write_sweep_report

EVIL = "<img src=x onerror=alert(1)>"


def page_of(board: dict[str, Any], info: dict[str, Any] | None = None) -> str:
    """The page without plotly, whose megabytes hold every string one could look for."""
    page = render_sweep(read_board(board), info or {}, name="s")
    return re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", page, count=1, flags=re.DOTALL)


def figures(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    parsed = json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(parsed, dict)
    return parsed


@pytest.mark.parametrize("num", [0, 1, 12, 120])
def test_page_when_there_are_so_many_trials_then_each_has_a_row_and_every_chart_is_there(num: int) -> None:
    board = sweep_board(num) if num else {"trials": []}
    page = page_of(board)
    assert page.count("data-pick=") == num
    for name in figures(page):
        assert f'id="{name}"' in page
    assert len(re.findall(r'class="chart[ "]', page)) == len(figures(page))


def test_page_then_the_headline_has_the_best_its_parameters_and_what_it_cost() -> None:
    board = sweep_board(12)
    page = page_of(board)
    best = board["trials"][0]
    assert f"<strong>{best['value']:.4f}</strong>" in page
    assert f"eval_loss of <b>{best['name']}</b>" in page
    assert "<dt>adapter.r</dt><dd>16</dd>" in page
    assert "6 done, 6 stopped" in page
    assert "<strong>4.70x</strong>" in page
    assert "eval_loss, the lower the better" in page


def test_page_then_reasons_are_text_and_hover() -> None:
    board = sweep_board(12)
    reason = board["trials"][-1]["reason"]
    page = page_of(board)
    assert f'title="{reason}"' in page
    assert f">{reason}</td>" in page


def test_page_then_what_stopping_saved_is_what_was_to_come() -> None:
    rows = [
        {"number": 0, "state": "done", "value": 1.0, "steps": 40, "total_steps": 40, "tokens": 4000, "seconds": 8.0},
        {"number": 1, "state": "stopped", "value": 2.0, "steps": 10, "total_steps": 40, "tokens": 1000, "seconds": 2.0},
        {
            "number": 2,
            "state": "stopped",
            "value": 2.0,
            "steps": 10,
            "total_steps": 40,
            "tokens": 9,
            "origin": "runs/a",
        },
    ]
    page = page_of({"trials": rows})
    assert "saved by stopping <strong>37.5 %</strong> <span>3.00 k</span>" in page
    assert "done <strong>50.0 %</strong> <span>4.00 k</span>" in page
    assert "saved by stopping <strong>37.5 %</strong> <span>6.0 s</span>" in page
    assert '<strong>3.00 k</strong><span class="note">tokens, 38 % of all</span>' in page


def test_page_when_no_trial_has_a_value_then_it_is_reported() -> None:
    board = sweep_board(9) | {"one_by_one_seconds": None}
    for trial in board["trials"]:
        trial |= {"state": "failed", "value": math.nan, "points": [], "rank": None, "reason": "diverged"}
    page = page_of(board)
    assert "No trial has a value." in page
    assert "Too few trials: 0 with a value" in page
    assert "speed-up" not in page
    assert set(figures(page)) == {"train_loss", "trial_times"}


def test_page_when_trials_are_few_or_the_sampler_adapts_then_the_importances_report_it() -> None:
    assert "Too few trials: 7 with a value; importances need 8." in page_of(sweep_board(7))
    many = sweep_board(40)
    assert "Rests on" in page_of(many)
    assert "moved together" not in page_of(many)
    assert "moved together" in page_of(many | {"sampler": "tpe"})


def test_page_when_the_sweep_still_runs_then_the_best_is_so_far() -> None:
    board = sweep_board(3, is_calm=True)
    for trial in board["trials"]:
        trial["state"] = "training"
    assert "best trial so far (training)" in page_of(board)
    board["trials"][0]["state"] = "done"
    assert "best trial so far</span>" in page_of(board)
    assert "best trial</span>" in page_of(sweep_board(3, is_calm=True))
    assert "No trial has a value yet." in page_of({"trials": [{"state": "waiting"}]})


def test_page_when_one_parameter_is_searched_then_it_has_all_its_charts() -> None:
    board = sweep_board(30)
    for trial in board["trials"]:
        trial["params"] = {"learning_rate": trial["params"]["learning_rate"]}
    assert {"parallel", "scatter_0"} <= set(figures(page_of(board)))


def test_page_when_names_hold_html_then_it_is_text() -> None:
    rows = [
        {"number": i, "name": EVIL, "state": EVIL, "reason": "</script>" + EVIL, "value": float(i), "steps": 3}
        | {"params": {EVIL: f"{EVIL}{i}"}, "points": [{"step": 1, "tokens": 5, "value": 1.0, "at_s": 1.0}]}
        for i in range(9)
    ]
    board = {"metric": EVIL, "sampler": EVIL, "trials": rows}
    page = page_of(board)
    assert "<img" not in page
    assert page.count("</script>") == page_of({"trials": []}).count("</script>") == 4
    for figure in figures(page).values():
        texts = [text for trace in figure["data"] for text in trace.get("text", ())]
        assert not any("<img" in text for text in texts)
        assert "<img" not in json.dumps(figure["layout"])


def test_page_then_it_is_one_file_that_loads_nothing() -> None:
    page = page_of(sweep_board(12))
    assert not re.search(r"(src|href)\s*=", page)
    assert "://" not in page
    assert "default-src 'none'" in page


def test_page_then_every_number_can_be_sorted_and_every_control_is_a_button() -> None:
    page = page_of(sweep_board(12))
    for row in re.findall(r"<tbody data-job.*?</tbody>", page, flags=re.DOTALL):
        keys = re.findall(r'data-key="([^"]*)"', row)
        assert len(keys) == 9
        assert all(math.isfinite(float(key)) for key in keys)
    assert page.count("data-sort=") == 11
    assert not re.search(r"<(?!button)\w+[^>]*data-(sort|pick|log)=", page)


def test_write_sweep_report_when_trials_are_500_then_the_page_stays_light_and_is_named_by_its_folder(
    tmp_path: Path,
) -> None:
    path = tmp_path / "evening" / "report.html"
    path.parent.mkdir()
    write_sweep_report(path, sweep_board(500), {})
    assert path.stat().st_size < 8_000_000
    assert "<h1>evening</h1>" in path.read_text(encoding="utf-8")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_write_sweep_report_when_it_cannot_be_written_then_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(StorageError, match="a directory is in the way"):
        write_sweep_report(tmp_path / "report.html", {"trials": []}, {})
