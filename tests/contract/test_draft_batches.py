"""A row's tokens do not depend on drafts, on rows that join or leave, or on when drafting begins.

Rows of a batch verify drafts together, each accepting a different number; or drafting stops when other
rows join and begins again when they have left, at every step where that is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import parity
from support.engines.drafted_scripts import DRAFT_TOKENS, DraftedScripts, always, if_alone
from support.engines.tiny_models import EVERY_RUN, TinyKind, each_kind_and_look_ahead
from support.every_run import sampled

from machd.engine.protocol.step import Lane
from machd_probes.play import DraftSchedule, Join
from machd_probes.scripts import LENGTHS, MIXED, Script, random_prompt, scripts

PROMPTS = [random_prompt(length, number) for number, length in enumerate(LENGTHS)]
SCRIPTS = scripts(PROMPTS, 14)
_FORMATS = ("affine8", "affine4", "turboquant")
_QUANTISED_SCRIPTS = ("early leaves", "down to one and up again", "chunked prefill", "two lanes")
_QUANTISED_EVERY_RUN = (
    *product(_QUANTISED_SCRIPTS[:1], _FORMATS), *product(_QUANTISED_SCRIPTS[2:], _FORMATS[-1:]),
)  # fmt: skip
_STEP_NATS = 0.05
"""A number at the border of two quantisation steps may be rounded either way (test_quantised_parity)."""


@pytest.fixture(name="noise_of_a_step")
def _noise_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "NOISE", _STEP_NATS)


@pytest.mark.parametrize(
    ("name", "looks_ahead"),
    sampled(
        product(SCRIPTS, (False, True)),
        [*product(SCRIPTS, (False,)), *product(list(SCRIPTS)[::2], (True,))],
    ),
)
def test_rows_that_verify_drafts_together(name: str, looks_ahead: bool) -> None:  # noqa: FBT001
    """Every row advances by its own accepted drafts, and generates what it generates alone."""
    stage = DraftedScripts(TinyKind.STANDARD, looks_ahead=looks_ahead)

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
            marks=() if (name, kv_format) in _QUANTISED_EVERY_RUN else pytest.mark.long,
        )
        for name in _QUANTISED_SCRIPTS
        for kv_format in _FORMATS
    ],
)
def test_rows_with_quantised_kv_that_verify_drafts_together(name: str, kv_format: str) -> None:
    """The same holds in every KV format."""
    stage = DraftedScripts(TinyKind.STANDARD, kv_format=kv_format)

    assert stage.differences(SCRIPTS[name], always) == []
    assert stage.engine.accepted_tokens > 0


@pytest.mark.parametrize(
    ("name", "kind"),
    sampled(
        product(("down to one and up again", "two lanes", "chunked prefill"), TinyKind),
        [("two lanes", kind) for kind in EVERY_RUN],
    ),
)
def test_caches_that_verify_no_drafts_in_a_batch(kind: TinyKind, name: str) -> None:
    """Whatever the plan allows, an engine drafts only where it can roll rejected drafts back."""
    stage = DraftedScripts(kind)
    assert stage.differences(SCRIPTS[name], always) == []
    assert stage.engine.accepted_tokens > 0


@each_kind_and_look_ahead()
@pytest.mark.parametrize(
    "steps",
    # In both lanes, with each way of allowing drafts.
    [
        pytest.param((1, 3, 4, 6), id="some"),
        pytest.param(range(1, 9), id="all", marks=pytest.mark.long),
    ],
)
def test_drafting_begins_and_ends_at_every_step(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
    steps: Sequence[int],
) -> None:
    """A row alone has drafts up to a step, or from it on, or at every other step."""
    stage = DraftedScripts(kind, looks_ahead=looks_ahead)
    for step in steps:
        row = Join(PROMPTS[0], 16, MIXED[step % len(MIXED)])
        lane = (Lane.BATCH, Lane.SERIAL)[step % 2]
        changing = range(step % 2, 99, 1 + step // 2)
        for allowed in (range(step), changing if step % 3 else range(step, 99)):
            script = Script((replace(row, lane=lane),))

            def drafts(at: int, _rows: int, on: range = allowed) -> int:
                return DRAFT_TOKENS * (at in on)

            found = stage.differences(script, drafts)
            assert found == [], (step, allowed)
            assert stage.engine.passes == 16 - stage.engine.accepted_tokens


@each_kind_and_look_ahead()
@pytest.mark.parametrize(
    ("drafts", "steps"),
    [
        # A neighbour in either lane, which leaves soon and later.
        pytest.param(always, (2, 3, 4, 7), id="always-some"),
        pytest.param(always, range(1, 8), id="always-all", marks=pytest.mark.long),
        pytest.param(if_alone, range(1, 8), id="if alone-all", marks=pytest.mark.long),
    ],
)
def test_a_second_row_comes_and_goes_at_every_step(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
    drafts: DraftSchedule,
    steps: Sequence[int],
) -> None:
    """A drafting row is joined by another and is alone again, and both generate what they do alone."""
    stage = DraftedScripts(kind, looks_ahead=looks_ahead)
    modes = set()
    for step in steps:
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


@pytest.mark.parametrize(
    "kind", sampled([TinyKind.STANDARD, TinyKind.ROTATING, TinyKind.NESTED], [TinyKind.STANDARD])
)
def test_three_come_and_go(kind: TinyKind) -> None:
    """One alone, four together, one alone again; in a slab whose rows move when others leave."""
    stage = DraftedScripts(kind)
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
def test_no_history_of_drafts_changes_a_row(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
    max_examples: int,
) -> None:
    """A row generates what it generates alone, however many drafts any step allows."""

    @settings(max_examples=max_examples, derandomize=True)
    @given(
        joins=st.lists(
            _JOINS, min_size=1, max_size=5, unique_by=lambda one: (one.prompt, one.sampling)
        ),
        slots=st.integers(1, 5),
        prefills_alone=st.booleans(),
        draft_tokens=st.lists(st.integers(0, 6), min_size=1, max_size=5),
        right_of_ten=st.integers(3, 10),
    )
    def _holds(
        *,
        joins: list[Join],
        slots: int,
        prefills_alone: bool,
        draft_tokens: list[int],
        right_of_ten: int,
    ) -> None:
        played = DraftedScripts(kind, looks_ahead=looks_ahead)
        played.oracle.right_of_ten = right_of_ten
        script = Script(tuple(joins), slots, prefills_alone)

        found = played.differences(
            script, lambda step, _rows: draft_tokens[step % len(draft_tokens)]
        )

        assert found == []

    _holds()
