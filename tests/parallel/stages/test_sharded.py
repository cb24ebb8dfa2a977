"""Devices that share the frozen weights of one backbone train every job to the bits of one device."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from covering import chosen, slow
from staged_models import assert_same_answers, part_backbones, train_until
from test_spread import jobs
from test_stage_pool import SPEC, paired
from tiny_models import assert_same_bits, finish, random_backbone, small_job, submit, train
from tiny_shards import Late, spread

from benchmarks.pipeline.in_process import LocalStages
from weft.engine.engine import Engine
from weft.engine.events import Event
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.parallel.stages.load_stages import find_parts
from weft.parallel.stages.stage_pool import StageLostError, StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.plan.cost.types import LinearCost
from weft.plan.spread import SpreadPlanner

LAYERS = 3


WHOLE = (LAYERS,)
"""A model in one stage."""
Copy = tuple[int, tuple[int, ...]]
"""By how many a copy of the frozen weights is shared, and the layers of its stages."""
BESIDE: list[list[Copy]] = [[(2, WHOLE), (1, WHOLE)], [(2, WHOLE), (2, WHOLE)], [(1, (1, 2)), (3, WHOLE)]]
"""Shards beside other replicas."""
STAGED: list[list[Copy]] = [[(2, (4, 1))], [(3, (1, 4)), (1, (5,))], [(2, (3, 1, 1)), (2, (5,))]]
"""Shards of stages."""


def planner(*copies: Copy) -> SpreadPlanner:
    sizes = tuple(len(layers) for count, layers in copies for _ in range(count))
    costs = (LinearCost(fixed_s=4.0),) * len(sizes)
    return SpreadPlanner(sizes, costs, shards=tuple(count for count, _ in copies))


def shared_by(*copies: Copy, **options: Any) -> tuple[Engine, list[list[list[Late]]]]:
    """An engine on devices in this process, and the calls of peers: by copy, stage and device."""
    peers: list[list[list[Late]]] = []
    replicas: list[list[Backbone]] = []
    for count, layers in copies:
        peers.append([[Late(index, count) for index in range(count)] for _ in layers])
        for shard in range(count):
            parts = part_backbones("llama", layers, **options)
            if count > 1:
                parts = [spread(part, peers=own[shard]) for part, own in zip(parts, peers[-1], strict=True)]
            replicas.append(parts)
    tokenizer: Any = replicas[0][0].tokenizer
    executor = StagedExecutor(LocalStages(*replicas), tokenizer, shards=[count for count, _ in copies])
    return Engine(executor, capacity=48, planner=planner(*copies)), peers


def sharded(count: int, **options: Any) -> tuple[Engine, list[Late]]:
    """The same of one whole model."""
    engine, (((peers,),)) = shared_by((count, WHOLE), **options)
    return engine, peers


@pytest.mark.parametrize(("count", "dtype"), chosen([(2, torch.float32), (3, torch.bfloat16), (4, torch.float32)], 1))
def test_jobs_when_trained_on_shards_then_have_the_bits_of_one_device(count, dtype):
    """Spread and at home, clipped, with dropout, evaluated between steps; some devices have nothing to do."""
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS, dtype=dtype), jobs(), capacity=48)
    engine, _ = sharded(count, dtype=dtype)
    submit(engine, *jobs())
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("layers", [slow(WHOLE), (1, 4)], ids=str)
def test_jobs_when_shards_take_the_fused_kernels_then_have_the_bits_of_one_device(layers):
    own = [small_job("a", max_grad_norm=0.05, max_steps=3), small_job("b", 1, global_batch_size=7, max_steps=2)]
    expected = train(random_backbone("llama", num_hidden_layers=sum(layers), kernels="fused"), own, capacity=48)
    engine, _ = shared_by((2, layers), kernels="fused")
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("copies", chosen([*BESIDE, *STAGED], 0, len(BESIDE)), ids=str)
def test_jobs_when_shards_are_combined_then_have_the_bits_of_one_device(copies):
    """Spread over all and at home on any."""
    own = [*jobs(), *(small_job(f"c{seed}", seed, max_steps=2, global_batch_size=seed) for seed in range(2, 5))]
    expected = train(random_backbone("llama", num_hidden_layers=sum(copies[0][1])), own, capacity=48)
    engine, _ = shared_by(*copies)
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("copies", [[(3, WHOLE)], *BESIDE, *STAGED], ids=str)
def test_devices_with_unequal_work_then_gather_the_same_layers_in_the_same_order(copies):
    """A device without work, too: no peer waits for one that has no more samples. Others gather nothing, and
    no layer is gathered again that always stays."""
    own = [
        small_job("short", max_steps=2),
        small_job("long", 1, max_steps=5, gradient_sum="any_order", global_batch_size=7),
    ]
    engine, peers = shared_by(*copies)
    submit(engine, *own)
    engine.run()
    for (count, layers), stages in zip(copies, peers, strict=True):
        for num_layers, together in zip(layers, stages, strict=True):
            assert len({tuple(device.calls) for device in together}) == 1
            assert (len(together[0].calls) > 20) == (count > 1 and num_layers > 2)


def test_jobs_when_others_join_and_leave_then_have_the_bits_of_one_device():
    own = jobs()
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=48)
    engine, _ = sharded(2)
    submit(engine, own[0], own[2], small_job("leaves", 5, max_steps=50))
    received: list[Event] = []

    def change(engine: Engine, event: Event) -> None:
        received.append(event)
        if len(received) == 5:
            submit(engine, own[1])
        if len(received) == 12:
            engine.cancel("leaves")
            submit(engine, own[3])

    found = finish(engine, change)
    assert found["leaves"].state == "cancelled" and len(received) > 12
    for spec, _ in own:
        assert_same_bits(found[spec.name], expected[spec.name])


def test_run_when_resumed_under_another_layout_then_the_files_are_those_of_one_device(tmp_path):
    def whole() -> Engine:
        return Engine(random_backbone("llama", num_hidden_layers=LAYERS), capacity=48)

    own = [small_job("a", gradient_sum="any_order", max_steps=6, ema_decay=0.5), small_job("b", 1, max_steps=6)]
    train_until(whole(), tmp_path / "one", 6, own)
    layouts: list[list[Copy]] = [[(2, WHOLE), (1, (1, 2))], [(2, (1, 2))], [(3, WHOLE)]]
    for index, copies in enumerate(layouts):
        engine, _ = shared_by(*copies)
        train_until(engine, tmp_path / "moved", 2 * index + 2, own)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors")]
    assert len(files) >= 4
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "moved" / path).read_bytes(), path


def test_memory_model_reports_what_shards_of_stages_hold():
    """Embedding on the first, head on the last."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    parts = part_backbones("llama", (2, 4), **sizes)
    shape = ModelShape.from_config(parts[0].model.config.to_dict())
    model = MemoryModel(shape, activation_bytes=4, num_stages=2, split=(2, 4), shards=3)
    for stage, part in enumerate(parts):
        assert model.weight_bytes(stage) == pytest.approx(spread(part, 3).num_bytes, rel=0.02)


@pytest.fixture
def processes() -> Iterator[StageProcesses]:
    group = StageProcesses(SPEC, *[find_parts(resolve(SPEC), 2)] * 2, shards=[2], silent_s=10.0)
    yield group
    group.close()
    assert all(process.poll() is not None for process in group.processes)


def test_jobs_when_shards_are_processes_then_have_the_bits_of_one_device(processes):
    """In two stages. One of them evaluates, runs references or answers, and the other goes through the layers with it;
    each holds a part of the backbone."""
    whole = load_backbone(SPEC)
    own = [*jobs(), paired()]
    one = Engine(whole, capacity=48)
    submit(one, *own)
    expected = finish(one)
    tokenizer: Any = whole.tokenizer
    engine = Engine(StagedExecutor(processes, tokenizer, shards=[2]), capacity=48, planner=planner((2, (2, 2))))
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    assert_same_answers(engine, one, ["a", "b"])
    assert all(facts.backbone_bytes < 0.9 * whole.num_bytes for facts in processes.call_all("facts"))
    os.kill(processes.processes[1].pid, signal.SIGKILL)
    with pytest.raises(StageLostError, match="shard 0, stage 1: was ended by signal 9, so all shards were ended"):
        engine.executor.row_tile(32)
