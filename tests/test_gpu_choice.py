"""Which GPUs processes get, on machines without any: only names are dealt out."""

from __future__ import annotations

import os
from typing import Any

import pytest

from weft.cli.layout_options import LayoutOptions
from weft.cli.service.serve import worker_environments
from weft.errors import ConfigError
from weft.model.resolve import resolve
from weft.parallel.replicas.hosts import rank_variables
from weft.parallel.stages.transport import find_gpus
from weft.processes import VISIBLE, are_idle, check_cpu_processes, choose_gpus, number_or_auto, visible_gpus
from weft.spec import BackboneSpec


@pytest.mark.parametrize(
    ("named", "found"), [("4, 5", ["4", "5"]), ("", []), ("-1", []), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])]
)
def test_visible_when_the_environment_names_gpus_then_those(monkeypatch, named, found):
    monkeypatch.setenv(VISIBLE, named)
    assert visible_gpus() == found


def test_choice_when_a_list_is_given_then_it_counts_among_the_visible_ones():
    assert choose_gpus("1,0", ["4", "5"]) == ["5", "4"]
    assert choose_gpus(None, ["4", "5"]) == ["4", "5"]
    for wrong in ("2", "x", "", "0,", "9" * 5000):
        with pytest.raises(ConfigError, match="accepted are numbers from 0 to 1"):
            choose_gpus(wrong, ["4", "5"])
    with pytest.raises(ConfigError, match="there is none"):
        choose_gpus("0", [])


def test_number_when_it_is_none_then_names_what_is_accepted():
    assert (number_or_auto("auto", "--x", 0), number_or_auto("3", "--x", 0)) == (None, 3)
    for wrong in ("-1", "two", "1.5", "", "1025", "9" * 5000):
        with pytest.raises(ConfigError, match="accepted are auto and numbers from 1"):
            number_or_auto(wrong, "--x", 1)


def test_processes_when_they_are_many_more_than_cores_then_refused(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    check_cpu_processes(16, "--layout")
    with pytest.raises(ConfigError, match="--layout: takes 999 processes, and 2 CPU cores can run 16; use"):
        check_cpu_processes(999, "--layout")


@pytest.mark.parametrize(
    "start",
    [
        lambda: worker_environments("999", None, 1),
        lambda: rank_variables("999", None, BackboneSpec("tiny", device="cpu")),
        lambda: find_gpus(resolve(BackboneSpec("tiny", device="cpu")), 999, None),
    ],
    ids=["workers", "replicas", "layout"],
)
def test_cpu_run_when_it_has_hundreds_of_processes_then_refused_before_any_starts(monkeypatch, start):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv(VISIBLE, "")
    with pytest.raises(ConfigError, match="takes 999 processes"):
        start()


def test_workers_when_there_are_several_gpus_then_each_has_its_own(monkeypatch):
    """Never all on the first."""
    monkeypatch.setenv(VISIBLE, "4,5")
    assert [env[VISIBLE] for env in worker_environments("auto", None, 1)] == ["4", "5"]
    assert [env[VISIBLE] for env in worker_environments("3", None, 1)] == ["4", "5", "4"]
    assert [env[VISIBLE] for env in worker_environments("1", None, 2)] == ["4", "5"], "one of each backbone"
    assert [env[VISIBLE] for env in worker_environments("2", "1", 1)] == ["5", "5"]
    assert [env[VISIBLE] for env in worker_environments("auto", None, 1, "stages:2")] == ["4,5"]
    assert [env[VISIBLE] for env in worker_environments("2", None, 1, "auto")] == ["4", "5"]
    with pytest.raises(ConfigError, match="--layout: stages:3 has 3 devices, and there are 2 GPUs"):
        worker_environments("1", None, 1, "stages:3")
    monkeypatch.setenv(VISIBLE, "")
    assert worker_environments("auto", None, 1) == [{}]
    assert worker_environments("0", None, 1) == []


class Driver:
    """NVIDIA's library, of GPUs with so many percent of their memory taken."""

    def __init__(self, *taken: int) -> None:
        self._taken = taken

    def __getattr__(self, name: str) -> object:
        return lambda *_: 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1 if index < len(self._taken) else None
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 100, self._taken[handle.value - 1]
        return 0


@pytest.mark.parametrize(
    ("visible", "layout", "device", "taken", "start"),
    [
        ("0,1,2,3", None, "auto", (90, 1, 0, 2), "3 more GPUs are free here: --layout auto trains on all 4"),
        ("0,1", None, "cuda", (1, 1), "1 more GPU is free here: --layout auto trains on all 2"),
        ("0,1", None, "auto", (1, 50), None),
        ("0,1", None, "auto", (1,), None),
        ("0,1", "stages:2", "auto", (1, 1), None),
        ("0,1", None, "cpu", (1, 1), None),
        ("0", None, "auto", (1, 1), None),
        ("", None, "auto", (), None),
    ],
)
def test_run_when_all_other_gpus_are_free_and_it_has_no_layout_then_a_note_names_one(
    monkeypatch, visible, layout, device, taken, start
):
    monkeypatch.setenv(VISIBLE, visible)
    monkeypatch.setattr("ctypes.CDLL", lambda _: Driver(*taken))
    note = LayoutOptions(layout).idle_note(device)
    assert (note is None) if start is None else (note is not None and note.startswith(start))


def test_gpus_when_their_driver_has_no_library_then_none_counts_as_idle(monkeypatch):
    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert not are_idle(["0"])
