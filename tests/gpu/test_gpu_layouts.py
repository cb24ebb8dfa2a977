"""Layouts on one GPU: as processes that share it, as streams of one process, and what of NCCL one process can run."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_runs import train, write_jobs

from weft.backbone.load import load_backbone
from weft.backbone.model_part import ModelPart
from weft.backbone.shards.peers import TorchPeers
from weft.backbone.source import load_tokenizer
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.execute.stages.stage_group import LocalStages
from weft.execute.stages.staged import StagedExecutor
from weft.execute.stages.transport import Channel, Route, TorchTransport
from weft.plan.pipeline.build import Schedule
from weft.plan.pipeline.planner import PipelinePlanner
from weft.spec import BackboneSpec, load_run

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
STEP = {"max_steps": 6, "global_batch_size": 5, "max_grad_norm": 0.05, "save_steps": 3}
JOBS = {
    "drops": {**STEP, "adapter": {"r": 16, "lora_dropout": 0.1}},
    "wide": {**STEP, "adapter": {"r": 64}, "eval_data": 4, "eval_steps": 3},
    "spread": {**STEP, "adapter": {"r": 8, "lora_dropout": 0.1}, "sums": "free"},
}


@pytest.fixture(scope="module")
def one_device(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files(trained(model, tmp_path_factory.mktemp("one")))


def trained(model: Path, folder: Path, *options: str) -> Path:
    jobs = write_jobs(folder, model, JOBS, capacity=1024)
    train(jobs, *options)
    return jobs


def files(jobs: Path) -> dict[str, bytes]:
    """Adapters and checkpoints of a run."""
    run = jobs.parent / "run"
    found = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.safetensors")}
    assert sum(name.endswith("adapter_model.safetensors") for name in found) == len(JOBS)
    return found


@pytest.mark.parametrize("layout", ["stages:2", "spread:2", "shards:2", "stages:1+stages:2"])
def test_files_when_processes_share_the_gpu_then_are_those_of_one_device(layout, model, one_device, tmp_path: Path):
    """Byte for byte: clipped, with dropout, evaluated, and one job that is spread."""
    number = 3 if "+" in layout else 2
    jobs = trained(model, tmp_path, "--layout", layout, "--devices", ",".join("0" * number))
    found = files(jobs)
    assert found.keys() == one_device.keys()
    assert [name for name in found if found[name] != one_device[name]] == []


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_adapters_when_stages_are_streams_of_this_process_then_have_the_bits_of_one_device(
    schedule, model, tmp_path: Path
):
    """Graphs for each place in flight, and marks between streams in the place of waiting."""
    path = write_jobs(tmp_path, model, {name: JOBS[name] for name in ("drops", "wide")})
    spec = BackboneSpec(str(model), device="cuda")
    parts = [load_backbone(spec, ModelPart(first, first + 1, 2)) for first in range(2)]
    staged = StagedExecutor(LocalStages(parts), load_tokenizer(spec.base_model))
    engines = [
        Engine(load_backbone(spec), capacity=1024),
        Engine(staged, capacity=1024, planner=PipelinePlanner(schedule, 2)),
    ]
    found = []
    for engine in engines:
        for job in load_run(path).jobs:
            engine.submit(job, load_job_data(job, engine.executor.tokenizer, tmp_path))
        engine.run()
        found.append({name: engine.executor.adapter_of(name) for name in engine.jobs})
    for name, adapter in found[0].items():
        for module, tensors in adapter.items():
            assert all(map(torch.equal, tensors, found[1][name][module])), (name, module)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(GPU)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_layer_when_gathered_by_nccl_then_is_whole(nccl):
    """With one process: what several would call, on streams as they would."""
    peers = TorchPeers(0, 1, GPU)
    peers.group = dist.new_group()
    whole = torch.arange(1 << 20, device=GPU).to(torch.uint8)
    into = torch.zeros_like(whole)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        peers.gather(0, peers.keep(0, whole), into).wait()
        assert torch.equal(into, whole)
        assert peers.most(7) == 7


def test_transport_when_made_for_nccl_then_opens_and_ends_without_anybody_to_talk_to(nccl):
    """Groups and streams can be made; others' routes are none of its business."""
    transport = TorchTransport(0, GPU, datetime.timedelta(minutes=1))
    transport.open([Route(Channel.PART, 2, 1)])
    transport.finish()


def test_layout_when_it_takes_more_gpus_than_there_are_then_refused_in_a_sentence(model, tmp_path: Path):
    jobs = write_jobs(tmp_path, model, JOBS)
    with pytest.raises(AssertionError, match=r"--layout: takes 99 GPUs, and there (is|are) \d+ GPU"):
        train(jobs, "--layout", "spread:99")
