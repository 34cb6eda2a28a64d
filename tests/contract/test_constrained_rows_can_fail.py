"""The tests of constrained rows notice what they are there to notice: faults planted on purpose."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
from support.engines.constrained_rows import Run, grammar_of, run_rows, schema_grammar

from machd.engine.grammar.masks import TokenMasks
from machd.engine.grammar.matcher import Matcher
from machd.engine.kv.row_positions import RowPositions
from machd.engine.protocol.engine import Engine
from machd.engine.step.decode_pass import DecodePass, Passes
from machd.request.constraint import ConstraintKind
from machd.request.generation import SamplingParams

Words: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint32]]

KEY = "a_key_that_is_so_long_that_it_takes_many_tokens_to_write_it_down"
LONG = {
    "type": "object",
    "properties": {KEY: {"type": "string", "maxLength": 8}},
    "required": [KEY],
    "additionalProperties": False,
}


def _rows(engine: Engine) -> Run:
    """A row of digits, a free one and a row of letters, together."""
    prompts = [
        tuple(engine.tokenizer.encode(text, add_special_tokens=False))
        for text in ("Count:", "The capital of France is", "Spell:")
    ]
    params = [
        SamplingParams(
            temperature=0.0, grammar=grammar_of(engine, ConstraintKind.REGEX, "[0-9]{8}")
        ),
        SamplingParams(temperature=0.0),
        SamplingParams(
            temperature=0.0, grammar=grammar_of(engine, ConstraintKind.REGEX, "[a-z]{8}")
        ),
    ]
    return run_rows(engine, prompts, params, max_tokens=12)


def _holds(engine: Engine, run: Run) -> bool:
    return (
        not run.faults
        and re.fullmatch("[0-9]{8}", run.text(engine, 0)) is not None
        and re.fullmatch("[a-z]{8}", run.text(engine, 2)) is not None
    )


def _swapped(words: Words) -> Words:
    """Each row's mask for its neighbour."""
    return words[::-1].copy()


def _all_allowed(words: Words) -> Words:
    """No mask at all."""
    return np.full_like(words, ~np.uint32(0))


@pytest.mark.parametrize("fault", [_swapped, _all_allowed])
def test_wrong_masks_are_noticed(
    short_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Words], Words],
) -> None:
    """Masks of the wrong row, or none: a row is ended with a fault instead of saying nonsense."""
    assert _holds(short_engine, _rows(short_engine))
    fill = TokenMasks._fill
    monkeypatch.setattr(TokenMasks, "_fill", lambda self, matchers: fault(fill(self, matchers)))
    assert not _holds(short_engine, _rows(short_engine))


def test_a_token_that_is_not_counted_is_noticed(
    short_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matcher that misses every fifth token lets a row say too much."""
    accept, seen = Matcher.accept, 0

    def forgetful(self: Matcher, token_id: int) -> None:
        nonlocal seen
        seen += 1
        if seen % 5:
            accept(self, token_id)

    monkeypatch.setattr(Matcher, "accept", forgetful)
    assert not _holds(short_engine, _rows(short_engine))


def _wrong_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens than the forced ones go through the pass."""
    dispatch = Passes.dispatch

    def others(self: Passes, rows: Any, last_ids: Any, spans: Any = (), *rest: Any) -> DecodePass:
        wrong = [replace(one, ahead_ids=(0,) * len(one.ahead_ids)) for one in spans]
        dispatched = dispatch(self, rows, last_ids, wrong, *rest)
        return replace(dispatched, spans=list(spans or dispatched.spans))

    monkeypatch.setattr(Passes, "dispatch", others)


def _wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are moved on as far as the one with the most tokens."""
    begin_pass = RowPositions.begin_pass

    def longest(self: RowPositions, lengths: Sequence[int] | None = None) -> None:
        begin_pass(self, None if lengths is None else [max(lengths)] * len(lengths))

    monkeypatch.setattr(RowPositions, "begin_pass", longest)


@pytest.mark.parametrize(
    "plant", [_wrong_logits, pytest.param(_wrong_positions, marks=pytest.mark.long)]
)
def test_forced_tokens_that_go_wrong_are_noticed(
    short_engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Planted faults of passes over several tokens change rows' tokens, which the comparison shows."""
    prompts = [
        tuple(short_engine.tokenizer.encode(text, add_special_tokens=False))
        for text in ("Fill in the form about a trip to the sea:", "The capital of France is")
    ]
    params = [
        SamplingParams(temperature=0.0, grammar=schema_grammar(short_engine, LONG)),
        SamplingParams(temperature=0.0),
    ]
    right = run_rows(short_engine, prompts, params, max_tokens=40)
    assert json.loads(right.text(short_engine, 0)).keys() == {KEY}
    plant(monkeypatch)
    wrong = run_rows(short_engine, prompts, params, max_tokens=40)
    assert wrong.tokens != right.tokens
