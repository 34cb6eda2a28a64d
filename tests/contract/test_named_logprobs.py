"""Log-probabilities of named tokens: every engine tells them with a row's tokens, and MLX's are the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.engines.fake_engine import FakeEngine

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import DecodeRow, PrefillChunk, SampledToken, StepPlan
from machd.request.generation import SamplingParams

if TYPE_CHECKING:
    from machd.engine.loading.loader import LoadedModel
    from machd.engine.step.mlx_engine import MlxEngine

GREEDY = SamplingParams(temperature=0.0)
NAMED = (200, 7, 31)
TEXTS = (
    "Once upon a time, in a village by the sea, there lived a baker.",
    "Is water wet? Answer yes or no.",
    "1, 2, 3,",
)
TOLERANCE = 2e-3
"""Float noise between batches of other widths."""


@pytest.fixture(name="engine", params=["fake", "mlx", "mlx ahead"])
def _engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine with no rows, and none left behind."""
    names = {"mlx": "short_engine", "mlx ahead": "short_ahead_engine"}
    name = names.get(request.param)
    engine: Engine = FakeEngine() if name is None else request.getfixturevalue(name)
    yield engine
    engine.reset()


def first_tokens(
    engine: Engine, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
) -> list[SampledToken]:
    """The first token of each prompt, all computed in one batch."""
    chunks = tuple(
        PrefillChunk(
            slot, prompt, 0, is_last=True, sampling=sampling, reserved_tokens=len(prompt) + 8
        )
        for slot, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
    )
    found: dict[int, SampledToken] = {}
    plan = StepPlan(prefill=chunks)
    for _ in range(4):
        for token in engine.run(plan).tokens:
            found.setdefault(token.slot_index, token)
        plan = StepPlan(decode=tuple(DecodeRow(slot) for slot in range(len(prompts))))
    engine.run(StepPlan(release=tuple(range(len(prompts)))))
    return [found[slot] for slot in range(len(prompts))]


def test_rows_get_log_probabilities_of_the_tokens_that_they_name(engine: Engine) -> None:
    """One for each in order, and none for a row that names none; the chosen token is the same."""
    prompts = [tuple(engine.tokenizer.encode(one, add_special_tokens=False)) for one in TEXTS]
    named = replace(GREEDY, logprob_token_ids=NAMED)
    plain = first_tokens(engine, prompts, [GREEDY] * 3)
    mixed = first_tokens(engine, prompts, [named, GREEDY, replace(named, logprob_token_ids=(5,))])

    assert [one.token_id for one in mixed] == [one.token_id for one in plain]
    assert [len(one.named_logprobs) for one in mixed] == [3, 0, 1]
    assert all(one.logprob is None for one in mixed)


def test_named_logprobs_equal_a_bare_forward_pass(
    short_model: LoadedModel, short_engine: MlxEngine
) -> None:
    """Alone and beside other rows they are the log of the softmax of one pass over the prompt."""
    import mlx.core as mx  # noqa: PLC0415 - comes after the BLAS

    prompts = [tuple(short_engine.tokenizer.encode(one, add_special_tokens=False)) for one in TEXTS]
    named = replace(GREEDY, logprob_token_ids=NAMED)
    together = first_tokens(short_engine, prompts, [named] * 3)
    for prompt, beside in zip(prompts, together, strict=True):
        logits = short_model.model(mx.array([list(prompt)]))[0, -1].astype(mx.float32)
        logprobs = (logits - mx.logsumexp(logits)).tolist()
        expected = pytest.approx([logprobs[token] for token in NAMED], abs=TOLERANCE)
        (alone,) = first_tokens(short_engine, [prompt], [named])
        assert alone.named_logprobs == expected
        assert beside.named_logprobs == expected
