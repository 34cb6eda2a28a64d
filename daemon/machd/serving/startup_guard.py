"""What is measured of a model, before anything decides how it is served.

A rule may not know whether rows of a batch get what they would get alone. Then the loaded model is
asked, on the engine thread, before the first request. Whatever goes wrong with that is logged and
leaves the rule's verdict: a model that cannot be measured is served one request at a time. Later an
operator may have it asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import structlog

from machd.capabilities.evidence import ProbeResult
from machd.capabilities.rules import Support, continuous_batching
from machd.clock import Clock
from machd.engine.protocol import Engine
from machd.errors import FaultError

__all__ = [
    "NOTHING_MEASURED",
    "Measure",
    "Measures",
    "NothingToMeasure",
    "OnStart",
    "Probe",
    "StartupGuard",
    "nothing_known",
]

_START_ADVICE = (
    "requests are served as the rule alone says; probe.on_start = facts starts without measuring"
)

Measure: TypeAlias = Callable[[Engine], tuple[ProbeResult, ...]]
"""Says what probes found of a loaded engine's model; called on the engine thread."""


def nothing_known(_engine: Engine) -> tuple[ProbeResult, ...]:
    """A :data:`Measure` that finds nothing."""
    return ()


@dataclass(frozen=True, slots=True)
class Measures:
    """The ways to find out what a model can do; each bounds its own time.

    Attributes:
        measure: Runs probes, or gives what they found before.
        recall: Gives what they found before and runs nothing.
        measure_anew: Runs probes, whatever they found before.
    """

    measure: Measure = nothing_known
    recall: Measure = nothing_known
    measure_anew: Measure = nothing_known


NOTHING_MEASURED = Measures()
"""For a daemon that takes its model as it is."""


class Probe(Protocol):
    """Finds out what a loaded engine's model can do, on the engine thread, while it has no rows."""

    def __call__(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """What is to be known of a model that has just been loaded."""
        ...

    def remeasure(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """What a model that is served already can do; raises where that cannot be found out."""
        ...


class NothingToMeasure:
    """A :class:`Probe` that finds nothing."""

    def __call__(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """Nothing."""
        del engine
        return ()

    def remeasure(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """Nothing."""
        del engine
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
        measures: The ways to find out.
        clock: Reads time.
    """

    on_start: OnStart
    is_batching_asked: bool
    measures: Measures
    clock: Clock

    def __call__(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """What is known of the model; nothing where finding out failed, which is logged.

        Raises:
            Exception: The engine cannot be put back to where it has no rows.
        """
        if self.on_start is OnStart.OFF:
            return ()
        if not self._has_to_measure(engine):
            return self._ask(self.measures.recall, engine, advice=_START_ADVICE) or ()
        return self._measured(self.measures.measure, engine, advice=_START_ADVICE) or ()

    def remeasure(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """Measure a model that is served already, whatever the settings say of its start.

        Raises:
            FaultError: It could not be measured; the log says why.
            Exception: The engine cannot be put back to where it has no rows.
        """
        results = self._measured(
            self.measures.measure_anew, engine, advice="what was known of the model still holds"
        )
        if results is None:
            raise FaultError("the model could not be measured; what was known of it still holds")
        return results

    def _measured(
        self, measure: Measure, engine: Engine, *, advice: str
    ) -> tuple[ProbeResult, ...] | None:
        structlog.get_logger("machd.probe").info("probe.started")
        try:
            return self._ask(measure, engine, advice=advice)
        finally:
            # Rows of a probe that broke off are nobody's, and would stay for good.
            engine.reset()

    def _has_to_measure(self, engine: Engine) -> bool:
        if not self.is_batching_asked or self.on_start is OnStart.FACTS:
            return False
        is_unknown = continuous_batching(engine.model.cache).support is Support.UNKNOWN
        return is_unknown or self.on_start is OnStart.MEASURE

    def _ask(
        self, source: Measure, engine: Engine, *, advice: str
    ) -> tuple[ProbeResult, ...] | None:
        """What it found; None where it failed, which is logged with ``advice``."""
        log = structlog.get_logger("machd.probe")
        start_s = self.clock.monotonic_s()
        try:
            results = tuple(source(engine))
        except (Exception, SystemExit):
            log.exception("probe.failed", duration_s=self._since_s(start_s), advice=advice)
            return None
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
