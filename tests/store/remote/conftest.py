"""What the tests of runs at a URL share: a store in memory, and an undisturbed run."""

import functools

import pytest
from toy_run import FragileStore, files, train

from weft.store import atomic, mirror, remote_files, run_dir

VERSIONS = functools.cache(run_dir.library_versions)


@pytest.fixture(autouse=True)
def _store(monkeypatch):
    """An empty store; nothing happens in the background, and nothing waits, not even for the local disk."""
    FragileStore.reset()
    monkeypatch.setattr(remote_files, "OBJECT_STORES", remote_files.OBJECT_STORES | {"fragile"})
    monkeypatch.setattr(atomic, "sync", lambda path: None)
    monkeypatch.setattr(run_dir, "library_versions", VERSIONS)
    monkeypatch.setattr(mirror, "MIRROR_S", 1e6)
    monkeypatch.setattr(remote_files, "BEAT_S", 1e6)
    monkeypatch.setattr(mirror.Mirror.drain, "__defaults__", ((0.0, 0.0), lambda seconds: None))
    yield
    FragileStore.reset()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The files of the toy run, trained without a URL."""
    path = tmp_path_factory.mktemp("alone") / "run1"
    train(path, resume=False)
    return files(path)
