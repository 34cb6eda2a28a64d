"""Properties of every engine, whether it computes or recites: the fake cannot lie.

The scheduler and all its tests trust the rules in ``engine/protocol/engine.py``; here they are proven on
the scripted engine and on a tiny model alike. Those about drafts are in
``test_drafting_engines.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.engines.fake_engine import FakeEngine

from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import DecodeRow, PrefillChunk, SampledToken, StepPlan
from machd.engine.protocol.tokenizer import Tokenizer
from machd.request.generation import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7)
PENALISED = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
)
MIXED = (GREEDY, SAMPLED, PENALISED, SamplingParams(temperature=1.5, top_k=40, min_p=0.02, seed=3))


@pytest.fixture(name="engine", params=["fake", "mlx", "mlx, looking ahead"])
def _engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine with no rows, and none left behind."""
    name = "tiny_engine" if request.param == "mlx" else "tiny_ahead_engine"
    engine: Engine = FakeEngine() if request.param == "fake" else request.getfixturevalue(name)
    yield engine
    engine.reset()


@pytest.fixture(name="tokenizer", params=["fake", "mlx"])
def _tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """The fake engine's, and a real one."""
    engine: Engine = (
        FakeEngine() if request.param == "fake" else request.getfixturevalue("short_engine")
    )
    return engine.tokenizer


def prompt_of(engine: Engine, text: str) -> tuple[int, ...]:
    """A text's tokens."""
    return tuple(engine.tokenizer.encode(text, add_special_tokens=False))


def chunks_of(
    prompt: tuple[int, ...], sampling: SamplingParams, *, slot_index: int = 0, size: int = 4096
) -> list[PrefillChunk]:
    """A prompt cut into chunks."""
    return [
        PrefillChunk(
            slot_index=slot_index,
            token_ids=prompt[start : start + size],
            start=start,
            is_last=start + size >= len(prompt),
            sampling=sampling,
            reserved_tokens=len(prompt) + 64,
        )
        for start in range(0, len(prompt), size)
    ]


def generate(
    engine: Engine,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    count: int,
    *,
    size: int = 4096,
) -> list[SampledToken]:
    """A row alone in slot 0, freed at the end."""
    tokens: list[SampledToken] = []
    for chunk in chunks_of(prompt, sampling, size=size):
        tokens.extend(engine.run(StepPlan(prefill=(chunk,))).tokens)
    while len(tokens) < count:
        row = DecodeRow(0)
        tokens.extend(engine.run(StepPlan(decode=(row,))).tokens)
    engine.run(StepPlan(release=(0,)))
    return tokens


def ids(tokens: list[SampledToken]) -> list[int]:
    """Token ids alone."""
    return [token.token_id for token in tokens]


def test_only_the_last_chunk_yields_a_token(engine: Engine) -> None:
    """Chunks before the last yield nothing; the last yields the row's first token at once."""
    prompt = prompt_of(engine, "The quick brown fox jumps over the lazy dog and runs away.")
    chunks = chunks_of(prompt, GREEDY, size=5)
    assert len(chunks) > 2

    results = [engine.run(StepPlan(prefill=(chunk,))) for chunk in chunks]

    assert [len(result.tokens) for result in results] == [0] * (len(chunks) - 1) + [1]
    assert not any(result.faults for result in results)


def test_chunking_does_not_change_the_tokens(engine: Engine) -> None:
    """A prompt in one piece and the same prompt in many give the same completion."""
    prompt = prompt_of(
        engine, "Once upon a time, in a village by the sea, there lived a baker. " * 2
    )

    whole = generate(engine, prompt, GREEDY, 12)
    pieces = generate(engine, prompt, GREEDY, 12, size=7)

    assert ids(whole) == ids(pieces)


def test_every_decode_yields_one_token_for_its_row(engine: Engine) -> None:
    """A decode step answers each of its rows exactly once, under the row's slot index.

    The first one may come before the token of a row that has just joined.
    """
    for slot_index in (0, 1):
        (chunk,) = chunks_of(prompt_of(engine, "Hello there"), GREEDY, slot_index=slot_index)
        engine.run(StepPlan(prefill=(chunk,)))
    engine.run(StepPlan(decode=(DecodeRow(0), DecodeRow(1))))

    result = engine.run(StepPlan(decode=(DecodeRow(0), DecodeRow(1))))

    assert sorted(token.slot_index for token in result.tokens) == [0, 1]


def test_working_ahead_changes_nothing(engine: Engine) -> None:
    """Tokens are the same whether or not the engine was told that more would follow."""
    prompt = prompt_of(engine, "My favourite colour is")

    ahead = generate(engine, prompt, SAMPLED, 8)
    (chunk,) = chunks_of(prompt, SAMPLED)
    tokens = list(engine.run(StepPlan(prefill=(chunk,))).tokens)
    for _ in range(7):
        tokens += engine.run(StepPlan(decode=(DecodeRow(0),))).tokens

    assert ids(ahead) == ids(tokens)


@pytest.mark.parametrize("sampling", MIXED, ids=["greedy", "sampled", "penalised", "top_k"])
def test_a_row_does_not_depend_on_its_neighbours(engine: Engine, sampling: SamplingParams) -> None:
    """A row's tokens beside three others, which join and leave, equal its tokens alone."""
    prompt = prompt_of(engine, "The capital of France is")
    alone = ids(generate(engine, prompt, sampling, 10))

    together: list[SampledToken] = []
    neighbours = [
        prompt_of(engine, text) for text in ("A dog", "Two cats sat on", "Numbers: 1 2 3")
    ]
    (chunk,) = chunks_of(prompt, sampling, slot_index=0)
    together += engine.run(StepPlan(prefill=(chunk,))).tokens
    slots: list[int] = []
    for slot_index, neighbour in enumerate(neighbours, start=1):
        (joining,) = chunks_of(neighbour, MIXED[slot_index], slot_index=slot_index)
        rows = tuple(DecodeRow(slot) for slot in (0, *slots))
        together += engine.run(StepPlan(prefill=(joining,), decode=rows)).tokens
        slots.append(slot_index)
    while slots:
        rows = tuple(DecodeRow(slot) for slot in (0, *slots[1:]))
        together += engine.run(StepPlan(release=(slots.pop(0),), decode=rows)).tokens
    for _ in range(10):
        together += engine.run(StepPlan(decode=(DecodeRow(0),))).tokens

    assert ids([token for token in together if token.slot_index == 0])[:10] == alone


def test_a_seed_decides_the_draw(engine: Engine) -> None:
    """The same seed gives the same completion; among several other seeds, one differs."""
    prompt = prompt_of(engine, "Write a random word:")
    hot = SamplingParams(temperature=1.5, seed=11)

    first = ids(generate(engine, prompt, hot, 8))
    again = ids(generate(engine, prompt, hot, 8))
    others = [ids(generate(engine, prompt, replace(hot, seed=seed), 8)) for seed in (12, 13, 14)]

    assert first == again
    assert any(other != first for other in others)


def test_a_slot_can_be_taken_in_the_plan_that_frees_it(engine: Engine) -> None:
    """Freeing comes first, so one plan may give a slot to the next row."""
    prompt = prompt_of(engine, "Good morning")
    fresh = ids(generate(engine, prompt, GREEDY, 4))
    (stale,) = chunks_of(prompt_of(engine, "Something else entirely"), GREEDY)
    engine.run(StepPlan(prefill=(stale,)))

    (chunk,) = chunks_of(prompt, GREEDY)
    tokens = list(engine.run(StepPlan(release=(0,), prefill=(chunk,))).tokens)
    for _ in range(3):
        tokens += engine.run(StepPlan(decode=(DecodeRow(0),))).tokens

    assert ids(tokens) == fresh


def test_logprobs_come_only_when_asked(engine: Engine) -> None:
    """No log-probabilities unless asked; with them, as many alternatives as asked, best first."""
    prompt = prompt_of(engine, "The sky is")

    plain = generate(engine, prompt, GREEDY, 3)
    asked = generate(engine, prompt, replace(GREEDY, top_logprobs=3), 3)

    assert ids(plain) == ids(asked)
    assert all(token.logprob is None and not token.top_logprobs for token in plain)
    for token in asked:
        assert token.logprob is not None
        assert token.logprob <= 0
        assert [entry.logprob for entry in token.top_logprobs] == sorted(
            (entry.logprob for entry in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token_id == token.token_id


def test_released_rows_hold_no_memory(engine: Engine) -> None:
    """KV bytes grow with a row and are back at the baseline when it is freed."""
    baseline = engine.memory().kv_used_bytes
    (chunk,) = chunks_of(prompt_of(engine, "Some text to remember"), GREEDY)
    engine.run(StepPlan(prefill=(chunk,)))
    held = engine.memory().kv_used_bytes

    engine.run(StepPlan(release=(0,)))

    assert held > baseline
    assert engine.memory().kv_used_bytes == baseline


def test_reset_forgets_every_row(engine: Engine) -> None:
    """After a reset the slots are free and a new row starts from nothing."""
    prompt = prompt_of(engine, "Begin again")
    fresh = ids(generate(engine, prompt, GREEDY, 3))
    (chunk,) = chunks_of(prompt, GREEDY)
    engine.run(StepPlan(prefill=(chunk,)))

    engine.reset()

    assert engine.memory().kv_used_bytes == 0
    assert ids(generate(engine, prompt, GREEDY, 3)) == fresh


def test_releasing_a_free_slot_is_no_fault(engine: Engine) -> None:
    """Freeing what is free does nothing, as after a reset."""
    result = engine.run(StepPlan(release=(0, 3)))

    assert result.tokens == ()
    assert result.faults == ()


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "  spaces  kept ",
        "línea única",
        "日本語のテキスト",
        "emoji 👩‍👩‍👧 here",
        "tabs\tand\nlines\n",
    ],
)
def test_pieces_of_text_add_up(tokenizer: Tokenizer, text: str) -> None:
    """Decoding token by token gives the whole text, and so do the tokens' own bytes."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()

    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    pieces.append(detokenizer.finish())

    assert "".join(pieces) == text == tokenizer.decode(token_ids)
    assert b"".join(tokenizer.token_bytes(one) for one in token_ids) == text.encode()
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_chat_prompt_ends_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    """Rendering keeps the user's words, and only the generation prompt differs at the end."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "Say hello."}]

    opened = tokenizer.render_chat(messages)
    closed = tokenizer.render_chat(messages, add_generation_prompt=False)

    assert "Say hello." in closed
    assert opened.startswith(closed)
    assert len(opened) > len(closed)
