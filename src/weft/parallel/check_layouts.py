"""Trains a run in every layout of this machine, compares adapters with those of one device, and measures links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from weft.engine.engine import Engine
from weft.engine.train import OpenEngine, load_engine, prepare_run
from weft.errors import WeftError
from weft.kernels.device import device_name
from weft.model.resolve import ResolvedModel, links_file, resolve
from weft.parallel.stages.load_stages import StageLayout, load_staged
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.layout import Layout, parse_layout
from weft.spec import RunSpec
from weft.store.atomic import write_file
from weft.store.json_text import dump, parse
from weft.store.wall_clock import Activity

ONE_DEVICE = "one device"
FIRST_STEPS = 2
MESSAGE_BYTES = 16 * 2**20
MOST_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest relative difference of adapters that counts as rounding, after a few steps."""
Adapters = Mapping[str, Mapping[str, tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class CheckedLayout:
    layout: str
    num_devices: int
    seconds: float = 0.0
    """Seconds of training, without the first steps."""
    difference: float = 0.0
    """Relative difference between the adapters of this layout and those of one device; 0.0: the same bytes."""
    is_right: bool = True
    problem: str = ""
    """Reason why the layout was not trained."""


@dataclass(frozen=True)
class MeasuredLinks:
    """The slowest of the links between any two devices."""

    device: str
    num_devices: int
    bytes_per_s: float
    latency_s: float


def layouts_over(num_devices: int) -> list[str]:
    found = [f"{kind}:{num_devices}" for kind in ("spread", "shards", "stages", "tensor")]
    if num_devices > 2 and num_devices % 2 == 0:
        found += [f"{kind}:2,stages:{num_devices // 2}" for kind in ("spread", "shards", "tensor")]
    return found


def check_layouts(
    spec: RunSpec, base_dir: Path, num_devices: int, report: Callable[[CheckedLayout], None]
) -> MeasuredLinks | None:
    """Trains the run on one device, then in every layout; stores the links for planners and returns them, or None if
    they could not be measured."""
    model = resolve(spec.backbone)
    links: list[MeasuredLinks] = []
    with _trained(spec, base_dir, load_engine) as (engine, seconds):
        expected = _adapters(engine)
        report(CheckedLayout(ONE_DEVICE, 1, seconds))
    for text in layouts_over(num_devices):
        layout = parse_layout(text, where="--layouts")
        try:
            with _trained(spec, base_dir, _opener(model, layout)) as (engine, seconds):
                if text == f"spread:{num_devices}":
                    links.append(_links(engine, model, num_devices))
                difference = _difference(_adapters(engine), expected)
        except WeftError as error:
            report(CheckedLayout(text, num_devices, problem=str(error)))
            continue
        most = MOST_ROUNDING[model.dtype] if layout.replicas[0].tensor > 1 else 0.0
        report(CheckedLayout(text, num_devices, seconds, difference, is_right=difference <= most))
    for found in links:
        _store(found)
    return links[0] if links else None


def _store(found: MeasuredLinks) -> None:
    file = links_file()
    try:
        known = parse(file.read_bytes())
    except (OSError, ValueError):
        known = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    figures = {"bytes_per_s": found.bytes_per_s, "latency_s": found.latency_s}
    write_file(file, dump({**(known if isinstance(known, dict) else {}), found.device: figures}))


def _opener(model: ResolvedModel, layout: Layout) -> OpenEngine:
    shards = layout.shards if max(layout.shards) > 1 else ()
    tensor = layout.degrees if max(layout.degrees) > 1 else ()
    stages = StageLayout(layout.replica_sizes, shards=shards, tensor=tensor)
    return lambda spec, jobs, wall: load_staged(spec, model, jobs, stages, wall)


@contextmanager
def _trained(spec: RunSpec, base_dir: Path, open_engine: OpenEngine) -> Iterator[tuple[Engine, float]]:
    """Engine after the run, and seconds of its steps after the first ones."""
    engine = prepare_run(spec, base_dir=base_dir, open_engine=open_engine).engine
    assert isinstance(engine, Engine), "a layout is trained by one engine"
    try:
        for name in engine.jobs:
            engine.hold(name, FIRST_STEPS)
        for _ in engine.events():
            pass
        begun_s = _computing_s(engine)
        for name, job in engine.jobs.items():
            engine.hold(name, job.num_steps)
        for name, job in engine.run().items():
            if job.state != "succeeded":
                raise WeftError(f"{job.state}: {job.reason}", where=name)
        yield engine, _computing_s(engine) - begun_s
    finally:
        engine.close()


def _computing_s(engine: Engine) -> float:
    return engine.timeline.wall.split().seconds(Activity.COMPUTING)


def _adapters(engine: Engine) -> Adapters:
    found = {name: engine.executor.adapter_of(name) for name in engine.jobs}
    return {
        name: {path: tuple(t.cpu().clone() for t in own) for path, own in one.items()} for name, one in found.items()
    }


def _difference(found: Adapters, expected: Adapters) -> float:
    """Largest relative difference of any job, over the matrices that start at zero: all of their values come from
    training."""
    largest = 0.0
    for name, own in found.items():
        assert own.keys() == expected[name].keys(), f"{name} has the same modules everywhere"
        pairs = [(t, e) for path in own for t, e in zip(own[path], expected[name][path], strict=True)]
        if all(torch.equal(t, e) for t, e in pairs):
            continue
        trained = [(own[path][-1].double(), expected[name][path][-1].double()) for path in own]
        apart = sum(float((t - e).square().sum()) for t, e in trained)
        size = sum(float(e.square().sum()) for _, e in trained)
        largest = max(largest, (apart / size) ** 0.5, torch.finfo(torch.float64).tiny)
    return largest


def _links(engine: Engine, model: ResolvedModel, num_devices: int) -> MeasuredLinks:
    executor = engine.executor
    assert isinstance(executor, StagedExecutor), "a layout's executor"
    waits, rates = [], []
    for first, second in combinations(range(num_devices), 2):
        small, large = (
            executor.stages.call_all("time_link", first, second, size)[first] for size in (4, MESSAGE_BYTES)
        )
        waits.append(small)
        rates.append(MESSAGE_BYTES / max(large - small, 1e-9))
    return MeasuredLinks(device_name(model.device), num_devices, min(rates), max(waits))
