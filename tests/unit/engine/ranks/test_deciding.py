"""Rank 0 and a rank that follows through the same steps, with all that rank 0 told in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import mlx.core as mx
import msgspec
import pytest
from support.engines import oracle
from support.engines.oracle import Oracle
from support.engines.tiny_engines import alone
from support.engines.tiny_models import VOCABULARY_TOKENS, TinyKind, tiny_model

from machd.engine import assembly
from machd.engine.assembly import make_engine
from machd.engine.grammar.matcher import matcher_for
from machd.engine.protocol.step import DecodeRow, PrefillChunk, StepPlan
from machd.engine.ranks.deciding import decider_of
from machd.engine.ranks.following import follow
from machd.engine.ranks.leading_engine import LeadingEngine
from machd.engine.ranks.rank_group import RankGroup
from machd.engine.sampling.sampling_state import Matcher
from machd.engine.step.mlx_engine import MlxEngine
from machd.errors import EngineFaultError
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY, Join
from machd_probes.scripts import random_prompt

_TOKENS = 12
_JOINS = tuple(Join(random_prompt(length, length), _TOKENS) for length in (9, 5, 14))
_NONE = msgspec.msgpack.encode(None)
_BAD = SamplingParams(temperature=0.0, seed=13)


class _OneProcess(RankGroup):
    """A group that keeps what rank 0 tells until another rank, which runs after it, asks for it."""

    def __init__(self, messages: deque[bytes], *, leads: bool) -> None:
        self._messages = messages
        self._leads = leads

    @property
    def leads(self) -> bool:
        return self._leads

    def tell(self, message: bytes) -> bytes:
        if not self._leads:
            return self._messages.popleft()
        self._messages.append(message)
        return message

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]


class _PlantedError(Exception):
    pass


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> deque[bytes]:
    """What rank 0 tells while it decodes three rows: one cannot begin, and drafts of the others are poisoned once."""

    def open_matcher(params: SamplingParams) -> Matcher | None:
        if params == _BAD:
            raise _PlantedError
        return matcher_for(params)

    monkeypatch.setattr(assembly, "matcher_for", open_matcher)
    answers = {
        (one.prompt, one.sampling): [
            token.token_id for token in alone(TinyKind.STANDARD).tokens(one)
        ]
        for one in _JOINS
    }
    known = {one for said in answers.values() for one in said}
    known |= {one for join in _JOINS for one in join.prompt}
    poison = next(one for one in range(1, VOCABULARY_TOKENS) if one not in known)
    right = oracle._Row.propose

    def propose(this: oracle._Row, max_tokens: int) -> tuple[int, ...]:
        proposed = right(this, max_tokens)
        return (poison,) * len(proposed) if len(this._said) < 3 else proposed

    monkeypatch.setattr(oracle._Row, "propose", propose)
    model = tiny_model(TinyKind.STANDARD)
    model.model.model.embed_tokens.weight[poison] = mx.nan
    told = deque[bytes]()
    group = _OneProcess(told, leads=True)
    shard = make_engine(model, decider=decider_of(group), proposer=Oracle(answers, 8))
    leading = LeadingEngine(shard, group, lambda: 0.0)
    said: list[list[int]] = [[], [], []]

    prefill = tuple(_whole(slot, _BAD if slot == 1 else GREEDY) for slot in range(3))
    result = leading.run(StepPlan(prefill=prefill))
    assert [(one.slot_index, type(one.cause)) for one in result.faults] == [(1, _PlantedError)]
    plan = StepPlan(decode=tuple(DecodeRow(slot, 3, 0.9) for slot in (0, 2)))
    drafts = 0
    while min(len(said[0]), len(said[2])) < _TOKENS:
        for token in result.tokens:
            said[token.slot_index].append(token.token_id)
        drafts += len(result.drafts)
        result = leading.run(plan)
    leading.run(StepPlan(release=(0, 2)))
    leading.close()

    assert drafts
    for slot in (0, 2):
        assert said[slot][:_TOKENS] == answers[_JOINS[slot].prompt, GREEDY]
    return told


def _whole(slot_index: int, sampling: SamplingParams) -> PrefillChunk:
    prompt = _JOINS[slot_index].prompt
    return PrefillChunk(
        slot_index,
        prompt,
        0,
        is_last=True,
        sampling=sampling,
        reserved_tokens=len(prompt) + 3 * _TOKENS,
    )


def _follower(group: RankGroup) -> MlxEngine:
    return make_engine(tiny_model(TinyKind.STANDARD), decider=decider_of(group))


def test_a_rank_that_is_told_keeps_the_rows_of_rank_0(messages: deque[bytes]) -> None:
    """Seats, drafts, rejected ones and passes computed again leave the rows whose checksum rank 0 sends."""
    assert _NONE in messages, "a pass was computed again"
    assert msgspec.msgpack.encode([0, 2]) in messages, "a row could not begin"
    group = _OneProcess(messages, leads=False)

    follow(_follower(group), group, lambda: None)

    assert not messages


def test_a_rank_with_other_rows_is_noticed(messages: deque[bytes]) -> None:
    """A row that sits where rank 0 has none makes more rows than are told."""
    seats = messages.index(msgspec.msgpack.encode([0, 2]))
    messages[seats] = msgspec.msgpack.encode([0, 1, 2])
    group = _OneProcess(messages, leads=False)

    with pytest.raises(EngineFaultError, match="rank 0 decodes 2 rows and this rank 3"):
        follow(_follower(group), group, lambda: None)
