"""What lies behind a URL never speaks of what is not there, whatever changes meanwhile."""

import json

import pytest
from toy_run import URL, FragileStore, check_complete, remote_files, train

from weft.store import mirror as mirror_module
from weft.store.mirror import LocalCopy, Mirror, whole_names
from weft.store.remote_files import Lease, RemoteDirectory
from weft.store.run_dir import RunDirectory, RunRecord


def open_mirror(tmp_path):
    remote = RemoteDirectory(URL, "--out")
    copy = LocalCopy(tmp_path, URL, "run.json")
    lease = Lease.claim(remote, copy.path, notify=lambda text: None)
    copy.take_ownership(lease.owner.term)
    return Mirror(copy, remote, lease), copy, lease


def test_mirror_when_files_change_while_it_looks_then_none_is_older_than_what_speaks_of_it(tmp_path, monkeypatch):
    """The job ends between two looks; a reader of the status finds the adapter it names."""
    mirror, copy, _ = open_mirror(tmp_path)
    num_looks = 0
    look = mirror_module._names

    def while_looking(root):
        nonlocal num_looks
        num_looks += 1
        if num_looks == 2:
            train(copy.path, resume=True)
        return look(root)

    with RunDirectory.open(copy.path, resume=False) as run:
        run.write_run(RunRecord(base_model="toy"))
    monkeypatch.setattr(mirror_module, "_names", while_looking)
    mirror.sync()
    check_complete(remote_files())
    assert "a/adapter/adapter_config.json" in remote_files()
    assert json.loads(remote_files()["run.json"])["base_model"] == "toy"


def test_mirror_when_a_checkpoint_goes_while_it_is_set_aside_then_no_half_of_it_is_uploaded(tmp_path, monkeypatch):
    mirror, copy, _ = open_mirror(tmp_path)
    train(copy.path, resume=False)
    copy_file = mirror_module._copy_file

    def vanishing(name, directory, target):
        if name == "tensors.safetensors":
            raise FileNotFoundError
        copy_file(name, directory, target)

    monkeypatch.setattr(mirror_module, "_copy_file", vanishing)
    mirror.sync()
    assert not [name for name in remote_files() if "checkpoints" in name]
    monkeypatch.undo()
    mirror.sync()
    assert "a/checkpoints/step-00000004/state.json" in remote_files()


def test_background_when_the_store_is_away_then_it_is_reported_once_and_when_it_is_back(
    tmp_path, monkeypatch, undisturbed
):
    mirror, copy, _ = open_mirror(tmp_path)
    train(copy.path, resume=False)
    notices, away = [], iter([True, True, True, False, False])

    def wait(seconds):
        FragileStore.is_away = next(away, None)
        return FragileStore.is_away is None

    monkeypatch.setattr(mirror._stop, "wait", wait)
    mirror._serve(notices.append)
    assert notices == [
        "fragile://bucket/run1: does not answer (AwayError: the store is away). "
        "Training goes on; what is written is uploaded later.",
        "fragile://bucket/run1: answers again; all is uploaded.",
    ]
    assert remote_files() == undisturbed


@pytest.mark.parametrize("job", ["a", "best", "adapter", "checkpoints", "trials"])
def test_order_when_a_job_has_the_name_of_a_directory_then_it_is_that_of_any_job(job):
    names = ["adapter/adapter_config.json", "checkpoints/step-00000004/state.json", "metrics.jsonl", "status.json"]
    names.append("checkpoints/step-00000004/tensors.safetensors")
    ordered = sorted(names, key=lambda name: mirror_module._upload_position(f"{job}/{name}"))
    assert ordered.index("metrics.jsonl") < ordered.index("status.json")
    assert ordered.index("adapter/adapter_config.json") < ordered.index("status.json")
    assert ordered[-1] == "checkpoints/step-00000004/state.json"
    taken = sorted(names, key=lambda name: -mirror_module._taken_at(f"{job}/{name}"))
    assert {name.split("/")[0] for name in taken[:2]} == {"checkpoints"} and taken[2] == "status.json"
    assert whole_names([f"{job}/{name}" for name in names]) == ([f"{job}/{name}" for name in names], [])
    assert whole_names([f"{job}/checkpoints/step-00000004/tensors.safetensors"])[0] == []
