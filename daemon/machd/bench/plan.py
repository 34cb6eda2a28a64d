"""What a bench is to do: chosen on the command line, the same for every mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from machd.bench.coalescing import COALESCING_REQUESTS, COPIES
from machd.bench.long_prompt import LongPromptLoad
from machd.bench.modes import Mode
from machd.bench.scenarios import Scenario
from machd.bench.staggered import Arrivals
from machd.bench.structured import STRUCTURED_REQUESTS, STRUCTURED_STREAMS
from machd.bench.workload import Workload

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The loads of a bench.

    Attributes:
        workload: What requests ask for.
        concurrencies: The levels of the sweep, in their order.
        scenarios: What is measured, for each mode that can be measured so.
    """

    workload: Workload
    concurrencies: tuple[int, ...]
    scenarios: tuple[Scenario, ...] = (Scenario.SWEEP,)
    arrivals: Arrivals = field(default_factory=Arrivals)
    long_prompt: LongPromptLoad = field(default_factory=LongPromptLoad)

    def of_mode(self, mode: Mode) -> tuple[Scenario, ...]:
        """What is measured of a mode."""
        return tuple(one for one in self.scenarios if one in mode.scenarios)

    @property
    def has_sweep(self) -> bool:
        """Whether there are levels to hold against the bare loop."""
        return Scenario.SWEEP in self.scenarios

    @property
    def max_width(self) -> int:
        """The most requests that are open at once."""
        return max(self._width(scenario) for scenario in self.scenarios)

    def bare_widths(self, modes: Sequence[Mode]) -> list[int]:
        """The batch widths at which levels are held against the bare loop."""
        if not self.has_sweep:
            return []
        widths = {mode.batch_width(clients) for mode in modes for clients in self.concurrencies}
        return sorted(width for width in widths if width is not None)

    def request_count(self, mode: Mode) -> int:
        """Requests that a mode gets, for the progress bar."""
        return sum(self._requests(scenario) for scenario in self.of_mode(mode))

    @property
    def limit_args(self) -> tuple[str, ...]:
        """Settings that let a server take all of it, however long it lets requests wait.

        They stand before the user's own, which count for more.
        """
        clients = self.max_width
        return (
            *("--limits-max-queue", str(max(64, 2 * clients))),
            *("--limits-max-in-flight", str(max(512, 4 * clients))),
            *("--limits-queue-timeout-s", str(_DAY_S)),
            *("--limits-request-timeout-s", str(_DAY_S)),
        )

    def _width(self, scenario: Scenario) -> int:
        match scenario:
            case Scenario.SWEEP:
                return max(self.concurrencies)
            case Scenario.STAGGERED:
                return self.arrivals.streams
            case Scenario.LONG_PROMPT:
                return self.long_prompt.streams + 1
            case Scenario.COALESCING:
                return COPIES
            case Scenario.STRUCTURED:
                return STRUCTURED_STREAMS

    def _requests(self, scenario: Scenario) -> int:
        match scenario:
            case Scenario.SWEEP:
                return sum(self.workload.request_count(one) for one in self.concurrencies)
            case Scenario.STAGGERED:
                return self.arrivals.requests
            case Scenario.LONG_PROMPT:
                return 1
            case Scenario.COALESCING:
                return COALESCING_REQUESTS
            case Scenario.STRUCTURED:
                return STRUCTURED_REQUESTS
