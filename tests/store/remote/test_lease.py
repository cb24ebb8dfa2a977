"""One owner of a URL over all machines, without a look at any clock."""

import pytest
from toy_run import URL, FragileStore

from weft.errors import StorageError
from weft.store import remote_files
from weft.store.remote_files import LEASE_S, LOOK_S, Lease, RemoteDirectory


def claimed(url=URL, local="one", notices=None, on_sleep=lambda: None):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        on_sleep()

    remote = RemoteDirectory(url, "--out")
    lease = Lease.claim(remote, local, notify=(notices if notices is not None else []).append, sleep=sleep)
    return lease, sum(slept)


def test_claim_when_the_owner_gives_signs_of_life_then_it_is_refused(tmp_path):
    first, _ = claimed()
    notices = []
    with pytest.raises(StorageError, match=r"^fragile://bucket/run1: is in use by process \d+\. Wait for its end, or"):
        claimed(local="two", notices=notices, on_sleep=first.beat)
    assert "without a heartbeat for 60 s, this process takes over" in notices[0]
    first.check()


def test_claim_when_the_owner_is_silent_then_it_is_taken_over_and_writes_nothing_more(tmp_path):
    first, _ = claimed()
    second, slept_s = claimed(local="two")
    assert LEASE_S - LOOK_S < slept_s <= LEASE_S
    for late in (first.check, first.beat):
        with pytest.raises(StorageError, match=r"was taken over by process \d+; this process writes nothing"):
            late()
    first.release()
    second.check()
    assert list(FragileStore.store) == ["/bucket/run1/.owner-2"]


@pytest.mark.parametrize("how", ["released", "same copy"])
def test_claim_when_the_owner_is_known_to_be_gone_then_nothing_waits(how):
    first, _ = claimed()
    if how == "released":
        first.release()
    assert claimed(local="one" if how == "same copy" else "two")[1] == 0


def test_claim_when_another_is_quicker_then_it_is_refused(monkeypatch):
    first, _ = claimed()
    first.release()
    second, _ = claimed()
    terms = iter([[1], [2]])
    monkeypatch.setattr(remote_files, "_terms", lambda remote: next(terms))
    with pytest.raises(StorageError, match="is in use by process"):
        claimed()
    monkeypatch.undo()
    second.check()
