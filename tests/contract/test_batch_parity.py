"""A row's tokens in a batch equal its tokens alone, with every kind of cache and whatever rows join.

Scripts and random histories are played on tiny models with every kind of cache, and scripts on the
embedded model. ``test_batch_parity_can_fail.py`` proves that the comparison notices faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.parity import NOISE, Alone, margins
from support.engines.small_classes import small_classes
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import EVERY_RUN, TinyKind, each_kind, each_kind_and_look_ahead
from support.every_run import sampled

from machd.engine.assembly import make_engine
from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import Lane
from machd.engine.step.mlx_engine import MlxEngine
from machd_probes.play import GREEDY, Join, play
from machd_probes.scripts import LENGTHS, MIXED, Script, random_prompt, scripts

TOKENS = 14
"""More than the steps within which all rows of a script join."""

PROMPTS = [random_prompt(length, number) for number, length in enumerate(LENGTHS)]
SCRIPTS = scripts(PROMPTS, TOKENS)

_KINDS = each_kind()


def _differences(kind: TinyKind, script: Script, *, looks_ahead: bool) -> list[str]:
    """Play a script on a fresh engine and compare."""
    engine = make_engine(loaded(kind), looks_ahead=looks_ahead)
    together = script.play(engine)
    assert engine.memory().kv_used_bytes == 0, "rows that left hold no memory"
    return alone(kind).differences(script, together)


_OTHER_CACHES = {
    False: ("staggered", "early leaves", "chunked prefill"),
    True: ("down to one and up again", "short prompts in one plan"),
}
"""By whether the engine looks ahead: rows come, go and move, and prompts come in pieces and together."""


def _is_of_every_run(kind: TinyKind, looks_ahead: bool, name: str) -> bool:  # noqa: FBT001 - of a case
    """All scripts in step and every second one ahead for plain keys and values, a few for other kinds."""
    if kind is TinyKind.STANDARD:
        return not looks_ahead or name in list(SCRIPTS)[::2]
    return kind in EVERY_RUN and name in _OTHER_CACHES[looks_ahead]


_CASES = list(product(TinyKind, (False, True), SCRIPTS))


@pytest.mark.parametrize(
    ("kind", "looks_ahead", "name"),
    sampled(_CASES, [one for one in _CASES if _is_of_every_run(*one)]),
)
def test_company_changes_nothing(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
    name: str,
) -> None:
    """Every row says what it says alone, to the token, its log-probabilities within noise."""
    assert _differences(kind, SCRIPTS[name], looks_ahead=looks_ahead) == []


@_KINDS
def test_growing_caches_change_nothing(kind: TinyKind) -> None:
    """Rows are right on both sides of 256 and 512 positions, where caches are enlarged."""
    rows = [
        Join(random_prompt(length, length), 15, at_step=step)
        for length, step in ((250, 0), (9, 0), (243, 3), (256, 5), (505, 8), (17, 9))
    ]

    assert _differences(kind, Script(tuple(rows)), looks_ahead=False) == []


@_KINDS
def test_a_long_prompt_in_chunks_beside_running_rows(kind: TinyKind) -> None:
    """A prompt that takes many steps changes no other row, and is itself right."""
    rows = [
        Join(random_prompt(300, 1), 12, at_step=4, chunk_tokens=33),
        *(Join(prompt, 24) for prompt in PROMPTS[:3]),
    ]

    assert _differences(kind, Script(tuple(rows)), looks_ahead=False) == []


@pytest.mark.parametrize("name", ["seven", "early leaves", "chunked prefill", "slots taken again"])
def test_rows_in_slabs_of_their_own_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slabs the rows lie in: here classes of 8 columns, so that rows outgrow them all the time."""
    small_classes(monkeypatch)
    assert _differences(TinyKind.STANDARD, SCRIPTS[name], looks_ahead=False) == []


def test_rows_that_outgrow_their_classes_in_one_step_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them takes the place that the next longer one leaves."""
    small_classes(monkeypatch)
    rows = [Join(random_prompt(length, length), TOKENS) for length in (48, 32, 24, 16, 12, 8)]

    assert _differences(TinyKind.STANDARD, Script(tuple(rows)), looks_ahead=False) == []


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
    length=st.integers(1, 60),
    seed=st.integers(0, 5),
    tokens=st.integers(1, 16),
    at_step=st.integers(0, 20),
    chunk_tokens=st.sampled_from([2, 5, 9, 64]),
    leaves_after=st.integers(1, 40),
    sampling=st.integers(0, len(MIXED) - 1),
    lane=st.sampled_from([Lane.BATCH] * 4 + [Lane.SERIAL]),
)


@each_kind_and_look_ahead()
@pytest.mark.parametrize("max_examples", [3, pytest.param(40, marks=pytest.mark.long)])
def test_no_history_changes_a_row(
    kind: TinyKind,
    looks_ahead: bool,  # noqa: FBT001
    max_examples: int,
) -> None:
    """A row says what it says alone, whatever the others are, and whenever they join and leave."""

    @settings(max_examples=max_examples, derandomize=True)
    @given(
        joins=st.lists(_JOINS, min_size=2, max_size=8),
        slots=st.integers(2, 7),
        prefills_alone=st.booleans(),
    )
    def _holds(joins: list[Join], slots: int, prefills_alone: bool) -> None:  # noqa: FBT001
        script = Script(tuple(joins), slots, prefills_alone)

        assert _differences(kind, script, looks_ahead=looks_ahead) == []

    _holds()


@pytest.mark.parametrize("max_examples", [5, pytest.param(150, marks=pytest.mark.long)])
def test_no_history_in_small_classes_changes_a_row(max_examples: int) -> None:
    """Nor does it where rows move from slab to slab all the time."""

    @settings(max_examples=max_examples, derandomize=True)
    @given(joins=st.lists(_JOINS, min_size=2, max_size=8), slots=st.integers(2, 7))
    def _holds(joins: list[Join], slots: int) -> None:
        script = Script(tuple(joins), slots)

        assert _differences(TinyKind.STANDARD, script, looks_ahead=False) == []

    with pytest.MonkeyPatch.context() as patch:
        small_classes(patch)
        _holds()


@_KINDS
def test_the_comparison_is_decided_by_more_than_noise(kind: TinyKind) -> None:
    """Another chunking moves log-probabilities by less than the tolerance, which few margins meet.

    So no fault hides behind the tolerance, and rounding is not taken for one.
    """
    rows = alone(kind)
    logprobs = replace(GREEDY, top_logprobs=2)
    gaps: list[float] = []
    for prompt in PROMPTS:
        whole = rows.tokens(Join(prompt, TOKENS, logprobs))
        pieces = rows.tokens(Join(prompt, TOKENS, logprobs, chunk_tokens=6))
        for one, other in zip(whole, pieces, strict=True):
            if one.token_id != other.token_id:
                break
            assert one.logprob is not None
            assert other.logprob is not None
            assert abs(one.logprob - other.logprob) < NOISE / 4
        gaps += margins(whole)

    assert sum(gap > NOISE for gap in gaps) > 0.98 * len(gaps)


def _mlx_lm_answers(model: LoadedModel, rows: list[Join]) -> list[list[int]]:
    """Return what mlx-lm's own batching says, greedily and past any end of text."""
    from mlx_lm.generate import batch_generate  # noqa: PLC0415 - after import_mlx_lm()

    class Endless:
        """A tokenizer without an end."""

        eos_token_ids = frozenset[int]()

        def decode(self, _: list[int]) -> str:
            return ""

    answer = batch_generate(
        model.model, Endless(), [list(row.prompt) for row in rows],
        max_tokens=[row.tokens for row in rows], return_token_ids=True,
    )  # fmt: skip
    ids: list[list[int]] = answer.token_ids
    return ids


def _decided(reference: Alone, row: Join) -> int:
    """Return how many of a greedy row's tokens come before the first near tie."""
    gaps = margins(reference.tokens(row))
    return next((place for place, gap in enumerate(gaps) if gap <= NOISE), len(gaps))


def _check_against_mlx_lm(
    engine: Engine, model: LoadedModel, reference: Alone, rows: list[Join]
) -> None:
    ours = play(engine, rows)
    theirs = _mlx_lm_answers(model, rows)
    for row, mine, other in zip(rows, ours, theirs, strict=True):
        count = _decided(reference, row)
        assert [token.token_id for token in mine][:count] == other[:count]


def test_the_answers_are_those_of_mlx_lms_batching() -> None:
    """On a plain cache, greedy rows say what ``mlx_lm.generate.batch_generate`` says."""
    model = loaded(TinyKind.STANDARD)
    rows = [Join(prompt, TOKENS) for prompt in PROMPTS]

    _check_against_mlx_lm(make_engine(model), model, alone(TinyKind.STANDARD), rows)


_TEXT = (
    "The old lighthouse keeper climbed the stairs every evening, counted the ships on the horizon, "
    "and wrote their names into a book that nobody but the wind had ever read. One night he saw"
)


@pytest.fixture(name="embedded_prompts", scope="module")
def _embedded_prompts(embedded_engine: Engine) -> list[tuple[int, ...]]:
    """Pieces of a text, each with its own beginning."""
    token_ids = embedded_engine.tokenizer.encode(_TEXT * 2, add_special_tokens=False)
    return [tuple(token_ids[2 * i : 2 * i + length]) for i, length in enumerate(LENGTHS)]


@pytest.fixture(name="embedded_alone", scope="module")
def _embedded_alone(embedded_engine: Engine) -> Alone:
    """The embedded model's rows alone."""
    return Alone(lambda: embedded_engine)


@pytest.fixture(name="embedded")
def _embedded(embedded_engine: Engine) -> Iterator[Engine]:
    """The embedded model with no rows, and none left behind."""
    yield embedded_engine
    embedded_engine.reset()


@pytest.mark.long
@pytest.mark.parametrize("name", ["seven", "mixed parameters", "chunked prefill"])
def test_company_changes_nothing_on_the_embedded_model(
    name: str, embedded: Engine, embedded_alone: Alone, embedded_prompts: list[tuple[int, ...]]
) -> None:
    """A real model's rows say what they say alone."""
    script = scripts(embedded_prompts, 6)[name]

    assert embedded_alone.differences(script, script.play(embedded)) == []


@pytest.mark.long
def test_the_answers_are_those_of_mlx_lms_batching_on_the_embedded_model(
    embedded: Engine,
    embedded_model: LoadedModel,
    embedded_alone: Alone,
    embedded_prompts: list[tuple[int, ...]],
) -> None:
    """A real model's greedy rows say what ``mlx_lm.generate.batch_generate`` says."""
    assert isinstance(embedded, MlxEngine)
    rows = [Join(prompt, 6) for prompt in embedded_prompts]

    _check_against_mlx_lm(embedded, embedded_model, embedded_alone, rows)
