"""Table, JSON file and picture of the figures."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from benchmarks.figures import Figure, Kind
from benchmarks.report import bar_length, draw, read_json, table, write_json
from weft.errors import ConfigError, MissingExtraError, StorageError
from weft.report.figure import check_plot

CPU = torch.device("cpu")
FIGURES = [
    Figure("fast", 2.345, Kind.SPEEDUP, 2.0, 21_000.4, 9_000.0),
    Figure("heavy", 0.125, Kind.OVERHEAD, 0.06, 100.0, 112.5),
    Figure("lean", 1.081, Kind.TIME_RATIO, 1.09),
    Figure("big", 41.26, Kind.PEAK_GB),
]


def test_table_when_printed_then_shows_values_targets_and_whether_they_are_met():
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(FIGURES))
    rows = [line.split() for line in captured.get().splitlines()]
    assert rows[1] == ["fast", "21,000", "9,000", "2.35x", "≥", "2.00x", "met"]
    assert rows[2] == ["heavy", "100", "112", "+12.5%", "≤", "+6.0%", "missed"]
    assert rows[3] == ["lean", "1.081", "≤", "1.090", "met"]
    assert rows[4] == ["big", "41.3", "GB"]


def test_json_when_written_twice_then_other_commands_keys_stay(tmp_path):
    path = tmp_path / "h200.json"
    write_json(path, {"linear4_p0": 1.0812345, "tok_s": 21_000.4}, CPU)
    write_json(path, {"sweep32": 13.5, "linear4_p0": 1.07}, CPU, key="machine_cpu")
    found = json.loads(path.read_text())
    machine = found.pop("machine")
    assert found.pop("machine_cpu")["device"].startswith("CPU")
    assert found == {"linear4_p0": 1.07, "tok_s": 21000, "sweep32": 13.5}
    assert machine["torch"] == torch.__version__
    assert machine.keys() >= {"device", "date"}


@pytest.mark.parametrize(("text", "why"), [("[1]", "holds no JSON object"), ("{", "is not JSON")])
def test_json_when_the_file_is_something_else_then_is_left_alone(text, why, tmp_path):
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(StorageError, match=why):
        write_json(path, {"a": 1.0}, CPU)
    assert path.read_text() == text


def test_json_when_its_directory_is_missing_then_reports_it(tmp_path):
    with pytest.raises(StorageError, match="there is no directory"):
        read_json(tmp_path / "gone" / "h200.json")


@pytest.mark.parametrize("name", ["figures.svg", "figures.png"])
def test_picture_when_drawn_then_is_a_file_of_its_kind(name, tmp_path):
    path = tmp_path / name
    draw(path, FIGURES, "a machine")
    begin = path.read_bytes()[:200]
    assert begin.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in path.read_bytes() and b"xml" in begin


def test_picture_when_it_cannot_be_drawn_then_is_refused_before_measuring(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"got figures.pdf; the name must end in .svg or .png"):
        check_plot(tmp_path / "figures.pdf")
    with pytest.raises(StorageError, match="there is no directory"):
        check_plot(tmp_path / "gone" / "figures.png")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed; pip install -e '.*\[bench\]'"):
        check_plot(tmp_path / "figures.png")


@pytest.mark.parametrize(
    ("figure", "length"),
    [
        (Figure("speed-up", 3.0, Kind.SPEEDUP, 2.0), 1.5),
        (Figure("no target", 3.0, Kind.SPEEDUP), 3.0),
        (Figure("overhead", 0.25, Kind.OVERHEAD, 0.0), 0.8),
        (Figure("time", 1.2, Kind.TIME_RATIO, 1.08), 0.9),
        (Figure("memory", 50.0, Kind.PEAK_GB, 40.0), 0.8),
        (Figure("memory alone", 50.0, Kind.PEAK_GB), 0.0),
        (Figure("equal", 0.0, Kind.DIFFERENCES, 0.0), 1.0),
        (Figure("unequal", 7.0, Kind.DIFFERENCES, 0.0), 0.0),
    ],
)
def test_bar_when_drawn_then_one_is_the_target_and_longer_is_better(figure, length):
    assert bar_length(figure) == pytest.approx(length)
