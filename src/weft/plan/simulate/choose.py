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
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.learned import AdapterTimes, PassCosts
from weft.plan.cost.profile import ProfiledCost
from weft.plan.cost.types import CostModel
from weft.plan.deploy.deal import DealtQueues
from weft.plan.fuse.planner import PipeCosts, grouped_streams
from weft.plan.pack.lorafusion import LoraFusionPlanner
from weft.plan.pack.rounds import pack_rounds
from weft.plan.pack.types import RoundLimits
from weft.plan.pipeline.append import joined
from weft.plan.pipeline.build import PipelinePlanner, Schedule, build
from weft.plan.pipeline.orders import Pipe, open_pipe
from weft.plan.pipeline.pair import RowsHeld, cut, in_halves, side_by_side, together, two_groups, uncut
from weft.plan.planner import HomeLoad, MeasuredPasses, PairChoice, PipelineChoice, Planner, PreviousMicrobatches
from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.two_streams import PairTimes
from weft.plan.spread import SpreadPlanner
from weft.plan.types import JobQueue, Limits, Microbatch, max_lead, whole_batches

EVENNESS_WEIGHTS = (1.0, 0.25)
"""Weights of evenness against empty rows when microbatches are packed."""
MIN_TILES = 8
"""Up to this many tiles in a microbatch, one empty tile costs enough that both weights are tried."""
WORTH = 0.01
"""Least share of the time that several groups, or pairs, must be predicted to save; cost models are no more exact."""


@dataclass(frozen=True)
class FastestPipeline(Planner):
    """A planner for a replica of several stages: of a few packings, the fastest simulated.

    Each job keeps its own order, unless all have order-independent sums: then packings that do not are tried as well.

    The next global batch of a job is kept as far away as equal microbatches need it, or up to twice as far, which
    leaves room for unlike ones; stages run ahead as far as they have memory, at most twice as many full microbatches as
    there are stages. Beside all jobs together, the groups that fusion finds are tried (`plan/fuse/`). Where jobs do not
    allow it, and where nothing else is faster, microbatches are packed greedily.
    """

    num_stages: int
    cost: CostModel
    adapters: AdapterTimes | None = None
    """Time that adapters add to the cost model's; None if it is not known."""
    row_tile: int = 1
    behind: tuple[Microbatch, ...] = ()
    """The last microbatches of the program that the next one is appended to; empty if the pipeline is."""
    pairs: PairTimes | None = None
    """Times of two microbatches side by side, for stages that devices share; None: each runs alone."""
    pairs_share_room: bool = False
    """True if two microbatches side by side have no more rows than a full one, which is what a GPU has memory for."""
    has_pairs: bool = False
    """True if the last program had pairs: a change takes a predicted gain of `least_gain`."""
    least_gain: float = WORTH
    num_measured: int = 0

    @property
    def quick(self) -> PipelinePlanner:
        return PipelinePlanner(Schedule.EAGER, self.num_stages)

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        return self.choose(queues, limits).program

    def informed(self, measured: MeasuredPasses, previous: PreviousMicrobatches) -> FastestPipeline:
        planner = dataclasses.replace(
            self,
            behind=previous[0] if previous else (),
            has_pairs=measured.has_pairs,
            # Each change has to be worth more than the last, so that noise of measurements ends.
            least_gain=WORTH * 2**measured.num_changes,
        )
        learned = measured.stages.learn(self.num_stages, self.cost, measured.ranks)
        if learned is None:
            return planner
        cost, adapters = learned
        pairs = self.pairs and dataclasses.replace(self.pairs, measured=measured.pairs.learn(cost.passes))
        stages = measured.stages
        return dataclasses.replace(
            planner, cost=cost, adapters=adapters, pairs=pairs, row_tile=stages.row_tile, num_measured=stages.num_seen
        )

    def open_pipes(self, limits: Limits) -> list[Pipe]:
        return [open_pipe(self.num_stages, self.memory_bytes(limits))] if self.num_stages > 1 else []

    @property
    def pass_costs(self) -> Sequence[PassCosts]:
        return [(self.cost, self.adapters)]

    def choose(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice:
        """The next program, how its jobs are grouped, and whether microbatches are in pairs."""
        best = self._alone(queues, limits)
        if self.pairs is None:
            return best
        return self._paired(best, whole_batches(queues, limits, self.num_stages), limits)

    def _paired(self, best: PipelineChoice, whole: Sequence[JobQueue], limits: Limits) -> PipelineChoice:
        """The best of a program, of its microbatches in halves or in pairs, and of those of two groups side by side."""
        best = dataclasses.replace(best, pairs=PairChoice())
        if len(whole) < 2 or not all(batch.lengths for queue in whole for batch in queue.batches):
            return best
        held, fill = None, limits.capacity
        if self.pairs_share_room:
            held = RowsHeld(-(-fill // self.row_tile) * self.row_tile, self.row_tile)
            fill = held.most // (2 * self.row_tile) * self.row_tile or fill
        groups, apart = two_groups(whole, fill)
        build = None if self.num_stages == 1 else functools.partial(self._build, limits=limits)
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
        if gain <= (-self.least_gain if self.has_pairs else self.least_gain):
            return dataclasses.replace(best, pairs=PairChoice(0, gain))
        return dataclasses.replace(found, pairs=PairChoice(len(found.program.pairs), gain))

    def _alone(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice:
        """The fastest program in which every pass runs alone."""
        greedy = self.quick(queues, limits)
        together = (tuple(queue.job for queue in queues),)
        if any(queue.lane or any(batch.groups for batch in queue.batches) for queue in queues):
            seconds = self._seconds(greedy)
            return PipelineChoice(greedy, together, (limits.capacity,), seconds, seconds, None)
        whole = whole_batches(queues, limits, self.num_stages)
        one_group = [
            greedy,
            *(self._build(stream, limits) for stream in self._even_streams(whole, limits.capacity)),
        ]
        seconds, index = min((self._seconds(program), index) for index, program in enumerate(one_group))
        best = PipelineChoice(one_group[index], together, (limits.capacity,), seconds, seconds, None)
        return self._grouped(best, whole, limits) if len(queues) > 1 else best

    def _grouped(self, best: PipelineChoice, whole: Sequence[JobQueue], limits: Limits) -> PipelineChoice:
        """The better of one group and the groups that fusion finds."""
        if not all(batch.lengths for queue in whole for batch in queue.batches):
            return best
        several_s: float | None = None
        costs = PipeCosts(self.num_stages, self.cost, self.adapters, self.row_tile)
        for stream in grouped_streams(whole, limits.capacity, costs):
            program = self._build(stream.microbatches, limits)
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
        keeps_order = [True] if any(queue.home is not None for queue in whole) else [True, False]
        has_few_tiles = self.row_tile > 1 and capacity <= MIN_TILES * self.row_tile
        # A single stage waits for no other, and takes no empty microbatches.
        slacks = (0, self.num_stages // 2, self.num_stages) if self.num_stages > 1 else (0,)
        for slack, keep_order in itertools.product(slacks, keeps_order):
            for unlike in EVENNESS_WEIGHTS if keep_order and has_few_tiles else EVENNESS_WEIGHTS[:1]:
                apart = RoundLimits(capacity, self.num_stages + slack, row_tile=self.row_tile, unlike=unlike)
                yield pack_rounds(whole, apart, cost=even, keep_order=keep_order, behind=self.behind).stream

    def _build(self, stream: Sequence[Microbatch], limits: Limits) -> Program:
        """Builds the program that runs a stream in its order, within memory."""
        return build(
            Schedule.EAGER,
            stream,
            self.num_stages,
            cost=self.cost,
            memory_bytes=self.memory_bytes(limits),
            adapters=self.adapters,
        )

    def memory_bytes(self, limits: Limits) -> list[int]:
        """Bytes of each stage for microbatches in flight."""
        most = limits.lead(max_lead(self.num_stages))
        return [number * self.cost.held_bytes([limits.capacity], stage) for stage, number in enumerate(most)]

    def _seconds(self, program: Program) -> float:
        if not self.behind:
            return simulate(program, self.cost, adapters=self.adapters, pairs=self.pairs).makespan_s
        parts = uncut(program)
        following = [together(own) for own in parts]
        whole = joined([self.behind, following], self.num_stages, self.cost, adapters=self.adapters)
        whole = cut(whole, [*((own,) for own in self.behind), *parts])
        return simulate(whole, self.cost, adapters=self.adapters, pairs=self.pairs).makespan_s


def pipeline_planner(
    named: str, cost: AnalyticCost, *, in_pairs: bool = False, measured: ProfiledCost | None = None
) -> FastestPipeline | PipelinePlanner:
    """The planner of a replica of several stages, by its name in a run's settings. `in_pairs`: microbatches run side by
    side where that is predicted to pay; `measured`: replaces the times of `cost`."""
    if named == "greedy":
        return PipelinePlanner(Schedule.EAGER, cost.num_stages)
    if named == "lorafusion":
        return PipelinePlanner(Schedule.MULTI_ADAPTER, cost.num_stages, LoraFusionPlanner(cost.num_stages))
    pairs, is_gpu = PairTimes(cost) if in_pairs else None, cost.hardware.name != "cpu"
    times, adapters = (measured or cost).apart()
    return FastestPipeline(
        cost.num_stages, times, adapters, row_tile=cost.row_tile, pairs=pairs, pairs_share_room=is_gpu
    )


@dataclass(frozen=True)
class _AverageStage:
    """A cost model that is the same on all stages: packing levels microbatches, whatever stage they are on."""

    cost: CostModel
    num_stages: int
    known: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    """Seconds forward and backward by lengths; packing requests each once per stage."""

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


@dataclass(frozen=True)
class FastestSpread(Planner):
    """A planner for several replicas, at least one of them in stages."""

    spread: SpreadPlanner
    """The planner used when this one is late; it has the replicas and their costs."""
    row_tile: int = 1
    behind: PreviousMicrobatches = ()
    num_measured: int = 0

    @property
    def quick(self) -> SpreadPlanner:
        return self.spread

    def informed(self, measured: MeasuredPasses, previous: PreviousMicrobatches) -> FastestSpread:
        spread = self.spread.informed(measured, previous)
        row_tile = measured.stages.row_tile if spread.measured else self.row_tile
        num = spread.num_measured
        return dataclasses.replace(self, spread=spread, row_tile=row_tile, behind=previous, num_measured=num)

    def home_seconds(self, jobs: Mapping[str, HomeLoad], capacity: int) -> Mapping[str, Sequence[float]]:
        return self.spread.home_seconds(jobs, capacity)

    def open_pipes(self, limits: Limits) -> list[Pipe]:
        return self.spread.open_pipes(limits)

    @property
    def pass_costs(self) -> Sequence[PassCosts]:
        return self.spread.pass_costs

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        choice = self.choose(queues, limits)
        return self.spread(queues, limits) if choice is None else choice.program

    def choose(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice | None:
        """The next program, and how jobs are grouped on the replicas in stages; None where that is no question."""
        sizes = self.spread.replica_sizes
        homes = [[queue for queue in queues if queue.home == k] for k in range(len(sizes))]
        if any(queue.home is None for queue in queues) or not any(
            size > 1 and len(own) > 1 for size, own in zip(sizes, homes, strict=True)
        ):
            return None
        whole = whole_batches(queues, limits, sum(sizes))
        streams: list[Sequence[Microbatch]] = []
        found: list[PipelineChoice] = []
        others_s = 0.0
        for k, (stages, holds) in enumerate(zip(self.spread.stages, self.spread.holds(limits.capacity), strict=True)):
            own = DealtQueues([queue for queue in whole if queue.home == k], {})
            there = dataclasses.replace(
                limits.of_stages(stages), capacity=max(holds, own.longest), max_microbatches=sys.maxsize
            )
            if not own.queues or len(stages) == 1:
                streams.append(own.packed(there))
                others_s = max(others_s, self._seconds(k, streams[-1]))
                continue
            cost, adapters = self.pass_costs[k]
            behind = self.behind[k] if self.behind else ()
            found.append(FastestPipeline(sizes[k], cost, adapters, self.row_tile, behind).choose(own.queues, there))
            streams.append([m for m in found[-1].program.microbatches if m.segments])
        several = [choice.seconds if choice.several_groups_s is None else choice.several_groups_s for choice in found]
        has_several = any(choice.several_groups_s is not None for choice in found)
        return PipelineChoice(
            self.spread.assemble(streams, {}, limits),
            tuple(group for choice in found for group in choice.groups),
            tuple(fill for choice in found for fill in choice.fills),
            max(others_s, *(choice.seconds for choice in found)),
            max(others_s, *(choice.one_group_s for choice in found)),
            max(others_s, *several) if has_several else None,
            num_replicas=len(found),
        )

    def _seconds(self, replica: int, stream: Sequence[Microbatch]) -> float:
        cost, adapters = self.pass_costs[replica]
        lengths = ([segment.length for segment in m.segments] for m in stream)
        added_s = 0.0 if adapters is None else sum(2 * adapters.microbatch_s(m.job_tokens) for m in stream)
        return sum(cost.forward_s(own, 0) + cost.backward_s(own, 0) for own in lengths) + added_s
