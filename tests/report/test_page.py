import base64
import gzip
import html
import json
import re
import sys
from pathlib import Path

import pytest
from synthetic_run import write_json, write_run

from weft.errors import MissingExtraError, StorageError
from weft.report.page import ReportExtra, SkillGain, json_for_script, render, write_report
from weft.report.read_run import read_run

EVIL = "<img src=x onerror=alert(1)>"


def without_plotly(page: str) -> str:
    """The page's own text; plotly's megabytes hold every string one could look for."""
    return re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", page, count=1, flags=re.DOTALL)


def figures(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    parsed = json.loads(found[1])
    assert isinstance(parsed, dict)
    return parsed


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def test_write_report_when_run_is_complete_then_it_shows_jobs_states_and_totals(page: str) -> None:
    text = without_plotly(page)
    for expected in (
        "evening sweep",
        "tiny",
        "float32",
        "2.13.0",
        "14 November 2026, 21:04 UTC",
        "reverse-words/<wbr>adapter",
    ):
        assert expected in text
    assert text.count('class="badge succeeded"') == 3
    assert text.count('class="badge failed"') == 1
    assert "the loss was not finite for 3 steps in a row (step 61)" in text
    assert "3 succeeded, 1 failed, 1 cancelled" in text
    assert "the first 160 of 360 recorded microbatches" in text


def test_write_report_then_the_page_is_one_file_that_loads_nothing(page: str) -> None:
    text = without_plotly(page)
    assert not re.search(r"(src|href)\s*=", text)
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text
    packed = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', page)
    assert "plotly.js v" in gzip.decompress(base64.b64decode(packed[0])).decode()
    assert len(packed) == 1 and len(page) < 2_500_000


def test_write_report_then_every_chart_is_on_the_page(page: str) -> None:
    for name in figures(page):
        assert f'id="{name}"' in without_plotly(page)


def test_write_report_when_an_objective_measures_more_then_each_metric_has_a_chart(tmp_path: Path) -> None:
    """Names come from a file, so they are text wherever they stand."""
    lines = [{"step": i, "loss": 1.0, "rewards/margins": i / 2, "<b>odd": 1.0} for i in (1, 2)]
    lines.append({"step": 2, "eval_loss": 1.0, "eval_rewards/margins": 3.0})
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    page = write_report(tmp_path).read_text()
    assert {"own_0", "own_1"} <= set(figures(page))
    page = without_plotly(page)
    assert "<h3>rewards/margins</h3>" in page and "<h3>&lt;b&gt;odd</h3>" in page and "<b>odd" not in page
    assert "margins 3.0000" in page


def test_write_report_when_jobs_are_of_several_methods_then_each_is_named_with_its_rank(tmp_path: Path) -> None:
    for name, adapter in (("a", {"method": "lora", "r": 8}), ("b", {"method": "ia3", "r": 16})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}))
        (tmp_path / name / "job.json").write_text(json.dumps({"name": name, "adapter": adapter}))
    page = without_plotly(write_report(tmp_path).read_text())
    assert re.findall(r'data-label="method"[^>]*>([^<]*)<', page) == ["lora 8", "ia3"]


def test_write_report_when_jobs_are_many_and_long_then_the_page_stays_light(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path, num_copies=7, stretch=5))
    assert path.stat().st_size < 3_000_000


def test_write_report_when_names_and_reasons_hold_html_then_it_is_text(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"run_name": EVIL, "base_model": EVIL, "versions": {EVIL: EVIL}, "jobs": [EVIL]})
    write_json(tmp_path / EVIL / "status.json", {"state": EVIL, "reason": "</script>" + EVIL, "step": 2})
    write_json(tmp_path / EVIL / "job.json", {EVIL: EVIL, "adapter": {"r": EVIL}})
    line = json.dumps({"step": 1, "loss": 1.0, "time": 1.0, "num_tokens": 5})
    (tmp_path / EVIL / "metrics.jsonl").write_text(line)
    extra = ReportExtra(EVIL, EVIL, [SkillGain(EVIL, 0.0, 1.0)], [(EVIL, EVIL)], [(EVIL, 1.0)], EVIL)
    page = render(read_run(tmp_path), extra)
    assert "<img" not in without_plotly(page)
    assert page.count("</script>") == render(read_run(tmp_path)).count("</script>") == 4
    loss = figures(page)["loss"]
    assert isinstance(loss, dict)
    assert loss["data"][0]["name"] == "&lt;img src=x onerror=alert(1)&gt;"


def test_figures_when_a_plotly_does_not_escape_them_then_they_still_cannot_leave_their_script() -> None:
    class Figure:
        def to_json(self) -> str:
            return '{"name": "</script>\u2028&"}'

    text = json_for_script({"loss": Figure()})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"loss": {"name": "</script>\u2028&"}}


def test_write_report_when_almost_everything_is_missing_then_there_is_still_a_page(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"jobs": ["lost"]})
    text = without_plotly(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "lost" in text
    assert "unknown" in text
    assert "Curves" not in text
    assert "Where the time went" not in text


def test_write_report_when_the_time_was_recorded_then_one_bar_shows_all_of_it(run_dir: Path) -> None:
    """What took no time is left out; the shares are of the wall clock, and what is short is not called nothing."""
    text = without_plotly(render(read_run(run_dir)))
    assert "1 min 14 s from the command to the last file" in text
    shown = re.findall(r"</i>([a-z ]+) <strong>([<\d.]+ ?[\d.]*) %</strong> <span>([^<]+)<", html.unescape(text))
    assert shown == [
        ("computing", "67.6", "50 s"),
        ("evaluating", "2.0", "1.5 s"),
        ("loading", "24.3", "18 s"),
        ("writing", "< 0.1", "0.0 s"),
        ("idle", "6.1", "4.5 s"),
    ]


def test_write_report_when_extra_is_given_then_its_section_is_there(run_dir: Path) -> None:
    skills = [SkillGain("capitals", 0.03, 0.97)]
    extra = ReportExtra(
        "What they learned", "A paragraph.", skills, [("speed-up", "3.1x")], [("alone", 5.0), ("all", 20.0)]
    )
    text = without_plotly(render(read_run(run_dir), extra))
    assert "What they learned" in text
    assert "3 % <span>→</span> 97 %" in text
    assert "width:25.0%" in text
    assert "3.1x" in text


def test_write_report_when_speeds_are_zero_then_the_bars_are_empty(run_dir: Path) -> None:
    assert "width:0.0%" in render(read_run(run_dir), ReportExtra("x", speeds=[("alone", 0.0)]))


def test_write_report_when_plotly_is_missing_then_it_reports_what_to_install(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingExtraError, match="pip install plotly"):
        write_report(run_dir)


def test_write_report_when_it_cannot_be_written_then_refused_in_one_sentence(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"jobs": ["lost"]})
    (tmp_path / "report.html").mkdir()
    with pytest.raises(StorageError, match=r"report\.html: a directory is in the way"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html.tmp").exists()
