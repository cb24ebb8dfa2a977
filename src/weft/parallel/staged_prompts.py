"""Answers prompts of a service on replicas in stages.

Sequences are here, with their tokens and settings; stages keep keys and values of their own layers. For each token a
pass goes through all stages of a replica, whose last one chooses. Training's programs have ended before (`wait`), since
both use the same channels. Every replica has every adapter that is used; a sequence stays on one of them.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from weft.engine.execute.protocol import ReplicaMemoryError
from weft.engine.inference.adapter_slots import LiveAdapter, SlotAdapter
from weft.engine.inference.attach import StoredAdapter
from weft.engine.inference.generate import BATCH, Continuation, Request, Written, decoded, write_chosen
from weft.engine.inference.grammar import KnownTokens
from weft.engine.inference.sampling import TokenLogprobs
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.admit import MARGIN
from weft.process_memory import memory_bytes


class _OpenSequence(dict[Any, Any]):
    """Stands for the keys and values that the stages of a replica keep, until no one has it."""

    def __init__(self, number: int, replica: int) -> None:
        super().__init__(number=number)
        self.replica = replica


class StagedPrompts:
    most_at_once = BATCH

    def __init__(self, executor: StagedExecutor, wait: Callable[[], None]) -> None:
        """`wait` ends the programs that stages have begun."""
        self._executor, self._stages, self.wait = executor, executor.stages, wait
        self.tokenizer: Any = executor.tokenizer
        self.vocabulary, self.max_positions = executor.facts.vocabulary, executor.facts.max_positions
        self.ends: set[int] = self._stages.call_all("end_tokens")[-1]
        memory = executor.memory()
        self.memory_bytes = memory_bytes() if memory is None else memory.usable_bytes
        self.passes = self
        self._numbers = itertools.count()
        self._open: WeakValueDictionary[int, _OpenSequence] = WeakValueDictionary()
        self._kept: list[int] = []
        """Sequences of which stages have keys and values."""
        self._leading: dict[int, int] = {}
        """Rows that an adapter puts in front of a prompt, by slot."""

    def prepare(self, stored: StoredAdapter) -> SlotAdapter:
        self._stages.call_all("check_stored", stored)
        return LiveAdapter(stored.name, stored.spec, stored.tensors, stored.chat_template)

    def attach(self, adapter: SlotAdapter) -> int:
        assert isinstance(adapter, LiveAdapter), "stages get adapters as in files"
        stored = StoredAdapter(adapter.name, Path(adapter.name), adapter.spec, dict(adapter.tensors), None)
        slot = next(self._numbers)
        try:
            self._stages.call_all("attach_stored", slot, stored)
        except Exception as error:
            self._stages.call_all("detach_stored", slot)
            raise (torch.OutOfMemoryError(str(error)) if isinstance(error, ReplicaMemoryError) else error) from None
        self._leading[slot] = adapter.spec.num_leading_rows
        return slot

    def detach(self, slot: int) -> None:
        self._stages.call_all("detach_stored", slot)
        del self._leading[slot]

    def bytes_of(self, adapter: SlotAdapter) -> int:
        return adapter.num_bytes

    def free_bytes(self) -> float | None:
        memory = self._executor.memory()
        return None if memory is None else memory.usable_bytes * (1 - MARGIN) - memory.allocated_bytes

    def empty_cache(self) -> None:
        self.release_memory()

    def release_memory(self) -> None:
        self._executor.release_memory()

    def text_of(self, request: Request) -> Callable[[Sequence[int]], str]:
        return lambda tokens: decoded(self.tokenizer, tokens)

    def scores_at_end(self, item: Continuation) -> bool:
        return False

    def advance(self, going: Sequence[Continuation]) -> Written:
        tokens, logprobs = self._run(going)
        leading = [self._leading_of(item) for item in going]
        return write_chosen(going, tokens, logprobs, leading, self.ends, self.max_positions)

    def finish(self) -> Written:
        """Makes the stages drop keys and values that are no longer needed."""
        if self._kept != list(self._open):
            self._run([])
        return []

    def read_ahead(self, item: Continuation, num_tokens: int) -> None:
        whole, num_top = item.new, item.decoding.prompt_logprobs
        scored = [] if num_top is None else item.prompt[item.num_read + 1 : item.num_read + 1 + num_tokens]
        item.new = whole[:num_tokens]
        try:
            _, logprobs = self._run([item], scored)
        finally:
            item.new = whole
        if scored:
            item.prompt_logprobs += logprobs
        item.new, item.num_read = whole[num_tokens:], item.num_read + num_tokens

    def _run(
        self, going: Sequence[Continuation], scored: Sequence[int] = ()
    ) -> tuple[list[int], Sequence[TokenLogprobs | None]]:
        """One pass of every replica over the new tokens of its sequences. Returns the chosen tokens, or the
        log-probabilities of `scored`, the tokens that come after the new ones of a single sequence."""
        own: list[list[int]] = [[] for _ in self._executor.replicas]
        for index, item in enumerate(going):
            own[self._sequence_of(item).replica].append(index)
        self._kept = list(self._open)
        given = {
            device: ([self._sent(going[index]) for index in indices], self._kept, scored)
            for devices, indices in zip(self._executor.replicas, own, strict=True)
            for device in devices
        }
        found = dict(zip(given, self._stages.call_each("read_prompts", given), strict=True))
        by_replica = [found[devices[-1]] for devices in self._executor.replicas]
        if scored:
            return [], next(logprobs for _, logprobs in by_replica if logprobs)
        chosen = {
            index: pair
            for indices, results in zip(own, by_replica, strict=True)
            for index, pair in zip(indices, zip(*results, strict=True), strict=True)
        }
        return [chosen[index][0] for index in range(len(going))], [chosen[index][1] for index in range(len(going))]

    def _sequence_of(self, item: Continuation) -> _OpenSequence:
        if not isinstance(item.cache, _OpenSequence):
            # It is new, or all of it has to be read again.
            counts = Counter(sequence.replica for sequence in self._open.values())
            replica = min(range(len(self._executor.replicas)), key=lambda replica: counts[replica])
            item.cache = _OpenSequence(next(self._numbers), replica)
            self._open[item.cache["number"]] = item.cache
        return item.cache

    def _sent(self, item: Continuation) -> Continuation:
        """A copy of the continuation that can be sent to another process."""
        sent = copy.copy(item)
        sent.cache, sent.logprobs, sent.prompt_logprobs = dict(item.cache), [], []
        sent.decode = sent._text = None
        if item.constraint is not None:
            sent.constraint = KnownTokens(item.constraint, self.vocabulary)
        return sent

    def _leading_of(self, item: Continuation) -> int:
        return 0 if item.request.slot is None else self._leading.get(item.request.slot, 0)
