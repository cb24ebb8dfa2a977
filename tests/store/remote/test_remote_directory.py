"""Files behind a URL appear whole, on object stores and on others."""

import pytest
from toy_run import URL, FragileStore

from weft.errors import StorageError
from weft.store.remote_files import RemoteDirectory


def test_create_when_the_store_cannot_refuse_to_overwrite_then_what_is_read_back_decides(monkeypatch):
    """Two create the file at once, and the later one stays."""
    remote = RemoteDirectory(URL, "--out")

    def overwritten(self, path, value, mode="overwrite", **options):
        FragileStore.store.clear()
        super(FragileStore, self).pipe_file(path, b"theirs")

    monkeypatch.setattr(FragileStore, "pipe_file", overwritten)
    assert not remote.create("x", b"ours")


def test_file_system_when_it_shows_files_while_they_are_written_then_they_are_written_under_another_name(tmp_path):
    remote = RemoteDirectory(f"local://{tmp_path}/far/run", "--out")
    assert remote.names() == [] and remote.read("x") is None
    remote.write("a/b", b"1")
    (tmp_path / "source").write_bytes(b"2")
    remote.upload(tmp_path / "source", "c")
    assert remote.create("d", b"3") and not remote.create("d", b"4")
    assert remote.names() == ["a/b", "c", "d"] and remote.top_names() == ["a", "c", "d"]
    remote.delete("c")
    remote.delete("c")
    remote.download("a/b", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"1"
    with pytest.raises(StorageError, match="does not answer"):
        remote.download("none", tmp_path / "none")
