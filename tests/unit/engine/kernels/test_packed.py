"""A chunk beside rows that decode is part of their pass, where the layers can tell them apart.

That tokens stay what they are is in the contract suite's scripts of chunked prefill.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engines.cpu_layers import for_cpu_layers
from support.engines.tiny_models import TinyKind, tiny_model

from machd.engine.assembly import make_engine
from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, StepPlan
from machd.engine.step.mlx_engine import MlxEngine
from machd.request.generation import SamplingParams
from machd_probes.scripts import random_prompt

pytestmark = for_cpu_layers


def _chunk(
    slot_index: int, tokens: int, *, start: int = 0, is_last: bool = True, lane: Lane = Lane.BATCH
) -> PrefillChunk:
    return PrefillChunk(
        slot_index=slot_index,
        token_ids=random_prompt(tokens, slot_index),
        start=start,
        is_last=is_last,
        sampling=SamplingParams(temperature=0.0),
        reserved_tokens=100,
        lane=lane,
    )


def _passes(monkeypatch: pytest.MonkeyPatch, engine: MlxEngine, plan: StepPlan) -> list[int]:
    """Rows of each call of the model's layers in a step."""
    calls: list[int] = []
    model_class = type(engine._model.model)
    right = model_class.__call__

    def call(self: Any, token_ids: Any, *others: Any) -> Any:
        calls.append(token_ids.shape[0])
        return right(self, token_ids, *others)

    with monkeypatch.context() as patch:
        patch.setattr(model_class, "__call__", call)
        engine.run(plan)
    return calls


def _with_two_rows(kind: TinyKind, *, looks_ahead: bool = False) -> MlxEngine:
    engine = make_engine(tiny_model(kind), looks_ahead=looks_ahead)
    engine.run(StepPlan(prefill=(_chunk(0, 7), _chunk(1, 9))))
    return engine


_ROWS = (DecodeRow(0), DecodeRow(1))


def test_logits_of_a_prompts_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost a fifth of what the layers do; of two rows and nine tokens the rows' alone are."""
    engine = _with_two_rows(TinyKind.STANDARD)
    heads: list[int] = []
    head = engine._model.lm_head
    monkeypatch.setattr(
        type(head),
        "__call__",
        _recording(type(head).__call__, lambda x: heads.append(len(x)), head),
    )
    engine.run(StepPlan(prefill=(_chunk(2, 9, is_last=False),), decode=_ROWS))
    assert heads == [2]


def _recording(right: Any, note: Any, noted: Any) -> Any:
    def call(self: Any, x: Any) -> Any:
        if self is noted:
            note(x)
        return right(self, x)

    return call


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("is_last", [False, True])
def test_rows_and_a_chunk_share_a_pass(
    lane: Lane,
    is_last: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is called once; a prompt's last token waits for its row's own first step."""
    engine = _with_two_rows(TinyKind.STANDARD)
    plan = StepPlan(prefill=(_chunk(2, 5, is_last=is_last, lane=lane),), decode=_ROWS)
    assert _passes(monkeypatch, engine, plan) == [2 + 5 - is_last]


def test_a_prompt_of_one_token_needs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of one token is only the input of its row's first step."""
    engine = _with_two_rows(TinyKind.STANDARD)
    plan = StepPlan(prefill=(_chunk(2, 1),), decode=_ROWS)
    assert _passes(monkeypatch, engine, plan) == [2]


def test_other_layers_get_a_pass_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is not fused never gets a packed cache."""
    engine = _with_two_rows(TinyKind.HYBRID)
    plan = StepPlan(prefill=(_chunk(2, 5, is_last=False),), decode=_ROWS)
    assert _passes(monkeypatch, engine, plan) == [1, 2]


def test_looking_ahead_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step dispatched ahead takes no chunk, as it was dispatched before the chunk was planned."""
    engine = _with_two_rows(TinyKind.STANDARD, looks_ahead=True)
    plan = StepPlan(prefill=(_chunk(2, 5, is_last=False),), decode=_ROWS)
    assert 7 not in _passes(monkeypatch, engine, plan)


def test_prompts_that_come_together_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones and chunks, of whatever length, without padding; a scored one has a pass of its own."""
    engine = make_engine(tiny_model(TinyKind.STANDARD), looks_ahead=False)
    scored = replace(
        _chunk(3, 6), sampling=SamplingParams(temperature=0.0, prompt_logprobs=0), start=0
    )
    chunks = (_chunk(0, 40), _chunk(1, 7, is_last=False), _chunk(2, 1), scored)
    assert _passes(monkeypatch, engine, StepPlan(prefill=chunks))[0] == 39 + 7


def test_chunks_of_several_prompts_ride_beside_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, the weights are read once."""
    engine = _with_two_rows(TinyKind.STANDARD)
    plan = StepPlan(prefill=(_chunk(2, 5), _chunk(3, 11, is_last=False)), decode=_ROWS)
    assert _passes(monkeypatch, engine, plan) == [2 + 4 + 11]
