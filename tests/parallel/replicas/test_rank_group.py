"""A group of ranks is alike, replaces lost ones, and explains in a sentence why it is impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.replicas.controller import CAPACITY
from benchmarks.replicas.controller import FACTS as SCRIPTED
from weft.errors import ConfigError, JobError
from weft.parallel.replicas.connections import Inbox, RankEnded, RankHandle
from weft.parallel.replicas.messages import RankAlive, RankFailed, RankReady, Report
from weft.parallel.replicas.rank_group import MAX_RESTARTS, RankGroup
from weft.plan.admit import Budget

FACTS = replace(SCRIPTED, environment={**SCRIPTED.environment, "config": "one"})
READY = RankReady(FACTS, CAPACITY, Budget(), weights="same")


class ScriptedRanks:
    """Ranks that send the next report of a list, each time that one is started."""

    def __init__(self, *reports: Report) -> None:
        self.inbox = Inbox()
        self._reports = list(reports)
        self.num_started = 0
        self.killed: list[int] = []

    def start(self, index: int) -> RankHandle:
        handle = RankHandle(index)
        self.num_started += 1
        self.inbox.put((handle, self._reports.pop(0)))
        return handle

    def kill(self, rank: RankHandle) -> None:
        self.killed.append(rank.index)

    def close(self) -> None: ...


def test_start_when_a_process_is_lost_by_accident_then_another_one_replaces_it():
    ranks = ScriptedRanks(RankEnded("was ended by signal 9", is_accident=True), READY)
    group = RankGroup(ranks, 1)
    group.await_all()
    assert len(group.loaded) == 1 and ranks.num_started == 2


def test_start_when_a_machine_is_lost_then_the_others_begin_without_waiting_for_a_replacement():
    ranks = ScriptedRanks(RankEnded("on far has gone", is_accident=True), READY, RankAlive())
    group = RankGroup(ranks, 2)
    group.await_all()
    assert [rank.index for rank in group.loaded] == [1] and len(group) == 2
    ranks.inbox.put((group[0].process, READY))
    while group.next_report() is not None:
        pass
    assert len(group.loaded) == 2


@pytest.mark.parametrize(
    ("reports", "problem"),
    [
        ([RankEnded("ended with code 1: no such thing")], r"replica 0: ended with code 1: no such thing\."),
        ([RankEnded("died", is_accident=True)] * (MAX_RESTARTS + 1), r"replica 0: died\."),
        ([RankFailed(JobError("no model there."))], "no model there"),
    ],
)
def test_start_when_a_process_fails_then_its_error_is_raised(reports, problem):
    with pytest.raises(JobError, match=problem):
        RankGroup(ScriptedRanks(*reports), 1).await_all()


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"weights": "others"}, "replica 1: has other weights of scripted than replica 0; all machines need the same"),
        ({"capacity": 96}, "replica 1: has memory for a capacity of 96 tokens, another one for 8,192; results depend"),
        (
            {"facts": replace(FACTS, environment={**FACTS.environment, "config": "other"})},
            "replica 1: has another config of scripted than replica 0; all machines need the same",
        ),
        (
            {"facts": replace(FACTS, environment={**FACTS.environment, "device": "A100"})},
            "replica 1: has device A100, replica 0 scripted; results would differ in their last bits.",
        ),
    ],
)
def test_start_when_replicas_are_unlike_then_one_sentence_names_the_difference(other: dict[str, Any], problem: str):
    ranks = ScriptedRanks(READY, replace(READY, **other))
    with pytest.raises(ConfigError) as error:
        RankGroup(ranks, 2).await_all()
    assert str(error.value).startswith(problem) and ranks.killed == [1]


@pytest.mark.parametrize("others_train", [True, False])
def test_free_index_when_no_rank_joins_for_long_then_is_kept_only_while_others_train(others_train):
    """A run over machines that are all gone ends after one such wait, not after several."""
    ranks = ScriptedRanks(*[READY] * (1 + others_train), RankEnded("was not joined"))
    group = RankGroup(ranks, 1 + others_train)
    group.await_all()
    group.replace(group[0], "on far has gone", is_wanted=True)
    group.give_up(group[0], "gave no sign of life for 300 s and was ended")
    ranks.inbox.put((group[0].process, READY))
    ranks._reports.append(READY)
    group.replace(group[0], "gave no sign of life for 300 s and was ended", is_wanted=True)
    assert len(group) == 2 * others_train


def test_close_when_a_rank_is_still_being_loaded_then_nothing_waits_for_it():
    ranks = ScriptedRanks(READY, READY, RankAlive())
    group = RankGroup(ranks, 2)
    group.await_all()
    group.replace(group[1], "vanished", is_wanted=True)
    group.close()
    assert ranks.killed == [1]
