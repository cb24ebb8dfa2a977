"""What LobRA publishes: its data sets, its clusters, and its measured tables, as far as they can be planned with.

Lengths: Table 4 gives mean, skewness and batch size of twelve data sets; the spread of a log-normal distribution with
that skewness is assumed. The longest sample of each is taken to be what its layout in Table 7 holds, by the rule below.

7B on 16 A100-40G: t(b, s) of every tensor-parallel degree is fitted to Table 11 (one sample per microbatch) and to the
rows of Table 3 without stages (full chunks). The longest samples are those of Table 3.

70B on A800-80G: timings are not published. Seconds come from the hardware table (A100-80, with the links the paper
states); the tokens that a layout holds are assumed to be what is left of a GPU beside the weights over 60 MB of
activations a token, shared by the tensor-parallel degree. With that <16,1> holds 16K, <8,1> 8K, <4,2> 4K and <2,4> 2K,
as the published plans suggest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.fit import PaddedBatch, PaddedTime, fit_padded
from weft.plan.cost.hardware import GB, LINK_SHARE, Hardware, find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.deploy import DeployProblem, ReplicaKind
from weft.plan.deploy.buckets import BucketCosts, Buckets, ReplicaTime, fixed_buckets
from weft.plan.deploy.kinds import fit_replica, possible_layouts
from weft.plan.deploy.types import DeployJob, LengthSpread
from weft.plan.layout import ReplicaLayout

LONGEST = 16_384
"""Of all data sets."""
DATA_SETS: Mapping[str, tuple[float, float, int, int]] = {
    "databricks-dolly-15k": (207, 7.11, 256, 8_192),
    "python_code_instructions": (269, 10.01, 128, 16_384),
    "Evol-Instruct": (702, 6.59, 128, 16_384),
    "CommitPackFT": (663, 0.79, 128, 8_192),
    "MathInstruct": (252, 3.03, 128, 4_096),
    "MetaMathQA": (236, 2.56, 128, 4_096),
    "NuminaMath-CoT": (543, 1.52, 256, 8_192),
    "PubMedQA": (371, 0.73, 64, 2_048),
    "XSum": (526, 7.49, 128, 16_384),
    "BillSum": (3903, 0.85, 32, 16_384),
    "cnn_dailymail": (947, 0.89, 256, 8_192),
    "MeetingBank": (3622, 4.35, 64, 16_384),
}
"""Mean length, skewness and batch size (Table 4), and the longest sample (from Table 7)."""
SIX = ("databricks-dolly-15k", "Evol-Instruct", "XSum", "CommitPackFT", "MeetingBank", "python_code_instructions")
"""The tasks of the 7B experiments."""
FOUR = ("Evol-Instruct", "CommitPackFT", "BillSum", "PubMedQA")
"""Those of the scalability experiments."""


TABLE_8: Mapping[str, Mapping[tuple[int, int], int]] = {
    "MathInstruct": {(2, 4): 5, (4, 1): 2, (4, 2): 2},
    "python_code_instructions": {(2, 4): 1, (4, 1): 2, (8, 1): 2, (16, 1): 2},
    "databricks-dolly-15k": {(2, 4): 2, (4, 1): 4, (4, 2): 3, (8, 1): 1},
    "BillSum": {(8, 1): 2, (16, 1): 3},
    "CommitPackFT": {(2, 4): 1, (4, 1): 6, (8, 1): 4},
    "NuminaMath-CoT": {(2, 4): 3, (4, 1): 6, (4, 2): 1, (8, 1): 1},
    "PubMedQA": {(2, 2): 10, (4, 1): 4, (2, 4): 1},
    "MetaMathQA": {(2, 4): 6, (4, 1): 2, (4, 2): 1},
    "Evol-Instruct": {(2, 4): 1, (4, 1): 4, (8, 1): 3, (16, 1): 1},
    "cnn_dailymail": {(2, 4): 6, (4, 2): 1, (8, 1): 1},
    "XSum": {(2, 4): 2, (4, 1): 2, (4, 2): 1, (16, 1): 2},
    "MeetingBank": {(4, 2): 1, (8, 1): 1, (16, 1): 3},
}
"""The replicas that LobRA used for each task of the 70B model by itself, on 64 GPUs: (tensor parallel, stages)."""


def padded_layer_s(time: PaddedTime, size: int, length: int) -> float:
    """One layer forward and backward over a padded batch."""
    terms = (size * length**2, length**2, size * length, length, size, 1.0)
    return sum(price * term for price, term in zip(time.coefficients, terms, strict=True))


def published_jobs(names: tuple[str, ...] = tuple(DATA_SETS)) -> list[DeployJob]:
    """The named data sets as jobs; all twelve by default."""
    rows = [(name, *DATA_SETS[name]) for name in names]
    return [
        DeployJob(name, size, LengthSpread(mean, skewness, longest)) for name, mean, skewness, size, longest in rows
    ]


K = 1000
LAYERS_7B = 32
TABLE_3: Mapping[tuple[int, int], tuple[float, ...]] = {
    (1, 1): (5.11,),
    (2, 1): (4.30, 4.12),
    (1, 2): (4.88,),
    (4, 1): (3.63, 3.50, 3.25),
    (2, 2): (4.15, 3.98),
    (1, 4): (5.03, 4.78),
    (8, 1): (2.79, 2.71, 2.56, 2.33),
    (4, 2): (3.48, 3.34, 3.12),
    (2, 4): (4.27, 4.10, 3.79),
    (1, 8): (4.45, 4.25),
}
"""Thousands of tokens per GPU and second with samples of 2K, 4K, 8K and 16K, as far as a layout holds them, by (tensor
parallel, stages)."""
TABLE_11 = (
    (1, 1, 2048, 4, 1.778),
    (1, 2, 2048, 8, 1.978),
    (1, 4, 2048, 16, 2.131),
    (1, 4, 4096, 16, 4.141),
    (1, 8, 2048, 32, 2.308),
    (1, 8, 4096, 32, 4.492),
    (2, 1, 2048, 8, 2.414),
    (2, 1, 4096, 8, 4.297),
    (2, 2, 2048, 16, 2.611),
    (2, 2, 4096, 16, 4.612),
    (2, 4, 2048, 32, 2.718),
    (2, 4, 4096, 32, 4.915),
    (2, 8, 2048, 64, 3.040),
    (2, 8, 4096, 64, 5.391),
    (2, 8, 8192, 64, 10.611),
    (4, 1, 2048, 16, 3.395),
    (4, 1, 4096, 16, 5.608),
    (4, 1, 8192, 16, 10.530),
    (4, 2, 2048, 32, 3.626),
    (4, 2, 4096, 32, 5.911),
    (4, 2, 8192, 32, 11.143),
    (4, 4, 2048, 64, 3.793),
    (4, 4, 4096, 64, 6.255),
    (4, 4, 8192, 64, 11.770),
    (8, 1, 2048, 32, 5.691),
    (8, 1, 4096, 32, 8.649),
    (8, 1, 8192, 32, 14.769),
    (8, 1, 16384, 32, 29.271),
    (8, 2, 2048, 64, 5.887),
    (8, 2, 4096, 64, 9.032),
    (8, 2, 8192, 64, 15.464),
    (8, 2, 16384, 64, 30.468),
)
"""(tensor parallel, stages, length, microbatches of one sample, seconds) of Llama2-7B on A100-40G."""


FIGURE_4 = dict(zip((2048, 4096, 8192, 16_384), (196, 62, 16, 4), strict=True))
"""Samples of each length in the batch of Figure 4, for 16 GPUs and the layouts of Table 3 without stages."""


@dataclass(frozen=True)
class RatedReplica:
    """A replica known by a table of its tokens per GPU and second at some lengths, in full chunks."""

    layout: ReplicaLayout
    rates: Mapping[int, float]
    """By length; a sample is priced by the first length that holds it."""
    is_packed: bool = False

    @property
    def most_tokens(self) -> int:
        """The longest in the table."""
        return max(self.rates)

    def costs(self, buckets: Buckets) -> BucketCosts:
        """Tokens over the rate; there is no cost per chunk."""
        known = sorted(self.rates)
        bounds = np.asarray(buckets.bounds)
        holds = bounds <= self.most_tokens
        row = [self.rates[known[min(i, len(known) - 1)]] for i in np.searchsorted(known, bounds)]
        slope = bounds / (np.asarray(row) * self.layout.num_devices)
        return BucketCosts(slope, np.zeros(len(bounds)), holds.astype(np.float64))


def figure_4() -> DeployProblem:
    """The example of Figure 4(d), priced by the rates of Table 3 as they are printed."""
    kinds = tuple(
        ReplicaKind(
            RatedReplica(
                ReplicaLayout(tensor=degree),
                {length: K * rate for length, rate in zip(FIGURE_4, rates, strict=False)},
            )
        )
        for (degree, stages), rates in TABLE_3.items()
        if stages == 1
    )
    lengths = [length for length, count in FIGURE_4.items() for _ in range(count)]
    return DeployProblem(kinds, {"gpus": 16}, fixed_buckets(lengths, tuple(FIGURE_4)))


def fitted_7b(tensor_parallel: int) -> PaddedTime:
    """t(b, s) of one layer of Llama2-7B at a tensor-parallel degree."""
    batches = [
        PaddedBatch(1, length, (count + stages - 1) * LAYERS_7B / stages, seconds)
        for degree, stages, length, count, seconds in TABLE_11
        if degree == tensor_parallel
    ]
    for layout, rates in TABLE_3.items():
        if layout != (tensor_parallel, 1):
            continue
        most = 2048 << (len(rates) - 1)
        for index, rate in enumerate(rates):
            seconds = most / (rate * K * tensor_parallel)
            batches.append(PaddedBatch(most // (2048 << index), 2048 << index, LAYERS_7B, seconds))
    return fit_padded(batches)


def replicas_7b(*, is_packed: bool = False) -> list[ReplicaTime]:
    """All layouts of Table 3."""
    times = {degree: fitted_7b(degree) for degree in (1, 2, 4, 8)}
    return [
        ReplicaTime(
            ReplicaLayout(tensor=degree, stages=stages),
            2048 << (len(rates) - 1),
            times[degree],
            LAYERS_7B,
            is_packed,
        )
        for (degree, stages), rates in TABLE_3.items()
    ]


MODEL_70B = "llama-3.1-70b"
"""As Llama2-70B but for the vocabulary."""
A800_LINK, A800_NETWORK = 200 * GB * LINK_SHARE, 100 * GB * LINK_SHARE
"""One way; the paper states 400 and 200 GB/s both ways, within and between servers."""
TOKEN_BYTES_70B = 60e6
GPUS_PER_MACHINE = 8
MIN_TOKENS = 512
"""Layouts that hold less are not planned with."""


def a800(tensor_parallel: int) -> Hardware:
    """The GPU with the link that tensor parallelism of a degree goes over."""
    rate = A800_LINK if tensor_parallel <= GPUS_PER_MACHINE else A800_NETWORK
    return replace(find_hardware("a100-80"), link_rate=rate)


def shape_70b() -> ModelShape:
    """Its sizes."""
    return ModelShape.from_config(find_shape(MODEL_70B).config().to_dict(), MODEL_70B)


def tokens_70b(layout: ReplicaLayout) -> int:
    """Tokens that a layout holds, as assumed above, in whole 64s."""
    hardware = find_hardware("a100-80")
    weights = 2.0 * shape_70b().num_parameters / layout.num_devices
    return int((hardware.memory_bytes - weights) * layout.tensor / TOKEN_BYTES_70B) // 64 * 64


def replicas_70b(num_gpus: int, *, is_packed: bool = False) -> list[ReplicaTime]:
    """Every layout of up to two machines on so many GPUs."""
    shape, found = shape_70b(), []
    for layout in possible_layouts(
        min(num_gpus, 2 * GPUS_PER_MACHINE), GPUS_PER_MACHINE, shape.num_layers, shape.num_heads
    ):
        most = tokens_70b(layout)
        if most >= MIN_TOKENS:
            setup = BackboneSetup(shape, ranks=(16,) * 12)
            cost = setup.cost(a800(layout.tensor), layout.stages, layout.tensor)
            found.append(fit_replica(cost, layout, shape.num_layers, most, is_packed=is_packed))
    return found
