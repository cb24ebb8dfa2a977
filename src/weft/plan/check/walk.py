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
        own = program.replicas[self.replica]
        self.first, self.num_stages = own.start, len(own)
        counts = {batch: count[self.replica] for batch, count in batches.num_backwards.items()}
        self.left = {batch: count * program.num_chunks for batch, count in counts.items()}
        self.measures = {batch for batch, count in batches.num_backwards.items() if self.replica in count}
        """Global batches of which the replica has a part."""
        self.newest: dict[tuple[str, int], int] = {}
        """The last microbatch that has gone backward, of each job and slice."""
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
                source = (Backward if i.is_gradient else Forward)(i.microbatch, i.chunk)
                if self._next(i.chunk, i.is_gradient) != i.to_stage or source not in self.done:
                    self._add("has nothing to send there")
            elif self._next(i.chunk, not i.is_gradient) != i.from_stage:
                self._add("has nothing to wait for there")
        self._missing()
        return self.found

    def _add(self, text: str) -> None:
        instruction = self.program.stages[self.stage][self.place]
        self.found.append(f"stage {self.stage}, instruction {self.place}: {instruction} {text}")

    def _next(self, chunk: int, is_gradient: bool) -> int | None:
        """Stage of the slice that comes after this one, in the direction of activations or of gradients."""
        virtual = chunk * self.num_stages + self.stage - self.first + (-1 if is_gradient else 1)
        if self.num_stages == 1 or not 0 <= virtual < self.num_stages * self.program.num_chunks:
            return None
        return self.first + virtual % self.num_stages

    def _forward(self, visit: Forward) -> None:
        k, chunk = visit.microbatch, visit.chunk
        self._input(k, chunk, is_gradient=False)
        # One stage holding several slices passes from slice to slice without a transfer.
        if self.num_stages == 1 and chunk > 0 and Forward(k, chunk - 1) not in self.done:
            self._add("comes before its input")
        for batch in self.batches.of[k]:
            before = self.batches.previous.get(batch)
            if before is not None and before not in self.stepped:
                self._add(f"comes before step {before[1]} of {before[0]}")
        self.held += self._held(k, chunk)
        if self.limit is not None and self.cost is not None and self.held > self.limit:
            self._add(f"brings the stage to {self.held:,} bytes; it has {self.limit:,}")

    def _backward(self, visit: Backward) -> None:
        k, chunk = visit.microbatch, visit.chunk
        self._input(k, chunk, is_gradient=True)
        is_last = self.num_stages > 1 or chunk + 1 == self.program.num_chunks
        if Forward(k, chunk) not in self.done or not (is_last or Backward(k, chunk + 1) in self.done):
            self._add("comes before what it goes back through")
        for job, step in self.batches.of[k]:
            self.left[job, step] -= 1
            newest = self.newest.get((job, chunk), -1)
            self.newest[job, chunk] = k
            if newest > k and job in self.batches.ordered:
                self._add(f"comes after microbatch {newest}, whose samples of {job} follow its own")
        self.held -= self._held(k, chunk)

    def _input(self, k: int, chunk: int, *, is_gradient: bool) -> None:
        source = self._next(chunk, not is_gradient)
        if source is not None and Receive(k, chunk, is_gradient, source) not in self.done:
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
        for k in range(len(self.program.microbatches)):
            if self.batches.replica_of[k] != self.replica:
                continue
            for chunk in range(self.program.num_chunks):
                expected += [Forward(k, chunk), Backward(k, chunk)]
                onward, back = self._next(chunk, False), self._next(chunk, True)
                expected += [] if onward is None else [Send(k, chunk, False, onward), Receive(k, chunk, True, onward)]
                expected += [] if back is None else [Receive(k, chunk, False, back), Send(k, chunk, True, back)]
        self.found.extend(f"stage {self.stage}: {i} is missing" for i in expected if i not in self.done)

    def _held(self, k: int, chunk: int) -> int:
        if self.cost is None:
            return 0
        lengths = [s.length for s in self.program.microbatches[k].segments]
        if not lengths:
            return 0
        return self.cost.held_bytes(lengths, chunk * self.num_stages + self.stage - self.first)
