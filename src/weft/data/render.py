"""Renders a normal form as the text that the model reads, and marks the trained characters.

- A conversation is rendered with the job's chat template, else the tokenizer's. The assistant's answers are trained
  (`chat/answers.py`).
- A prompt and its completion become a user and an assistant turn when there is a chat template. Without one they are
  joined unchanged, `prompt + completion`, with the tokenizer's BOS in front (if it adds one itself) and EOS at the end;
  the completion and EOS are trained. Several turns of a prompt (system, history) are joined by blank lines.
- A text gets BOS and EOS the same way; all of it is trained.
- With `train_on_inputs` all characters are trained.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from weft.data.chat_template import ChatTemplate, Tokenizer, agreement
from weft.data.chats import THOUGHTS, ChatTurn, Conversation, Form, Rendered, Text
from weft.errors import DataError


def check_template(chat_template: str, tokenizer: Tokenizer) -> None:
    """Raises a ConfigError if the text is no chat template, whatever the conversation."""
    turn = ChatTurn("user", "?")
    # A template may refuse this one, so only what is wrong with the template itself counts.
    with contextlib.suppress(DataError):
        ChatTemplate(tokenizer, chat_template).apply((turn,), Conversation((turn,)), "chat_template", generation=True)


@dataclass(frozen=True)
class Renderer:
    template: ChatTemplate
    train_on_inputs: bool = False
    mask_history: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self.template.tokenizer

    @property
    def has_template(self) -> bool:
        return bool(self.template.text)

    @property
    def ignores_tools(self) -> bool:
        """True if the template does not render a list of tools."""
        return "tools" not in self.template.text

    def ignores_thoughts(self, form: Form) -> bool:
        """True if a turn has thoughts in a field that the template does not read."""
        if not isinstance(form, Conversation):
            return False
        fields = {name for turn in form.turns for name in THOUGHTS if turn.extra.get(name)}
        return any(name not in self.template.text for name in fields)

    def render(self, form: Conversation | Text, where: str) -> tuple[Rendered, ...]:
        """The texts to train on: one, except for chats whose template changes earlier answers later on."""
        if isinstance(form, Text):
            # Blank text would train nothing but the end of a text; corpora use it as a separator.
            text = form.text if form.text.strip() else ""
            return (Rendered(text, ((0, len(text)),), bool(text), where),)
        if self.has_template and not self.train_on_inputs:
            return train_answers(_last_answer(form) if self.mask_history else form, self.template, where)
        if self.has_template:
            if any(turn.trained and turn.weight != 1 for turn in form.turns):
                raise DataError("messages have weights, but train_on_inputs counts all tokens the same.", where=where)
            full = self.template.apply(form.turns, form, where)
            return (Rendered(full, ((0, len(full)),), False, where),)
        prompt = self._join(form.turns[:-1], where, form)
        text = prompt + form.turns[-1].content
        start = 0 if self.train_on_inputs else len(prompt)
        return (Rendered(text, ((start, len(text)),), True, where),)

    def render_prompt(self, form: Conversation | Text, where: str) -> tuple[Rendered, str | None]:
        if isinstance(form, Text):
            return Rendered(form.text, (), True, where), None
        turns, reference = form.turns, None
        if len(turns) > 1 and turns[-1].role == "assistant":
            turns, reference = turns[:-1], turns[-1].content or None
        if self.has_template:
            text = self.template.apply(turns, form, where, generation=True)
            return Rendered(text, (), False, where), reference
        return Rendered(self._join(turns, where, form), (), True, where), reference

    def _join(self, turns: Sequence[ChatTurn], where: str, form: Conversation) -> str:
        if form.is_chat:
            model = self.tokenizer.name_or_path or "this model"
            problem = f"the row is a chat, but the tokenizer of {model} has no chat template"
            raise DataError(f"{problem}.", where=where, hint="Set chat_template to a Jinja template.")
        return "\n\n".join(turn.content for turn in turns)


def _last_answer(form: Conversation) -> Conversation:
    last = max((i for i, turn in enumerate(form.turns) if turn.trained), default=-1)
    turns = tuple(replace(turn, trained=turn.trained and i == last) for i, turn in enumerate(form.turns))
    return replace(form, turns=turns)


MAX_RENDERED_ALL = 8
"""Chats with up to so many answers locate all of them by rendering; longer chats use landmarks for most of them."""
THOUGHT_START, THOUGHT_END = "<think>", "</think>"


@dataclass(frozen=True)
class Answer:
    turn: int
    text: str
    start: int
    end: int
    """The answer is text[start:end]."""


def train_answers(form: Conversation, template: ChatTemplate, where: str) -> tuple[Rendered, ...]:
    """The samples of a chat; a chat without a trained turn is one sample with nothing to learn."""
    marked = None if template.prompt_opening else template.apply_marked(form, where)
    if marked is not None:
        text, blocks = marked
        spans = _blocks_of_turns(form, blocks)
        if spans is not None:
            return (_rendered(form, text, spans, where),)
    full = template.apply(form.turns, form, where)
    trained = [i for i, turn in enumerate(form.turns) if turn.trained]

    def find(i: int) -> Answer:
        return _find_answer(i, form, template, where, full)

    if len(trained) > MAX_RENDERED_ALL:
        spans = _spans_by_landmarks(form, trained, full, template, where, find)
        if spans is not None:
            return (_rendered(form, full, spans, where),)
    groups = _gather(full, [find(i) for i in trained], form, template.ends_text)
    return tuple(_rendered(form, text, {a.turn: (a.start, a.end) for a in answers}, where) for text, answers in groups)


def _rendered(form: Conversation, text: str, spans: dict[int, tuple[int, int]], where: str) -> Rendered:
    turns = sorted(spans)
    return Rendered(text, tuple(spans[i] for i in turns), False, where, tuple(form.turns[i].weight for i in turns))


def _blocks_of_turns(form: Conversation, blocks: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]] | None:
    """The generation blocks of the trained turns; None where the template does not mark each assistant turn once."""
    turns = [i for i, turn in enumerate(form.turns) if turn.role == "assistant"]
    if len(turns) != len(blocks):
        return None
    return {i: block for i, block in zip(turns, blocks, strict=True) if form.turns[i].trained}


def _find_answer(i: int, form: Conversation, template: ChatTemplate, where: str, full: str) -> Answer:
    """The answer of turn `i`, from the text before it and the text through it."""
    turns = form.turns
    before = template.apply(turns[:i], form, where, generation=True)
    through = full if i + 1 == len(turns) else template.apply(turns[: i + 1], form, where)
    if through.startswith(before):
        return Answer(i, through, len(before), len(through))
    agreed = agreement(before, through)
    opening = before[agreed:]
    question = turns[i - 1].content.strip()
    if question in opening and agreed < agreement(template.apply(turns[:i], form, where), before):
        body = _after_question(before, through, question, turns[i].content.strip())
        if body is None:
            raise DataError(
                "the chat template renders the turns before an answer otherwise without the answer, so it does not "
                "show which tokens the assistant wrote.",
                where=where,
                hint="Set another chat_template, or train_on_inputs to train on all tokens.",
            )
        return Answer(i, before + body, len(before), len(before) + len(body))
    # The generation prompt has more than the turn, such as the beginning of a thought. The model will meet it before
    # every answer, so the answer is trained after it.
    rest = _with_thought(through[agreed:], turns[i].content, opening)
    # The end of the generation prompt that the turn begins with is not repeated.
    repeated = next(n for n in range(min(len(opening), len(rest)), -1, -1) if opening.endswith(rest[:n]))
    return Answer(i, before + rest[repeated:], len(before), len(before) + len(rest) - repeated)


def _with_thought(rest: str, content: str, opening: str) -> str:
    """The rest of a turn after a generation prompt that opens a thought, with the thought that a template cut off."""
    thought, end, answer = content.rpartition(THOUGHT_END)
    if not end or THOUGHT_START not in opening or THOUGHT_END in rest:
        return rest
    blanks = answer[: len(answer) - len(answer.lstrip())]
    return thought.rpartition(THOUGHT_START)[2].lstrip("\n") + end + blanks + rest.lstrip()


def _after_question(before: str, through: str, question: str, content: str) -> str | None:
    """The part after the question and the generation prompt in the text through an answer, or None if it lacks them.
    For templates that change the text before a question once it is answered, such as its system prompt."""
    prompt = before[before.rfind(question) :]
    at = through.rfind(prompt, 0, through.rfind(content)) if question and content else -1
    return None if at < 0 else through[at + len(prompt) :]


def _gather(full: str, answers: Sequence[Answer], form: Conversation, ends_text: str) -> list[tuple[str, list[Answer]]]:
    """The texts to train, each with the answers that appear in it unchanged, in the order of the turns."""
    groups: list[tuple[str, list[Answer]]] = [(full, [])]
    for answer in reversed(answers):
        text, shown = groups[-1]
        end = _shown_until(text, answer, form.turns[answer.turn].content, ends_text)
        if end is None:
            groups.append((answer.text, [answer]))
        else:
            shown.append(answer if end == answer.end else replace(answer, end=end))
    if answers and not groups[0][1]:
        # Nothing but turns that come after the last answer.
        groups.pop(0)
    return groups[::-1]


def _shown_until(text: str, answer: Answer, content: str, ends_text: str) -> int | None:
    """End of the answer in a longer text, or None if the answer appears there changed. What a template writes once,
    after the last turn, may be missing: a token that ends the text, if the turn has an end-of-turn marker before it,
    and all that follows such a token."""
    if text.startswith(answer.text):
        return answer.end
    at = answer.text.rfind(ends_text, answer.start) if ends_text else -1
    if at < 0:
        return None
    has_marker = not answer.text[:at].rstrip().endswith(content.strip())
    for end in (at + len(ends_text), at if has_marker else 0):
        if end > answer.start and text.startswith(answer.text[:end]):
            return end
    return None


def _spans_by_landmarks(
    form: Conversation,
    trained: Sequence[int],
    full: str,
    template: ChatTemplate,
    where: str,
    find: Callable[[int], Answer],
) -> dict[int, tuple[int, int]] | None:
    """The spans of a long chat that is one sample, most of them by comparison with turns that look alike. Turns with
    the same text before and after their content are rendered once at the first and once at the last of them. None where
    the chat has to be rendered turn by turn."""
    landmarks = Landmarks.of(form, template.apply(Landmarks.marked(form), form, where), full)
    if landmarks is None:
        return None
    spans: dict[int, tuple[int, int]] = {}
    for alike in _by_surroundings(trained, landmarks):
        offsets: set[tuple[int, int]] = set()
        for i in {alike[0], alike[-1]}:
            answer = find(i)
            end = _shown_until(full, answer, form.turns[i].content, template.ends_text)
            if end is None:
                return None
            offsets.add(landmarks.offsets(i, answer.start, end))
        if len(offsets) > 1:
            return None
        distances = offsets.pop()
        spans |= {i: landmarks.span(i, *distances) for i in alike}
    return spans


def _by_surroundings(trained: Iterable[int], landmarks: Landmarks) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    for i in trained:
        groups.setdefault(landmarks.surroundings(i), []).append(i)
    return list(groups.values())


# Private-use characters: no template looks for them, and data that has them is rendered turn by turn.
OPEN, CLOSE = "\ue0b0", "\ue0b1"
MARK = re.compile(f"{OPEN}([0-9]+)([+-]){CLOSE}")


@dataclass(frozen=True)
class Landmarks:
    text: str
    contents: tuple[tuple[int, int] | None, ...]
    """Span [start, end) of every turn; None for content that is blank, missing or repeated."""
    roles: tuple[str, ...]

    @staticmethod
    def marked(form: Conversation) -> tuple[ChatTurn, ...]:
        """The turns with marks in their contents, inside of blanks at their ends, which templates strip."""
        return tuple(_marked(turn, i) for i, turn in enumerate(form.turns))

    @classmethod
    def of(cls, form: Conversation, marked_text: str, text: str) -> Landmarks | None:
        """The landmarks of a chat; None where the marks changed the rest of the text."""
        pieces = MARK.split(marked_text)
        if OPEN in text or "".join(pieces[::3]) != text:
            return None
        positions: dict[tuple[int, str], list[int]] = {}
        at = 0
        for piece, turn, side in zip(pieces[0::3], pieces[1::3], pieces[2::3], strict=False):
            at += len(piece)
            positions.setdefault((int(turn), side), []).append(at)
        contents = []
        for i in range(len(form.turns)):
            starts, ends = positions.get((i, "+"), []), positions.get((i, "-"), [])
            contents.append((starts[0], ends[0]) if len(starts) == len(ends) == 1 else None)
        return cls(text, tuple(contents), tuple(turn.role for turn in form.turns))

    def surroundings(self, turn: int) -> Hashable:
        """The text before and after a turn's content, up to its neighbours' contents. Unknown surroundings equal no
        others."""
        own, before = self.contents[turn], self.contents[turn - 1]
        is_last = turn + 1 == len(self.contents)
        after = None if is_last else self.contents[turn + 1]
        if own is None or before is None or (after is None and not is_last):
            return turn
        behind = self.text[own[1] : after[0]] if after is not None else self.text[own[1] :]
        return self.roles[turn - 1], self.text[before[1] : own[0]], behind, "" if is_last else self.roles[turn + 1]

    def offsets(self, turn: int, start: int, end: int) -> tuple[int, int]:
        first, last = self.contents[turn] or (0, 0)
        return start - first, end - last

    def span(self, turn: int, from_start: int, from_end: int) -> tuple[int, int]:
        first, last = self.contents[turn] or (0, 0)
        return first + from_start, last + from_end


def _marked(turn: ChatTurn, i: int) -> ChatTurn:
    inner = turn.content.strip()
    if not inner:
        return turn
    lead, _, tail = turn.content.partition(inner)
    return replace(turn, content=f"{lead}{OPEN}{i}+{CLOSE}{inner}{OPEN}{i}-{CLOSE}{tail}")
