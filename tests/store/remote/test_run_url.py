"""Runs behind a URL: what lies there can always be gone on with, by one process at a time."""

import pytest
from toy_run import URL, FragileStore, KilledError, check_complete, files, remote_files, tensors, train

from weft.errors import ConfigError, StorageError
from weft.job_state import JobState
from weft.store import mirror as mirror_module
from weft.store import remote_files as remote_module
from weft.store.checkpoint import latest_checkpoint
from weft.store.mirror import Mirror, RunUrl
from weft.store.owner import Owner
from weft.store.remote_files import RemoteDirectory
from weft.store.run_dir import RunDirectory, RunFiles, RunRecord


def trained(cache, work, *, resume=False):
    """Does something in the directory of the run behind the URL."""
    with RunUrl(URL).open_for_training(cache, resume=resume, notify=print) as path:
        work(path)


def toy(*, resume=False):
    """Trains the toy run, with an upload only at its end."""
    return lambda path: train(path, resume=resume)


def toy_mirrored(cache, monkeypatch, *, resume=False):
    """Trains the toy run behind the URL, with an upload after every step."""
    mirrors = []
    monkeypatch.setattr(mirror_module, "Mirror", lambda *given: mirrors.append(Mirror(*given)) or mirrors[-1])
    trained(cache, lambda path: train(path, resume=resume, after_step=mirrors[-1].sync), resume=resume)


def test_run_when_trained_then_all_files_lie_behind_the_url_and_none_is_left_here(tmp_path, undisturbed, monkeypatch):
    toy_mirrored(tmp_path, monkeypatch)
    assert remote_files() == undisturbed
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [".lock"]
    toy_mirrored(tmp_path / "elsewhere", monkeypatch, resume=True)
    assert remote_files() == undisturbed


def test_run_when_only_its_end_is_uploaded_then_the_files_are_the_same(tmp_path, undisturbed):
    trained(tmp_path, toy())
    assert remote_files() == undisturbed


def newest(found):
    """Less the earlier checkpoint, which a kill may leave beside the last one, as on a local disk."""
    return {name: data for name, data in found.items() if "/step-00000002/" not in name}


@pytest.mark.faults
def test_run_when_killed_at_any_change_of_the_store_then_resuming_ends_with_the_same_bytes(
    tmp_path, undisturbed, monkeypatch
):
    """On another machine with nothing but the URL, and on the same one with its copy."""
    for farewell in ("release", "withdraw"):
        monkeypatch.setattr(remote_module.Lease, farewell, lambda lease: lease._stop.set())
    num_begun = 0
    for n in range(1, 1000):
        FragileStore.reset()
        FragileStore.dies_at = n
        cache = tmp_path / f"{n}"
        try:
            toy_mirrored(cache, monkeypatch)
        except KilledError:
            FragileStore.dies_at = None
        else:
            break
        found = remote_files()
        check_complete(found)
        num_begun += "run.json" in found
        left = {path: bytes(file.getvalue()) for path, file in FragileStore.store.items()}
        # Elsewhere the lease has run out by now.
        monkeypatch.setattr(remote_module, "LEASE_S", 0.0)
        toy_mirrored(tmp_path / "elsewhere" / f"{n}", monkeypatch, resume="run.json" in found)
        assert newest(remote_files()) == undisturbed, f"killed at change {n}, resumed elsewhere"
        FragileStore.reset()
        for path, data in left.items():
            FragileStore().pipe_file(path, data)
        holds_run = "run.json" in found or any(cache.glob("*/run1/run.json"))
        toy_mirrored(cache, monkeypatch, resume=holds_run)
        assert newest(remote_files()) == undisturbed, f"killed at change {n}, resumed here"
    assert n > 40 and num_begun > n / 2


def test_run_when_the_store_is_away_for_a_while_then_it_is_trained_and_uploaded_later(tmp_path, undisturbed):
    def work(path):
        FragileStore.is_away = True
        train(path, resume=False)
        FragileStore.is_away = False

    trained(tmp_path, work)
    assert remote_files() == undisturbed


def test_run_when_its_end_cannot_be_uploaded_then_reports_where_it_is_and_resuming_uploads_it(tmp_path, undisturbed):
    def work(path):
        train(path, resume=False)
        FragileStore.is_away = True

    with pytest.raises(StorageError) as failed:
        trained(tmp_path, work)
    (path,) = tmp_path.glob("*/run1")
    message = (
        f"{URL}: does not answer (AwayError: the store is away). All is in {path}; --resume on this machine goes on "
    )
    assert str(failed.value).startswith(message)
    assert files(path) == undisturbed and remote_files() == {}
    FragileStore.is_away = False
    trained(tmp_path, toy(resume=True), resume=True)
    assert remote_files() == undisturbed


def test_run_when_the_block_fails_before_there_is_a_run_then_nothing_is_left_anywhere(tmp_path):
    def work(path):
        with RunDirectory.open(path, resume=False) as run:
            run.write_job("a", {})
            raise ConfigError("bad data.")

    with pytest.raises(ConfigError):
        trained(tmp_path, work)
    assert FragileStore.store == {}
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == [".lock"]


def test_run_when_the_block_fails_later_then_what_was_written_is_uploaded(tmp_path, undisturbed):
    def work(path):
        train(path, resume=False)
        raise ConfigError("bad end.")

    with pytest.raises(ConfigError):
        trained(tmp_path, work)
    assert remote_files() == undisturbed


def test_run_when_the_url_holds_one_then_only_resume_takes_it(tmp_path):
    with pytest.raises(StorageError, match=rf"^{URL}: there is no run to resume\. Leave out"):
        trained(tmp_path, toy(resume=True), resume=True)
    assert FragileStore.store == {}
    trained(tmp_path, toy())
    with pytest.raises(StorageError, match=rf"^{URL}: already holds a run\. Use --resume"):
        trained(tmp_path, toy())


def test_run_when_this_machine_trains_it_already_then_it_is_refused_at_once(tmp_path):
    def work(path):
        with pytest.raises(StorageError, match=rf"^{URL}: is in use by another process of this machine\. Wait"):
            trained(tmp_path, toy())
        train(path, resume=False)

    trained(tmp_path, work)


def test_resume_when_another_machine_went_on_meanwhile_then_its_files_count(tmp_path):
    """A leftover copy is worthless once another process has owned the run."""

    def interrupted(path):
        train(path, resume=False)
        raise KeyboardInterrupt

    def second(path):
        with RunDirectory.open(path, resume=False) as run:
            run.write_run(RunRecord(base_model="second"))

    def look(path):
        assert RunFiles(path).read_run().base_model == "second" and not (path / "a").exists()

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "one", interrupted)
    assert remote_files() == {} and any(tmp_path.glob("one/*/run1/run.json"))
    trained(tmp_path / "two", second)
    trained(tmp_path / "one", look, resume=True)


def test_run_when_taken_over_while_it_trains_then_reports_it_and_uploads_nothing_more(tmp_path):
    def work(path):
        with RunDirectory.open(path, resume=False) as run:
            run.write_run(RunRecord())
            other = Owner(term=2, host="far", pid=7, boot="other", token="far")
            RemoteDirectory(URL, "--out").write(".owner-2", other.encode())

    with pytest.raises(StorageError, match=rf"^{URL}: was taken over by process 7 on far; this process writes nothing"):
        trained(tmp_path, work)
    assert remote_files() == {}


def test_run_when_the_mirror_has_seen_a_new_owner_then_local_files_stay_unchanged_too(tmp_path, monkeypatch):
    mirrors = []
    monkeypatch.setattr(mirror_module, "Mirror", lambda *given: mirrors.append(Mirror(*given)) or mirrors[-1])

    def work(path):
        with RunDirectory.open(path, resume=False) as run:
            run.write_run(RunRecord())
            mirrors[0].lost = remote_module.LeaseLostError("was taken over.", where=URL)
            run.write_status("a", JobState.RUNNING)

    with pytest.raises(StorageError, match=rf"^{URL}: was taken over\."):
        trained(tmp_path, work)


def test_run_when_the_url_holds_files_of_others_then_they_stay(tmp_path, monkeypatch):
    RemoteDirectory(URL, "--out").write("notes/mine.txt", b"mine")
    toy_mirrored(tmp_path, monkeypatch)
    assert remote_files()["notes/mine.txt"] == b"mine"


def test_reading_when_another_process_trains_then_all_but_tensors_is_there_to_read(tmp_path):
    trained(tmp_path, toy())
    with RunUrl(URL).open_for_reading() as folder:
        assert folder.name == "run1" and (folder / "a" / "status.json").exists()
        assert not list(folder.rglob("*.safetensors"))

    def fail():
        with RunUrl(URL).open_for_reading() as folder:
            raise StorageError("is gone.", where=str(folder / "x"))

    with pytest.raises(StorageError, match=rf"^{URL}/x: is gone\."):
        fail()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a//b", ".hidden", "a/.hidden"])
def test_resume_when_an_object_has_a_name_that_leads_elsewhere_then_it_is_left_where_it_is(tmp_path, name):
    def work(path):
        assert latest_checkpoint(path / "a" / "checkpoints")[0].tensors["params.a"].equal(tensors(4)["params.a"])

    trained(tmp_path, toy())
    FragileStore().pipe_file(f"{URL}/{name}", b"evil")
    trained(tmp_path / "cache", work, resume=True)
    assert not [found for found in tmp_path.rglob("*") if "evil" in found.name or "hidden" in found.name]
