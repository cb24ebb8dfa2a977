"""Templates that write the date: the clock of a run stands still."""

from __future__ import annotations

import datetime

import pytest
from tiny_tokenizer import make_tokenizer

from weft.data.chat_template import DIRECTIVES, ChatTemplate, freeze_clock
from weft.data.chats import ChatTurn, Conversation

BEGAN = datetime.datetime(2026, 2, 3, 4, 5, 6)
FORM = Conversation((ChatTurn("user", "hi"),))


def rendered(template: str, at: datetime.datetime | None = BEGAN) -> str:
    return ChatTemplate(make_tokenizer(template=template), clock=at).apply(FORM.turns, FORM, "line 1")


def test_date_when_the_clock_is_frozen_then_is_what_strftime_gives():
    """Every format gives what Python gives at that moment."""
    shapes = ["%d %b %Y", "%Y-%m-%d", "%-d.%-m.%y", "100%% at %H:%M:%S", *(f"%{d}" for d in DIRECTIVES)]
    found = rendered("|".join(f"<{{{{ strftime_now('{shape}') }}}}>" for shape in shapes)).split("|")
    assert dict(zip(shapes, found, strict=True)) == {shape: f"<{BEGAN.strftime(shape)}>" for shape in shapes}


@pytest.mark.parametrize(
    "template",
    [
        "{% if strftime_now is defined %}{% set today = strftime_now('%d') %}{% endif %}{{ today }}",
        "{% macro head() %}{{ strftime_now('%d') }}{% endmacro %}{{ head() }}",
        "{% for m in messages %}{{ strftime_now('%d') }}{% endfor %}",
        "{% set shape = '%' ~ 'd' %}{{ strftime_now(shape) }}",
    ],
)
def test_date_when_used_anywhere_in_a_template_then_is_the_frozen_one(template: str):
    """In macros, loops and conditions, with formats made on the way."""
    assert rendered(template) == "03"


def test_template_when_its_clock_is_frozen_then_blanks_stay_as_they_were():
    """Only the date changes: what stands before and around it is rendered as ever."""
    for head in ("\n", "  ", "\n  ", "", "{# note #}\n"):
        template = head + "{% if true %}\n  x{{ strftime_now('') }}\n  {% endif %}\ny"
        assert rendered(template) == rendered(template, None)
    assert freeze_clock("{{ messages }}", BEGAN) == "{{ messages }}"
