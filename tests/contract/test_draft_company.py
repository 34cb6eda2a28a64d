"""What a row says does not depend on guesses, whoever joins, leaves, and whenever guessing begins.

Rows in a batch are guessed for together, each with another number of right guesses; or guessing stops
when others come and begins again when they are gone, at every step at which that can be.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import parity
from support.engines.guessed_rows import GUESSES, GuessedScripts, always, if_alone
from support.engines.tiny_models import TinyKind, each_kind, each_kind_and_look_ahead

from machd.engine.protocol.step import Lane
from machd_probes.play import DraftSchedule, Join
from machd_probes.scripts import LENGTHS, MIXED, Script, random_prompt, scripts

PROMPTS = [random_prompt(length, number) for number, length in enumerate(LENGTHS)]
SCRIPTS = scripts(PROMPTS, 16)
_FORMATS = ("affine8", "affine4", "turboquant")
_CODED_SCRIPTS = ("early leaves", "down to one and up again", "chunked prefill", "two lanes")
_STEP_NATS = 0.05
"""A number at the border of two quantisation steps may be rounded either way (test_quantised_parity)."""

_KINDS = each_kind()
_AHEAD = pytest.mark.parametrize("looks_ahead", [False, True], ids=["in step", "looking ahead"])


@pytest.fixture(name="noise_of_a_step")
def _noise_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "NOISE", _STEP_NATS)


@_AHEAD
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_rows_that_are_guessed_for_together(name: str, looks_ahead: bool) -> None:  # noqa: FBT001
    """Every row goes on by as many tokens as its own guesses were right, and says what it says alone."""
    stage = GuessedScripts(TinyKind.STANDARD, looks_ahead=looks_ahead)

    assert stage.differences(SCRIPTS[name], always) == []
    together = [len(result.drafts) for result in stage.engine.results]
    assert max(together) > 1
    ragged = [
        len({one.accepted_tokens for one in result.drafts}) > 1 for result in stage.engine.results
    ]
    assert any(ragged)


@pytest.mark.usefixtures("noise_of_a_step")
@pytest.mark.parametrize(
    ("name", "kv_format"),
    [
        pytest.param(
            name,
            kv_format,
            marks=()
            if name == _CODED_SCRIPTS[0] or kv_format == _FORMATS[-1]
            else pytest.mark.long,
        )
        for name in _CODED_SCRIPTS
        for kv_format in _FORMATS
    ],
)
def test_rows_in_fewer_bits_that_are_guessed_for_together(name: str, kv_format: str) -> None:
    """The same in every format of keys and values."""
    stage = GuessedScripts(TinyKind.STANDARD, kv_format=kv_format)

    assert stage.differences(SCRIPTS[name], always) == []
    assert stage.engine.accepted_tokens > 0


@_KINDS
@pytest.mark.parametrize("name", ["down to one and up again", "two lanes", "chunked prefill"])
def test_caches_that_take_no_guesses_in_a_batch(kind: TinyKind, name: str) -> None:
    """Whatever the plan allows, an engine guesses only where it can take wrong guesses back."""
    stage = GuessedScripts(kind)
    assert stage.differences(SCRIPTS[name], always) == []
    assert stage.engine.accepted_tokens > 0


@each_kind_and_look_ahead()
def test_guessing_begins_and_ends_at_every_step(kind: TinyKind, looks_ahead: bool) -> None:  # noqa: FBT001
    """A lonely row is guessed for up to a step, or from it on, or at every other step."""
    stage = GuessedScripts(kind, looks_ahead=looks_ahead)
    for step in range(1, 9):
        row = Join(PROMPTS[2], 16, MIXED[step % len(MIXED)])
        lane = (Lane.BATCH, Lane.SERIAL)[step % 2]
        changing = range(step % 2, 99, 1 + step // 2)
        for allowed in (range(step), changing if step % 3 else range(step, 99)):
            script = Script((replace(row, lane=lane),))
            found = stage.differences(script, lambda at, _rows, on=allowed: GUESSES * (at in on))  # type: ignore[misc]
            assert found == [], (step, allowed)
            assert stage.engine.passes == 16 - stage.engine.accepted_tokens


@each_kind_and_look_ahead()
@pytest.mark.parametrize("drafts", [if_alone, always])
def test_a_second_row_comes_and_goes_at_every_step(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
    drafts: DraftSchedule,
) -> None:
    """A row that is guessed for is joined by another and is alone again, and both are right."""
    stage = GuessedScripts(kind, looks_ahead=looks_ahead)
    modes = set()
    for step in range(1, 8):
        first = Join(PROMPTS[step % 3], 24, MIXED[step % len(MIXED)])
        lane = (Lane.BATCH, Lane.BATCH, Lane.SERIAL)[step % 3]
        second = Join(
            PROMPTS[3],
            12,
            MIXED[(step + 1) % len(MIXED)],
            at_step=step,
            leaves_after=2 + step % 2,
            lane=lane,
        )
        assert stage.differences(Script((first, second)), drafts) == [], step
        modes |= {len(result.drafts) for result in stage.engine.results if result.tokens}
    can_batch = kind is TinyKind.STANDARD and drafts is always
    assert modes >= ({0, 1, 2} if can_batch else {0, 1})


@pytest.mark.parametrize("kind", [TinyKind.STANDARD, TinyKind.ROTATING, TinyKind.NESTED])
def test_three_come_and_go(kind: TinyKind) -> None:
    """One alone, four together, one alone again; in a slab whose rows move when others leave."""
    stage = GuessedScripts(kind)
    others = [
        Join(PROMPTS[number], 8, MIXED[number], at_step=3 + number % 2) for number in (1, 4, 5)
    ]
    for place in range(4):
        rows = [replace(other) for other in others]
        rows.insert(place, Join(PROMPTS[2], 40, MIXED[3]))
        assert stage.differences(Script(tuple(rows)), if_alone) == []
        drafted = [bool(result.drafts) for result in stage.engine.results if result.tokens]
        assert drafted[1], "alone"
        assert not all(drafted[1:8]), "together"
        assert drafted[-1], "alone again"


_JOINS = st.builds(
    lambda length, seed, tokens, at_step, chunk_tokens, leaves_after, sampling, lane: Join(
        random_prompt(length, seed),
        tokens,
        MIXED[sampling],
        at_step,
        chunk_tokens,
        min(leaves_after, tokens),
        lane,
    ),
    length=st.integers(1, 40),
    seed=st.integers(0, 5),
    tokens=st.integers(1, 20),
    at_step=st.integers(0, 12),
    chunk_tokens=st.sampled_from([2, 9, 64]),
    leaves_after=st.integers(1, 40),
    sampling=st.integers(0, len(MIXED) - 1),
    lane=st.sampled_from([Lane.BATCH] * 4 + [Lane.SERIAL]),
)


@each_kind_and_look_ahead()
@pytest.mark.parametrize("max_examples", [3, pytest.param(30, marks=pytest.mark.long)])
def test_no_history_with_guesses_changes_a_row(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
    max_examples: int,
) -> None:
    """A row says what it says alone, however many tokens may be guessed at any step."""

    @settings(max_examples=max_examples, derandomize=True)
    @given(
        joins=st.lists(
            _JOINS, min_size=1, max_size=5, unique_by=lambda one: (one.prompt, one.sampling)
        ),
        slots=st.integers(1, 5),
        prefills_alone=st.booleans(),
        guesses=st.lists(st.integers(0, 6), min_size=1, max_size=5),
        right_of_ten=st.integers(3, 10),
    )
    def _holds(
        *,
        joins: list[Join],
        slots: int,
        prefills_alone: bool,
        guesses: list[int],
        right_of_ten: int,
    ) -> None:
        played = GuessedScripts(kind, looks_ahead=looks_ahead)
        played.oracle.right_of_ten = right_of_ten
        script = Script(tuple(joins), slots, prefills_alone)

        found = played.differences(script, lambda step, _rows: guesses[step % len(guesses)])

        assert found == []

    _holds()
