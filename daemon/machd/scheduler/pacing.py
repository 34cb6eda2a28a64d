"""How many prompt tokens a step may compute while other rows wait for their next token.

Streams that run must not notice a prompt that comes in: their inter-token latency is to stay under
twice what it is without one. What a chunk costs is only known by measuring, and differs a
hundredfold between machines, so each step that computes both corrects the chunk of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from machd.engine.protocol.step import Lane

PREFILL_CHUNK_TOKENS = 512
"""The most prompt tokens between two looks at the inbox."""

_ALONE_S = 1.0
"""How long a step without decoding rows should take: whoever comes, or leaves, waits for its end. With
6,000 tokens before them, 512 take 7 s on two cores; in chunks of 100 the whole takes a tenth longer."""

_LEAST_ALONE_TOKENS = 32
"""Fewer cost much more each, because a step reads all weights."""

_GOAL = 1.5
"""How long a step may take beside a prompt, in steps without one. The slowest in a hundred take half as
long again, and are to stay about twice as long as usual ones."""

_YOUNG_TOKENS = 8
"""Tokens until which a stream has no rhythm yet that a pause could break."""

_FIRST_CHUNK_TOKENS = 8.0
_MIN_CHUNK_TOKENS = 4.0
"""Where a chunk's fixed cost alone is beyond the goal, this is still computed: a prompt that never
got in would be worse than streams that are slower than promised while it does."""

_MAX_SHRINK, _MAX_GROWTH = 0.5, 1.5
"""What one observation may do, so that a hiccup of the machine neither stops nor floods prefill."""

_TOKEN_WEIGHT = 0.2
"""How much the newest step counts in the moving average of the time for a prompt token."""

_SAMPLES = 9
_MIN_SAMPLES = 3
_MAX_MIXED_STEPS = 32
"""After so many steps with prefill, one without: the measure must follow the growing contexts."""


class _Width:
    """What is known of steps in which about so many rows decode."""

    __slots__ = ("chunk_tokens", "durations_s", "mixed_steps")

    def __init__(self) -> None:
        self.durations_s: deque[float] = deque(maxlen=_SAMPLES)
        self.mixed_steps = 0
        self.chunk_tokens = _FIRST_CHUNK_TOKENS

    @property
    def is_measured(self) -> bool:
        return len(self.durations_s) >= _MIN_SAMPLES and self.mixed_steps < _MAX_MIXED_STEPS

    def see_decode(self, duration_s: float) -> None:
        self.durations_s.append(duration_s)
        self.mixed_steps = 0

    def see_mixed(self, prefill_tokens: int, duration_s: float) -> None:
        self.mixed_steps += 1
        if not self.durations_s:
            return
        idle_s = median(self.durations_s)
        allowed_s = (_GOAL - 1) * idle_s
        # Beyond the bounds the exact ratio does not matter, and a cost of nothing has none.
        cost_s = max(duration_s - idle_s, allowed_s / _MAX_GROWTH)
        ratio = max(_MAX_SHRINK, allowed_s / cost_s) if cost_s else _MAX_GROWTH
        if ratio > 1 and prefill_tokens < int(self.chunk_tokens):
            return  # the prompt ended: that a shorter chunk fits says nothing of this one
        grown = self.chunk_tokens * ratio
        self.chunk_tokens = min(float(PREFILL_CHUNK_TOKENS), max(_MIN_CHUNK_TOKENS, grown))


class _AloneSteps:
    """Prompt tokens for steps in which no row decodes, by how much context they have before them.

    A token costs more the more it attends to, so contexts are told apart by powers of two.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: dict[int, float] = {}

    def tokens(self, context_tokens: int) -> int:
        """As many as should take the time of a step; of a context never seen, as of the one below."""
        width = _context_width(context_tokens)
        known = [self._tokens[one] for one in range(width, -1, -1) if one in self._tokens]
        return int(known[0]) if known else self._most

    def observe(self, context_tokens: int, prefill_tokens: int, duration_s: float) -> None:
        """Take in what a step took."""
        now = self.tokens(context_tokens)
        if duration_s <= _ALONE_S and prefill_tokens < now:
            return  # the prompt ended: that a shorter chunk is quick says nothing of this one
        ratio = _ALONE_S / duration_s if duration_s else _MAX_GROWTH
        wanted = prefill_tokens * min(ratio, _MAX_GROWTH)
        least = min(self._most, _LEAST_ALONE_TOKENS)
        self._tokens[_context_width(context_tokens)] = max(least, min(float(self._most), wanted))


def _context_width(tokens: int) -> int:
    return (tokens // PREFILL_CHUNK_TOKENS).bit_length()


class PrefillPace:
    """Learns from every step; what it has learnt stays for the next prompt.

    Rows are told apart by lane and by the power of two that their number rounds up to, as the
    engine rounds its cache: one row's step tells nothing of eight.
    """

    def __init__(self, *, beside_decode: int | None, alone: int = PREFILL_CHUNK_TOKENS) -> None:
        """Know nothing.

        Args:
            beside_decode: Prompt tokens in a step in which rows decode; None measures.
            alone: The most prompt tokens in a step in which none does.
        """
        self._beside_decode = beside_decode
        self._alone = alone
        self._alone_steps = _AloneSteps(alone)
        self._token_s = 0.0
        self._widths: dict[tuple[Lane, int], _Width] = {}

    def is_made_as(self, other: PrefillPace) -> bool:
        """Whether both began alike, whatever either has learnt since."""
        return (self._beside_decode, self._alone) == (other._beside_decode, other._alone)

    @property
    def token_s(self) -> float:
        """Seconds for each prompt token of late, what ran beside it included; 0 before the first."""
        return self._token_s

    def prefill_tokens(self, lane: Lane | None, rows: int, *, context_tokens: int = 0) -> int:
        """Prompt tokens for a step in which ``rows`` of ``lane`` decode.

        0 asks for a step without prefill, to measure it: three times when nothing is known of such
        rows, later now and then.

        Args:
            lane: None where no row decodes.
            rows: Of that lane.
            context_tokens: Before the tokens that come next of a prompt.
        """
        if lane is None:
            return self._alone_steps.tokens(context_tokens)
        if self._beside_decode is not None:
            return self._beside_decode
        width = self._widths.get(_key(lane, rows))
        return int(width.chunk_tokens) if width is not None and width.is_measured else 0

    def burst_tokens(self, completions: Iterable[int], *, context_tokens: int = 0) -> int:
        """Prompt tokens for a step of its own, before rows with so few tokens go on decoding.

        Requests that come together are to run together: prefilled in small chunks beside the first
        of them, the others would take several times as long and run behind for good.

        Args:
            completions: Tokens that each row has which could decode.
            context_tokens: Before the tokens that come next of a prompt.
        """
        is_young = all(tokens < _YOUNG_TOKENS for tokens in completions)
        if not is_young or self._beside_decode is not None:
            return 0
        return self._alone_steps.tokens(context_tokens)

    def observe(
        self,
        lane: Lane | None,
        rows: int,
        *,
        prefill_tokens: int,
        duration_s: float,
        context_tokens: int = 0,
    ) -> None:
        """Take in what a step took; arguments as of :meth:`prefill_tokens`."""
        if prefill_tokens:
            token_s = duration_s / prefill_tokens
            self._token_s += (token_s - self._token_s) * (_TOKEN_WEIGHT if self._token_s else 1.0)
        if lane is None:
            if prefill_tokens:
                self._alone_steps.observe(context_tokens, prefill_tokens, duration_s)
            return
        if self._beside_decode is not None:
            return
        width = self._widths.setdefault(_key(lane, rows), _Width())
        if prefill_tokens:
            width.see_mixed(prefill_tokens, duration_s)
        else:
            width.see_decode(duration_s)


def _key(lane: Lane, rows: int) -> tuple[Lane, int]:
    return lane, (rows - 1).bit_length()
