"""Memory that a step takes, checked against the free bytes before the step computes anything.

The engine process catches StepMemoryError: the scheduler gives blocks or rows up, and plans the step again.

It has to be judged beforehand on the CPU: mlx 0.32.4 does not look at what its allocator returns
there, so an allocation that fails ends the process. What a step takes besides keys and values is
learnt from the peaks of the steps before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from machd.clock import Clock
from machd.engine.protocol.memory import StepMemoryError
from machd.engine.step.ports import Decider

_RESERVED_SHARE = 0.05
_MIN_RESERVED_BYTES = 128 << 20
_MAX_RESERVED_BYTES = 1 << 30
"""Of what is left once the model is loaded, the part that steps never touch. Tokenizers, grammars,
request bodies, thread stacks and the C library's arenas (64 MiB of address space each) live on it."""

_MARGIN = 1.25
"""On what was measured: the next step may attend to a longer context."""

_LEARNING_TOKENS = 64
"""A pass of fewer prompt tokens costs about as much as one of so many."""

_MAX_READING_AGE_S = 0.25
"""For steps that decode, and compute a few tokens of prompts at the most: they take about what the last one took."""

_FEW_PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class StepNeed:
    """Quantities that a step's memory depends on.

    Attributes:
        prompt_tokens: Tokens of prompts in the step.
        rows: Rows that decode.
        kv_bytes: What caches grow by in the step, what is copied on the way included.
        joining_bytes: What the batch's caches grow by for rows that join. The pass that decodes these
            rows allocates it, which may be a later step's.
        scoring_bytes: What the log-probabilities of prompts take besides the pass.
    """

    prompt_tokens: int
    rows: int
    kv_bytes: int
    joining_bytes: int = 0
    scoring_bytes: int = 0


class StepMemory:
    """Memory that steps take, and what is left for them. Lives on the engine thread."""

    def __init__(self, read_available: Callable[[], int], clock: Clock, decider: Decider) -> None:
        """Look at what is left now, with the model loaded, and have mlx keep within it.

        Args:
            read_available: Bytes that the process can still take; may raise OSError later.
            clock: Reads time.
            decider: Compares what ranks need and have.
        """
        self._decider = decider
        self._read_available = read_available
        self._clock = clock
        self._available_bytes = read_available()
        self._read_s = clock.monotonic_s()
        share_bytes = int(self._available_bytes * _RESERVED_SHARE)
        self._reserved_bytes = min(max(share_bytes, _MIN_RESERVED_BYTES), _MAX_RESERVED_BYTES)
        self._peak_bytes = 0
        self._bytes_per_prompt_token = 0
        self._bytes_per_row = 0
        self._learnt_tokens = 1  # prompt tokens of the step that the bytes a token were learnt from
        self._active_bytes = 0
        self._pending_bytes = 0  # growth for rows that joined, not allocated until their first pass
        # Beyond its limit mlx waits for running operations before it allocates for the next ones.
        mx.set_memory_limit(mx.get_active_memory() + self.usable_bytes(self._available_bytes))

    def usable_bytes(self, available_bytes: int) -> int:
        """The part of ``available_bytes`` that steps may take."""
        return max(0, available_bytes - self._reserved_bytes)

    def read_usable_bytes(self) -> int:
        """Return what steps may take now."""
        self._look(max_age_s=0.0)
        return self.usable_bytes(self._available_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that mlx has held since the start."""
        return max(self._peak_bytes, mx.get_peak_memory())

    def forget_peak(self) -> None:
        """Count the peak from now on."""
        self._peak_bytes = 0
        mx.reset_peak_memory()

    def needed_bytes(self, need: StepNeed) -> int:
        """An upper estimate of what a step takes at its peak."""
        tokens = max(need.prompt_tokens, _LEARNING_TOKENS) if need.prompt_tokens else 0
        passing = tokens * self._bytes_per_prompt_token + need.rows * self._bytes_per_row
        return self._growth_bytes(need) + int(passing * _MARGIN)

    def _growth_bytes(self, need: StepNeed) -> int:
        return self._pending_bytes + need.kv_bytes + need.joining_bytes + need.scoring_bytes

    def check(self, need: StepNeed) -> None:
        """Refuse a step that does not fit.

        Raises:
            StepMemoryError: It does not.
        """
        measure = partial(self._measure, need)
        tightest = self._decider.agree_on_memory(measure, only_decodes=not need.prompt_tokens)
        if tightest is None:
            return
        needed_bytes, left_bytes = tightest
        if needed_bytes > left_bytes:
            raise StepMemoryError(needed_bytes=needed_bytes, left_bytes=left_bytes)

    def _measure(self, need: StepNeed) -> tuple[int, int]:
        """Return the bytes that a step takes here, and those that are left for it."""
        takes_little = need.prompt_tokens <= _FEW_PROMPT_TOKENS and not need.kv_bytes
        self._look(max_age_s=_MAX_READING_AGE_S if takes_little else 0.0)
        return self.needed_bytes(need), self.usable_bytes(self._available_bytes)

    def begin(self) -> None:
        """Watch the step that begins now."""
        self._active_bytes = mx.get_active_memory()
        self._peak_bytes = self.peak_bytes
        mx.reset_peak_memory()

    def end(self, need: StepNeed, *, has_decoded: bool) -> None:
        """Learn from the step that has ended what it took.

        Args:
            need: Of the step.
            has_decoded: Whether rows decoded, with all that had been laid out for them.
        """
        passing_bytes = mx.get_peak_memory() - self._active_bytes - self._growth_bytes(need)
        self._pending_bytes = 0 if has_decoded else self._pending_bytes + need.joining_bytes
        if need.prompt_tokens >= self._learnt_tokens:
            per_token = (passing_bytes - need.rows * self._bytes_per_row) // need.prompt_tokens
            known = self._bytes_per_prompt_token
            has_doubled = need.prompt_tokens > 2 * self._learnt_tokens
            if has_doubled and self._learnt_tokens < _LEARNING_TOKENS:
                known = 0  # too high: what few tokens take in common was counted for each of them
            self._bytes_per_prompt_token = max(known, per_token)
            self._learnt_tokens = min(need.prompt_tokens, _LEARNING_TOKENS)
        elif need.rows and not need.prompt_tokens:
            self._bytes_per_row = max(self._bytes_per_row, passing_bytes // need.rows)

    def _look(self, *, max_age_s: float) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s < max_age_s:
            return
        try:
            self._available_bytes = self._read_available()
        except OSError:
            return  # the loop's own reading fails, too, and is logged there
        self._read_s = now_s
