"""Evidence on a model, collected before the decode mode is chosen.

Evidence is measured on this model or on a small one that runs the same code. If batching is requested
and no evidence exists, the model is measured before the first request. A failure is logged, and the
model is then served one request at a time. Checks that do not fit into the start run beside the daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import structlog

from machd.capabilities.evidence import Results
from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import judge
from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.errors import FaultError

_START_ADVICE = (
    "requests are served one at a time; probe.on_start = off batches by rules, without evidence"
)

_SERVED_ADVICE = "what was known of the model still holds; report the traceback"

Measure: TypeAlias = Callable[[Engine], Results]
"""Returns the evidence on a loaded engine's model; called on the engine thread."""


def nothing_known(_engine: Engine) -> Results:
    """Return no evidence: a :data:`Measure` of a daemon that measures nothing."""
    return None


@dataclass(frozen=True, slots=True)
class Measures:
    """The ways to get evidence on a model; each has its own time limit.

    Attributes:
        measure: Stored evidence; the rest is measured on a small model that runs the same code.
        recall: Stored evidence; measures nothing.
        measure_weights: Stored evidence on the loaded weights; the rest is measured on them.
        measure_anew: Evidence measured on the loaded weights, without stored evidence.
        measure_next: Evidence so far, while more is measured beside the daemon; None when that has ended.
            Returns at once.
    """

    measure: Measure = nothing_known
    recall: Measure = nothing_known
    measure_weights: Measure = nothing_known
    measure_anew: Measure = nothing_known
    measure_next: Measure = nothing_known


NOTHING_MEASURED = Measures()
"""Measures of a daemon that measures nothing."""


class Probe(Protocol):
    """Collects evidence on a loaded engine's model, on the engine thread, while it has no rows."""

    def __call__(self, engine: Engine) -> Results:
        """Return the evidence on a model that has just been loaded."""
        ...

    def remeasure(self, engine: Engine) -> Results:
        """Measure a model that is being served; raise if that fails."""
        ...

    def measure_next(self, engine: Engine) -> Results:
        """Return the evidence known by now; None when the measurement is over. Does not block."""
        ...


class NothingToMeasure:
    """A :class:`Probe` that finds nothing."""

    def __call__(self, engine: Engine) -> Results:
        """Nothing."""
        del engine
        return None

    def remeasure(self, engine: Engine) -> Results:
        """Nothing."""
        del engine
        return None

    def measure_next(self, engine: Engine) -> Results:
        """Nothing."""
        del engine
        return None


class _NotMeasuredError(Exception):
    """A probe raised an error, which is logged."""


class OnStart(StrEnum):
    """When a model is measured; the values of ``probe.on_start``."""

    FACTS = "facts"
    MEASURE = "measure"
    AUTO = "auto"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class StartupGuard:
    """Measures a loaded model or uses stored evidence, by ``probe.on_start``.

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

    def __call__(self, engine: Engine) -> Results:
        """Return the evidence on the model; empty if it could not be measured, which is logged.

        Raises:
            Exception: The engine's rows cannot be freed.
        """
        if self.on_start is OnStart.OFF:
            return None
        try:
            return self._found(engine)
        except _NotMeasuredError:
            return ()

    def remeasure(self, engine: Engine) -> Results:
        """Measure the weights of a model that is served, whatever the settings say of its start.

        Raises:
            FaultError: The measurement failed; the log has the reason.
            Exception: The engine's rows cannot be freed.
        """
        try:
            return self._measured(self.measures.measure_anew, engine, advice=_SERVED_ADVICE)
        except _NotMeasuredError:
            raise FaultError(
                "the model could not be measured; what was known of it still holds"
            ) from None

    def measure_next(self, engine: Engine) -> Results:
        """Return the evidence known by now; None when the measurement is over or has failed."""
        if self.on_start in {OnStart.OFF, OnStart.FACTS}:
            return None
        try:
            return self.measures.measure_next(engine)
        except (Exception, SystemExit):  # noqa: BLE001 - logged, and nothing more is measured
            structlog.get_logger("machd.probe").exception("probe.failed", advice=_SERVED_ADVICE)
            return None

    def _found(self, engine: Engine) -> Results:
        if self.on_start is OnStart.MEASURE and self.is_batching_asked:
            return self._measured(self.measures.measure_weights, engine, advice=_START_ADVICE)
        known = self._ask(self.measures.recall, engine, advice=_START_ADVICE)
        if self.on_start is OnStart.FACTS or not self.is_batching_asked:
            return known
        if judge(engine.model.cache, known).continuous_batching.support is not Support.UNKNOWN:
            return known
        return self._measured(self.measures.measure, engine, advice=_START_ADVICE)

    def _measured(self, measure: Measure, engine: Engine, *, advice: str) -> Results:
        structlog.get_logger("machd.probe").info("probe.started")
        try:
            return self._ask(measure, engine, advice=advice)
        finally:
            # Rows of an interrupted probe have no owner, and would never be freed.
            engine.reset()

    def _ask(self, source: Measure, engine: Engine, *, advice: str) -> Results:
        """Call ``source`` and log what it returns.

        Raises:
            _NotMeasuredError: ``source`` raised; the traceback is logged with ``advice``.
        """
        log = structlog.get_logger("machd.probe")
        start_s = self.clock.monotonic_s()
        try:
            results = source(engine)
        except (Exception, SystemExit):
            log.exception("probe.failed", duration_s=self._since_s(start_s), advice=advice)
            raise _NotMeasuredError from None
        _log_finished(results, self._since_s(start_s))
        return results

    def _since_s(self, start_s: float) -> float:
        return round(self.clock.monotonic_s() - start_s, 3)


def _log_finished(results: Results, duration_s: float) -> None:
    """Log the evidence after a look-up, a measurement at the start, or one beside the daemon."""
    log = structlog.get_logger("machd.probe")
    counts = Counter(result.outcome.value for result in results or ())
    log.info("probe.finished", duration_s=duration_s, **counts)
    for result in results or ():
        log.debug(
            "probe.answered",
            probe=result.probe,
            outcome=result.outcome.value,
            detail=result.detail,
            measured_on=result.measured_on.value,
        )


_INTERVAL_S = 1.0


class ProbeNews:
    """Polls a measurement beside the daemon once a second until it ends. Lives on the engine thread."""

    def __init__(self, probe: Probe, clock: Clock) -> None:
        """Start with everything left to measure.

        Args:
            probe: Returns the evidence measured so far.
            clock: Reads time.
        """
        self._probe = probe
        self._clock = clock
        self._began_s: float | None = None
        self._due_s = 0.0
        self._newest: Results = None
        self._is_done = False

    def poll(self, engine: Engine) -> Results:
        """Return the results known now; None between polls and when the measurement has ended."""
        now_s = self._clock.monotonic_s()
        if self._began_s is None:
            # The start has just polled; the first requests are not delayed.
            self._began_s, self._due_s = now_s, now_s + _INTERVAL_S
        if self._is_done or now_s < self._due_s:
            return None
        self._due_s = now_s + _INTERVAL_S
        results = self._probe.measure_next(engine)
        if results is not None:
            self._newest = results
            return results
        self._is_done = True
        if self._newest is not None:
            _log_finished(self._newest, round(now_s - self._began_s, 3))
        return None
