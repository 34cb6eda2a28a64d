"""A load that failed, and how long it is not tried again."""

from __future__ import annotations

from machd.clock import Clock
from machd.errors import MachdError, ModelNotLoadedError

_REST_S = 10.0
"""How long a model that could not be loaded is not tried again for a request; an operator may at once."""


class FailedLoad:
    """The last failure of a model; none at first."""

    def __init__(self, clock: Clock) -> None:
        """Begin without one."""
        self._clock = clock
        self._error: MachdError | None = None
        self._ends_s = 0.0

    def note(self, error: MachdError) -> None:
        """Note what clients are told of it."""
        self._error = error
        self._ends_s = self._clock.monotonic_s() + _REST_S

    def forgive(self) -> None:
        """Let the next request have the model loaded."""
        self._ends_s = self._clock.monotonic_s()

    def check(self) -> None:
        """Raise the failure again while it is not to be tried again.

        Raises:
            ModelNotLoadedError: It failed just now.
        """
        rest_s = self._ends_s - self._clock.monotonic_s()
        if rest_s > 0:
            retry_after_s = max(1, round(rest_s))
            raise ModelNotLoadedError(
                f"{self._error}; it is tried again in {retry_after_s} s",
                retry_after_s=retry_after_s,
            )
