"""Whole runs on a GPU: exact beside others, out of memory, quantised, killed and resumed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gpu_runs import same_bits, start, train, weights, write_jobs

pytestmark = pytest.mark.gpu
JOB = {"max_steps": 8, "global_batch_size": 4, "save_steps": 2}
DROPS = {**JOB, "adapter": {"r": 16, "lora_dropout": 0.1}}
NEIGHBOURS = {
    "wide": {**JOB, "adapter": {"r": 64}},
    "odd": {**JOB, "adapter": {"r": 3, "target_modules": ["q_proj", "down_proj"]}, "max_steps": 5},
    "wild": {**JOB, "learning_rate": 1.0e10},
}


@pytest.mark.parametrize("quantize", ["none", "fp8", "int8", "nf4"])
def test_adapter_when_trained_beside_others_then_has_the_bits_of_the_one_trained_alone(quantize, model, tmp_path: Path):
    """Whatever the frozen weights are stored as; one of the neighbours diverges."""
    alone = write_jobs(tmp_path / "alone", model, {"mine": DROPS}, capacity=2048, quantize=quantize)
    beside = write_jobs(tmp_path / "beside", model, {**NEIGHBOURS, "mine": DROPS}, capacity=2048, quantize=quantize)
    train(alone)
    start(beside).communicate(timeout=500)
    assert same_bits(weights(alone, "mine"), weights(beside, "mine"))


def test_adapter_when_a_neighbour_has_a_method_without_kernels_then_keeps_its_bits(model, tmp_path: Path):
    """The neighbour runs on the reference path; this one stays on the captured one."""
    scales = {**JOB, "adapter": {"method": "ia3"}}
    alone = write_jobs(tmp_path / "alone", model, {"mine": DROPS}, capacity=2048)
    beside = write_jobs(tmp_path / "beside", model, {"scales": scales, "mine": DROPS}, capacity=2048)
    train(alone)
    train(beside)
    assert same_bits(weights(alone, "mine"), weights(beside, "mine"))
    assert weights(beside, "scales")


def test_adapter_when_activations_are_made_again_or_kept_elsewhere_then_has_the_same_bits(model, tmp_path: Path):
    """Captured graphs, recomputation, and offloading, which runs without graphs."""
    found = []
    for name, memory in {"kept": {}, "made": {"recompute": "full"}, "moved": {"offload": True}}.items():
        jobs = write_jobs(tmp_path / name, model, {"mine": DROPS, **NEIGHBOURS}, capacity=2048, **memory)
        start(jobs).communicate(timeout=500)
        found.append(weights(jobs, "mine"))
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


def test_run_when_the_memory_ends_then_goes_on_with_smaller_microbatches(model, tmp_path: Path):
    """All jobs end well although the requested capacity does not fit."""
    jobs = {name: {**JOB, "global_batch_size": 24, "max_steps": 3} for name in ("one", "two", "three")}
    path = write_jobs(tmp_path, model, jobs, capacity=65536, memory_limit="1GB")
    printed = train(path)
    assert "ran out of memory at a capacity of" in printed or "they hold at most" in printed
    assert all(weights(path, name) for name in jobs)


def test_run_when_killed_again_and_again_then_ends_with_the_bits_of_an_undisturbed_one(model, tmp_path: Path):
    """`kill -9` once a checkpoint is there, three times, then `--resume` to the end."""
    jobs = {"mine": {**DROPS, "max_steps": 40}, "other": {**JOB, "max_steps": 40}}
    undisturbed = write_jobs(tmp_path / "undisturbed", model, jobs, capacity=2048)
    killed = write_jobs(tmp_path / "killed", model, jobs, capacity=2048)
    train(undisturbed)
    for resume in ((), ("--resume",), ("--resume",)):
        seen = newest_checkpoint(killed)
        process = start(killed, *resume)
        while process.poll() is None and newest_checkpoint(killed) <= seen:
            time.sleep(0.02)
        process.kill()
        process.communicate()
    train(killed, "--resume")
    assert all(same_bits(weights(undisturbed, name), weights(killed, name)) for name in jobs)


def newest_checkpoint(jobs: Path) -> str:
    return max((path.name for path in (jobs.parent / "run" / "mine" / "checkpoints").glob("step-*")), default="")
