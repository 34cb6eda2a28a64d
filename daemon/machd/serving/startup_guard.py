"""What is measured of a model when the daemon starts, before anything decides how it is served.

A rule may not know whether rows of a batch get what they would get alone. Then the loaded model is
asked, on the engine thread, before the first request. Whatever goes wrong with that is logged and
leaves the rule's verdict: a model that cannot be measured is served one request at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import structlog

from machd.capabilities.evidence import ProbeResult
from machd.capabilities.rules import Support, continuous_batching
from machd.clock import Clock
from machd.engine.protocol import Engine

__all__ = ["Measure", "OnStart", "StartupGuard", "nothing_known"]

Measure: TypeAlias = Callable[[Engine], tuple[ProbeResult, ...]]
"""Says what probes found of a loaded engine's model; called on the engine thread."""


def nothing_known(_engine: Engine) -> tuple[ProbeResult, ...]:
    """A :data:`Measure` that finds nothing."""
    return ()


class OnStart(StrEnum):
    """When a model is measured; the values of ``probe.on_start``."""

    FACTS = "facts"
    MEASURE = "measure"
    AUTO = "auto"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class StartupGuard:
    """Measures a model that has just been loaded, or remembers, as the settings say.

    Attributes:
        on_start: ``probe.on_start``.
        is_batching_asked: ``continuous_batching.enabled``; without it nothing depends on an
            answer, so nothing is measured.
        measure: Runs probes, or gives what they found before; bounds its own time.
        recall: Gives what they found before and runs nothing.
        clock: Reads time.
    """

    on_start: OnStart
    is_batching_asked: bool
    measure: Measure
    recall: Measure
    clock: Clock

    def __call__(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """What is known of the model; nothing where finding out failed, which is logged.

        Raises:
            Exception: The engine cannot be put back to where it has no rows.
        """
        if self.on_start is OnStart.OFF:
            return ()
        if not self._has_to_measure(engine):
            return self._ask(self.recall, engine)
        structlog.get_logger("machd.probe").info("probe.started")
        try:
            return self._ask(self.measure, engine)
        finally:
            # Rows of a probe that broke off are nobody's, and would stay for good.
            engine.reset()

    def _has_to_measure(self, engine: Engine) -> bool:
        if not self.is_batching_asked or self.on_start is OnStart.FACTS:
            return False
        is_unknown = continuous_batching(engine.model.cache).support is Support.UNKNOWN
        return is_unknown or self.on_start is OnStart.MEASURE

    def _ask(self, source: Measure, engine: Engine) -> tuple[ProbeResult, ...]:
        log = structlog.get_logger("machd.probe")
        start_s = self.clock.monotonic_s()
        try:
            results = tuple(source(engine))
        except (Exception, SystemExit):
            log.exception(
                "probe.failed",
                duration_s=self._since_s(start_s),
                advice="requests are served as the rule alone says; probe.on_start = facts starts "
                "without measuring",
            )
            return ()
        if results:
            counts = Counter(result.outcome.value for result in results)
            log.info("probe.finished", duration_s=self._since_s(start_s), **counts)
            for result in results:
                log.debug(
                    "probe.answered",
                    probe=result.probe,
                    outcome=result.outcome.value,
                    detail=result.detail,
                )
        return results

    def _since_s(self, start_s: float) -> float:
        return round(self.clock.monotonic_s() - start_s, 3)
