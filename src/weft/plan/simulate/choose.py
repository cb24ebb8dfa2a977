"""The fastest program for a replica of several stages: packs, builds and simulates a few candidates.

Problem: min makespan over the packing of samples into microbatches, subject to capacity, memory, and each job's steps.
Candidates differ in their distance: how many microbatches lie between a job's global batch and its next. At S stages,
where equal microbatches leave no bubble, the smallest unevenness makes a stage wait for a step. A few more absorb it,
as stages run ahead, at the price of more, smaller microbatches. Which wins depends on the lengths, so all are
simulated; deterministic as long as packing is, ties go to the smaller distance.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import CostModel
from weft.plan.fuse.groups import PipeCosts, grouped_streams
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import RoundLimits
from weft.plan.pair import RowsHeld, cut, in_halves, side_by_side, together, two_groups, uncut
from weft.plan.pipeline.append import joined
from weft.plan.pipeline.build import Schedule, build
from weft.plan.pipeline.planner import PipelinePlanner, whole_batches
from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.two_streams import PairTimes
from weft.plan.types import JobQueue, Limits, Microbatch

EVENNESS_WEIGHTS = (1.0, 0.25)
"""How much alike the rows of microbatches are kept: more evenness, or fewer empty rows."""
MIN_TILES = 8
"""Up to so many tiles in a microbatch, an empty one weighs enough that both are tried."""
WORTH = 0.01
"""Part of the time that several groups, or pairs, must be predicted to save: a cost model tells no finer than that."""


@dataclass(frozen=True)
class PairChoice:
    """Whether microbatches of devices that share every layer run side by side, and why."""

    num_pairs: int = 0
    """Of the program."""
    gain: float | None = None
    """Predicted: the part of the time that pairs save, or would; None: no two microbatches can be a
    pair."""


@dataclass(frozen=True)
class PipelineChoice:
    """The program that was chosen for a replica of several stages, and what grouping its jobs is predicted to gain."""

    program: Program
    groups: tuple[tuple[str, ...], ...]
    """Jobs that share microbatches; one group: all."""
    fills: tuple[int, ...]
    """Tokens that a microbatch of each group is filled up to."""
    seconds: float
    """Of the program, simulated."""
    one_group_s: float
    """Of the fastest program found in which all jobs may share microbatches."""
    several_groups_s: float | None
    """Of the fastest found for several groups; None if there was none to try."""
    num_replicas: int = 1
    """On which jobs were grouped: each of them has groups of its own."""
    pairs: PairChoice | None = None
    """Whether microbatches run side by side; None: that was no question."""


@dataclass(frozen=True)
class FastestPipeline:
    """A planner for a replica of several stages: of a few packings, the fastest simulated.

    Each job keeps its own order, unless all have order-independent sums: then packings that do not are tried as well.

    The next global batch of a job is kept as far away as equal microbatches need it, or up to twice as far, which
    leaves room for unlike ones; stages run ahead, within memory for twice as many full microbatches as there are
    stages. Beside all jobs together, the groups that fusion finds are tried (`plan/fuse/`). Where jobs do not allow it,
    and where nothing else is faster, microbatches are packed greedily.
    """

    num_stages: int
    cost: CostModel
    adapters: AdapterTimes | None = None
    """What adapters add to what the cost model says; None: nothing is known of them."""
    row_tile: int = 1
    behind: tuple[Microbatch, ...] = ()
    """The last microbatches of the program that the next one is appended to; none: the pipeline is empty."""
    pairs: PairTimes | None = None
    """For stages that devices share: what two microbatches side by side take; None: each runs alone."""
    pairs_share_room: bool = False
    """Two side by side have no more rows than a full one: on a GPU there is memory for those."""

    @property
    def quick(self) -> PipelinePlanner:
        """What plans at once, where nobody can wait for this one."""
        return PipelinePlanner(Schedule.EAGER, self.num_stages)

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program."""
        return self.choose(queues, limits).program

    def choose(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice:
        """The next program, how its jobs are grouped, and whether microbatches are in pairs."""
        best = self._alone(queues, limits)
        if self.pairs is None:
            return best
        return self._paired(best, whole_batches(queues, limits, self.num_stages), limits.capacity)

    def _paired(self, best: PipelineChoice, whole: Sequence[JobQueue], capacity: int) -> PipelineChoice:
        """The best of a program, of its microbatches in halves or in pairs, and of those of two groups side by side."""
        best = dataclasses.replace(best, pairs=PairChoice())
        if len(whole) < 2 or not all(batch.lengths for queue in whole for batch in queue.batches):
            return best
        held, fill = None, capacity
        if self.pairs_share_room:
            held = RowsHeld(-(-capacity // self.row_tile) * self.row_tile, self.row_tile)
            fill = held.most // (2 * self.row_tile) * self.row_tile or capacity
        groups, apart = two_groups(whole, fill)
        build = None if self.num_stages == 1 else functools.partial(self._build, capacity=capacity)
        divided = dataclasses.replace(best, groups=groups, fills=(fill,) * len(groups))
        tried = [
            dataclasses.replace(divided, program=side_by_side(apart, held, build)),
            dataclasses.replace(best, program=in_halves(best.program, held)),
        ]
        if self.num_stages == 1:
            tried.append(dataclasses.replace(best, program=side_by_side(best.program.microbatches, held)))
        timed = [dataclasses.replace(each, seconds=self._seconds(each.program)) for each in tried if each.program.pairs]
        if not timed:
            return best
        found = min(timed, key=lambda each: each.seconds)
        gain = 1.0 - found.seconds / best.seconds
        if gain <= WORTH:
            return dataclasses.replace(best, pairs=PairChoice(0, gain))
        return dataclasses.replace(found, pairs=PairChoice(len(found.program.pairs), gain))

    def _alone(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice:
        """The fastest in which every pass runs alone."""
        greedy = self.quick(queues, limits)
        together = (tuple(queue.job for queue in queues),)
        if any(queue.lane or any(batch.groups for batch in queue.batches) for queue in queues):
            seconds = self._seconds(greedy)
            return PipelineChoice(greedy, together, (limits.capacity,), seconds, seconds, None)
        whole = whole_batches(queues, limits, self.num_stages)
        one_group = [
            greedy,
            *(self._build(stream, limits.capacity) for stream in self._even_streams(whole, limits.capacity)),
        ]
        seconds, place = min((self._seconds(program), place) for place, program in enumerate(one_group))
        best = PipelineChoice(one_group[place], together, (limits.capacity,), seconds, seconds, None)
        return self._grouped(best, whole, limits.capacity) if len(queues) > 1 else best

    def _grouped(self, best: PipelineChoice, whole: Sequence[JobQueue], capacity: int) -> PipelineChoice:
        """The better of one group and the groups that fusion finds."""
        if not all(batch.lengths for queue in whole for batch in queue.batches):
            return best
        several_s: float | None = None
        costs = PipeCosts(self.num_stages, self.cost, self.adapters, self.row_tile)
        for stream in grouped_streams(whole, capacity, costs):
            program = self._build(stream.microbatches, capacity)
            seconds = self._seconds(program)
            if len(stream.groups) == 1:
                best = dataclasses.replace(best, one_group_s=min(best.one_group_s, seconds))
            else:
                several_s = seconds if several_s is None else min(several_s, seconds)
            least_s = best.seconds if len(stream.groups) == 1 else (1.0 - WORTH) * best.seconds
            if seconds < least_s:
                best = dataclasses.replace(
                    best, program=program, groups=stream.groups, fills=stream.fills, seconds=seconds
                )
        return dataclasses.replace(best, several_groups_s=several_s)

    def _even_streams(self, whole: Sequence[JobQueue], capacity: int) -> Iterator[Sequence[Microbatch]]:
        """All jobs packed together, evenly, their global batches ever further apart."""
        even = _AverageStage(self.cost, self.num_stages)
        keeping = [True] if any(queue.home is not None for queue in whole) else [True, False]
        has_few_tiles = self.row_tile > 1 and capacity <= MIN_TILES * self.row_tile
        # One stage has nobody to wait for, and takes no empty microbatches.
        slacks = (0, self.num_stages // 2, self.num_stages) if self.num_stages > 1 else (0,)
        for slack, keep_order in itertools.product(slacks, keeping):
            for unlike in EVENNESS_WEIGHTS if keep_order and has_few_tiles else EVENNESS_WEIGHTS[:1]:
                apart = RoundLimits(capacity, self.num_stages + slack, row_tile=self.row_tile, unlike=unlike)
                yield pack_rounds(
                    whole, apart, cost=even, budget_s=0.0, keep_order=keep_order, behind=self.behind
                ).stream

    def _build(self, stream: Sequence[Microbatch], capacity: int) -> Program:
        """In the order of a stream, with memory for twice as many full microbatches as there are stages."""
        return build(
            Schedule.EAGER,
            stream,
            self.num_stages,
            cost=self.cost,
            memory_bytes=self.memory_bytes(capacity),
            adapters=self.adapters,
        )

    def memory_bytes(self, capacity: int) -> list[int]:
        """What each stage has for microbatches in flight."""
        return [2 * self.num_stages * self.cost.held_bytes([capacity], stage) for stage in range(self.num_stages)]

    def _seconds(self, program: Program) -> float:
        if not self.behind:
            return simulate(program, self.cost, adapters=self.adapters, pairs=self.pairs).makespan_s
        parts = uncut(program)
        following = [together(own) for own in parts]
        whole = joined([self.behind, following], self.num_stages, self.cost, adapters=self.adapters)
        whole = cut(whole, [*((own,) for own in self.behind), *parts])
        return simulate(whole, self.cost, adapters=self.adapters, pairs=self.pairs).makespan_s


def pipeline_planner(
    named: str, cost: AnalyticCost, *, in_pairs: bool = False, measured: CostModel | None = None
) -> FastestPipeline | PipelinePlanner:
    """What plans a replica of several stages that costs so much, by the planner that a run names.

    `in_pairs`: microbatches may run side by side, where that is predicted to pay; `measured`: seconds come from it.
    """
    if named == "greedy":
        return PipelinePlanner(Schedule.EAGER, cost.num_stages)
    pairs, is_gpu = PairTimes(cost) if in_pairs else None, cost.hardware.name != "cpu"
    return FastestPipeline(
        cost.num_stages, measured or cost, row_tile=cost.row_tile, pairs=pairs, pairs_share_room=is_gpu
    )


@dataclass(frozen=True)
class _AverageStage:
    """A cost model that is the same on all stages: packing levels microbatches, whatever stage they are on."""

    cost: CostModel
    num_stages: int
    known: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    """Forward and backward of microbatches; whoever packs asks for each once a stage."""

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._passes_s(tuple(lengths))[0]

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._passes_s(tuple(lengths))[1]

    def _passes_s(self, lengths: tuple[int, ...]) -> tuple[float, float]:
        if lengths not in self.known:
            stages = range(self.num_stages)
            forward_s = sum(self.cost.forward_s(lengths, s) for s in stages)
            backward_s = sum(self.cost.backward_s(lengths, s) for s in stages)
            self.known[lengths] = forward_s / self.num_stages, backward_s / self.num_stages
        return self.known[lengths]

    def transfer_s(self, num_tokens: int) -> float:
        return self.cost.transfer_s(num_tokens)

    def step_s(self, stage: int) -> float:
        return sum(self.cost.step_s(s) for s in range(self.num_stages)) / self.num_stages

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return max(self.cost.held_bytes(lengths, s) for s in range(self.num_stages))
