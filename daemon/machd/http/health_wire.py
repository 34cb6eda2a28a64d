"""What the health endpoints answer."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Health(Struct, frozen=True, kw_only=True):
    """Whether the daemon lives, or whether it takes work.

    Attributes:
        status: ``ok`` goes with 200, ``unavailable`` with 503.
        state: The daemon's state, such as ``ready`` or ``draining``.
        reason: Why it is unavailable; null while it is not.
    """

    status: Literal["ok", "unavailable"]
    state: str
    reason: str | None = None
