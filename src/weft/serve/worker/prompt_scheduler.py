"""Answers prompts between microbatches: all prompts of all adapters in one batch on the backbone that trains.

Training goes on meanwhile: after a microbatch that took t seconds, prompts get `share` · t, and at least one forward
pass over at most `capacity` tokens. So while prompts wait, a step takes by this share longer, or one pass longer where
that is more; a long prompt is read in several turns. When nothing trains, prompts have all the time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from weft.engine.execute.protocol import ReplicaFaultError
from weft.engine.inference.adapter_slots import AdapterSlots, LiveAdapter, SlotAdapter
from weft.engine.inference.attach import StoredAdapter
from weft.engine.inference.generate import Continuation, Request, Written
from weft.engine.inference.grammar import Constraint
from weft.engine.inference.sampling import TokenLogprobs
from weft.errors import WeftError
from weft.kernels.device import memory_errors
from weft.model.backbone import Backbone
from weft.serve.errors import Busy
from weft.serve.worker.prompt_replica import LocalPrompts, PromptReplica
from weft.spec.sampling import Decoding

LOG = logging.getLogger("weft.serve.worker")
IDLE_TURN_S = 0.05
"""How long a turn lasts while nothing trains; the worker looks for new jobs between two turns."""
MAX_WAITING = 256
"""How many prompts may wait; more are refused."""
ADAPTER_SHARE, ADAPTER_SHARE_ALONE = 1 / 16, 1 / 4
"""Part of the device's memory for prompts' adapters, beside training and without."""


@dataclass(frozen=True)
class AnswerEnd:
    """The answer is complete."""

    reason: str
    """`stop` if the model ended the answer, `length` if it reached its greatest length."""


@dataclass(frozen=True)
class ScoredPrompt:
    """Log-probabilities of the prompt's tokens; None for the first."""

    logprobs: list[TokenLogprobs | None]


AnswerPart = int | TokenLogprobs | ScoredPrompt | AnswerEnd | Exception


@dataclass(frozen=True)
class RunningJob:
    """A job that trains here: prompts get a copy of its adapter at the step boundary where they begin."""

    id: str
    chat_template: str | None = None


@dataclass(eq=False)
class PromptRequest:
    """A prompt, and the queue on which its answer comes back: tokens and then an AnswerEnd, or an error. Tokens come
    with log-probabilities, and those of the prompt before them, if the decoding has them."""

    tokens: list[int]
    adapter: SlotAdapter | RunningJob | None
    """The adapter that answers; None is the bare backbone."""
    decoding: Decoding
    constraint: Constraint | None = None
    """Which tokens may come next; None is all."""
    answer: queue.SimpleQueue[AnswerPart] = field(default_factory=queue.SimpleQueue)
    is_cancelled: bool = False
    slot_name: str | None = None
    """The name under which its adapter is on a slot."""
    num_sent: int | None = None
    """Tokens that are in the queue; None before anything is."""


class PromptScheduler:
    """The prompts of one worker. Any thread may call `submit`; only the one that trains calls the rest."""

    def __init__(
        self,
        answering: PromptReplica | Backbone,
        capacity: int,
        share: float = 0.25,
        adapter_share: float = ADAPTER_SHARE,
        live: Callable[[str], LiveAdapter] | None = None,
    ) -> None:
        """`live`: returns the adapter of a job that trains on this backbone; raises a WeftError for any other."""
        self._live = live
        replica = LocalPrompts(answering) if isinstance(answering, Backbone) else answering
        self._replica: PromptReplica = replica
        self._passes, self._share = replica.passes, share
        self._capacity = capacity
        self._waiting: deque[PromptRequest] = deque()
        self._active: dict[PromptRequest, Continuation] = {}
        self._alone: deque[PromptRequest] = deque()
        """Prompts of a pass that failed: each is read alone once, so that only the one to blame fails."""
        self._slots = AdapterSlots(replica, adapter_share)
        self._is_closed = False
        self.num_answered = 0
        self.tokenizer = replica.tokenizer
        self.max_positions = replica.max_positions
        self.vocabulary = replica.vocabulary
        self.ends = replica.ends

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._active)

    def prepare(self, stored: StoredAdapter) -> SlotAdapter:
        """As `PromptReplica.prepare`; Busy if the replica is lost."""
        try:
            return self._replica.prepare(stored)
        except ReplicaFaultError:
            raise Busy("the worker starts again; try again.") from None

    def submit(self, request: PromptRequest) -> None:
        """Puts a prompt into the queue; raises Busy if the queue is full."""
        if self._is_closed or len(self._waiting) >= MAX_WAITING:
            raise Busy("the worker stops." if self._is_closed else f"{MAX_WAITING} prompts are waiting; try again.")
        self._waiting.append(request)

    def close(self) -> None:
        """Refuses prompts from now on; those without an answer get the error that the worker stops."""
        self._is_closed = True
        for request in [*self._active, *self._waiting]:
            request.answer.put(Busy("the worker stops."))
        self._active.clear()
        self._waiting.clear()

    def take_turn(self, trained_s: float | None) -> bool:
        """Answers prompts for a while; `trained_s` is how long the last microbatch took, None if nothing trains.
        Returns False if there was no prompt to answer."""
        deadline = None
        while True:
            self._start_waiting()
            if not self._active:
                self._write(self._passes.finish())
                return deadline is not None
            if deadline is None:
                # The next microbatch may be running already; waiting for it does not count as time for prompts.
                self._replica.wait()
                deadline = time.perf_counter() + (IDLE_TURN_S if trained_s is None else self._share * trained_s)
            self._pass()
            if time.perf_counter() >= deadline:
                self._write(self._passes.finish())
                return True

    def _start_waiting(self) -> None:
        cancelled = [request for request in self._active if request.is_cancelled]
        if cancelled or self._waiting:
            # Slots may change: no pass that uses them is under way.
            self._write(self._passes.finish())
        for request in cancelled:
            if (item := self._active.pop(request, None)) is not None:
                item.cache = {}
        while self._waiting and len(self._active) < self._replica.most_at_once:
            request = self._waiting.popleft()
            if request.is_cancelled:
                continue
            slot: int | None = None
            if request.adapter is not None:
                try:
                    slot = self._slot(request)
                except ReplicaFaultError:
                    raise
                except Exception as error:
                    # An adapter that cannot be attached costs its own prompt only.
                    if not isinstance(error, WeftError | torch.OutOfMemoryError):
                        LOG.exception("an adapter could not be attached")
                    request.answer.put(_no_memory() if isinstance(error, torch.OutOfMemoryError) else error)
                    continue
                if slot is None:
                    # Those that came later wait as well, or it would never get a slot.
                    self._waiting.appendleft(request)
                    return
            own = Request(request.tokens, slot)
            item = Continuation(own, request.decoding, constraint=request.constraint)
            if self._passes.scores_at_end(item):
                # Its text is sent at its end, so no one else looks for stop strings before that.
                item = replace(item, decode=self._replica.text_of(own))
            self._active[request] = item

    def _in_use(self) -> set[str]:
        return {request.slot_name for request in self._active if request.slot_name is not None}

    def _slot(self, request: PromptRequest) -> int | None:
        """The slot of its adapter; None as long as there is no room for it."""
        adapter = request.adapter
        assert adapter is not None
        if not isinstance(adapter, RunningJob):
            request.slot_name = adapter.name
            return self._slots.slot(adapter, self._in_use)
        if self._live is None:
            raise Busy("no job trains here.")
        live = self._live(adapter.id)
        # Copies of earlier steps are of no more use.
        in_use = self._in_use()
        earlier = [name for name in self._slots.names if name.startswith(f"{adapter.id}@") and name not in in_use]
        self._slots.free([name for name in earlier if name != live.name])
        request.slot_name = live.name
        return self._slots.slot(live, self._in_use)

    def _pass(self) -> None:
        """Runs the backbone once: over part of one long prompt, or for one more token of as many answers as fit."""
        while self._alone and self._alone[0] not in self._active:
            self._alone.popleft()
        candidates = {self._alone[0]: self._active[self._alone[0]]} if self._alone else self._active
        for request, item in candidates.items():
            if number := item.num_ahead(self._capacity):
                self._run([request], partial(self._replica.read_ahead, item, number))
                return
        if self._alone:
            self._alone.popleft()
        going: list[PromptRequest] = []
        room = self._capacity
        # Answers under way come first with one token each, so that none waits for another's long prompt.
        for request, item in sorted(candidates.items(), key=lambda pair: len(pair[1].new)):
            room -= len(item.new)
            if room < 0:
                break
            going.append(request)
        self._run(going, partial(self._advance, going))

    def _advance(self, going: list[PromptRequest]) -> None:
        self._write(self._passes.advance([self._active[request] for request in going]))

    def _write(self, written: Written) -> None:
        """Puts new tokens into the queues of their requests."""
        requests = {id(item): request for request, item in self._active.items()}
        for item, _ in written:
            request = requests.get(id(item))
            if request is None:
                continue
            if item.error is not None:
                LOG.error("a prompt could not be answered", exc_info=item.error)
                self._end(request, item.error)
                continue
            if item.reason is not None or not self._passes.scores_at_end(item):
                _send(request, item)
            if item.reason is not None:
                self._end(request, AnswerEnd(item.reason))
                self.num_answered += 1

    def _run(self, going: list[PromptRequest], work: Callable[[], None]) -> None:
        """Runs a pass; if it raises, each of its prompts starts again and is read alone, and fails if that raises."""
        error: Exception
        try:
            with memory_errors():
                work()
            return
        except torch.OutOfMemoryError:
            error = _no_memory()
        except ReplicaFaultError:
            raise
        except Exception as other:
            LOG.exception("a pass over prompts failed")
            error = other
        self._write(self._passes.finish())
        going = [request for request in going if request in self._active]
        with contextlib.suppress(torch.OutOfMemoryError):
            self._replica.release_memory()
        if len(going) == 1:
            self._end(going[0], error)
            return
        for request in going:
            # What a pass that failed has written of keys and values is not known.
            self._active[request].forget_read()
            self._alone.append(request)

    def _end(self, request: PromptRequest, end: AnswerEnd | Exception) -> None:
        request.answer.put(end)
        self._active.pop(request).cache = {}


def _send(request: PromptRequest, item: Continuation) -> None:
    """Puts what is new of an answer into its queue."""
    if request.num_sent is None:
        request.num_sent = 0
        if item.prompt_logprobs:
            request.answer.put(ScoredPrompt(item.prompt_logprobs))
    for part in (item.logprobs or item.tokens)[request.num_sent :]:
        request.answer.put(part)
    request.num_sent = len(item.tokens)


def _no_memory() -> Busy:
    return Busy("there is no memory for prompts at the moment; try again.")
