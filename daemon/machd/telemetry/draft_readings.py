"""What the metrics of speculation show: the scheduler's own counts of guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from machd.scheduler.draft_reading import DraftReading
from machd.serving.configuration import Configuration
from machd.serving.loop import EngineLoop
from machd.telemetry.metrics import Metrics

_COUNTS: tuple[tuple[str, Callable[[DraftReading], float]], ...] = (
    ("machd_speculation_cycles_total", lambda now: now.cycles),
    ("machd_speculation_draft_tokens_total", lambda now: now.drafted_tokens),
    ("machd_speculation_accepted_tokens_total", lambda now: now.accepted_tokens),
    ("machd_speculation_fallbacks_total", lambda now: now.fallbacks),
)
_BY_POSITION: tuple[tuple[str, Callable[[DraftReading], Sequence[int]]], ...] = (
    (
        "machd_speculation_draft_by_position_tokens_total",
        lambda now: now.drafted_by_position,
    ),
    (
        "machd_speculation_accepted_by_position_tokens_total",
        lambda now: now.accepted_by_position,
    ),
)


def watch_drafts(metrics: Metrics, loop: EngineLoop, configuration: Configuration) -> None:
    """Point the metrics at the newest snapshot.

    Every position that a guess may have is there at 0 before the first one, or a rate would lose
    it; one that guesses once had stays when the settings allow fewer.
    """

    def of_drafts(read: Callable[[DraftReading], float]) -> Callable[[], float]:
        return lambda: float(read(loop.snapshot.drafts))

    def by_position(
        read: Callable[[DraftReading], Sequence[int]],
    ) -> Callable[[], dict[str, float]]:
        return lambda: _numbered(read(loop.snapshot.drafts), _allowed_positions(configuration))

    for name, count in _COUNTS:
        metrics.watch(name, of_drafts(count))
    for name, counts in _BY_POSITION:
        metrics.watch_all(name, by_position(counts))


def _numbered(counts: Sequence[int], at_least: int) -> dict[str, float]:
    """Counts by their place, from 1 on."""
    missing = [0] * (at_least - len(counts))
    return {str(place): float(count) for place, count in enumerate([*counts, *missing], start=1)}


def _allowed_positions(configuration: Configuration) -> int:
    section = configuration.settings.speculation
    return 0 if section.mode == "off" else section.max_draft_tokens
