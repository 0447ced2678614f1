"""What can be wrong with a request, independent of the protocol in whose shape it is told."""

from __future__ import annotations

from collections.abc import Mapping


class WireError(Exception):
    """A request that is answered with an error.

    ``status`` is the HTTP status, ``code`` a machine-readable word, ``param`` the field at fault.
    ``retry_after``: seconds after which asking again makes sense; None: it never does.
    ``data``: the numbers of the message, for protocols that tell it in other words.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "",
        param: str | None = None,
        retry_after: float | None = None,
        data: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.data = dict(data or {})


def invalid(field: str, got: object, expected: str, code: str = "invalid_value") -> WireError:
    """A 400 that names the field, what came and what was expected."""
    shown = repr(got)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return WireError(400, f"{field}: got {shown} ({type(got).__name__}), expected {expected}", code, field)
