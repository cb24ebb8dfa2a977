"""A chat template with a fixed clock.

Some templates write the date into the text. A run that is resumed after midnight, or read twice, must produce the same
tokens, so the templates of a run read the time at which it began.
"""

from __future__ import annotations

import datetime
import json

FUNCTION = "strftime_now"
DIRECTIVES = "aAbBcCdDeFgGhHIjmMnpRStTuUVwWxXyYzZ"
_PERCENT = "\ue0b2"
"""Replaces a literal per cent sign while directives are replaced."""


def freeze_clock(template: str, at: datetime.datetime) -> str:
    """The template with the fixed time `at`; a template that does not read the time is returned unchanged."""
    if FUNCTION not in template:
        return template
    replaced = [("%%", _PERCENT)]
    replaced += [(f"%{flag}{letter}", at.strftime(f"%{flag}{letter}")) for letter in DIRECTIVES for flag in ("", "-")]
    replaced += [(_PERCENT, "%")]
    filters = "".join(f" | replace({json.dumps(result)}, {json.dumps(text)})" for result, text in replaced)
    # A macro of the function's name goes before the function. The newline, which Jinja leaves out after a block, keeps
    # the template at the start of a line.
    return f"{{% macro {FUNCTION}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"
