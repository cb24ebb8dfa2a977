"""Batched decoding: several sequences, each with its own adapter, on one shared backbone; answers to prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from weft.data.load import Prompt
from weft.engine.inference.answer_text import AnswerText, before_stop
from weft.engine.inference.grammar import Constraint
from weft.engine.inference.read import (
    can_run_ahead,
    decodes_as_training,
    next_logits,
    read_ahead,
    score_again,
)
from weft.engine.inference.sampling import Chosen, ChosenCopy, Sampler, TokenLogprobs, check
from weft.errors import DataError, JobError
from weft.kernels.device import memory_errors
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.fused.decode import MOST_ROWS
from weft.spec.sampling import Decoding, Sampling

BATCH = 64
"""Maximum number of sequences of a pass on the reference path."""


@dataclass(frozen=True)
class Request:
    """A prompt's tokens and the slot whose adapter continues them."""

    tokens: Sequence[int]
    slot: int | None = None
    seed: int = 0
    """Seed of its draws, combined with that of the decoding."""


@dataclass(frozen=True)
class Finished:
    """A finished answer, with log-probabilities if the decoding has them."""

    tokens: list[int]
    """Tokens of the answer, without the end token."""
    reason: str
    """`stop` if an end token or a stop string came, `length` at the longest length."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Log-probability of each token of the prompt, given those before it; None for the first."""


@dataclass(eq=False)
class Continuation:
    request: Request
    decoding: Decoding
    decode: Callable[[Sequence[int]], str] | None = None
    """Function from tokens to text, in which stop strings are searched; None: the caller searches."""
    constraint: Constraint | None = None
    """Constraint on the tokens that may come next; None: any may."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    reason: str | None = None
    """Reason why it ended: `stop` or `length`."""
    error: Exception | None = None
    """Error of `advance` for this continuation alone; then it is over."""

    def __post_init__(self) -> None:
        if self.decoding.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self._text = AnswerText(self.decode) if self.decode is not None and self.decoding.stop else None
        self.sampling: Sampling = replace(self.decoding, seed=mix(self.decoding.seed, self.request.seed))
        self.cache: dict[Any, Any] = {}
        """Keys and values by layer, and states of mixers."""
        self.new: list[int] = list(self.request.tokens)
        """Tokens that the model has not read yet: first the whole request, then the last token."""
        self.num_read = 0
        self.num_pending = 0
        """Tokens that a pass has chosen and that are not written here yet: 0 or 1."""

    @property
    def is_over(self) -> bool:
        return self.reason is not None or self.error is not None

    @property
    def has_logprobs(self) -> bool:
        return self.decoding.logprobs is not None or self.decoding.prompt_logprobs is not None

    @property
    def finished(self) -> Finished:
        assert self.reason is not None
        return Finished(self.tokens, self.reason, self.logprobs, self.prompt_logprobs)

    def num_ahead(self, capacity: int) -> int:
        """New tokens to read before the pass that chooses the next one, which reads at most `capacity`."""
        if self.decoding.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt):
            return min(capacity, len(self.prompt) - 1 - self.num_read)
        return capacity if len(self.new) > capacity else 0

    @property
    def num_chosen(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def can_run_ahead(self) -> bool:
        """True if a pass may read a token that is not written yet; penalties and constraints need it first."""
        return self.constraint is None and not self.sampling.has_penalties

    def ends_with_next(self, longest: int, num_leading: int) -> bool:
        """True if the next token is the last one, whichever it is; arguments as in `write`."""
        num_tokens = len(self.tokens) + 1
        return num_tokens >= self.decoding.max_new_tokens or num_leading + len(self.prompt) + num_tokens >= longest

    def forget_read(self) -> None:
        """Makes the next pass read everything again: the request and the tokens written so far."""
        self.cache = {}
        self.new = [*self.request.tokens, *self.tokens]
        self.num_read = 0
        if len(self.prompt_logprobs) < len(self.prompt):
            self.prompt_logprobs = self.prompt_logprobs[:1]

    @property
    def prompt(self) -> Sequence[int]:
        return self.request.tokens

    def write(
        self,
        token: int,
        ends: Collection[int],
        longest: int,
        num_leading: int,
        logprobs: TokenLogprobs | None = None,
    ) -> int | None:
        """Adds the chosen token; None if it ends the answer instead. `longest`: positions that the model has;
        `num_leading`: rows in front of the request that an adapter fills. JobError if none could be chosen."""
        check(token)
        is_last = self.ends_with_next(longest, num_leading)
        if token in ends or token in self.decoding.stop_token_ids:
            self.reason = "stop"
            return None
        if self.constraint is not None:
            self.constraint.take(token)
        self.tokens.append(token)
        if logprobs is not None and self.decoding.logprobs is not None:
            self.logprobs.append(logprobs.only(self.decoding.logprobs))
        self.num_read += len(self.new)
        self.new = [token]
        if self._text is not None and before_stop(self._text.add(token), self.decoding.stop) is not None:
            self.reason = "stop"
        elif is_last:
            self.reason = "length"
        return token


Written = list[tuple[Continuation, int | None]]
"""Tokens that a pass has written, or None where an end token or an error came instead."""


def generate(
    backbone: Backbone,
    requests: Sequence[Request],
    decoding: Decoding,
    *,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """New tokens of every request; the rest is as in `complete`."""
    return [each.tokens for each in complete(backbone, requests, decoding, on_token=on_token)]


def complete(
    backbone: Backbone,
    requests: Sequence[Request],
    decoding: Decoding,
    *,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Finished]:
    """Continues every request; `on_token(index, token)` gets each token at once. A sequence's draws depend on its own
    seed and the decoding's, not on the others or its index."""
    items = [Continuation(request, decoding, text_of(backbone, request)) for request in requests]
    index_of = {id(item): index for index, item in enumerate(items)}
    passes, waiting, going = Passes(backbone), deque(items), list[Continuation]()
    most, can_join = most_at_once(backbone), backbone.decoder(None) is not None
    while waiting or going:
        # Without a decoder the number of rows may decide last bits, so groups stay as stages have them.
        room = most - len(going) if can_join or not going else 0
        going += [waiting.popleft() for _ in range(min(len(waiting), room))]
        try:
            for item in going:
                while number := item.num_ahead(len(item.new)):
                    read_ahead(backbone, item, number)
            written = passes.advance(going)
        except torch.OutOfMemoryError:
            most = len(going) // 2
            if not most:
                raise
            written = passes.finish()
            # The last to come give way until others have ended. All are read again: the pass may have ended halfway.
            for item in going:
                item.forget_read()
            waiting.extendleft(reversed(going[most:]))
            del going[most:]
        for item, token in written:
            if item.error is not None:
                raise item.error
            if token is not None and on_token is not None:
                on_token(index_of[id(item)], token)
        going = [item for item in going if not item.is_over]
    return [item.finished for item in items]


def most_at_once(backbone: Backbone) -> int:
    """The most sequences that are continued in one pass."""
    return BATCH if backbone.decoder(None) is None else MOST_ROWS


def text_of(backbone: Backbone, request: Request) -> Callable[[Sequence[int]], str]:
    return lambda tokens: decoded(backbone.tokenizer_of(request.slot), tokens)


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class StartedPass:
    items: Sequence[Continuation]
    chosen: Chosen
    copy: ChosenCopy


class Passes:
    """Passes of the backbone, each of which chooses the next token of some continuations. A continuation's token does
    not depend on the others in the pass.

    On a GPU a pass starts before the tokens of the one before are here, and reads them on the device. So the GPU does
    not wait while they are written; an end token is then noticed a pass late, and what was read after it is dropped.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone, self._ends, self._sampler = backbone, end_tokens(backbone), Sampler()
        self._longest = backbone.max_positions
        self._started: StartedPass | None = None

    def advance(self, going: Sequence[Continuation]) -> Written:
        """Starts a pass over those that are not at their end; returns what was written: the tokens of this pass or of
        the one before."""
        is_ahead = can_run_ahead(self._backbone, going)
        if not is_ahead and self._started is not None:
            return self.finish()
        reading = [item for item in going if not (item.num_pending and self._ends_with_next(item))]
        started = self._start(reading) if reading else None
        written = self.finish()
        self._started = started
        return written if is_ahead else self.finish()

    def finish(self) -> Written:
        """Writes the tokens of the last pass, if they are not written."""
        started, self._started = self._started, None
        if started is None:
            return []
        tokens, logprobs = started.copy.get()
        for item in started.items:
            item.num_pending -= 1
        leading = [self._backbone.leading_rows(item.request.slot) for item in started.items]
        written = write_chosen(started.items, tokens, logprobs, leading, self._ends, self._longest)
        for item, _ in written:
            if item.reason is not None and self.scores_at_end(item):
                self._score(item)
        return written

    def scores_at_end(self, item: Continuation) -> bool:
        """True if the answer's log-probabilities are known only at its end, because decoding does not have training's
        bits."""
        return item.has_logprobs and not decodes_as_training(self._backbone, item.request.slot)

    def _score(self, item: Continuation) -> None:
        try:
            with memory_errors():
                score_again(self._backbone, item)
        except torch.OutOfMemoryError as error:
            item.error = error

    def _start(self, reading: Sequence[Continuation]) -> StartedPass:
        logits_NV = next_logits(self._backbone, reading, self._started)
        chosen = self._sampler.choose(logits_NV, reading)
        started = StartedPass(reading, chosen, ChosenCopy(chosen))
        for item in reading:
            item.num_pending += 1
        return started

    def _ends_with_next(self, item: Continuation) -> bool:
        return item.ends_with_next(self._longest, self._backbone.leading_rows(item.request.slot))


def write_chosen(
    items: Sequence[Continuation],
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    leading: Sequence[int],
    ends: Collection[int],
    longest: int,
) -> Written:
    """Writes the tokens that a pass has chosen; those of answers that are over are dropped."""
    written: Written = []
    for item, token, own, num_leading in zip(items, tokens, logprobs, leading, strict=True):
        if item.is_over:
            continue
        try:
            kept = item.write(token, ends, longest, num_leading, own)
        except JobError as error:
            item.error, kept = error, None
        if item.is_over:
            # What it has read is needed no more.
            item.cache = {}
        written.append((item, kept))
    return written


def end_tokens(backbone: Backbone) -> set[int]:
    configured = getattr(backbone.model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(t) for t in [*listed, backbone.tokenizer.eos_token_id] if t is not None}


@dataclass(frozen=True)
class Answer:
    prompt: Prompt
    text: str
    finished: Finished | None = None

    @property
    def is_exact(self) -> bool:
        """True if it equals the data's answer, apart from surrounding white space."""
        return self.prompt.reference is not None and self.text.strip() == self.prompt.reference.strip()


def answers(
    backbone: Backbone, prompts_of: Mapping[str, tuple[int | None, Sequence[Prompt]]], decoding: Decoding
) -> dict[str, list[Answer]]:
    """Answers by name: each name's slot (None: the bare backbone) to its prompts, all decoded together; `n` to each
    prompt, one after another. A prompt's index among those of its name and the answer's decide its seed, so no draw
    depends on the other names."""
    refuse_long([prompt for _, prompts in prompts_of.values() for prompt in prompts], backbone.max_positions)
    requests = [one for slot, prompts in prompts_of.values() for one in requests_of(prompts, slot, decoding.n)]
    finished = iter(complete(backbone, requests, decoding))
    return {
        name: worded(prompts, list(islice(finished, len(prompts) * decoding.n)), backbone.tokenizer_of(slot), decoding)
        for name, (slot, prompts) in prompts_of.items()
    }


def refuse_long(prompts: Sequence[Prompt], longest: int) -> None:
    for prompt in prompts:
        if len(prompt.tokens) >= longest:
            raise DataError(
                f"the prompt has {len(prompt.tokens):,} tokens; the backbone has {longest:,} positions.",
                where=prompt.where,
            )


def requests_of(prompts: Sequence[Prompt], slot: int | None, number: int = 1) -> list[Request]:
    """`number` of each prompt, the first with the prompt's index as its seed."""
    return [
        Request(prompt.tokens.tolist(), slot, mix(index, sample) if sample else index)
        for index, prompt in enumerate(prompts)
        for sample in range(number)
    ]


def worded(prompts: Sequence[Prompt], finished: Sequence[Finished], tokenizer: Any, decoding: Decoding) -> list[Answer]:
    """Answers to prompts, `decoding.n` to each."""
    repeated = [prompt for prompt in prompts for _ in range(decoding.n)]
    texts = [decoded(tokenizer, each.tokens) for each in finished]
    cut = [text if (before := before_stop(text, decoding.stop)) is None else before for text in texts]
    return [Answer(*each) for each in zip(repeated, cut, finished, strict=True)]


def exact_match(given: Sequence[Answer]) -> float:
    return sum(answer.is_exact for answer in given) / len(given)
