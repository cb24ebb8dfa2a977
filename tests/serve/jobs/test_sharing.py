"""Workers share jobs: each holds what it can, none is idle beside a full one, and nothing moves for ever."""

from __future__ import annotations

import itertools

import pytest

from weft.serve.db.workers import WorkerLoad, fair_room, is_for_another, num_to_give_back


def job(max_length=1024, min_job_bytes=None, started_at=None):
    return {"max_length": max_length, "min_job_bytes": min_job_bytes, "started_at": started_at}


def load(id, num_held=0, **facts):
    return WorkerLoad(id, num_held, **{"max_jobs": 8, "max_length": 2048, **facts})


@pytest.mark.parametrize(
    ("wanted", "facts", "is_left"),
    [
        (job(4096), {"max_length": 8192}, True),
        (job(4096), {"max_length": 2048}, False),
        (job(4096), {"max_length": None}, True),
        (job(1024), {"max_length": 8192}, False),
        (job(min_job_bytes=50), {"job_bytes": 60}, True),
        (job(min_job_bytes=50), {"job_bytes": None}, True),
        (job(min_job_bytes=50), {"job_bytes": 40}, False),
        (job(4096, min_job_bytes=50), {"max_length": 8192, "job_bytes": 40}, False),
        (job(4096), {"max_length": 8192, "is_draining": True}, True),
        (job(4096, started_at=1), {"max_length": 2048}, True),
        (job(1024, started_at=1), {"max_length": 2048}, False),
    ],
)
def test_job_when_it_does_not_fit_here_then_left_only_to_a_worker_that_holds_it(wanted, facts, is_left):
    """A new job that fits no worker fails here, as it would alone; one that has begun waits for a worker that could."""
    assert is_for_another(wanted, load("small", job_bytes=30), [load("other", **facts)]) is is_left


def test_room_when_the_others_cannot_hold_the_jobs_then_they_are_not_left_waiting_for_them():
    long = [job(4096) for _ in range(4)]
    large, small = load("large", max_length=8192), load("small")
    assert fair_room(large, [small], 8, long) == 4
    assert fair_room(large, [small], 8, [*long[:2], job(), job()]) == 2, "two are the other's to take"


@pytest.mark.parametrize(
    ("held", "others", "most", "number"),
    [(4, [0], 8, 2), (3, [0], 8, 1), (2, [1], 8, 0), (1, [0], 8, 0), (6, [0, 0], 8, 4), (6, [0], 1, 1), (0, [6], 8, 0)],
)
def test_give_back_when_others_have_empty_seats_then_the_numbers_end_equal_to_within_one(held, others, most, number):
    given = [load(f"w{i}", other, max_jobs=most) for i, other in enumerate(others)]
    assert num_to_give_back(load("full", held), given) == number


def test_give_back_when_carried_out_then_every_move_levels_and_it_ends_with_equal_numbers():
    """Whatever the numbers were, a job moves only to a worker with fewer, and soon nothing moves any more."""
    for held in itertools.product(range(6), repeat=3):
        now = list(held)
        for _ in range(4):
            for giver in range(3):
                others = [load(str(i), now[i]) for i in range(3) if i != giver]
                for _ in range(num_to_give_back(load("giver", now[giver]), others)):
                    now[giver] -= 1
                    taker = now.index(min(now))
                    assert taker != giver
                    now[taker] += 1
        assert max(now) - min(now) <= 1
        for giver in range(3):
            assert num_to_give_back(load("x", now[giver]), [load("y", n) for i, n in enumerate(now) if i != giver]) == 0


def test_jobs_when_the_other_drains_then_nothing_is_left_or_given_to_it():
    draining = load("b", is_draining=True)
    assert fair_room(load("a"), [draining], 8, [job() for _ in range(4)]) == 8, "all of its seats"
    assert num_to_give_back(load("a", 4), [draining]) == 0


def test_give_back_when_the_other_is_of_another_kind_then_keeps_its_jobs():
    """On other devices, or in other microbatches, a job would end with other bits."""
    assert num_to_give_back(load("a", 4, kind=("H200",)), [load("b", kind=("L4",))]) == 0
