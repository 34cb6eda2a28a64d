"""Plays a script of joins and leaves on an engine, as a scheduler would: plans in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import (
    DecodeRow,
    Lane,
    PrefillChunk,
    SampledToken,
    SharedPrefix,
    StepPlan,
)
from machd.request.generation import SamplingParams

GREEDY = SamplingParams(temperature=0.0)

DraftSchedule = Callable[[int, int], int]
"""A step's number and the rows that have slots to the draft tokens allowed for each row."""

_WHOLE = 1 << 20


def no_drafts(step: int, rows: int) -> int:
    """Allow no draft tokens."""
    del step, rows
    return 0


@dataclass(frozen=True)
class Join:
    """One row's life.

    Attributes:
        tokens: How many it may have, which is what the engine is told, and is given unless it leaves.
        at_step: The first step whose plan may hold its prompt.
        chunk_tokens: Prompt tokens a step.
        leaves_after: Released after so many tokens, work for the next one in flight; None to stay.
        lane: Where it decodes.
        shared: Beginning of its prompt that it shares with other rows of the batch lane.
    """

    prompt: tuple[int, ...]
    tokens: int
    sampling: SamplingParams = GREEDY
    at_step: int = 0
    chunk_tokens: int = _WHOLE
    leaves_after: int | None = None
    lane: Lane = Lane.BATCH
    shared: SharedPrefix | None = None

    @property
    def given_tokens(self) -> int:
        """Tokens that the row gets before its slot is freed."""
        return self.tokens if self.leaves_after is None else self.leaves_after


@dataclass
class _Row:
    """A join that has its slot."""

    join: Join
    slot_index: int
    prefilled: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    has_waited: bool = False

    @property
    def decodes(self) -> bool:
        return self.prefilled == len(self.join.prompt)

    @property
    def is_done(self) -> bool:
        return self.decodes and len(self.tokens) >= self.join.given_tokens

    def next_chunk(self) -> PrefillChunk:
        start = self.prefilled
        token_ids = self.join.prompt[start : start + self.join.chunk_tokens]
        self.prefilled += len(token_ids)
        return PrefillChunk(
            slot_index=self.slot_index,
            token_ids=token_ids,
            start=start,
            is_last=self.decodes,
            sampling=self.join.sampling,
            reserved_tokens=len(self.join.prompt) + self.join.tokens,
            lane=self.join.lane,
            shared=self.join.shared if self.decodes else None,
        )

    def decode(self, max_draft_tokens: int) -> DecodeRow:
        return DecodeRow(self.slot_index, max_draft_tokens)

    def take(self, token: SampledToken) -> None:
        # Of several tokens of a step, those after its last one are not wanted.
        if not (self.decodes and len(self.tokens) >= self.join.given_tokens):
            self.tokens.append(token)


def play(
    engine: Engine,
    joins: Sequence[Join],
    *,
    slots: int | None = None,
    prefills_alone: bool = False,
    drafts: DraftSchedule = no_drafts,
) -> list[list[SampledToken]]:
    """Run the rows to their ends and free them; returns each row's tokens, in the order of joins.

    A row takes the lowest free slot, and waits where there is none. Each step decodes every row
    of one lane whose prompt is computed, the lanes in turn, and takes one chunk of every other row.

    Args:
        engine: With no rows; it is left with none.
        joins: The script.
        slots: Rows that may run at once; as many as there are joins unless given.
        prefills_alone: A step that takes chunks decodes no row.
        drafts: The draft tokens allowed in each step.
    """
    free = list(range(len(joins) if slots is None else slots))
    waiting = sorted(range(len(joins)), key=lambda number: joins[number].at_step)
    rows: dict[int, _Row] = {}
    released: list[int] = []
    results: list[list[SampledToken]] = [[] for _ in joins]
    step = 0
    while waiting or rows or released:
        while waiting and free and joins[waiting[0]].at_step <= step:
            number = waiting.pop(0)
            rows[number] = _Row(joins[number], free.pop(0))
        turn = (Lane.BATCH, Lane.SERIAL)[step % 2]
        running = _Running(list(rows.values()), turn, drafts(step, len(rows)))
        plan = running.plan(released, prefills_alone=prefills_alone)
        if not plan.is_empty:
            _run(engine, plan, list(rows.values()))
        released = []
        for number in [number for number, row in rows.items() if row.is_done]:
            row = rows.pop(number)
            results[number] = row.tokens
            released.append(row.slot_index)
            free = sorted([*free, row.slot_index])
        step += 1
    return results


@dataclass(frozen=True)
class _Running:
    """The rows that have slots, and what the next step may do with them."""

    rows: list[_Row]
    turn: Lane
    max_draft_tokens: int

    def plan(self, released: list[int], *, prefills_alone: bool) -> StepPlan:
        ready = [row for row in self.rows if row.decodes]
        decoding = [row for row in ready if row.join.lane is self.turn] or ready
        prefill = tuple(row.next_chunk() for row in self.rows if row not in ready)
        if prefill and prefills_alone:
            decoding = []
        decode = tuple(row.decode(self.max_draft_tokens) for row in decoding)
        return StepPlan(tuple(released), prefill, decode)


def _run(engine: Engine, plan: StepPlan, rows: list[_Row]) -> None:
    """Run a plan, and hold the answer against the rules of the seam."""
    result = engine.run(plan)
    assert not result.faults, f"rows failed: {result.faults}"
    by_slot = {row.slot_index: row for row in rows}
    answered = [token.slot_index for token in result.tokens]
    asked = {row.slot_index for row in plan.decode}
    # A first token may come one step later, where the step was under way when its row joined.
    due = {slot for slot in asked if by_slot[slot].tokens or by_slot[slot].has_waited}
    for slot in asked:
        by_slot[slot].has_waited = True
    may = asked | {chunk.slot_index for chunk in plan.prefill if chunk.is_last}
    drafted = {one.slot_index: 1 + one.accepted_tokens for one in result.drafts}
    for slot in set(answered):
        assert answered.count(slot) == drafted.get(slot, 1), "a row got more tokens than it may"
    assert due <= set(answered), f"decode rows without a token: {due - set(answered)}"
    assert set(answered) <= may, f"tokens for rows that asked for none: {set(answered) - may}"
    for token in result.tokens:
        by_slot[token.slot_index].take(token)
