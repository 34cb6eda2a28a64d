"""What the subscribers of a row that failed are told."""

from __future__ import annotations

from machd.engine.protocol.step import RowFault
from machd.errors import MachdError, RequestError, RowFaultError


def error_of(fault: RowFault) -> MachdError:
    """The client's own mistake where it was one, else nothing of the cause."""
    if isinstance(fault.cause, RequestError):
        return fault.cause
    error = RowFaultError("the generation failed inside the server")
    error.__cause__ = fault.cause
    return error
