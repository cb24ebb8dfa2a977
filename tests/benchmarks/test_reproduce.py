"""The papers' experiments: what is run, compared, kept and written as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures import Kind
from benchmarks.reproduce import command
from benchmarks.reproduce.command import PAPERS
from benchmarks.reproduce.experiments import Row, page_of
from benchmarks.reproduce.lobra import example
from benchmarks.reproduce.mlora import formula, simulated


@pytest.mark.parametrize(
    ("kind", "value", "result"),
    [
        (Kind.SPEEDUP, 1.9, "reproduced"),
        (Kind.SPEEDUP, 2.3, "exceeded"),
        (Kind.SPEEDUP, 1.7, "not reproduced"),
        (Kind.SECONDS, 2.1, "reproduced"),
        (Kind.SECONDS, 1.5, "exceeded"),
        (Kind.SECONDS, 2.3, "not reproduced"),
    ],
)
def test_result_then_follows_from_the_numbers_alone(kind, value, result):
    assert Row("a figure", "key", kind, published=2.0).result(value) == result
    assert Row("a figure", "key", kind).result(value) == ""


def test_example_of_lobra_then_has_the_papers_plan_and_seconds():
    found = example()
    assert found["figure4_same_plan"] == 1.0 and found["figure4_step_s"] == pytest.approx(14.83, abs=0.005)


@pytest.mark.parametrize(("jobs", "microbatches"), [(1, 1), (1, 4), (2, 2), (4, 1), (6, 2)])
def test_program_of_lorapp_when_simulated_then_idles_as_by_mloras_formula(jobs, microbatches):
    assert simulated(4, jobs, microbatches) == pytest.approx(formula(4, jobs, microbatches), abs=0.001)


def test_reproduce_when_run_then_keeps_figures_and_draws_them_and_the_page_shows_them(bench, tmp_path, monkeypatch):
    shown = bench("reproduce", "lobra", "figure-4", "--json", tmp_path)
    assert shown.code == 0 and "14.83 s" in shown.out
    kept = json.loads((tmp_path / "lobra.json").read_text())
    assert kept["figure4_step_s"] == 14.83 and kept["machine"]["device"].startswith("CPU")
    assert (tmp_path / "lobra.svg").stat().st_size > 1000
    monkeypatch.setattr(command, "RECORDED", tmp_path)
    assert bench("reproduce", "--page", tmp_path / "page.md").code == 0
    page = (tmp_path / "page.md").read_text()
    assert "| figure-4: four tasks on 16 GPUs | a step of the best plan | 14.83 s | 14.83 s | simulated | repro" in page
    assert "## LobRA" in page and "## mLoRA" not in page


def test_page_then_is_what_the_recorded_files_give():
    recorded = {name: command.RECORDED / f"{name}.json" for name in PAPERS}
    values = {name: json.loads(file.read_text()) for name, file in recorded.items()}
    page = Path(__file__).parents[2] / "docs" / "reproduction.md"
    assert page.read_text(encoding="utf-8") == page_of(list(PAPERS.values()), values)


@pytest.mark.parametrize(
    ("words", "accepted"), [(["lobby"], "lobra"), ([], "lobra"), (["lobra", "figure-99"], "figure-4")]
)
def test_reproduce_when_a_name_is_unknown_then_refused_with_those_there_are(refused, words, accepted):
    assert accepted in refused("reproduce", *words)
