"""`weft plan`."""

from __future__ import annotations

import json


def test_plan_when_a_file_is_good_then_shows_the_plan_and_writes_nothing(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert weft("init").code == 0
    before = sorted(tmp_path.rglob("*"))
    result = weft("plan", "jobs.yaml", "--steps", "4", "--device", "h200", "--stages", "2")
    assert result.code == 0
    for part in ("shout", "reverse", "microbatches of up to", "bubbles", "tokens/s", "GiB", "stage 1"):
        assert part in result.out
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_when_json_is_asked_for_then_prints_nothing_else(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert weft("init").code == 0
    found = json.loads(weft("plan", "jobs.yaml", "--steps", "2", "--json").out)
    assert found["jobs"] == ["shout", "reverse"] and found["num_stages"] == 1 and found["keeps_order"] is True


def test_plan_when_asked_for_what_cannot_be_then_one_sentence(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert weft("init").code == 0
    for options, part in (
        (("--stages", "99"), "tiny has 6 layers"),
        (("--device", "h300"), "Did you mean h200"),
        (("capacity=1",), "capacity"),
    ):
        result = weft("plan", "jobs.yaml", *options)
        assert result.code == 2
        assert part in result.err
