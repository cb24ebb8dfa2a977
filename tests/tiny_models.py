"""Tiny random backbones of every family, random data for them, and jobs to train; shared by several folders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny_families import FAMILIES as FAMILIES
from tiny_families import POSITIONS as POSITIONS
from tiny_families import SETTINGS as SETTINGS
from tiny_families import VOCABULARY as VOCABULARY
from tiny_families import model_type, plain_model

from weft.data.dataset import Dataset, JobData
from weft.data.samples import Sample, Samples
from weft.engine.engine import Engine
from weft.engine.events import EvalDone, Event, StepDone
from weft.model.backbone import Backbone
from weft.model.packing import attention
from weft.model.path import Memory
from weft.spec import AdapterSpec, JobSpec

Job = tuple[JobSpec, JobData]
TWO_LINEARS = r".*\.(q_proj|query_key_value|c_attn|down_proj|dense_4h_to_h|fc2|c_fc)"
"""Of a layer, one before attention and one after it: targets of runs in which something else is of interest."""


def random_model(name: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model that attends as packed samples do; all biases and norms are random too."""
    attention.register()
    with_attention = attention.attention_to_load(model_type(name))
    return plain_model(name, seed=seed, attention=with_attention, **changes).to(dtype)


def random_backbone(
    name: str = "llama", *, kernels: str = "reference", memory: Memory | None = None, **options: Any
) -> Backbone:
    """A tiny random backbone whose tokenizer knows nothing but its end token."""
    backbone = Backbone(random_model(name, **options), SimpleNamespace(eos_token_id=None), name)
    backbone.use_kernels(kernels, memory)
    return backbone


def shallow_backbone(name: str = "llama", **options: Any) -> Backbone:
    """A random backbone of one layer: enough for what is done with jobs, in about half the time."""
    return random_backbone(name, num_hidden_layers=1, **options)


def random_sample(rng: np.random.Generator, length: int, *, low: int = 3, high: int = VOCABULARY) -> Sample:
    """A sample whose last token at least is supervised."""
    supervised = rng.random(length) < 0.6
    supervised[-1] = True
    return Sample(rng.integers(low, high, length, dtype=np.int32), supervised)


def dataset(samples: Sequence[Sample]) -> Dataset:
    """Samples as if read from a file."""
    return Dataset.of(samples, "random")


def random_data(
    seed: int, num_samples: int = 12, *, lengths: tuple[int, int] = (3, 20), num_eval: int = 0, high: int = VOCABULARY
) -> JobData:
    """Random samples to train on and, if requested, to evaluate on."""
    rng = np.random.default_rng(seed)
    drawn = [random_sample(rng, int(rng.integers(*lengths)), high=high) for _ in range(num_samples + num_eval)]
    return JobData(dataset(drawn[:num_samples]), dataset(drawn[num_samples:]) if num_eval else None)


def weighted_data(data: JobData, *, weights: Sequence[float] = (0.25, 1.0, 3.0)) -> JobData:
    """The same samples, but their tokens count more or less; one sample after the other has the next of the weights."""

    def weighed(samples: Sequence[Sample]) -> list[Sample]:
        own = [weights[i % len(weights)] for i in range(len(samples))]
        # Every other token counts the square of it.
        each = [np.where(np.arange(s.length) % 2, w, w * w) for s, w in zip(samples, own, strict=True)]
        return [Sample(s.tokens, s.supervised, e) for s, e in zip(samples, each, strict=True)]

    held = None if data.eval is None else replace(data.eval, samples=Samples.of(weighed(data.eval.samples)))
    return JobData(replace(data.train, samples=Samples.of(weighed(data.train.samples))), held)


def job_spec(name: str, *, adapter: Mapping[str, Any] | None = None, **settings: Any) -> JobSpec:
    """A small job, by default on two linears of each layer; its data is given to `submit`, not read from a file."""
    defaults: dict[str, Any] = {"max_length": 24, "global_batch_size": 4, "learning_rate": 5e-3, "max_steps": 6}
    chosen = {"target_modules": TWO_LINEARS} if adapter is None else dict(adapter)
    if "method" not in chosen:
        chosen.setdefault("r", 4)
    return JobSpec(name, ("random",), adapter=AdapterSpec(**chosen), **{**defaults, **settings})


def small_job(name: str, seed: int = 0, **settings: Any) -> Job:
    """A job with dropout on two linears of each layer and a handful of samples."""
    adapter = {"lora_dropout": 0.1, "target_modules": TWO_LINEARS}
    return job_spec(name, seed=seed, adapter=adapter, **settings), random_data(seed, num_samples=7)


def submit(engine: Engine, *jobs: Job) -> None:
    """Hands jobs to an engine."""
    for spec, data in jobs:
        engine.submit(spec, data)


def taken_slots(backbone: Backbone) -> set[int]:
    """Slots that an adapter sits on."""
    return {slot for linear in backbone.linears.values() for slot in linear.slots}


def flat(adapter: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """The tensors of an adapter, one after another."""
    return [tensor for pair in adapter.values() for tensor in pair]


@dataclass
class Outcome:
    """What became of one job."""

    adapter: dict[str, tuple[torch.Tensor, ...]]
    state: str
    reason: str | None
    losses: list[float] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    eval_accuracies: list[float] = field(default_factory=list)

    def goes_on_from(self, earlier: Outcome) -> None:
        """Puts the results of its earlier steps before those of these."""
        self.losses[:0], self.eval_losses[:0] = earlier.losses, earlier.eval_losses
        self.accuracies[:0], self.eval_accuracies[:0] = earlier.accuracies, earlier.eval_accuracies


def train(
    backbone: Backbone,
    jobs: Sequence[Job],
    *,
    capacity: int = 64,
    on_event: Callable[[Engine, Event], None] | None = None,
) -> dict[str, Outcome]:
    """Trains jobs together and returns what became of each; `on_event` may use the engine while it runs."""
    engine = Engine(backbone, capacity=capacity)
    submit(engine, *jobs)
    return finish(engine, on_event)


def finish(engine: Engine, on_event: Callable[[Engine, Event], None] | None = None) -> dict[str, Outcome]:
    """Runs an engine to its end and returns what became of its jobs."""
    steps: dict[str, list[StepDone]] = {}
    evals: dict[str, list[EvalDone]] = {}
    for event in engine.events():
        if isinstance(event, StepDone):
            steps.setdefault(event.job, []).append(event)
        elif isinstance(event, EvalDone):
            evals.setdefault(event.job, []).append(event)
        if on_event is not None:
            on_event(engine, event)
    return {
        name: Outcome(
            engine.executor.adapter_of(name),
            str(job.state),
            None if job.reason is None else job.reason.text,
            [event.loss for event in steps.get(name, [])],
            [event.eval_loss for event in evals.get(name, [])],
            [event.mean_token_accuracy for event in steps.get(name, [])],
            [event.eval_mean_token_accuracy for event in evals.get(name, [])],
        )
        for name, job in engine.jobs.items()
    }


def assert_same_bits(mine: Outcome, other: Outcome) -> None:
    """Both jobs ended with the same adapter, to the bit, by way of the same losses and accuracies."""
    assert mine.losses == other.losses
    assert mine.eval_losses == other.eval_losses
    assert mine.accuracies == other.accuracies
    assert mine.eval_accuracies == other.eval_accuracies
    assert mine.state == other.state
    assert mine.adapter.keys() == other.adapter.keys()
    for path, tensors in mine.adapter.items():
        assert all(x.equal(y) for x, y in zip(tensors, other.adapter[path], strict=True)), path


@contextlib.contextmanager
def attending_eagerly(model: Any) -> Iterator[Any]:
    """Lets a model use transformers' own attention for a while."""
    model.set_attn_implementation("eager")
    try:
        yield model
    finally:
        model.set_attn_implementation(attention.NAME)
