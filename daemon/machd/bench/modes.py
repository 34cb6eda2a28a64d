"""The ways to decode that can be compared, and how a server is started in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from machd.bench.scenarios import Scenario

_MIN_MAX_B = 4


class Batching(Enum):
    """Who computes several requests together."""

    NONE = "a server that answers one request after the other"
    STATIC = "mlx-lm's batch_generate, without a server"
    CONTINUOUS = "a server whose requests join and leave a running batch"
    UNKNOWN = "a server of somebody else's"


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode.

    Attributes:
        scenarios: What it can be measured with: streams that wait for each other cannot run
            beside a long prompt.
    """

    name: str
    batching: Batching
    scenarios: frozenset[Scenario]

    def batch_width(self, concurrency: int) -> int | None:
        """How many rows are computed together when so many requests are open."""
        match self.batching:
            case Batching.NONE:
                return 1
            case Batching.STATIC | Batching.CONTINUOUS:
                return concurrency
            case Batching.UNKNOWN:
                return None

    def serve_args(self, max_width: int) -> tuple[str, ...]:
        """What ``machd serve`` is told, so that as many requests can run together."""
        if self.batching is Batching.CONTINUOUS:
            width = max(max_width, _MIN_MAX_B)
            return ("--continuous-batching", "--continuous-batching-max-b", str(width))
        return ("--no-continuous-batching",)


_ANY = frozenset({Scenario.SWEEP, Scenario.STAGGERED})

SINGLE = Mode("single", Batching.NONE, _ANY)
STATIC = Mode("static", Batching.STATIC, _ANY)
CONTINUOUS = Mode("continuous", Batching.CONTINUOUS, frozenset(Scenario))
MODES = (SINGLE, STATIC, CONTINUOUS)

REMOTE = Mode("remote", Batching.UNKNOWN, frozenset(Scenario))
"""A server that runs already, whichever way it decodes."""


def modes_named(names: Iterable[str]) -> tuple[Mode, ...]:
    """The modes of these names, in their order.

    Raises:
        ValueError: One of them is no mode; the message says which there are.
    """
    known = {mode.name: mode for mode in MODES}
    chosen: dict[str, Mode] = {}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no mode; there are: {', '.join(known)}")
        chosen[name] = known[name]
    return tuple(chosen.values())
