"""Errors for the subscribers of a failed row."""

from __future__ import annotations

from machd.engine.protocol.step import RowFault
from machd.errors import MachdError, RequestError, RowFaultError


def error_of(fault: RowFault) -> MachdError:
    """Return the cause if it is the client's mistake, else an error without its details."""
    if isinstance(fault.cause, RequestError):
        return fault.cause
    error = RowFaultError("the generation failed inside the server")
    error.__cause__ = fault.cause
    return error
