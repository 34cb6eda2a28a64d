"""Limits of one client: generations open or being prepared at once, and tokens in a minute.

Tokens are counted when they are used: the prompts of a generation when its first sequence gets a slot,
each prompt once whatever its number of completions; and the tokens of every completion as they are
generated, read by the client or not. A request that is rejected, or leaves the queue, uses none; a
coalesced request counts like any other. A client's count decreases at its limit a minute, and a new
request is admitted while the count is below one minute's limit. So one long answer may take a client beyond
its limit, and the next request then waits until the count is below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from machd.clock import Clock
from machd.errors import KeyLimitError

_MINUTE_S = 60.0


class _Usage:
    """The open generations of one client, and its token count."""

    __slots__ = ("as_of_s", "open_count", "used_tokens")

    def __init__(self, now_s: float) -> None:
        self.open_count = 0
        self.used_tokens = 0.0
        self.as_of_s = now_s


class KeyLimits:
    """Counts per client. Lives on the event loop; has only clients with a count."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_requests: int | None = None,
        max_tokens_per_minute: int | None = None,
    ) -> None:
        """Begin without any client.

        Args:
            clock: Reads time.
            max_requests: Generations that one client may have open; None for no limit.
            max_tokens_per_minute: Prompt and completion tokens together; None for no limit.
        """
        self._clock = clock
        self._max_requests = max_requests
        self._max_tokens_per_minute = max_tokens_per_minute
        self._usage: dict[str, _Usage] = {}

    def __len__(self) -> int:
        """Number of clients with open generations or a token count."""
        return len(self._usage)

    def set(self, *, max_requests: int | None, max_tokens_per_minute: int | None) -> None:
        """Apply other limits from now on; token counts are kept.

        Counts decrease at the new limit. A lower limit scales the counts down with it, so that no client
        waits longer than it was told; a higher limit makes the wait shorter. Without a limit of tokens
        none are counted, so a limit that is set later begins at 0.
        """
        share = 1.0
        if self._max_tokens_per_minute is not None and max_tokens_per_minute is not None:
            share = min(share, max_tokens_per_minute / self._max_tokens_per_minute)
        for client, usage in tuple(self._usage.items()):
            self._drain(usage)
            usage.used_tokens *= share
            self._forget_if_settled(client)
        self._max_requests = max_requests
        self._max_tokens_per_minute = max_tokens_per_minute

    def check(self, client: str) -> None:
        """Raise unless the client may open one more generation now.

        Raises:
            KeyLimitError: It may not; the error says how many seconds to wait.
        """
        usage = self._usage.get(client)
        if usage is None:
            return
        self._drain(usage)
        self._check_open(usage)
        limit = self._max_tokens_per_minute
        if limit is not None and usage.used_tokens >= limit:
            # The next whole second at which the count is below the limit.
            wait_s = math.floor((usage.used_tokens - limit) * _MINUTE_S / limit) + 1
            raise KeyLimitError(
                f"this API key has used its {limit} tokens a minute "
                f"(limits.max_tokens_per_minute_per_key); try again in {wait_s} seconds",
                retry_after_s=wait_s,
            )

    @contextmanager
    def preparing(self, client: str) -> Iterator[None]:
        """Count a request as open while its prompt is prepared.

        It uses no tokens yet, so the limit of tokens does not apply.

        Raises:
            KeyLimitError: The client has reached its limit of open requests; this one was not counted.
        """
        if not client:
            yield  # the operator's
            return
        usage = self._known(client)
        self._check_open(usage)
        usage.open_count += 1
        try:
            yield
        finally:
            self.leave(client)

    def enter(self, client: str) -> None:
        """Count a generation that opens. Each call is paired with one of :meth:`leave`.

        Raises:
            KeyLimitError: The client may not open it; it was not counted.
        """
        self.check(client)
        self._known(client).open_count += 1

    def spend(self, client: str, tokens: int) -> None:
        """Count tokens that an open generation has used."""
        if self._max_tokens_per_minute is not None:
            usage = self._known(client)
            self._drain(usage)
            usage.used_tokens += tokens

    def leave(self, client: str) -> None:
        """Count a generation that has ended."""
        usage = self._usage[client]
        assert usage.open_count > 0, "every generation enters before it leaves"
        usage.open_count -= 1
        self._drain(usage)
        self._forget_if_settled(client)

    def _check_open(self, usage: _Usage) -> None:
        if self._max_requests is not None and usage.open_count >= self._max_requests:
            raise KeyLimitError(
                f"this API key has {usage.open_count} requests open, and "
                f"limits.max_requests_per_key is {self._max_requests}; wait until one has ended"
            )

    def _known(self, client: str) -> _Usage:
        return self._usage.setdefault(client, _Usage(self._clock.monotonic_s()))

    def _drain(self, usage: _Usage) -> None:
        """Decrease the count by the time that has passed."""
        now_s = self._clock.monotonic_s()
        limit = self._max_tokens_per_minute
        if limit is None:
            usage.used_tokens = 0.0
        else:
            paid_off = (now_s - usage.as_of_s) * limit / _MINUTE_S
            usage.used_tokens = max(0.0, usage.used_tokens - paid_off)
        usage.as_of_s = now_s

    def _forget_if_settled(self, client: str) -> None:
        usage = self._usage[client]
        if not usage.open_count and not usage.used_tokens:
            del self._usage[client]
