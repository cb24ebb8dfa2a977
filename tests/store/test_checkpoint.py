import json
import math
import os
import resource
import shutil
import signal

import pytest
import torch

from weft.errors import CheckpointError, StorageError
from weft.store import faults
from weft.store.atomic import TEMP_PREFIX, remove_leftovers
from weft.store.checkpoint import (
    STATE_FILE,
    TENSORS_FILE,
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from weft.store.faults import FaultPlan


def checkpoint(step: int, **state) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "a": torch.randn(3, 5, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(step),
        "rng": torch.randint(0, 255, (16,), generator=generator, dtype=torch.uint8),
    }
    return Checkpoint(step, tensors, {"cursor": [step, 0], "lr": 1 / (step + 3), **state}, {"torch": "2"})


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert (a.step, a.state, a.environment) == (b.step, b.state, b.environment)
    assert {name: bits(t) for name, t in a.tensors.items()} == {name: bits(t) for name, t in b.tensors.items()}


def steps(directory) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


def test_load_when_saved_then_every_bit_comes_back(tmp_path):
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 3.4e38])
    tensors = {
        "f32": special,
        "bf16": special.bfloat16(),
        "f16": torch.randn(4).half(),
        "f64": torch.randn(2, 2, dtype=torch.float64),
        "i64": torch.tensor([-(2**63), 2**63 - 1]),
        "bool": torch.tensor([True, False]),
        "u8": torch.arange(256, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "zero_dim_int": torch.tensor(2**40),
        "zero_dim_f32": torch.tensor(0.1),
        "zero_dim_bf16": torch.tensor(0.1, dtype=torch.bfloat16),
    }
    saved = Checkpoint(7, tensors, {"x": 0.1, "n": None, "s": "ü\ud800", "deep": [{"a": [1, 2]}]}, {"v": "1"})
    path = save_checkpoint(tmp_path, saved, keep=1)
    assert path == tmp_path / "step-00000007"
    loaded = load_checkpoint(path)
    assert_same(loaded, saved)
    assert list(loaded.tensors) == sorted(tensors)


def test_save_when_tensors_share_memory_or_are_views_then_they_are_saved_as_seen(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    live = torch.nn.Parameter(torch.ones(2))
    saved = Checkpoint(1, {"base": base, "t": base.T, "slice": base[:, 1], "live": live}, {}, {})
    loaded = load_checkpoint(save_checkpoint(tmp_path, saved, keep=1))
    assert loaded.tensors["t"].equal(base.T)
    assert loaded.tensors["slice"].equal(base[:, 1])
    assert not loaded.tensors["live"].requires_grad


def test_save_when_repeated_then_bytes_are_the_same(tmp_path, files):
    save_checkpoint(tmp_path, checkpoint(4), keep=2)
    first = files(tmp_path)
    save_checkpoint(tmp_path, checkpoint(4), keep=2)
    assert files(tmp_path) == first


def test_save_when_the_step_exists_then_it_is_replaced(tmp_path):
    save_checkpoint(tmp_path, checkpoint(4, tries=1), keep=2)
    path = save_checkpoint(tmp_path, checkpoint(4, tries=2), keep=2)
    assert load_checkpoint(path).state["tries"] == 2
    assert steps(tmp_path) == [4]


@pytest.mark.parametrize("state", [{"best": math.inf}, {"t": (1, 2)}, {1: 2}, {"x": object()}, {"s": {1, 2}}])
def test_save_when_state_would_not_come_back_then_refuses_and_writes_nothing(tmp_path, state, files):
    with pytest.raises(CheckpointError, match="state of step 3"):
        save_checkpoint(tmp_path / "c", Checkpoint(3, {}, state, {}), keep=1)
    assert files(tmp_path) == {}


def test_save_when_more_than_keep_then_the_oldest_go(tmp_path):
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    assert steps(tmp_path) == [30, 40]


def test_save_when_a_newer_or_damaged_one_lies_around_then_it_never_pushes_out_a_sound_one(tmp_path):
    for step in (10, 20, 30, 40):
        save_checkpoint(tmp_path, checkpoint(step), keep=9)
    _flip(tmp_path / "step-00000040", TENSORS_FILE, -1)
    (tmp_path / "step-00000030" / STATE_FILE).write_text("{")
    save_checkpoint(tmp_path, checkpoint(35), keep=2)
    assert steps(tmp_path) == [20, 30, 35, 40]
    found, rejected = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 35
    assert len(rejected) == 1


def test_latest_when_there_is_nothing_then_returns_none(tmp_path):
    assert latest_checkpoint(tmp_path / "missing") == (None, [])
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert latest_checkpoint(tmp_path) == (None, [])


def _rewrite_state(path, change):
    outer = json.loads((path / STATE_FILE).read_text())
    change(outer)
    (path / STATE_FILE).write_text(json.dumps(outer))


def _flip(path, name, at, bit=0):
    data = bytearray((path / name).read_bytes())
    data[at] ^= 1 << bit
    (path / name).write_bytes(data)


def _cut(path, name, size):
    os.truncate(path / name, size)


def _append(path, name):
    with (path / name).open("ab") as file:
        file.write(b"\0")


DAMAGE = {
    "tensors_missing": (lambda p: (p / TENSORS_FILE).unlink(), "missing"),
    "tensors_empty": (lambda p: _cut(p, TENSORS_FILE, 0), "0 bytes"),
    "tensors_cut_by_one": (lambda p: _cut(p, TENSORS_FILE, (p / TENSORS_FILE).stat().st_size - 1), "were written"),
    "tensors_cut_in_header": (lambda p: _cut(p, TENSORS_FILE, 20), "20 bytes"),
    "tensors_longer": (lambda p: _append(p, TENSORS_FILE), "were written"),
    "tensors_first_bit": (lambda p: _flip(p, TENSORS_FILE, 0), "checksum"),
    "tensors_header_bit": (lambda p: _flip(p, TENSORS_FILE, 30, 3), "checksum"),
    "tensors_last_bit": (lambda p: _flip(p, TENSORS_FILE, -1, 7), "checksum"),
    "tensors_zeroed": (
        lambda p: (p / TENSORS_FILE).write_bytes(bytes((p / TENSORS_FILE).stat().st_size)),
        "checksum",
    ),
    "tensors_is_directory": (lambda p: ((p / TENSORS_FILE).unlink(), (p / TENSORS_FILE).mkdir()), "cannot be read"),
    "state_missing": (lambda p: (p / STATE_FILE).unlink(), "missing"),
    "state_empty": (lambda p: _cut(p, STATE_FILE, 0), "not valid JSON"),
    "state_cut": (lambda p: _cut(p, STATE_FILE, 60), "not valid JSON"),
    "state_binary": (lambda p: (p / STATE_FILE).write_bytes(b"\xff" * 50), "UTF-8"),
    "state_nan": (lambda p: (p / STATE_FILE).write_text('{"format": NaN}'), "finite"),
    "state_list": (lambda p: (p / STATE_FILE).write_text("[]"), "does not describe"),
    "state_other_number": (
        lambda p: _rewrite_state(p, lambda o: o["content"]["state"].update(lr=0.5)),
        "checksum",
    ),
    "state_other_step": (lambda p: _rewrite_state(p, lambda o: o["content"].update(step=21)), "checksum"),
    "state_newer_format": (lambda p: _rewrite_state(p, lambda o: o.update(format=2)), "format 2"),
    "both_missing": (lambda p: [f.unlink() for f in p.iterdir()], "missing"),
    "is_a_file": (lambda p: (shutil.rmtree(p), p.write_text("x")), "cannot be read"),
    "other_steps_files": (
        lambda p: shutil.copytree(p.with_name("step-00000010"), p, dirs_exist_ok=True),
        "holds step 10",
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize("damage", DAMAGE)
def test_latest_when_the_newest_is_damaged_then_the_previous_one_loads_and_the_reason_is_reported(tmp_path, damage):
    for step in (10, 20):
        save_checkpoint(tmp_path, checkpoint(step), keep=2)
    break_it, reason = DAMAGE[damage]
    break_it(tmp_path / "step-00000020")
    found, rejected = latest_checkpoint(tmp_path)
    assert found is not None
    assert_same(found, checkpoint(10))
    assert len(rejected) == 1
    assert "step-00000020" in rejected[0]
    assert reason in rejected[0]


@pytest.mark.faults
def test_load_when_any_single_bit_of_the_state_is_flipped_then_it_is_rejected_or_unchanged(tmp_path):
    """Only whitespace may change unnoticed."""
    path = save_checkpoint(tmp_path, checkpoint(20), keep=1)
    whole = (path / STATE_FILE).read_bytes()
    noticed = 0
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        (path / STATE_FILE).write_bytes(data)
        try:
            assert_same(load_checkpoint(path), checkpoint(20))
            assert chr(whole[at]).isspace()
        except CheckpointError:
            noticed += 1
    assert noticed > len(whole) / 2


# A crash at every point of two consecutive saves, the second of which prunes; and of saving one step again.

BEFORE = (10, 20)


def prepare(root):
    for step in BEFORE:
        save_checkpoint(root, checkpoint(step), keep=2)


def two_saves(root, first=30):
    for step in (30, 40):
        if step >= first:
            save_checkpoint(root, checkpoint(step), keep=2)


def save_again(root):
    save_checkpoint(root, checkpoint(20), keep=2)


def count_points(work, root) -> int:
    prepare(root)
    faults.arm(FaultPlan("raise", 10**9))
    work(root)
    faults.disarm()
    return faults.hits()


def check_after_crash(root) -> int:
    """What a restart finds; returns the step it goes on from."""
    remove_leftovers(root)
    assert not [path for path in root.rglob("*") if TEMP_PREFIX in path.name]
    found, rejected = latest_checkpoint(root)
    assert found is not None
    assert rejected == []
    assert_same(found, checkpoint(found.step))
    return found.step


@pytest.mark.faults
@pytest.mark.parametrize("work", [two_saves, save_again])
def test_save_when_any_operation_fails_then_a_previous_one_loads_and_no_temp_remains(tmp_path, work):
    total = count_points(work, tmp_path / "count")
    found = []
    for n in range(1, total + 1):
        root = tmp_path / str(n)
        prepare(root)
        faults.arm(FaultPlan("raise", n))
        with pytest.raises(StorageError):
            work(root)
        faults.disarm()
        assert not [path for path in root.rglob("*") if TEMP_PREFIX in path.name], "cleaned up without a restart"
        found.append(check_after_crash(root))
    assert found == sorted(found)
    assert set(found) == ({20, 30, 40} if work is two_saves else {20})
    assert total > 20


@pytest.mark.faults
@pytest.mark.parametrize("work", [two_saves, save_again])
def test_save_when_killed_at_any_point_then_a_restart_ends_with_the_same_bytes(tmp_path, work, in_child, files):
    total = count_points(work, tmp_path / "count")
    undisturbed = files(tmp_path / "count")
    found = []
    for n in range(1, total + 1):
        root = tmp_path / str(n)
        prepare(root)

        def killed(n=n, root=root):
            faults.arm(FaultPlan("kill", n))
            work(root)

        status = in_child(killed)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        found.append(check_after_crash(root))
        if work is two_saves:
            two_saves(root, first=found[-1])
        assert files(root) == undisturbed
    assert found == sorted(found)
    assert set(found) == ({20, 30, 40} if work is two_saves else {20})


@pytest.mark.faults
def test_remove_leftovers_when_itself_killed_at_any_point_then_the_next_restart_still_heals(tmp_path, in_child, files):
    total = count_points(save_again, tmp_path / "count")
    undisturbed = files(tmp_path / "count")
    interrupted = 0
    for n in range(1, total + 1):
        root = tmp_path / str(n)
        prepare(root)
        in_child(lambda n=n, root=root: (faults.arm(FaultPlan("kill", n)), save_again(root)))
        at = 1
        while os.WIFSIGNALED(
            in_child(lambda at=at, root=root: (faults.arm(FaultPlan("kill", at)), remove_leftovers(root)))
        ):
            at += 1
        interrupted += at - 1
        assert check_after_crash(root) == 20
        assert files(root) == undisturbed
    assert interrupted > 20


@pytest.mark.faults
def test_save_when_the_disk_is_full_then_reports_it_and_leaves_only_what_was_there(tmp_path, in_child, files):
    save_checkpoint(tmp_path, checkpoint(10), keep=2)
    before = files(tmp_path)
    faults.arm(FaultPlan("enospc", 2, "file.write"))
    with pytest.raises(StorageError, match=r"step-00000020: the disk is full\."):
        save_checkpoint(tmp_path, checkpoint(20), keep=2)
    faults.disarm()
    assert files(tmp_path) == before

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with pytest.raises(StorageError, match="file size limit"):
            save_checkpoint(tmp_path, Checkpoint(30, {"big": torch.zeros(10_000)}, {}, {}), keep=2)

    assert in_child(limited) == 0
    assert files(tmp_path) == before
