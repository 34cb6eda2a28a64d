"""Log-probabilities of prompts: every engine tells them, and MLX computes them right and in little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.engines.fake_engine import FakeEngine
from support.every_run import sampled

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import (
    DecodeRow,
    PrefillChunk,
    PromptLogprob,
    SampledToken,
    ScoredPrompt,
    StepPlan,
)
from machd.request.generation import SamplingParams

if TYPE_CHECKING:
    import mlx.core as mx

    from machd.engine.backend.untyped import LanguageModel
    from machd.engine.step.mlx_engine import MlxEngine

GREEDY = SamplingParams(temperature=0.0)
SCORED = replace(GREEDY, prompt_logprobs=3)
TEXT = "Once upon a time, in a village by the sea, there lived a baker who sang. " * 9
TOLERANCE = 2e-3
"""Float noise between chunkings; neighbouring tokens' log-probabilities differ by whole numbers."""


@pytest.fixture(name="engine", params=sampled(["fake", "mlx", "mlx ahead"], ["fake", "mlx"]))
def _engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine with no rows, and none left behind."""
    names = {"mlx": "tiny_engine", "mlx ahead": "short_ahead_engine"}
    name = names.get(request.param)
    engine: Engine = FakeEngine() if name is None else request.getfixturevalue(name)
    yield engine
    engine.reset()


def prompt_of(engine: Engine, text: str = TEXT) -> tuple[int, ...]:
    """A text's tokens."""
    return tuple(engine.tokenizer.encode(text, add_special_tokens=False))


def chunks_of(
    prompt: Sequence[int],
    sampling: SamplingParams,
    size: int,
    *,
    slot_index: int = 0,
    max_tokens: int = 16,
) -> list[PrefillChunk]:
    """A prompt cut into chunks, as the scheduler plans them."""
    return [
        PrefillChunk(
            slot_index=slot_index,
            token_ids=tuple(prompt[start : start + size]),
            start=start,
            is_last=max_tokens > 0 and start + size >= len(prompt),
            sampling=sampling,
            reserved_tokens=len(prompt) + max_tokens,
            prompt_tokens=0 if start else len(prompt),
        )
        for start in range(0, len(prompt), size)
    ]


def scores(
    engine: Engine,
    prompt: Sequence[int],
    size: int = 4096,
    *,
    sampling: SamplingParams = SCORED,
    max_tokens: int = 16,
) -> list[PromptLogprob]:
    """The log-probabilities of a prompt alone in slot 0, which is freed; they come before its first token."""
    results = [
        engine.run(StepPlan(prefill=(chunk,)))
        for chunk in chunks_of(prompt, sampling, size, max_tokens=max_tokens)
    ]
    engine.run(StepPlan(release=(0,)))
    assert not any(result.outputs or result.faults for result in results[:-1])
    scored, *tokens = results[-1].outputs
    assert isinstance(scored, ScoredPrompt)
    assert tuple(tokens) == results[-1].tokens
    assert (scored.slot_index, results[-1].faults) == (0, ())
    return list(scored.logprobs)


def assert_alike(found: Sequence[PromptLogprob], expected: Sequence[PromptLogprob]) -> None:
    """The same tokens at the same positions, as likely but for noise."""
    assert [(one.position, one.token_id) for one in found] == [
        (one.position, one.token_id) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        mine, others = ([top.logprob for top in each.top_logprobs] for each in (one, other))
        assert mine == pytest.approx(others, abs=TOLERANCE)


def test_prompt_logprobs_are_of_every_token_but_the_first(engine: Engine) -> None:
    """One entry a token in order, alternatives best first, and rank 1 for the likeliest token alone."""
    prompt = prompt_of(engine)
    found = scores(engine, prompt)
    assert [(one.position, one.token_id) for one in found] == [*enumerate(prompt[1:], start=1)]
    for one in found:
        top = [entry.logprob for entry in one.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert one.logprob <= 0
        assert (one.rank == 1) == (one.logprob == top[0])


@pytest.mark.parametrize("size", sampled([1, 7, 128, 129], [7, 129]))
def test_prompt_logprobs_do_not_depend_on_chunks(engine: Engine, size: int) -> None:
    """A prompt in pieces has the log-probabilities of the whole one."""
    prompt = prompt_of(engine)[:140]
    assert_alike(scores(engine, prompt, size), scores(engine, prompt))


@pytest.mark.parametrize("size", [1, 4096])
def test_prompt_of_one_token_has_no_logprobs(engine: Engine, size: int) -> None:
    """Nothing comes before the first token, so nothing says how likely it is."""
    assert scores(engine, prompt_of(engine)[:1], size) == []


def test_prompt_logprobs_come_only_when_asked(engine: Engine) -> None:
    """Only the prompt that asked is scored of two in one step, without alternatives for 0."""
    prompt = prompt_of(engine)[:20]
    (plain,) = chunks_of(prompt, GREEDY, 4096)
    (asked,) = chunks_of(prompt, replace(GREEDY, prompt_logprobs=0), 4096, slot_index=1)
    outputs = engine.run(StepPlan(prefill=(plain, asked))).outputs
    (scored,) = [one for one in outputs if isinstance(one, ScoredPrompt)]
    assert (scored.slot_index, len(scored.logprobs)) == (1, 19)
    assert not any(one.top_logprobs for one in scored.logprobs)


def _tokens(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> list[SampledToken]:
    """Six tokens of a row in slot 1, beside a row that is decoding in slot 0."""
    (neighbour,) = chunks_of(prompt_of(engine, "Hello there"), GREEDY, 4096)
    engine.run(StepPlan(prefill=(neighbour,)))
    tokens: list[SampledToken] = []
    for chunk in chunks_of(prompt, sampling, 50, slot_index=1):
        tokens += engine.run(StepPlan(prefill=(chunk,), decode=(DecodeRow(0),))).tokens
    for _ in range(6):
        tokens += engine.run(StepPlan(decode=(DecodeRow(0), DecodeRow(1)))).tokens
    engine.run(StepPlan(release=(0, 1)))
    return [token for token in tokens if token.slot_index == 1][:6]


def test_scored_row_says_what_it_would_say_unscored(engine: Engine) -> None:
    """A row's completion is the same whether or not its prompt was scored, beside another row too."""
    prompt = prompt_of(engine)[:120]
    assert _tokens(engine, prompt, SCORED) == _tokens(engine, prompt, GREEDY)


@pytest.mark.parametrize("sampling", [GREEDY, SCORED], ids=["plain", "scored"])
def test_row_without_completion_never_decodes(engine: Engine, sampling: SamplingParams) -> None:
    """A prompt none of whose chunks is the last one yields no token and gives its memory back."""
    prompt = prompt_of(engine)[:40]
    before = engine.memory().kv_used_bytes
    for chunk in chunks_of(prompt, sampling, 15, max_tokens=0):
        assert not engine.run(StepPlan(prefill=(chunk,))).tokens
    engine.run(StepPlan(release=(0,)))
    assert engine.memory().kv_used_bytes == before
    alone = scores(engine, prompt, 15, max_tokens=0)
    assert_alike(alone, scores(engine, prompt))


# What follows is of MLX alone.


@pytest.fixture(name="mlx_engine")
def _mlx_engine(tiny_engine: MlxEngine) -> Iterator[MlxEngine]:
    """The engine with the tiny model, and no row left behind."""
    yield tiny_engine
    tiny_engine.reset()


def bare_scores(model: LanguageModel, prompt: Sequence[int]) -> list[PromptLogprob]:
    """Return what one forward pass over the whole prompt says, without caches."""
    import mlx.core as mx  # noqa: PLC0415 - comes after the BLAS

    logits = model(mx.array([list(prompt)]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    found = []
    for position, token_id in enumerate(prompt[1:], start=1):
        row = logprobs[position - 1]
        logprob: Any = row[token_id].item()
        better: Any = mx.sum(row > row[token_id]).item()
        found.append(PromptLogprob(position, token_id, logprob, 1 + better))
    return found


def test_prompt_logprobs_equal_a_bare_forward_pass(mlx_engine: MlxEngine) -> None:
    """Scores of chunks, caches and several passes are those of one pass over the whole prompt."""
    prompt = prompt_of(mlx_engine)
    found = scores(mlx_engine, prompt, 150, sampling=replace(GREEDY, prompt_logprobs=0))
    expected = bare_scores(mlx_engine.module, prompt)
    assert_alike(found, expected)
    same_rank = sum(one.rank == other.rank for one, other in zip(found, expected, strict=True))
    assert same_rank > 0.95 * len(expected), "ranks change where tokens are as likely but for noise"


@pytest.mark.parametrize("fault", ["shifted by one", "without the chunk before"])
def test_planted_fault_in_prompt_logprobs_is_noticed(
    mlx_engine: MlxEngine,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """Logits of the position before, or none across chunks, do not pass for the bare pass."""
    import mlx.core as mx  # noqa: PLC0415 - comes after the BLAS

    from machd.engine.step.prompts.scores import PromptScores  # noqa: PLC0415 - imports mlx

    score, compute = PromptScores._score, PromptScores.compute

    def shifted(self: PromptScores, logits: mx.array, targets: Sequence[int]) -> Any:
        return score(self, mx.roll(logits, 1, 0), targets)

    def forgetting(self: PromptScores, *args: Any) -> Any:
        self._last_logits = None
        return compute(self, *args)

    if fault == "shifted by one":
        monkeypatch.setattr(PromptScores, "_score", shifted)
    else:
        monkeypatch.setattr(PromptScores, "compute", forgetting)
    prompt = prompt_of(mlx_engine)[:60]
    asked, expected = replace(GREEDY, prompt_logprobs=0), bare_scores(mlx_engine.module, prompt)
    with pytest.raises(AssertionError):
        assert_alike(scores(mlx_engine, prompt, 25, sampling=asked), expected)


def test_prompt_logprobs_that_are_not_numbers_are_the_rows_fault(
    mlx_engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in a prompt's logits ends its row and no other."""
    model = mlx_engine._model
    prompt = prompt_of(mlx_engine)[:30]
    (sound,) = chunks_of(prompt, GREEDY, 4096)
    (broken,) = chunks_of(prompt, SCORED, 4096, slot_index=1)
    monkeypatch.setattr(
        mlx_engine,
        "_model",
        lambda ids, **given: model(ids, **given) * (float("nan") if ids.shape[1] > 1 else 1.0),
    )
    result = mlx_engine.run(StepPlan(prefill=(sound, broken)))
    assert [fault.slot_index for fault in result.faults] == [1]
    assert isinstance(result.faults[0].cause, FloatingPointError)
    assert not any(one.slot_index == 1 for one in result.outputs)


def test_row_that_fails_behind_its_prompt_has_no_output(
    mlx_engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that fails once its prompt is scored is a fault alone."""
    from machd.engine.sampling.sampling_state import SamplingState  # noqa: PLC0415 - imports mlx

    def failing(*_args: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(SamplingState, "for_prompt", failing)
    (chunk,) = chunks_of(prompt_of(mlx_engine)[:30], SCORED, 4096)
    result = mlx_engine.run(StepPlan(prefill=(chunk,)))
    assert [fault.slot_index for fault in result.faults] == [0]
    assert not result.outputs


def test_memory_of_prompt_logprobs_does_not_grow_with_the_prompt(short_engine: MlxEngine) -> None:
    """Scoring takes less than the logits of the whole prompt would, and no more than was foreseen."""
    import mlx.core as mx  # noqa: PLC0415 - comes after the BLAS

    prompt = (prompt_of(short_engine) * 4)[:600]

    def peak_bytes(sampling: SamplingParams) -> int:
        most = 0
        for chunk in chunks_of(prompt, sampling, 300):
            active = mx.get_active_memory()
            foreseen = short_engine._need_of(StepPlan(prefill=(chunk,))).scoring_bytes
            mx.reset_peak_memory()
            short_engine.run(StepPlan(prefill=(chunk,)))
            most = max(most, mx.get_peak_memory() - active - foreseen)
        short_engine.run(StepPlan(release=(0,)))
        return most

    foreseen = short_engine._need_of(StepPlan(prefill=(chunks_of(prompt, SCORED, 300)[0],)))
    assert foreseen.scoring_bytes < len(prompt) * short_engine.model.vocabulary_tokens * 4
    assert peak_bytes(SCORED) <= peak_bytes(GREEDY)
