"""The next step as a pure function of slots, pace and prefix cache, and the pace learnt from steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from machd.engine.protocol.step import EncodeRow, Lane, PrefillChunk, StepPlan, StepResult
from machd.scheduler.config import NO_DRAFTS, DraftPolicy, SchedulerConfig
from machd.scheduler.pacing import StepPace
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.running import RunningSequences
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots


class Planner:
    """The pace of steps, and the lane that decodes next.

    Attributes:
        pace: Prompt tokens and drafts that fit a step, as learnt.
        turn: Lane that decodes in the next step if both have rows.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        """Start with the batch lane as the next one."""
        self.pace = config.pace
        self.turn = Lane.BATCH
        self._drafts = config.drafts

    def plan(self, running: RunningSequences) -> StepPlan:
        """Plan the next step, and change nothing."""
        return plan_step(running.slots, self.pace, running.prefixes, self._drafts, turn=self.turn)

    def observe(
        self, plan: StepPlan, result: StepResult, running: RunningSequences, duration_s: float
    ) -> None:
        """Learn from a step, and let the other lane decode next."""
        lane = running.at(plan.decode[0].slot_index).lane if plan.decode else None
        # A prompt's last token is computed by the step that decodes it.
        prefill_tokens = plan.prefill_tokens - sum(chunk.is_last for chunk in plan.prefill)
        self.pace.observe(
            lane,
            len(plan.decode),
            duration_s=duration_s - result.encoding_s,
            prefill_tokens=prefill_tokens,
            context_tokens=max((chunk.start for chunk in plan.prefill), default=0),
            ahead_tokens=max(0, result.span_tokens - 1),
            accepted_tokens=len(result.tokens) - len({one.slot_index for one in result.tokens}),
        )
        outcomes = {one.slot_index: one for one in result.drafts}
        for row in plan.decode:
            acceptance = running.at(row.slot_index).acceptance
            if (drafts := outcomes.get(row.slot_index)) is not None:
                acceptance.observe(drafts.drafted_tokens, drafts.accepted_tokens)
            else:
                acceptance.fade()
        if lane is not None:
            self.turn = Lane.SERIAL if lane is Lane.BATCH else Lane.BATCH


def plan_step(
    slots: Slots,
    pace: StepPace,
    prefixes: PrefixCache | None = None,
    drafts: DraftPolicy = NO_DRAFTS,
    *,
    turn: Lane,
) -> StepPlan:
    """Plan a step: free released rows, prefill within the pace, decode all rows of one lane.

    Args:
        slots: Running sequences.
        pace: Prompt tokens and drafts that fit a step.
        prefixes: Prefix cache, which bounds chunks; None without one.
        drafts: When rows may have drafts.
        turn: Lane that decodes if both have rows.
    """
    changes = prefixes.changes if prefixes is not None else ()
    prompts = _Prompts(
        in_turn((one for one in slots if not one.is_prefilled), pace.token_s), prefixes
    )
    context_tokens = prompts.context_tokens
    burst_tokens = pace.burst_tokens(
        (one.completion_tokens for one in slots if one.is_prefilled), context_tokens=context_tokens
    )
    if burst := prompts.whole(burst_tokens):
        return StepPlan(slots.released, burst, blocks=changes)
    lane, rows = _decoding(slots, turn)
    budget_tokens = pace.prefill_tokens(
        lane, len(rows), waiting=prompts.count, context_tokens=context_tokens
    )
    chunks = prompts.chunks(budget_tokens)
    encode_s = pace.encode_s(lane, len(rows)) if prompts.unencoded else 0.0
    encode = prompts.unencoded if encode_s else ()
    if chunks:
        encode_s /= 2  # so that a stream of prompts cannot starve an image
    if lane is None:
        return StepPlan(slots.released, chunks, blocks=changes, encode=encode, encode_s=encode_s)
    max_draft_tokens = drafts.tokens_for(len(slots))
    if max_draft_tokens:
        # A chunk already makes the step as long as the pace allows.
        max_draft_tokens = (
            0 if chunks or encode else pace.draft_tokens(lane, len(rows), max_draft_tokens)
        )
    return StepPlan(
        slots.released,
        chunks,
        tuple(sequence.next_row(max_draft_tokens) for sequence in rows),
        changes,
        pace.span_cost(lane, len(rows)),
        encode,
        encode_s,
    )


def in_turn(sequences: Iterable[Sequence], token_s: float) -> list[Sequence]:
    """Sort sequences by place in the queue plus the time that the rest of their prompt takes.

    So a short prompt need not wait for a long one that came just before it, and a long one is late
    by its own length at most.
    """

    def due_s(sequence: Sequence) -> tuple[float, int]:
        due_s, number = sequence.place
        return due_s + sequence.unprefilled_tokens * token_s, number

    return sorted(sequences, key=due_s)


def _decoding(slots: Slots, turn: Lane) -> tuple[Lane | None, list[Sequence]]:
    ready = [sequence for sequence in slots if sequence.is_prefilled]
    if not ready:
        return None, []
    lane = turn if any(sequence.lane is turn for sequence in ready) else ready[0].lane
    return lane, [sequence for sequence in ready if sequence.lane is lane]


class _Prompts:
    """Sequences in prefill that can begin now, in order.

    Attributes:
        unencoded: The first image or video that each waits for, or will after its next chunks.
    """

    def __init__(self, sequences: Collection[Sequence], prefixes: PrefixCache | None) -> None:
        self._prefixes = prefixes
        ready = [one for one in sequences if prefixes is None or prefixes.is_ready(one)]
        self._sequences = [one for one in ready if not _needs_encoding(one)]
        self.unencoded = tuple(
            EncodeRow(one.slot_index, span.media)
            for one in ready
            if one.slot_index is not None and (span := one.next_unencoded) is not None
        )

    @property
    def count(self) -> int:
        """Number of prompts that could be computed."""
        return len(self._sequences)

    @property
    def context_tokens(self) -> int:
        """Computed tokens of the first prompt."""
        return self._sequences[0].prefilled_tokens if self._sequences else 0

    def whole(self, budget_tokens: int) -> tuple[PrefillChunk, ...]:
        """Return whole unopened prompts, up to the first that is opened or exceeds the budget."""
        chunks: list[PrefillChunk] = []
        for sequence in self._sequences:
            rest = sequence.unprefilled_tokens
            if sequence.is_opened or rest > budget_tokens or sequence.next_unencoded is not None:
                break
            chunks.append(self._chunk(sequence, rest))
            budget_tokens -= rest
        return tuple(chunks)

    def chunks(self, budget_tokens: int) -> tuple[PrefillChunk, ...]:
        """Return chunks that share the budget in order."""
        chunks: list[PrefillChunk] = []
        for sequence in self._sequences:
            if budget_tokens > 0:
                chunk = self._chunk(sequence, budget_tokens)
                chunks.append(chunk)
                budget_tokens -= len(chunk.token_ids)
        return tuple(chunks)

    def _chunk(self, sequence: Sequence, max_tokens: int) -> PrefillChunk:
        stop = sequence.prefilled_tokens + min(max_tokens, sequence.unprefilled_tokens)
        if (span := sequence.next_unencoded) is not None:
            stop = min(stop, span.start)
        if self._prefixes is None:
            return sequence.next_chunk(stop)
        stop = self._prefixes.stop_before(sequence, stop)
        return sequence.next_chunk(stop, self._prefixes.reused(sequence))


def _needs_encoding(sequence: Sequence) -> bool:
    """Return True if the prompt's next token lies in an image or video that is not encoded yet."""
    span = sequence.next_unencoded
    return span is not None and span.start <= sequence.prefilled_tokens
