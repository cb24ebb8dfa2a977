"""What all objectives on pairs share: a row is a prompt with a chosen and a rejected answer, which stay together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from weft.errors import DataError
from weft.objectives.objective import GroupRows, LikelihoodObjective, Part
from weft.settings import describe

if TYPE_CHECKING:
    from torch import Tensor


class Pairs(LikelihoodObjective):
    """A row's chosen and rejected answer form a group; the loss of a global batch is the mean over pairs."""

    group_size: ClassVar[int] = 2
    part_format: ClassVar[str | None] = "auto"
    example: ClassVar[Mapping[str, Any]] = {"prompt": "a", "chosen": "b", "rejected": "c"}

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        row = read_preference(values, where)
        return tuple(Part({**row.context, "completion": answer}) for answer in (row.chosen, row.rejected))

    def divisor(self, sample_weights: Sequence[float]) -> float:
        return len(sample_weights) / self.group_size


def lengths(groups: GroupRows) -> Tensor:
    return groups.sums(groups.logprobs_N.new_ones(len(groups.logprobs_N)))


def opposed(values_G: Tensor) -> Tensor:
    """A value for the chosen answer of each pair and its negative for the rejected one (G, 2)."""
    return values_G[:, None] * values_G.new_tensor([1.0, -1.0])


def log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - (-x.abs()).exp().log1p()


def reward_metrics(rewards_G2: Tensor) -> dict[str, Tensor]:
    """Metrics of the rewards of both answers, by TRL's names."""
    chosen_G, rejected_G = rewards_G2[:, 0], rewards_G2[:, 1]
    return {
        "rewards/chosen": chosen_G,
        "rewards/rejected": rejected_G,
        "rewards/accuracies": (chosen_G > rejected_G).float(),
        "rewards/margins": chosen_G - rejected_G,
    }


PAIRS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class Preference:
    context: Mapping[str, Any]
    chosen: Any
    rejected: Any


def is_preference(values: Mapping[str, Any]) -> bool:
    answers = [values[name] for pair in PAIRS for name in pair if _is_there(values, name)]
    return any(isinstance(answer, str | list | Mapping) for answer in answers)


def read_preference(values: Mapping[str, Any], where: str) -> Preference:
    """A row's prompt and answers; DataError if one is missing or both are the same."""
    better, worse = _columns(values, where)
    chosen, rejected = _messages(values[better]), _messages(values[worse])
    if isinstance(chosen, list) != isinstance(rejected, list):
        found = f"{better} is {describe(values[better])} and {worse} {describe(values[worse])}"
        raise DataError(f"{found}; expected two texts or two lists of messages.", where=where)
    context = _context(values, where)
    if "prompt" not in context:
        context["prompt"], chosen, rejected = _shared(chosen, rejected, better, worse, where)
    elif isinstance(chosen, list) and _role(chosen) != "assistant":
        # A whole chat that begins with the prompt.
        context["prompt"], chosen, rejected = _shared(chosen, rejected, better, worse, where)
    if chosen == rejected:
        raise DataError(f"{better} and {worse} are the same answer.", where=where)
    return Preference(context, chosen, rejected)


def _columns(values: Mapping[str, Any], where: str) -> tuple[str, str]:
    for better, worse in PAIRS:
        if _is_there(values, better) and _is_there(values, worse):
            return better, worse
    for pair in PAIRS:
        for name, other in (pair, pair[::-1]):
            if _is_there(values, name):
                raise DataError(f"has {name} and no {other}.", where=where)
    raise DataError("has no preference: chosen and rejected are missing.", where=where)


def _context(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    given = values.get("input")
    if isinstance(given, Mapping):
        # OpenAI's form.
        if not isinstance(given.get("messages"), list):
            raise DataError("input.messages is missing.", where=where)
        return {"prompt": given["messages"], **({"tools": given["tools"]} if given.get("tools") else {})}
    context = {"tools": values["tools"]} if _is_there(values, "tools") else {}
    if _is_there(values, "conversations"):
        return {**context, "prompt": _messages(values["conversations"])}
    for name in ("prompt", "question"):
        if _is_there(values, name):
            return {**context, "prompt": _with_system(values, _messages(values[name]))}
    if _is_there(values, "instruction"):
        parts = [str(values[name]) for name in ("instruction", "input") if _is_there(values, name)]
        return {**context, "prompt": _with_system(values, "\n\n".join(parts))}
    return context


def _with_system(values: Mapping[str, Any], prompt: Any) -> Any:
    system = values.get("system")
    if not isinstance(system, str) or not system or not isinstance(prompt, str):
        return prompt
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def _shared(chosen: Any, rejected: Any, better: str, worse: str, where: str) -> tuple[Any, Any, Any]:
    """The common beginning of two whole chats, and the rest of each."""
    if isinstance(chosen, str):
        if not all(_SPEAKER.match(text) for text in (chosen, rejected)):
            raise DataError(f"has no prompt to {better} and {worse}.", where=where)
        chosen, rejected = _turns(chosen), _turns(rejected)
    count = 0
    while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
        count += 1
    if count == len(chosen) == len(rejected):
        raise DataError(f"{better} and {worse} are the same answer.", where=where)
    # What follows must be answers, so a question that only one side has is none of the prompt.
    if not count or any(_role(chat[count:]) != "assistant" for chat in (chosen, rejected)):
        found = f"{better} and {worse} do not answer the same prompt"
        raise DataError(f"{found}: they differ before an assistant's turn.", where=where)
    return chosen[:count], chosen[count:], rejected[count:]


def _turns(text: str) -> list[dict[str, str]]:
    marks = [*_SPEAKER.finditer(text)]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def _messages(value: Any) -> Any:
    """ShareGPT's turns, one or several, as messages; other values unchanged."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        return value
    return [
        {"role": _SHAREGPT_ROLES.get(str(turn["from"]), turn["from"]), "content": turn.get("value")}
        if isinstance(turn, Mapping) and "from" in turn
        else turn
        for turn in value
    ]


def _role(messages: Sequence[Any]) -> Any:
    return messages[0].get("role") if messages and isinstance(messages[0], Mapping) else None


def _is_there(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) not in (None, "", [], {})
