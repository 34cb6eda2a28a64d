"""The ways to decode that can be compared, and how a server is started in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["MODES", "REMOTE", "Mode", "modes_named"]

REMOTE = "remote"
"""Mode of a server that runs already, whichever it decodes in."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode.

    Attributes:
        serve_args: What ``machd serve`` is told.
        max_width: The widest batch it makes.
    """

    name: str
    serve_args: tuple[str, ...]
    max_width: int

    def batch_width(self, concurrency: int) -> int:
        """How many rows are computed together when so many requests are open."""
        return min(concurrency, self.max_width)


MODES = (Mode("single", (), 1),)


def modes_named(names: Iterable[str]) -> tuple[Mode, ...]:
    """The modes of these names, in their order.

    Raises:
        ValueError: One of them is no mode; the message says which there are.
    """
    known = {mode.name: mode for mode in MODES}
    chosen: dict[str, Mode] = {}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no mode of this machd; it has: {', '.join(known)}")
        chosen[name] = known[name]
    return tuple(chosen.values())
