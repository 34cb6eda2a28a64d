"""The comparison of rows with drafts and without notices faults: each is planted where one could be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from msgspec import structs
from support.engines.constrained_rows import grammar_of
from support.engines.drafted_scripts import (
    DRAFT_TOKENS,
    DraftedScripts,
    always,
    constrained_differences,
    if_alone,
    say,
)
from support.engines.oracle import Oracle, WatchedEngine
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import TinyKind

from machd.engine.assembly import make_engine
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.layers.cache_state import StateCheckpoint
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.serial_lane import SerialLaneKv
from machd.engine.protocol.step import Lane, SampledToken
from machd.engine.sampling.sampling_state import SamplingState
from machd.engine.step import decoder, verification
from machd.engine.step.decode_pass import DecodePass
from machd.engine.step.decoder import Decoder
from machd.engine.step.row import Decoded, DecoderRow, RowProposals
from machd.engine.step.verification import Span, Verdict
from machd.request.constraint import ConstraintKind
from machd_probes.play import GREEDY, DraftSchedule, Join
from machd_probes.scripts import LENGTHS, MIXED, Script, random_prompt

TOKENS = 24
ROWS = [
    Join(random_prompt(length, number), TOKENS, MIXED[number])
    for number, length in enumerate(LENGTHS)
]


Plant = Callable[[pytest.MonkeyPatch], None]


def _change_ahead_states(
    patch: pytest.MonkeyPatch, change: Callable[[SamplingState, SamplingState], dict[str, Any]]
) -> None:
    """Change the states behind tokens ahead; ``change`` gets the row's own and the one to change."""
    right = verification.span_of

    def span_of(row: SamplingState, *rest: Any) -> Span:
        draft = right(row, *rest)
        states = [replace(one, **change(row, one)) for one in draft.ahead_states]
        return replace(draft, ahead_states=tuple(states))

    patch.setattr("machd.engine.step.span_choice.span_of", span_of)


def _keep_of_the_row(patch: pytest.MonkeyPatch, name: str) -> None:
    """After accepted tokens ahead a row keeps this part of the state that it had before them."""
    right = decoder._move_on

    def move_on(row: DecoderRow, draft: Span, verdict: Verdict) -> BaseException | None:
        before = getattr(row.sampling, name)
        cause = right(row, draft, verdict)
        if verdict.accepted_tokens:
            row.sampling = replace(row.sampling, **{name: before})
        return cause

    patch.setattr(decoder, "_move_on", move_on)


def one_too_many_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """The first rejected draft is emitted, and the token behind it that was sampled."""
    right = verification.verify

    def verify(draft: Span, chosen: Sequence[SampledToken | None]) -> Verdict:
        found = right(draft, chosen)
        place, following = found.accepted_tokens, found.accepted_tokens + 1
        token = chosen[following] if following < len(chosen) else None
        if token is None:
            return found
        wrong = structs.replace(token, token_id=draft.ahead_ids[place])
        said = (*found.tokens[:-1], wrong, token)
        return Verdict(said, found.is_finite)

    patch.setattr("machd.engine.step.decoder.verify", verify)


def one_too_few_is_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft stays in the caches, and the next token goes behind it."""
    for caches in (BatchLaneKv, SerialLaneKv):
        right = caches.roll_back

        def roll_back(this: Any, counts: Sequence[int], right: Any = right) -> bool:
            return bool(right(this, [max(0, count - 1) for count in counts]))

        patch.setattr(caches, "roll_back", roll_back)


def nothing_is_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafts stay."""
    for caches in (BatchLaneKv, SerialLaneKv):
        right = caches.roll_back

        def roll_back(this: Any, counts: Sequence[int], right: Any = right) -> bool:
            return bool(right(this, [0] * len(counts)))

        patch.setattr(caches, "roll_back", roll_back)


def all_rows_are_cut_alike(patch: pytest.MonkeyPatch) -> None:
    """The first row's rollback is applied to every row."""
    right = RowPositions.cut

    def cut(this: RowPositions, counts: Sequence[int]) -> None:
        right(this, [counts[0]] * len(counts))

    patch.setattr(RowPositions, "cut", cut)


def draws_are_not_of_their_positions(patch: pytest.MonkeyPatch) -> None:
    """Every position of a guess has the draw of the first."""
    _change_ahead_states(patch, lambda row, _: {"position": row.position})


def draws_are_one_position_late(patch: pytest.MonkeyPatch) -> None:
    """Positions are one too high."""
    _change_ahead_states(patch, lambda _, ahead: {"position": ahead.position + 1})


def drafts_do_not_count_for_penalties(patch: pytest.MonkeyPatch) -> None:
    """The counts behind a guess are those before it."""
    _change_ahead_states(patch, lambda row, _: {"counts": row.counts})


def the_rows_own_counts_stay(patch: pytest.MonkeyPatch) -> None:
    """After a guess the row's counts are those before it."""
    _keep_of_the_row(patch, "counts")


def a_matcher_is_shared(patch: pytest.MonkeyPatch) -> None:
    """The row's own matcher sees the guesses."""
    patch.setattr(SamplingState, "fork", lambda this: this)


def a_matcher_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """The row's matcher stays before its guesses, which it has said."""
    _keep_of_the_row(patch, "matcher")


def a_checkpoint_is_a_reference(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint changes with the cache."""

    def remember(this: StateCheckpoint, cache: Any) -> None:
        this._cache, this._state = cache, cache.state

    patch.setattr(StateCheckpoint, "__init__", remember)


def nothing_is_computed_again(patch: pytest.MonkeyPatch) -> None:
    """Restored state stays where it was before the pass."""
    roll_back = Decoder._roll_back

    def without(this: Decoder, *args: Any) -> None:
        forward = this._passes._forward
        this._passes._forward = lambda *_: None  # type: ignore[assignment]
        roll_back(this, *args)
        this._passes._forward = forward

    patch.setattr(Decoder, "_roll_back", without)


def the_next_token_is_the_first_rows(patch: pytest.MonkeyPatch) -> None:
    """Every row goes on from what the first one said."""
    right = Decoder.apply

    def apply(this: Decoder, current: DecodePass, decoded: Decoded) -> Decoded:
        right(this, current, decoded)
        for row in this._rows:
            row.last_token_id = this._rows[0].last_token_id
        return decoded

    patch.setattr(Decoder, "apply", apply)


def a_proposer_is_not_told(patch: pytest.MonkeyPatch) -> None:
    """A proposer gets no accepted drafts, only the sampled token: its next drafts are wrong."""
    right = RowProposals.extend
    patch.setattr(RowProposals, "extend", lambda this, ids: right(this, ids[-1:]))


TWO = Script((ROWS[2], replace(ROWS[3], at_step=3, tokens=8)))
ALL = Script(tuple(replace(row, at_step=number) for number, row in enumerate(ROWS)))
SERIAL = Script((replace(ROWS[1], lane=Lane.SERIAL),))
PENALISED = Script((ROWS[4],))
SAMPLED = Script((ROWS[1],))

_FAULTS: list[tuple[Plant, TinyKind, Script, DraftSchedule]] = [
    (one_too_many_is_accepted, TinyKind.STANDARD, SAMPLED, always),
    (one_too_many_is_accepted, TinyKind.HYBRID, SERIAL, always),
    (one_too_many_is_accepted, TinyKind.STANDARD, ALL, always),
    (one_too_few_is_rolled_back, TinyKind.STANDARD, SERIAL, always),
    (one_too_few_is_rolled_back, TinyKind.STANDARD, ALL, always),
    (one_too_few_is_rolled_back, TinyKind.ROTATING, SAMPLED, always),
    (nothing_is_rolled_back, TinyKind.STANDARD, TWO, if_alone),
    (nothing_is_rolled_back, TinyKind.HYBRID_GDN, TWO, if_alone),
    (nothing_is_rolled_back, TinyKind.NESTED, SERIAL, always),
    (all_rows_are_cut_alike, TinyKind.STANDARD, ALL, always),
    (draws_are_not_of_their_positions, TinyKind.STANDARD, SAMPLED, always),
    (draws_are_one_position_late, TinyKind.STANDARD, SAMPLED, always),
    (draws_are_one_position_late, TinyKind.STANDARD, ALL, always),
    (drafts_do_not_count_for_penalties, TinyKind.STANDARD, PENALISED, always),
    (the_rows_own_counts_stay, TinyKind.STANDARD, PENALISED, always),
    (the_rows_own_counts_stay, TinyKind.STANDARD, ALL, always),
    (a_checkpoint_is_a_reference, TinyKind.HYBRID_GDN, SERIAL, always),
    (a_checkpoint_is_a_reference, TinyKind.HYBRID, TWO, if_alone),
    (nothing_is_computed_again, TinyKind.HYBRID_GDN, SAMPLED, always),
    (nothing_is_computed_again, TinyKind.NESTED_ROTATING, SERIAL, always),
    (the_next_token_is_the_first_rows, TinyKind.STANDARD, ALL, always),
    (a_proposer_is_not_told, TinyKind.STANDARD, SAMPLED, always),
]


@pytest.mark.parametrize(
    ("plant", "kind", "script", "drafts"),
    _FAULTS,
    ids=[f"{plant.__name__}-{kind}-{len(script.joins)}" for plant, kind, script, _ in _FAULTS],
)
def test_a_planted_fault_is_noticed(
    plant: Plant,
    kind: TinyKind,
    script: Script,
    drafts: DraftSchedule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison passes without the fault and reports differences with it."""
    assert _differences_without_a_fault(kind, script, drafts) == []

    plant(monkeypatch)

    try:
        found = _differences(kind, script, drafts)
    except (AssertionError, ValueError) as error:
        found = [repr(error)]  # the caches' own, the oracle's or the player's
    assert found != []


def _differences(kind: TinyKind, script: Script, drafts: DraftSchedule) -> list[str]:
    return DraftedScripts(kind).differences(script, drafts)


_differences_without_a_fault = cache(_differences)


@pytest.mark.parametrize(
    ("plant", "pattern"),
    [
        (a_matcher_is_shared, "([a-z]{2}[0-9]){40}"),
        (a_matcher_is_shared, "(abc|xy[0-9]z){9}"),
        (a_matcher_is_not_told, "([a-z]{2}[0-9]){40}"),
        (a_matcher_is_not_told, "(abc|xy[0-9]z){9}"),
        (one_too_many_is_accepted, "([a-z]{2}[0-9]){40}"),
    ],
)
def test_a_fault_in_a_constrained_row_is_noticed(
    plant: Plant, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's matcher is at another place than the row."""
    plain = make_engine(loaded(TinyKind.STANDARD))
    grammar = grammar_of(plain, ConstraintKind.REGEX, pattern)
    rows = [Join(random_prompt(9, 1), 20, replace(GREEDY, grammar=grammar))]
    expected = say(plain, rows)
    # Wrong drafts are letters that the pattern may allow.
    answers = {(rows[0].prompt, rows[0].sampling): expected.token_ids[0]}
    engine = WatchedEngine(loaded(TinyKind.STANDARD), Oracle(answers, 8))
    assert constrained_differences(expected, say(engine, rows, DRAFT_TOKENS), rows) == []

    plant(monkeypatch)

    try:
        found = constrained_differences(expected, say(engine, rows, DRAFT_TOKENS), rows)
    except AssertionError as error:
        found = [repr(error)]
    assert found != []
