"""The errors that the service raises on purpose; the API gives each of them its HTTP status.

WeftError
├── NotFound        there is no such object, or it is another tenant's; the answer is the same
├── NotPossible     the object is in a state in which this cannot be done
├── Conflict        the same idempotency key came with another request
├── OverLimit       a quota of the tenant is used up
├── Damaged         stored bytes are not those that were stored, or are gone though a row names them
├── Fenced          another worker has claimed the job since; the caller must stop writing about it
└── Busy            the database is locked or away; the same request may succeed later
    └── Unsure      it went away during a commit; the transaction may have happened or not
"""

from __future__ import annotations

from weft.errors import WeftError


class NotFound(WeftError):  # noqa: N818 - these are answers, named as the API's readers know them
    code = "not_found"


class NotPossible(WeftError):  # noqa: N818
    code = "invalid_state"


class Conflict(WeftError):  # noqa: N818
    code = "idempotency_mismatch"


class OverLimit(WeftError):  # noqa: N818
    code = "quota_exceeded"


class Damaged(WeftError):  # noqa: N818
    code = "stored_data_damaged"


class Fenced(WeftError):  # noqa: N818
    code = "fenced"


class Busy(WeftError):  # noqa: N818
    code = "busy"


class Unsure(Busy):
    """The database went away during a commit; the transaction may have happened or not."""
