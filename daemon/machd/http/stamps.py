"""What the gate writes on every request, and whoever answers it reads: an id and an arrival."""

from __future__ import annotations

from litestar.types import Scope

__all__ = ["arrived_s", "request_id", "stamp"]

_REQUEST_ID_KEY = "machd_request_id"
_ARRIVED_KEY = "machd_arrived_s"


def stamp(scope: Scope, *, request_id: str, arrived_s: float) -> None:
    """Write both on a request."""
    state = scope.setdefault("state", {})
    state[_REQUEST_ID_KEY] = request_id
    state[_ARRIVED_KEY] = arrived_s


def request_id(scope: Scope) -> str:
    """The id that the gate gave the request."""
    return str(scope["state"][_REQUEST_ID_KEY])


def arrived_s(scope: Scope) -> float:
    """When the request came, on the monotonic clock."""
    return float(scope["state"][_ARRIVED_KEY])
