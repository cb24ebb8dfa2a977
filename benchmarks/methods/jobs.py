"""The jobs that are measured, on random tokens: eight of different methods and objectives, eight LoRAs; their pace.

Every job needs as many rows a step as any other: half of them where each sample runs twice (KTO), and so on. So
the work of a step is the same in every mixture. What a reference returns for a sample is computed once: where
no job meets a sample twice, every step pays for its own.

The pace is measured from the moment when all of them are under way to the last step but one of all.

The last step is left out: after it jobs are closed, and their weights leave the device one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.clock import peak_gb, release
from weft.data.dataset import Dataset, JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.engine.events import JobFailed, MicrobatchDone, StepDone
from weft.errors import WeftError
from weft.model.backbone import Backbone
from weft.objectives.heads import Classification
from weft.objectives.preference import Dpo, Kto
from weft.spec import AdapterSpec, JobSpec

SEED = 20260101
FOREVER = 10**6
NUM_VIRTUAL = 16
CLASSES = ("no", "yes")


@dataclass(frozen=True)
class MethodJobs:
    """Makes jobs whose steps have so many rows, in samples of so many tokens."""

    rows: int
    """Of one step of a job."""
    length: int
    """Tokens of a sample."""
    num_steps: int
    vocabulary: int
    widest: int = 64
    """The rank of the LoRA on pairs; no more than the backbone's narrowest linear."""
    num_read: int | None = None
    """Steps' worth of samples, met again and again; None: as many as there are steps."""

    def lora(self, number: int, rank: int = 16) -> tuple[JobSpec, JobData]:
        """A LoRA on answers."""
        return self._job(f"lora{number}", number, {"r": rank})

    def dora(self, number: int) -> tuple[JobSpec, JobData]:
        """A DoRA on answers."""
        return self._job(f"dora{number}", number, {"method": "dora", "r": 16})

    def ia3(self, number: int) -> tuple[JobSpec, JobData]:
        """IA³ on answers: the method that is least like LoRA of those that everybody has."""
        return self._job(f"ia3-{number}", number, {"method": "ia3"})

    def dpo(self, number: int, rank: int = 16) -> tuple[JobSpec, JobData]:
        """A LoRA on pairs; the bare backbone reads both answers too."""
        spec, data = self._job(f"dpo{number}", number, {"r": rank}, group=2, objective="dpo")
        return spec, JobData(replace(data.train, objective=Dpo()), None)

    def mixed(self) -> list[tuple[JobSpec, JobData]]:
        """Eight jobs, no two alike."""
        marked, marks = self._job("vera-kto", 6, {"method": "vera"}, runs=2, labels=2, objective="kto")
        classed, classes = self._job("ia3-classes", 3, {"method": "ia3"}, labels=2, objective="classification")
        ends = Dataset.of([sample.labelled_end(sample.label) for sample in classes.train.samples], "random tokens")
        ends = replace(ends, objective=Classification(CLASSES))
        prompt = {"method": "prompt_tuning", "num_virtual_tokens": NUM_VIRTUAL}
        return [
            self.lora(0, 8),
            self.dpo(1, self.widest),
            self.dora(2),
            (replace(classed, labels=CLASSES), JobData(ends, None)),
            self._job("bottleneck", 4, {"method": "bottleneck"}),
            self._job("diff-pruning", 5, {"method": "diff_pruning"}),
            (marked, JobData(replace(marks.train, objective=Kto()), None)),
            self._job("prompt", 7, prompt, leading=NUM_VIRTUAL),
        ]

    def _job(
        self,
        name: str,
        seed: int,
        adapter: dict[str, Any],
        *,
        runs: int = 1,
        group: int = 1,
        labels: int = 0,
        leading: int = 0,
        objective: str = "supervised",
    ) -> tuple[JobSpec, JobData]:
        """A job whose groups of `group` samples run `runs` times each."""
        num_groups = max(1, self.rows // (self.length * runs * group))
        spec = JobSpec(
            name,
            ("random tokens",),
            max_steps=self.num_steps,
            save_steps=FOREVER,
            save_minutes=0.0,
            global_batch_size=num_groups,
            max_length=self.length,
            objective=objective,
            adapter=AdapterSpec(**adapter),
        )
        rng = np.random.default_rng([SEED, seed])
        count = (self.num_read or self.num_steps) * num_groups * group
        samples = [self._sample(rng, number, labels, leading) for number in range(count)]
        return spec, JobData(Dataset.of(samples, "random tokens"), None)

    def _sample(self, rng: np.random.Generator, number: int, labels: int, leading: int) -> Sample:
        """Random tokens, of which the second half is an answer."""
        length = self.length - leading
        tokens = rng.integers(3, self.vocabulary, length, dtype=np.int32)
        sample = Sample(tokens, np.arange(length) >= length // 2)
        return sample.labelled(float(number % labels)) if labels else sample


WARM_UP = 4
"""Steps of every job before time counts: kernels are compiled, graphs captured and moments there."""


@dataclass(frozen=True)
class Pace:
    """What was seen."""

    tokens: int
    """Of all microbatches, those that teach nothing included."""
    num_reference: int
    """Rows that went through references besides, forward only."""
    trained: int
    """Of the samples that steps were taken on."""
    seconds: float
    alone: dict[str, tuple[int, float]]
    """Tokens and seconds of microbatches that only one job had rows in, by job."""
    peak_gb: float

    @property
    def tokens_per_s(self) -> float:
        """The speed of all jobs together; a row that goes forward only is half of one that also goes back."""
        return (self.tokens + self.num_reference / 2) / self.seconds

    @property
    def trained_per_s(self) -> float:
        """The same without what ran for comparison only."""
        return self.trained / self.seconds

    def seconds_per_token(self, foreign: str = "") -> float:
        """Of microbatches that are not one job's alone."""
        tokens, seconds = self.alone.get(foreign, (0, 0.0))
        return (self.seconds - seconds) / (self.tokens - tokens)


def measure_pace(backbone: Backbone, jobs: Sequence[tuple[JobSpec, JobData]], capacity: int) -> Pace:
    """Trains the jobs to their end; leaves the backbone without adapters."""
    backbone.path.forget()
    release(backbone.device)
    engine = Engine(backbone, capacity=capacity)
    for spec, data in jobs:
        engine.submit(spec, data)
    steps = dict.fromkeys(engine.jobs, 0)
    most = min(spec.max_steps or 0 for spec, _ in jobs)
    tokens, num_reference, trained, begun_s, ended_s = 0, 0, 0, None, None
    alone = dict.fromkeys(engine.jobs, (0, 0.0))
    for event in engine.events():
        if isinstance(event, JobFailed):
            raise WeftError(f"{event.job} failed: {event.reason}.", where="benchmarks methods")
        if isinstance(event, StepDone):
            steps[event.job] = event.step
            trained += event.tokens if begun_s is not None and ended_s is None else 0
            if begun_s is None and min(steps.values()) >= WARM_UP:
                begun_s = time.perf_counter()
            if ended_s is None and min(steps.values()) >= most - 1:
                ended_s = time.perf_counter()
        elif isinstance(event, MicrobatchDone) and begun_s is not None and ended_s is None:
            tokens += event.tokens
            num_reference += event.num_reference_rows
            if len(event.jobs) == 1:
                own_tokens, own_s = alone[event.jobs[0]]
                alone[event.jobs[0]] = own_tokens + event.tokens, own_s + event.seconds
    assert begun_s is not None and ended_s is not None, "jobs have more steps than the warm-up"
    return Pace(tokens, num_reference, trained, ended_s - begun_s, alone, peak_gb(backbone.device))
