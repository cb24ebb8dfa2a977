"""Answers prompts between microbatches: all prompts of all adapters in one batch on the backbone that trains.

Training goes on: after a microbatch that took t seconds prompts get `SHARE` · t, and at least one pass of the backbone
over at most `capacity` tokens, forward only. So while prompts are waiting a step is held up by a quarter of its time,
or by one pass where that is longer; longer requests are read in several turns. Without jobs prompts have all the time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch

from weft.backbone.backbone import Backbone
from weft.backbone.out_of_memory import memory_errors
from weft.engine.capacity import release_memory
from weft.errors import WeftError
from weft.inference.attach import StoredAdapter, attach_adapter
from weft.inference.generate import BATCH, Continuation, Decoding, Request, advance, end_tokens, read_ahead
from weft.serve.errors import Busy

LOG = logging.getLogger("weft.serve.worker")
SHARE = 0.25
"""Of the time training takes, what prompts get while there are any."""
IDLE_TURN_S = 0.05
"""Length of a turn while nothing trains: so often the worker looks for new jobs."""
MAX_WAITING = 256
"""Prompts that may wait; more are refused."""
MAX_VOICES = 8
"""Adapters on the backbone for prompts at a time."""


@dataclass(frozen=True)
class End:
    """The answer is complete."""

    reason: str
    """stop: the model ended it; length: it reached its longest length."""


@dataclass(eq=False)
class Asked:
    """A prompt and the way its answer comes back: tokens, then an End; or an error."""

    tokens: list[int]
    voice: StoredAdapter | None
    """The adapter that answers; None: the bare backbone."""
    decoding: Decoding
    answer: queue.SimpleQueue[int | End | Exception] = field(default_factory=queue.SimpleQueue)
    is_cancelled: bool = False
    """Nobody listens any more."""


class Speaker:
    """The prompts of one worker. `ask` may be called from any thread, the rest from the one that trains."""

    def __init__(self, backbone: Backbone, capacity: int) -> None:
        self._backbone = backbone
        self._capacity = capacity
        self._waiting: deque[Asked] = deque()
        self._active: dict[Asked, Continuation] = {}
        self._slots: OrderedDict[str, int] = OrderedDict()
        """Slots of adapters by name, the one used longest ago first."""
        self._is_closed = False
        self.num_answered = 0
        self.tokenizer = backbone.tokenizer
        self.max_positions = backbone.max_positions

    @property
    def num_waiting(self) -> int:
        """Prompts that are not answered yet."""
        return len(self._waiting) + len(self._active)

    def ask(self, asked: Asked) -> None:
        """Puts a prompt into the queue; Busy if that is full."""
        if self._is_closed or len(self._waiting) >= MAX_WAITING:
            raise Busy("the worker stops." if self._is_closed else f"{MAX_WAITING} prompts are waiting; try again.")
        self._waiting.append(asked)

    def close(self) -> None:
        """Takes no more prompts; those without an answer hear that the worker stops."""
        self._is_closed = True
        for asked in [*self._active, *self._waiting]:
            asked.answer.put(Busy("the worker stops."))
        self._active.clear()
        self._waiting.clear()

    def take_turn(self, trained_s: float | None) -> bool:
        """Writes for a while; `trained_s` is how long the last microbatch took, None if nothing trains.

        False if there was nothing to write.
        """
        deadline = None
        while True:
            self._admit()
            if not self._active:
                return deadline is not None
            if deadline is None:
                # The next microbatch may have been started already; what is left of it is not the prompts' time.
                self._backbone.wait()
                deadline = time.perf_counter() + (IDLE_TURN_S if trained_s is None else SHARE * trained_s)
            try:
                self._pass()
            except torch.OutOfMemoryError:
                self._fail(Busy("there is no memory for prompts at the moment; try again."))
            except Exception as error:
                LOG.exception("prompts could not be answered")
                self._fail(error)
            if time.perf_counter() >= deadline:
                return True

    def _admit(self) -> None:
        """Starts on waiting prompts while there is room, in order."""
        for asked in [asked for asked in self._active if asked.is_cancelled]:
            del self._active[asked]
        while self._waiting and len(self._active) < BATCH:
            asked = self._waiting.popleft()
            if asked.is_cancelled:
                continue
            if not self._has_slot(asked.voice):
                self._waiting.appendleft(asked)
                return
            try:
                slot = self._slot(asked.voice)
            except (WeftError, torch.OutOfMemoryError) as error:
                asked.answer.put(error)
                continue
            self._active[asked] = Continuation(Request(asked.tokens, slot), asked.decoding)

    def _has_slot(self, voice: StoredAdapter | None) -> bool:
        """Whether an adapter can be on the backbone now; one that nobody is asking makes room if need be."""
        if voice is None or voice.name in self._slots or len(self._slots) < MAX_VOICES:
            return True
        in_use = {asked.voice.name for asked in self._active if asked.voice is not None}
        unused = next((name for name in self._slots if name not in in_use), None)
        if unused is None:
            return False
        self._backbone.detach(self._slots.pop(unused))
        return True

    @memory_errors()
    def _slot(self, voice: StoredAdapter | None) -> int | None:
        if voice is None:
            return None
        if voice.name not in self._slots:
            self._slots[voice.name] = attach_adapter(self._backbone, voice)
        self._slots.move_to_end(voice.name)
        return self._slots[voice.name]

    @memory_errors()
    def _pass(self) -> None:
        """One pass of the backbone: part of one long request, or a token for as many as fit."""
        for item in self._active.values():
            if len(item.new) > self._capacity:
                read_ahead(self._backbone, item, self._capacity)
                return
        going: list[Asked] = []
        room = self._capacity
        # Those that write already come first: a token each, and nobody waits for another's long request.
        for asked, item in sorted(self._active.items(), key=lambda pair: len(pair[1].new)):
            room -= len(item.new)
            if room < 0:
                break
            going.append(asked)
        written = advance(self._backbone, [self._active[asked] for asked in going], end_tokens(self._backbone))
        for asked, token in zip(going, written, strict=True):
            if token is not None:
                asked.answer.put(token)
            if self._active[asked].is_over:
                asked.answer.put(End("stop" if token is None else "length"))
                del self._active[asked]
                self.num_answered += 1

    def _fail(self, error: Exception) -> None:
        """Ends all prompts under way; training and the prompts after them go on."""
        for asked in self._active:
            asked.answer.put(error)
        self._active.clear()
        with contextlib.suppress(torch.OutOfMemoryError):
            release_memory(self._backbone)
