"""Which GPUs processes get, on machines without any: only names are dealt out."""

from __future__ import annotations

import pytest

from weft.cli.service.serve import worker_places
from weft.errors import ConfigError
from weft.gpu_choice import VISIBLE, choose_gpus, number_or_auto, visible_gpus


@pytest.mark.parametrize(
    ("named", "found"), [("4, 5", ["4", "5"]), ("", []), ("-1", []), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_visible_when_the_environment_names_gpus_then_those(monkeypatch, named, found):
    monkeypatch.setenv(VISIBLE, named)
    assert visible_gpus() == found


def test_choice_when_a_list_is_given_then_it_counts_among_the_visible_ones():
    assert choose_gpus("1,0", ["4", "5"]) == ["5", "4"]
    assert choose_gpus(None, ["4", "5"]) == ["4", "5"]
    for wrong in ("2", "x", "", "0,"):
        with pytest.raises(ConfigError, match="accepted are numbers from 0 to 1"):
            choose_gpus(wrong, ["4", "5"])
    with pytest.raises(ConfigError, match="there is none"):
        choose_gpus("0", [])


def test_number_when_it_is_none_then_says_what_is_accepted():
    assert (number_or_auto("auto", "--x", 0), number_or_auto("3", "--x", 0)) == (None, 3)
    for wrong in ("-1", "two", "1.5", ""):
        with pytest.raises(ConfigError, match="accepted are auto and numbers from 1"):
            number_or_auto(wrong, "--x", 1)


def test_workers_when_there_are_several_gpus_then_each_has_its_own(monkeypatch):
    """Never all on the first."""
    monkeypatch.setenv(VISIBLE, "4,5")
    assert [place[VISIBLE] for place in worker_places("auto", None, 1)] == ["4", "5"]
    assert [place[VISIBLE] for place in worker_places("3", None, 1)] == ["4", "5", "4"]
    assert [place[VISIBLE] for place in worker_places("1", None, 2)] == ["4", "5"], "one of each backbone"
    assert [place[VISIBLE] for place in worker_places("2", "1", 1)] == ["5", "5"]
    monkeypatch.setenv(VISIBLE, "")
    assert worker_places("auto", None, 1) == [{}]
    assert worker_places("0", None, 1) == []
