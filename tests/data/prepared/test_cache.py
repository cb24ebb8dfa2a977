"""Data is prepared once for all that need it, and the cache never costs a run anything."""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import Dataset
from weft.data.load import load_dataset, load_job_data
from weft.data.prepared import cache as cache_module
from weft.data.prepared import prepare as prepare_module
from weft.data.prepared.arrays import PAGE, read_entry
from weft.data.prepared.cache import PreparedCache, default_cache
from weft.errors import ConfigError, DataError
from weft.spec import JobSpec

Write = Callable[..., str]
TOKENIZER = make_tokenizer()
ROWS = [{"prompt": "ask", "completion": f"answer {i}"} for i in range(9)]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The folders in which anything was prepared."""
    seen: list[Path | None] = []
    real = prepare_module.prepare

    def counted(sources: Any, converter: Any, folder: Path | None = None) -> Dataset:
        seen.append(folder)
        return real(sources, converter, folder)

    monkeypatch.setattr(prepare_module, "prepare", counted)
    return seen


def load(tmp_path: Path, name: str = "train.jsonl", **settings: Any) -> Dataset:
    return load_dataset(
        [name], settings.pop("tokenizer", TOKENIZER), **{"max_length": 64, **settings}, base_dir=tmp_path
    )


def forget() -> None:
    """As a new process begins: nothing at hand."""
    cache_module._cache_at.cache_clear()


def same(one: Dataset, other: Dataset) -> bool:
    pairs = zip(one.samples, other.samples, strict=True)
    return one.fingerprint == other.fingerprint and all(
        a.tokens.tolist() == b.tokens.tolist()
        and a.supervised.tolist() == b.supervised.tolist()
        and (a.weights is None) == (b.weights is None)
        for a, b in pairs
    )


def test_jobs_when_they_read_the_same_file_then_it_is_prepared_once(
    write: Write, tmp_path: Path, root: Path, prepared: list[Path | None]
):
    """Six jobs on one file cost one preparation; a split by seed is a view of the same tokens."""
    write("train.jsonl", ROWS)
    specs = [JobSpec(f"job{i}", ("train.jsonl",), eval_data=2, seed=i, max_length=64) for i in range(6)]
    found = [
        load_job_data(spec, TOKENIZER, tmp_path, clock=datetime.datetime(2026, 1, 1 + spec.seed)) for spec in specs
    ]
    assert len(prepared) == 1
    assert len({id(data.train.samples.arrays) for data in found}) == 1
    assert len({data.train.fingerprint for data in found}) > 1


def test_data_when_prepared_before_then_another_process_maps_it(
    write: Write, tmp_path: Path, root: Path, prepared: list[Path | None], monkeypatch: pytest.MonkeyPatch
):
    """What comes from disk is what was prepared, with the same account; also under another name."""
    write("train.jsonl", ROWS)
    first = load(tmp_path)
    forget()
    write("again.jsonl", ROWS)
    second = load(tmp_path, "again.jsonl")
    assert len(prepared) == 1
    assert same(first, second)
    assert second.summary == dataclasses.replace(first.summary, sources=("again.jsonl",))
    assert not second.samples.arrays.tokens.flags.writeable
    monkeypatch.setenv("WEFT_CACHE", "off")
    assert same(first, load(tmp_path))
    assert len(prepared) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 32},
        {"objective": "weighted"},
        {"train_on_inputs": True},
        {"long_samples": "drop"},
        {"chat_template": "{% for m in messages %}{{ m.content }};{% endfor %}"},
        {"tokenizer": make_tokenizer(template="{% for m in messages %}{{ m.content }}!{% endfor %}")},
    ],
)
def test_data_when_any_setting_differs_then_is_prepared_again(
    change: dict[str, Any], write: Write, tmp_path: Path, root: Path, prepared: list[Path | None]
):
    """A key holds everything that decides what rows become."""
    write("train.jsonl", ROWS)
    load(tmp_path)
    load(tmp_path, **change)
    assert len(prepared) == 2


def test_clock_when_the_template_reads_it_then_is_part_of_the_key(
    write: Write, tmp_path: Path, root: Path, prepared: list[Path | None]
):
    """Only templates that write the date are prepared again another day; without a clock nothing is kept."""
    write("train.jsonl", ROWS)
    dated = "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    days = [datetime.datetime(2026, 1, day) for day in (1, 2, 1)]
    for day in days:
        load(tmp_path, clock=day)
    assert len(prepared) == 1
    for day in days:
        load(tmp_path, clock=day, chat_template=dated)
    assert len(prepared) == 3
    load(tmp_path, chat_template=dated)
    assert prepared[-1] is None


def break_array(folder: Path) -> None:
    path = folder / "tokens.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    stamp = path.stat().st_mtime_ns
    path.write_bytes(bytes(data))
    os.utime(path, ns=(stamp, stamp))


def cut_array(folder: Path) -> None:
    path = folder / "supervised.npy"
    path.write_bytes(path.read_bytes()[:-1])


def lose_array(folder: Path) -> None:
    (folder / "lengths.npy").unlink()


def change_page(folder: Path) -> None:
    path = folder / PAGE
    path.write_text(path.read_text().replace('\\"num_rows\\": 9', '\\"num_rows\\": 8'))


def lose_page(folder: Path) -> None:
    (folder / PAGE).write_text("{")


@pytest.mark.parametrize("damage", [break_array, cut_array, lose_array, change_page, lose_page])
def test_entry_when_broken_then_is_made_again(
    damage: Callable[[Path], None], write: Write, tmp_path: Path, root: Path, prepared: list[Path | None]
):
    """No bit of a damaged entry is trained on."""
    write("train.jsonl", ROWS)
    first = load(tmp_path)
    fingerprint, summary = first.fingerprint, first.summary
    (folder,) = root.iterdir()
    damage(folder)
    assert read_entry(folder) is None
    forget()
    again = load(tmp_path)
    assert (len(prepared), again.samples.fingerprint, again.summary) == (2, fingerprint, summary)
    assert read_entry(folder) is not None


def test_cache_when_it_cannot_be_written_then_the_data_is_there_with_one_note(
    write: Write, tmp_path: Path, root: Path, prepared: list[Path | None]
):
    """A file where the cache should be: every job trains, and one of them gets a warning."""
    write("train.jsonl", ROWS)
    root.write_text("in the way")
    forget()
    first, other = load(tmp_path), load(tmp_path, max_length=32)
    assert first.summary.notes == (
        f"prepared data is not kept for the next run: {root} cannot be written (File exists)",
    )
    assert other.summary.notes == ()
    assert len(first.samples) == len(load(tmp_path).samples) == 9
    assert len(prepared) == 2


def test_cache_when_the_disk_fills_up_then_nothing_is_left_behind(
    write: Write, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """An entry that cannot be completed goes; what was prepared is trained on."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "write_entry", full)
    write("train.jsonl", ROWS)
    forget()
    data = load(tmp_path)
    assert "No space left on device" in data.summary.notes[0]
    assert len(list(data.samples)) == 9
    assert list(root.iterdir()) == []


def test_file_when_it_changes_while_it_is_read_then_nothing_is_kept(
    write: Write, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was read may be neither the old file nor the new one."""
    write("train.jsonl", ROWS)
    real = prepare_module.prepare

    def prepare(*arguments: Any) -> Dataset:
        write("train.jsonl", ROWS[:5])
        return real(*arguments)

    monkeypatch.setattr(prepare_module, "prepare", prepare)
    forget()
    assert len(load(tmp_path).samples) == 5
    assert list(root.iterdir()) == []


def test_data_when_wrong_then_the_error_is_the_same_and_nothing_is_kept(write: Write, tmp_path: Path, root: Path):
    """Errors are reported again each time."""
    write("train.jsonl", [*ROWS, {"prompt": "ask"}])
    for _ in range(2):
        with pytest.raises(DataError, match=r"^train\.jsonl line 10: completion is missing\."):
            load(tmp_path)
    assert list(root.iterdir()) == []


def test_cache_when_full_then_what_was_used_least_recently_goes(write: Write, tmp_path: Path, root: Path):
    """A deleted entry stays readable where it is mapped."""
    write("train.jsonl", ROWS)
    first = load(tmp_path)
    (entry,) = PreparedCache(root, 1e9).entries()
    os.utime(root / entry.key / "used", (1, 1))
    load(tmp_path, max_length=32)
    small = PreparedCache(root, 2.5 * entry.num_bytes)
    small._shrink("")
    assert len(small.entries()) == 2
    write("other.jsonl", ROWS[:8])
    load(tmp_path, "other.jsonl")
    small._shrink(small.entries()[0].key)
    assert entry.key not in [each.key for each in small.entries()]
    assert len(small.entries()) == 2
    assert int(np.sum([sample.length for sample in first.samples])) == first.summary.num_tokens


def _prepare_there(tmp_path: Path, root: Path, barrier: Any) -> None:
    os.environ["WEFT_CACHE"] = str(root)
    barrier.wait()
    assert len(load(tmp_path).samples) == 9


def test_processes_when_they_prepare_the_same_file_at_once_then_one_entry_is_left(
    write: Write, tmp_path: Path, root: Path
):
    """No process waits for another, and none sees half an entry."""
    write("train.jsonl", ROWS)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    others = [context.Process(target=_prepare_there, args=(tmp_path, root, barrier)) for _ in range(3)]
    for process in others:
        process.start()
    for process in others:
        process.join()
    assert [process.exitcode for process in others] == [0, 0, 0]
    (folder,) = root.iterdir()
    assert read_entry(folder) is not None


def _die_half_way(tmp_path: Path, root: Path) -> None:
    def die(*_: Any) -> None:
        os.kill(os.getpid(), 9)

    os.environ["WEFT_CACHE"] = str(root)
    cache_module.write_entry = die  # type: ignore[assignment]
    load(tmp_path)


@pytest.mark.faults
def test_process_when_killed_half_way_then_the_next_removes_what_it_left(write: Write, tmp_path: Path, root: Path):
    """`kill -9` in the middle of an entry costs nothing but the work."""
    write("train.jsonl", ROWS)
    process = multiprocessing.get_context("fork").Process(target=_die_half_way, args=(tmp_path, root))
    process.start()
    process.join()
    assert process.exitcode == -9
    assert [path.name.startswith("tmp-") for path in root.iterdir()] == [True]
    load(tmp_path)
    (folder,) = root.iterdir()
    assert read_entry(folder) is not None


def test_leftovers_when_in_use_then_they_stay(tmp_path: Path):
    """A folder that is being filled belongs to the process that fills it."""
    cache = PreparedCache(tmp_path, 1e9)
    (tmp_path / "tmp-new").mkdir()
    (tmp_path / "tmp-old").mkdir()
    os.utime(tmp_path / "tmp-old", (1, time.time() - 7200))
    with cache._temporary() as folder:
        cache._remove_leftovers()
        assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["tmp-new"]


def test_limit_when_it_is_no_number_then_is_refused(monkeypatch: pytest.MonkeyPatch):
    """The variable is named, with what it may be."""
    monkeypatch.setenv("WEFT_CACHE", "somewhere")
    for text in ("much", "-1", "nan"):
        monkeypatch.setenv("WEFT_CACHE_GB", text)
        with pytest.raises(ConfigError, match=r"^WEFT_CACHE_GB: is .*; expected a number of gigabytes above 0\.$"):
            default_cache()
