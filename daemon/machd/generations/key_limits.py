"""Limits of one client: generations open or being prepared at once, and tokens in a minute.

Tokens are counted when they are used, not when they are asked for: the prompts of a generation when
the first of its sequences has a slot, each prompt once however many completions it gets; and the
tokens of every completion as the engine makes them, whether the client reads them or not. A request
that is turned away, or gives up while it waits, has used nothing; one that shares another's decode
pays as if it had its own. What a client has used drains away at its limit a minute, and it
is let in while less than a minute's worth is left. So one long answer may take a client beyond its
limit, and it then waits until that is paid off; no client is held to what it did not use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from machd.clock import Clock
from machd.errors import KeyLimitError

_MINUTE_S = 60.0


class _Usage:
    """The open generations of one client, and its tokens that have not drained away yet."""

    __slots__ = ("as_of_s", "open_count", "used_tokens")

    def __init__(self, now_s: float) -> None:
        self.open_count = 0
        self.used_tokens = 0.0
        self.as_of_s = now_s


class KeyLimits:
    """Counts per client. Lives on the event loop; remembers only clients that have used something."""

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
        """Clients that have something open, or tokens that have not drained away."""
        return len(self._usage)

    def set(self, *, max_requests: int | None, max_tokens_per_minute: int | None) -> None:
        """Hold clients against other limits from now on; what they have used stays used.

        It drains away at the new limit. Under a lower one that would take a client longer than it
        was told, so what it has used shrinks along: its wait stays as it was. A higher limit makes
        it shorter. Without a limit for tokens none are counted, so one that is set later begins
        afresh.
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
            # The next whole second at which less than the limit is left.
            wait_s = math.floor((usage.used_tokens - limit) * _MINUTE_S / limit) + 1
            raise KeyLimitError(
                f"this API key has used its {limit} tokens a minute "
                f"(limits.max_tokens_per_minute_per_key); try again in {wait_s} seconds",
                retry_after_s=wait_s,
            )

    @contextmanager
    def preparing(self, client: str) -> Iterator[None]:
        """Count a request whose prompt is prepared inside, as an open one.

        It has used no tokens, so it need not wait for those that were used to drain away.

        Raises:
            KeyLimitError: The client has as many open as it may; it was not counted.
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
        """Let go of what time has paid off."""
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
