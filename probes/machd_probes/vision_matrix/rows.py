"""Rows of an engine under the scheduler that serves it, without HTTP, threads or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from machd.clock import SystemClock
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import SampledToken
from machd.reading.keyed_prompt import KeyedPrompt
from machd.request.generation import SamplingParams
from machd.scheduler.admission import Batching, KvBudget, KvPolicy
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.events import Event, FinishReason, OutputGenerated, SequenceFinished
from machd.scheduler.pacing import PREFILL_SHARE
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waiting import QueueLimits

_MAX_STEPS = 2000
"""No script of a probe takes a tenth of it."""

_LIMITS = QueueLimits(
    max_queue=64, max_queue_tokens=1_000_000, queue_timeout_s=3600.0, request_timeout_s=3600.0
)
_KV_BYTES = 1 << 40
_WHOLE = 4096


@dataclass(frozen=True, slots=True)
class AskedRow:
    """A row of a script.

    Attributes:
        said: Tokens that the row says, whatever the model prefers; its log-probabilities are compared.
        at_step: Steps that run before it is submitted.
    """

    prompt: KeyedPrompt
    said: tuple[int, ...]
    at_step: int = 0


@dataclass(slots=True)
class Answer:
    """Tokens of a row.

    Attributes:
        cached_tokens: Prompt tokens that were taken from the prefix cache.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    cached_tokens: int = 0


class RowFailedError(Exception):
    """A row ended with an error; the message is the cause's."""


class Rows:
    """An engine without other rows, and a scheduler. Lives on the thread that loaded the model."""

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int = 1,
        chunk_tokens: int = _WHOLE,
        prefixes: PrefixCache | None = None,
        top_logprobs: int = 32,
    ) -> None:
        """Begin without rows.

        Args:
            engine: Computes.
            slots: Rows that run together; one runs as in a daemon without batching.
            chunk_tokens: Prompt tokens that a step computes at most, alone or beside other rows.
            prefixes: Prefix cache; None computes every prompt whole.
            top_logprobs: The likeliest tokens to list for each token.
        """
        self._engine = engine
        self._clock = SystemClock()
        self._sampling = SamplingParams(temperature=0.0, top_logprobs=top_logprobs)
        self._scheduler = Scheduler(_config(slots, chunk_tokens), prefixes)
        self._submitted = 0

    def answers(self, asked: Sequence[AskedRow]) -> list[Answer]:
        """Run rows to their ends, and free them.

        Returns:
            An answer for each row, in the order of the rows.

        Raises:
            RowFailedError: A row ended with an error.
            Exception: What the engine raises.
        """
        found = {str(self._submitted + number): Answer() for number in range(len(asked))}
        waiting = dict(zip(found, asked, strict=True))
        self._submitted += len(asked)
        for step in range(_MAX_STEPS):
            for sequence_id in [one for one, row in waiting.items() if row.at_step <= step]:
                request = self._request(sequence_id, waiting.pop(sequence_id))
                self._take(self._scheduler.submit((request,), self._now_s), found)
            is_idle = not self._step(found)
            if is_idle and not waiting:
                return list(found.values())
        raise RowFailedError(f"rows did not end within {_MAX_STEPS} steps")

    def forget(self) -> None:
        """Drop every block of the prefix cache."""
        self._scheduler.clear_prefixes(is_disk_included=False)
        while self._step({}):
            pass

    def _step(self, found: dict[str, Answer]) -> bool:
        """Run one step; False if there was nothing to do."""
        self._take(self._scheduler.admit(self._now_s), found)
        plan = self._scheduler.plan()
        if plan.is_empty:
            return False
        begin_s = self._now_s
        result = self._engine.run(plan)
        now_s = self._now_s
        events = self._scheduler.commit(plan, result, now_s, duration_s=now_s - begin_s)
        for fault in result.faults:
            raise RowFailedError(f"{type(fault.cause).__name__}: {fault.cause}") from fault.cause
        self._take(events, found)
        return True

    def _take(self, events: Sequence[Event], found: dict[str, Answer]) -> None:
        for event in events:
            match event:
                case OutputGenerated(sequence_id, SampledToken() as token):
                    found[sequence_id].tokens.append(token)
                case SequenceFinished(sequence_id, reason, error):
                    if reason is not FinishReason.LENGTH:
                        raise RowFailedError(f"a row ended by {reason}: {error}")
                    found[sequence_id].cached_tokens = event.cached_tokens
                case _:
                    pass

    def _request(self, sequence_id: str, row: AskedRow) -> SequenceRequest:
        return SequenceRequest(
            sequence_id=sequence_id,
            group_id=sequence_id,
            prompt=row.prompt.keys,
            sampling=replace(self._sampling, forced_token_ids=row.said),
            max_tokens=len(row.said),
            stop_token_ids=frozenset(),
            arrived_s=self._now_s,
            media=row.prompt.spans,
        )

    @property
    def _now_s(self) -> float:
        return self._clock.monotonic_s()


def _config(slots: int, chunk_tokens: int) -> SchedulerConfig:
    if slots == 1:
        return single_flight(_LIMITS, prefill_chunk_tokens=chunk_tokens)
    kv = KvBudget(_KV_BYTES, bytes_per_token=1, bytes_per_sequence=0, policy=KvPolicy.DEFER)
    batching = Batching(
        max_b=slots,
        window_s=0.0,
        prefill_chunk_tokens=chunk_tokens,
        coalesce=False,
        kv=kv,
        prefill_share=PREFILL_SHARE,
    )
    return continuous(_LIMITS, batching)
