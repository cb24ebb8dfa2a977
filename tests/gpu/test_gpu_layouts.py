"""Layouts on one GPU: as processes that share it, as streams of one process, and what of NCCL one process can run.

Every phase prints a line with its seconds, and a layout that takes too long is ended after its processes have printed
where they are; one that starts in a new machine takes half a minute. It has not been run on several GPUs.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_runs import start, write_jobs, write_model

from benchmarks.pipeline.in_process import LocalStages
from weft.adapters.devices import SideBySide
from weft.adapters.routing import Routing
from weft.data.load import load_job_data
from weft.engine.engine import Engine
from weft.engine.execute.memory import ExpectedJobs
from weft.kernels.device import Stream, beside, on_stream, record
from weft.model.load import load_backbone
from weft.model.model_part import ModelPart
from weft.model.resolve import resolve
from weft.model.shards import TorchPeers
from weft.model.source import load_tokenizer
from weft.parallel.stages.load_stages import StageLayout, load_stages
from weft.parallel.stages.stage_pool import StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.parallel.stages.transport import Channel, Route, Teams, TorchTransport, join_devices, tensor_devices
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.pipeline.pair import RowsHeld, side_by_side, two_groups
from weft.plan.planner import Planner
from weft.plan.program import Program
from weft.plan.spread import SpreadPlanner
from weft.plan.types import JobQueue, Limits, whole_batches
from weft.spec import BackboneSpec, load_run

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
CAPACITY = 1024
LONGEST_S = 90.0
"""For one layout, the start of its processes included."""
STEP = {"max_steps": 4, "global_batch_size": 5, "max_grad_norm": 0.05}
JOBS = {
    "drops": {**STEP, "adapter": {"r": 16, "lora_dropout": 0.1}},
    "plain": {**STEP, "adapter": {"r": 16}, "eval_data": 4, "eval_steps": 2},
    "spread": {**STEP, "adapter": {"r": 16, "lora_dropout": 0.1}, "gradient_sum": "any_order"},
}
SGD = {**STEP, "optim": "sgd", "learning_rate": 1.0}
SHARED_JOBS = {
    "drops": {**SGD, "adapter": {"r": 16, "lora_dropout": 0.1}},
    "narrow": {**SGD, "adapter": {"r": 4}, "eval_data": 4, "eval_steps": 2},
    "dora": {**SGD, "adapter": {"method": "dora", "r": 16}},
    "bias": {**SGD, "adapter": {"method": "bitfit"}},
    "prefix": {**SGD, "adapter": {"method": "prefix_tuning", "num_virtual_tokens": 4, "init_prefix_weights": "zero"}},
}
"""For devices that share layers, which round otherwise: AdamW would make steps of that where gradients are small."""
Adapters = dict[str, dict[str, tuple[torch.Tensor, ...]]]


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Prints when something has been done, and how long it took."""
    begun_s = time.perf_counter()
    yield
    print(f"[{what}: {time.perf_counter() - begun_s:.1f} s]", flush=True)


@contextmanager
def ended_in_time(stages: StageProcesses) -> Iterator[None]:
    """Has processes that take too long print where they are, and ends them, so that callers get an error."""

    def end() -> None:
        for process in stages.processes:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        for index, process in enumerate(stages.processes):
            print(f"--- stage {index}\n{stages._log(index).read_text(errors='replace')[-4000:]}", flush=True)
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(LONGEST_S, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> BackboneSpec:
    """Two layers, so that it can be cut once."""
    return BackboneSpec(str(write_model(tmp_path_factory.mktemp("layouts") / "llama")), device="cuda")


@pytest.fixture(scope="module")
def jobs_file(small: BackboneSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jobs(tmp_path_factory.mktemp("jobs"), Path(small.base_model), JOBS, capacity=CAPACITY)


def trained(engine: Engine, jobs_file: Path) -> Adapters:
    for job in load_run(jobs_file).jobs:
        engine.submit(job, load_job_data(job, engine.executor.tokenizer, jobs_file.parent))
    with phase("trained"):
        engine.run()
    states = {name: (job.state, job.reason) for name, job in engine.jobs.items()}
    assert all(state == "succeeded" for state, _ in states.values()), states
    return {name: engine.executor.adapter_of(name) for name in engine.jobs}


def assert_equal(found: Adapters, expected: Adapters) -> None:
    unequal = [
        (name, module)
        for name, adapter in expected.items()
        for module, tensors in adapter.items()
        if not all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(tensors, found[name][module], strict=True))
    ]
    assert not unequal, f"{len(unequal)} modules differ, such as {unequal[:3]}"


@pytest.fixture(scope="module")
def one_device(small: BackboneSpec, jobs_file: Path) -> Adapters:
    with phase("one device, with the kernels it compiles"):
        return trained(Engine(load_backbone(small), capacity=CAPACITY), jobs_file)


def test_adapters_when_stages_are_streams_of_this_process_then_have_the_bits_of_one_device(
    small, jobs_file, one_device
):
    """Graphs for each buffer in flight, and marks between streams instead of waiting."""
    parts = [load_backbone(small, ModelPart(first, first + 1, 2)) for first in range(2)]
    executor = StagedExecutor(LocalStages(parts), load_tokenizer(small.base_model))
    engine = Engine(executor, capacity=CAPACITY, planner=PipelinePlanner(Schedule.ONE_F_ONE_B, 2))
    assert_equal(trained(engine, jobs_file), one_device)


def planner_of(layout: StageLayout) -> Planner:
    sizes = layout.replica_sizes
    if len(sizes) == 1:
        return PipelinePlanner(Schedule.ONE_F_ONE_B, *sizes)
    return SpreadPlanner(sizes, (LinearCost(),) * len(sizes), shards=layout.shards)


@pytest.mark.parametrize(
    "layout",
    [
        StageLayout((2,), gpus="0,0"),
        StageLayout((1, 1), gpus="0,0"),
        StageLayout((1, 1), shards=(2,), gpus="0,0"),
        StageLayout((1, 2), gpus="0,0,0"),
        StageLayout((1, 1, 1), shards=(2, 1), gpus="0,0,0"),
        StageLayout((2, 2), shards=(2,), gpus="0,0,0,0"),
    ],
    ids=["stages:2", "spread:2", "shards:2", "stages:1+stages:2", "shards:2+stages:1", "shards:2,stages:2"],
)
def test_adapters_when_processes_share_the_gpu_then_have_the_bits_of_one_device(layout, small, jobs_file, one_device):
    """Clipped, with dropout, evaluated, and one job that is spread; through pinned memory and gloo."""
    assert_equal(in_layout(small, layout, jobs_file), one_device)


@pytest.mark.parametrize("quantize", ["nf4", "fp8"])
def test_adapters_when_quantised_stages_share_the_gpu_then_have_the_bits_of_one_device(quantize, small, jobs_file):
    """The second one has no embedding, and its linears are of another type than it computes in."""
    spec = replace(small, quantize=quantize)
    expected = trained(Engine(load_backbone(spec), capacity=CAPACITY), jobs_file)
    assert_equal(in_layout(spec, StageLayout((2,), gpus="0,0"), jobs_file), expected)


def in_layout(small: BackboneSpec, layout: StageLayout, jobs_file: Path, planner: Planner | None = None) -> Adapters:
    """What the jobs have learnt in processes of their own."""
    adapters = tuple(job.adapter for job in load_run(jobs_file).jobs)
    expected = ExpectedJobs(adapters, len(adapters))
    with phase("processes have loaded and met"):
        executor = load_stages(resolve(small), layout, 0.2, expected)
    assert isinstance(executor.stages, StageProcesses)
    try:
        with ended_in_time(executor.stages):
            engine = Engine(executor, capacity=CAPACITY, planner=planner or planner_of(layout))
            return trained(engine, jobs_file)
    finally:
        executor.close()


def far(found: Adapters, expected: Adapters, starts: Adapters) -> dict[str, float]:
    """By job, how far two adapters are from each other, as a share of how far one went."""

    def length(one: Adapters, other: Adapters, name: str) -> float:
        pairs = ((x, y) for path, own in one[name].items() for x, y in zip(own, other[name][path], strict=True))
        return sum(float((x.cpu().float() - y.cpu().float()).square().sum()) for x, y in pairs) ** 0.5

    return {name: length(found, expected, name) / length(expected, starts, name) for name in expected}


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (StageLayout((1,), tensor=(2,), gpus="0,0"), {}),
        (StageLayout((1,), tensor=(2,), gpus="0,0"), {"quantize": "nf4"}),
        (StageLayout((1,), tensor=(2,), gpus="0,0"), {"kernels": "reference"}),
        (StageLayout((2,), tensor=(2,), gpus="0,0,0,0"), {}),
    ],
    ids=["tensor:2", "tensor:2 in nf4", "tensor:2 without kernels", "tensor:2,stages:2"],
)
def test_adapters_when_processes_share_every_layer_then_are_near_one_device_and_the_same_again(
    layout, settings, small, tmp_path: Path
):
    """Sums go through pinned memory and gloo, so no graph is captured; in bfloat16, which rounds them otherwise."""
    spec = replace(small, **settings)
    jobs_file = write_jobs(tmp_path / "jobs", Path(small.base_model), SHARED_JOBS, capacity=CAPACITY)
    backbone = load_backbone(spec)
    made = {job.name: backbone.new_adapter(job.adapter, job.seed) for job in load_run(jobs_file).jobs}
    starts = {name: adapter.tensors() for name, adapter in made.items()}
    with phase("one device"):
        expected = trained(Engine(backbone, capacity=CAPACITY), jobs_file)
    first, second = (in_layout(spec, layout, jobs_file) for _ in range(2))
    assert_equal(second, first)
    found = far(first, expected, starts)
    print(f"[{found}]", flush=True)
    assert max(found.values()) < 0.05, found


def in_pairs(queues: Sequence[JobQueue], limits: Limits) -> Program:
    """All jobs in two groups, side by side wherever that can be; two have no more rows than one would."""
    groups = two_groups(whole_batches(queues, limits, 1), limits.capacity // 2)
    return side_by_side(groups[1], RowsHeld(limits.capacity))


def test_adapters_when_microbatches_run_side_by_side_then_have_the_bits_that_they_have_without(small, tmp_path: Path):
    """Two processes share every layer; while the sums of one microbatch are on their way, the other one computes."""
    jobs_file = write_jobs(tmp_path / "jobs", Path(small.base_model), SHARED_JOBS, capacity=CAPACITY)
    layout = StageLayout((1,), tensor=(2,), gpus="0,0")
    num_pairs = []

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        program = in_pairs(queues, limits)
        num_pairs.append(len(program.pairs))
        return program

    alone, paired = (in_layout(small, layout, jobs_file, planner) for planner in (planner_of(layout), plan))
    assert sum(num_pairs) >= 4, num_pairs
    assert_equal(paired, alone)


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
    stream = torch.cuda.Stream(GPU)
    stream.wait_stream(torch.cuda.current_stream(GPU))
    with phase("gathered"), torch.cuda.stream(stream):
        peers.gather(0, peers.keep(0, whole), into).wait()
        assert torch.equal(into, whole)
        assert peers.most(7) == 7


def test_sum_when_recorded_with_nccl_then_the_graph_adds_up_again(nccl):
    """With one process, whose sum is its own part: what several would record."""
    devices = tensor_devices(0, 1, GPU, "nccl")
    assert devices.can_be_recorded
    devices.groups = join_devices(0, Teams((1,)), datetime.timedelta(minutes=1))
    part = torch.ones(64, 32, dtype=torch.bfloat16, device=GPU)
    stream = torch.cuda.Stream(GPU)
    with beside(GPU, stream):
        devices.add_up(part)
    torch.cuda.synchronize(GPU)
    with record(stream=stream) as graph:
        (swapped,) = devices.start_swap(2 * part[None], 0)()
        added = devices.add_up(swapped)
    part.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize(GPU)
    assert torch.equal(added, torch.full_like(part, 6.0))


def test_sums_when_two_passes_take_turns_with_nccl_then_each_has_its_own(nccl):
    """With one process: two groups of processes, one stream, and threads that launch in turn."""
    devices = tensor_devices(0, 1, GPU, "nccl")
    devices.groups = join_devices(0, Teams((1,)), datetime.timedelta(minutes=1))
    starts = torch.randn(2, 512, 512, device=GPU)
    ends: list[torch.Tensor | None] = [None, None]

    def run(index: int) -> None:
        x = starts[index]
        for _ in range(8):
            x = torch.tanh(devices.add_up(x @ starts[index]))
        ends[index] = x

    with on_stream(Stream(GPU)):
        SideBySide(devices, Routing(), GPU).run([lambda: run(0), lambda: run(1)])
        paired = list(ends)
        for index in range(2):
            run(index)
    torch.cuda.synchronize(GPU)
    assert all(torch.equal(one, other) for one, other in zip(paired, ends, strict=True))


def test_transport_when_made_for_nccl_then_opens_and_ends_without_anybody_to_talk_to(nccl):
    """Groups and streams can be made; others' routes are none of its business."""
    transport = TorchTransport(0, GPU, datetime.timedelta(minutes=1), Teams((1,)))
    transport.open([Route(Channel.PART, 2, 1)])
    transport.finish()


def run_to_its_end(jobs: Path, *options: str) -> tuple[int, str]:
    """`weft train`, ended where it takes too long."""
    process = start(jobs, *options)
    timer = threading.Timer(LONGEST_S, process.kill)
    timer.start()
    with phase(f"weft train {' '.join(options)}"):
        printed, _ = process.communicate()
    timer.cancel()
    return process.returncode, printed


def test_layout_when_it_takes_more_gpus_than_there_are_then_refused_in_a_sentence(jobs_file):
    code, printed = run_to_its_end(jobs_file, "--layout", "spread:99")
    assert code == 2 and "--layout: takes 99 GPUs, and there " in printed, printed


def test_files_when_the_command_trains_in_stages_then_are_those_of_one_device(small, tmp_path: Path):
    """Byte for byte, as a user would start it."""
    files = {}
    for name, options in {"one": (), "stages": ("--layout", "stages:2", "--devices", "0,0")}.items():
        own = write_jobs(tmp_path / name, Path(small.base_model), {"drops": JOBS["drops"]}, capacity=CAPACITY)
        code, printed = run_to_its_end(own, *options)
        assert code == 0, printed[-4000:]
        files[name] = (own.parent / "run" / "drops" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert files["one"] == files["stages"]
