"""What a process may still take is read from Linux, within a container's limit."""

from __future__ import annotations

import pytest

from weft import process_memory


@pytest.mark.parametrize(("limit", "left"), [("1000", 1000 - 900 + 500 + 200), ("max", 50 * 1024), ("800", 800 - 200)])
def test_available_bytes_when_a_container_has_a_limit_then_cached_files_count_as_free(
    monkeypatch, tmp_path, limit, left
):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:      50 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\ninactive_file 500\nactive_file 200\n")
    monkeypatch.setattr(process_memory, "_PROC", tmp_path)
    monkeypatch.setattr(process_memory, "_GROUP", tmp_path)
    assert process_memory.available_bytes() == left


def test_available_bytes_when_linux_reports_nothing_then_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(process_memory, "_PROC", tmp_path)
    monkeypatch.setattr(process_memory, "_GROUP", tmp_path)
    assert process_memory.available_bytes() is None and process_memory.resident_bytes() is None
