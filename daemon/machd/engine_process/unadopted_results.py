"""Results that were measured beside the daemon, until the scheduler is at rest and they can be applied."""

from __future__ import annotations

from machd.capabilities.evidence import Results
from machd.capabilities.verdict import Support
from machd.engine.protocol.engine import Engine
from machd.engine_process.startup_guard import ProbeNews
from machd.link.state import ServedState
from machd.scheduler.scheduler import Scheduler


class UnadoptedResults:
    """The newest results that are not part of the served state yet. Lives on the engine thread."""

    def __init__(self, news: ProbeNews) -> None:
        """Begin without results; ``news`` brings them."""
        self._news = news
        self._results: Results = None

    def forget(self) -> None:
        """Drop the results: the model has been measured since."""
        self._results = None

    def poll(self, engine: Engine, state: ServedState) -> bool:
        """Take new results; returns whether there were any."""
        results = self._news.poll(engine)
        if results is not None and results != state.results:
            self._results = results
        return results is not None

    def due_state(
        self, engine: Engine, scheduler: Scheduler, before: ServedState
    ) -> ServedState | None:
        """Return the state with results that can be applied now; None if there are none, or rows run.

        Rows keep the config that they were admitted under, so results are applied when none runs. Running
        sequences are suspended for a verdict on batching or on a feature that failed; other results must
        not delay a sequence.
        """
        is_new = self.poll(engine, before)
        if self._results is None:
            return None
        after = ServedState.of(engine.model, self._results)
        if not scheduler.is_at_rest:
            changed = after.verdicts.changed_since(before.verdicts)
            if is_new and _are_urgent(after, changed):
                scheduler.hold_admission()
                scheduler.suspend()
            return None
        self._results = None
        return after


def _are_urgent(state: ServedState, changed: frozenset[str]) -> bool:
    verdicts = state.verdicts.by_feature()
    return "continuous_batching" in changed or any(
        verdicts[name].support is Support.BLOCKED for name in changed
    )
