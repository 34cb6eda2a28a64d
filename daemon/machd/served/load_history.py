"""What became of a model's loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class LoadOutcome(StrEnum):
    """How a load ended."""

    LOADED = "loaded"
    FAILED = "failed"
    """Its engine process could not load it."""

    REFUSED = "refused"
    """The memory that it needs can never be free."""


@dataclass(slots=True)
class LoadHistory:
    """What became of a model's loads since the daemon started.

    Attributes:
        outcomes: How many ended in each way.
        suspensions: How often it gave way while requests held it.
        last_load_s: Seconds from the grant of its memory until it was ready, the last time; 0 before.
        loaded_unix_s: When it was last ready; None before.
    """

    outcomes: dict[LoadOutcome, int] = field(default_factory=lambda: dict.fromkeys(LoadOutcome, 0))
    suspensions: int = 0
    last_load_s: float = 0.0
    loaded_unix_s: float | None = None
