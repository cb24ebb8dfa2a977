"""One stage of a program by itself: all that its list must hold, and in what order."""

from __future__ import annotations

from weft.plan.check.batches import CheckedBatch, CheckedBatches
from weft.plan.cost.types import CostModel
from weft.plan.program import Backward, Forward, Instruction, Measure, Program, Receive, Send, Step


class StageWalk:
    """One stage's list from its first instruction to its last."""

    def __init__(
        self, program: Program, stage: int, batches: CheckedBatches, cost: CostModel | None, limit: int | None
    ) -> None:
        self.program, self.stage, self.batches, self.cost, self.limit = program, stage, batches, cost, limit
        self.replica = next(place for place, own in enumerate(program.replicas) if stage in own)
        self.own = program.replicas[self.replica]
        self.left = {batch: count[self.replica] for batch, count in batches.num_backwards.items()}
        self.measures = {batch for batch, count in batches.num_backwards.items() if self.replica in count}
        """Global batches of which the replica has a part."""
        self.newest: dict[str, int] = {}
        """The last microbatch that has gone backward, of each job."""
        self.place = 0
        self.done: set[Instruction] = set()
        self.stepped: set[CheckedBatch] = set()
        self.held = 0
        self.found: list[str] = []

    def problems(self) -> list[str]:
        """What is wrong with it."""
        for place, i in enumerate(self.program.stages[self.stage]):
            self.place = place
            if i in self.done:
                self._add("comes again")
                continue
            self.done.add(i)
            if not isinstance(i, Measure | Step) and self.batches.replica_of[i.microbatch] != self.replica:
                self._add("is of a microbatch that another replica runs")
            elif isinstance(i, Measure):
                self._measure(i)
            elif isinstance(i, Step):
                self._step(i)
            elif isinstance(i, Forward):
                self._forward(i)
            elif isinstance(i, Backward):
                self._backward(i)
            elif isinstance(i, Send):
                source = (Backward if i.is_gradient else Forward)(i.microbatch)
                if self._next(i.is_gradient) != i.to_stage or source not in self.done:
                    self._add("has nothing to send there")
            elif self._next(not i.is_gradient) != i.from_stage:
                self._add("has nothing to wait for there")
        self._missing()
        return self.found

    def _add(self, text: str) -> None:
        instruction = self.program.stages[self.stage][self.place]
        self.found.append(f"stage {self.stage}, instruction {self.place}: {instruction} {text}")

    def _next(self, is_gradient: bool) -> int | None:
        """The replica's stage after this one, in the direction of activations or of gradients."""
        neighbour = self.stage + (-1 if is_gradient else 1)
        return neighbour if neighbour in self.own else None

    def _forward(self, visit: Forward) -> None:
        k = visit.microbatch
        self._input(k, is_gradient=False)
        for batch in self.batches.of[k]:
            before = self.batches.previous.get(batch)
            if before is not None and before not in self.stepped:
                self._add(f"comes before step {before[1]} of {before[0]}")
        self.held += self._held(k)
        if self.limit is not None and self.cost is not None and self.held > self.limit:
            self._add(f"brings the stage to {self.held:,} bytes; it has {self.limit:,}")

    def _backward(self, visit: Backward) -> None:
        k = visit.microbatch
        self._input(k, is_gradient=True)
        if Forward(k) not in self.done:
            self._add("comes before what it goes back through")
        for job, step in self.batches.of[k]:
            self.left[job, step] -= 1
            newest = self.newest.get(job, -1)
            self.newest[job] = k
            if newest > k and job in self.batches.ordered:
                self._add(f"comes after microbatch {newest}, whose samples of {job} follow its own")
        self.held -= self._held(k)

    def _input(self, k: int, *, is_gradient: bool) -> None:
        source = self._next(not is_gradient)
        if source is not None and Receive(k, is_gradient, source) not in self.done:
            self._add("comes before its input is received")

    def _measure(self, measure: Measure) -> None:
        batch = (measure.job, measure.step)
        if self.program.num_stages == 1:
            self._add("is for several stages; one has the whole gradient")
        elif batch not in self.batches.ended:
            self._add("measures a global batch that is not there, or not whole")
        elif batch not in self.measures:
            self._add("measures a global batch of which the replica has no sample")
        elif self.left[batch]:
            self._add(f"comes {self.left[batch]} backwards early")

    def _step(self, step: Step) -> None:
        batch = (step.job, step.step)
        self.stepped.add(batch)
        if batch not in self.batches.ended:
            self._add("steps a global batch that is not there, or not whole")
        elif self.replica not in self.batches.steps_on[step.job]:
            self._add("steps a job that is not at home here")
        elif self.left[batch]:
            self._add(f"comes {self.left[batch]} backwards early")
        elif self.program.num_stages > 1 and batch in self.measures and Measure(*batch) not in self.done:
            self._add("comes before its gradient is measured")

    def _missing(self) -> None:
        ended = sorted(self.batches.ended)
        steps_on = self.batches.steps_on
        expected: list[Instruction] = [Step(job, step) for job, step in ended if self.replica in steps_on[job]]
        if self.program.num_stages > 1:
            expected += [Measure(job, step) for job, step in ended if (job, step) in self.measures]
        onward, back = self._next(False), self._next(True)
        for k in range(len(self.program.microbatches)):
            if self.batches.replica_of[k] != self.replica:
                continue
            expected += [Forward(k), Backward(k)]
            expected += [] if onward is None else [Send(k, False, onward), Receive(k, True, onward)]
            expected += [] if back is None else [Receive(k, False, back), Send(k, True, back)]
        self.found.extend(f"stage {self.stage}: {i} is missing" for i in expected if i not in self.done)

    def _held(self, k: int) -> int:
        if self.cost is None:
            return 0
        lengths = [s.length for s in self.program.microbatches[k].segments]
        if not lengths:
            return 0
        return self.cost.held_bytes(lengths, self.stage - self.own.start)
