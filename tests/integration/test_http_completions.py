"""Text completions through OpenAI's own client, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types import Completion
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import completion, sse_data, told
from support.engines.fake_engine import FakeEngine

_CASES = [
    pytest.param({"prompt": "say Hello, world."}, id="natural end"),
    pytest.param({"prompt": "say Größe 寿司 🍣"}, id="many bytes a character"),
    pytest.param({"prompt": list(b"say from ids")}, id="token ids"),
    pytest.param({"prompt": ["say one", "say two"]}, id="two prompts"),
    pytest.param({"prompt": [list(b"say one"), list(b"hm")], "max_tokens": 6}, id="lists of ids"),
    pytest.param({"prompt": ["a", "b"], "n": 2, "max_tokens": 6, "seed": 2}, id="two choices each"),
    pytest.param({"prompt": "say hi", "echo": True}, id="echo"),
    pytest.param({"prompt": ["say a", "say b"], "n": 2, "echo": True}, id="echo to each choice"),
    pytest.param({"prompt": "say one STOP two", "stop": ["STOP"]}, id="stopped"),
    pytest.param({"prompt": "say é🍣x", "logprobs": 3}, id="logprobs"),
    pytest.param({"prompt": "say abc", "logprobs": 0}, id="logprobs without alternatives"),
    pytest.param({"prompt": "say 🍣", "max_tokens": 2}, id="cut inside a character"),
    pytest.param({"prompt": "say é🍣x", "echo": True, "logprobs": 2}, id="echo with logprobs"),
    pytest.param(
        {"prompt": ["say a", "say b"], "n": 2, "echo": True, "logprobs": 0},
        id="echo with logprobs to each choice",
    ),
    pytest.param({"prompt": "hm", "max_tokens": 0}, id="no completion"),
    pytest.param(
        {"prompt": "hm", "max_tokens": 0, "echo": True, "logprobs": 1},
        id="no completion, echo with logprobs",
    ),
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for the module, with little room by default."""
    flags = {"limits.max_tokens_default": 50}
    with RunningDaemon(lambda: FakeEngine(told), flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[OpenAI]:
    """OpenAI's client, which never tries again."""
    with OpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
    ) as opened:
        yield opened


def _ask(client: OpenAI, **fields: Any) -> Completion:
    answer = client.completions.create(model="fake", **fields)
    assert isinstance(answer, Completion)
    return answer


def _stream(client: OpenAI, **fields: Any) -> list[Completion]:
    with client.completions.create(model="fake", stream=True, **fields) as stream:
        return list(stream)


def _text(chunks: list[Completion], index: int) -> str:
    return "".join(one.text for chunk in chunks for one in chunk.choices if one.index == index)


@pytest.mark.parametrize("fields", _CASES)
def test_a_completion_streams_what_it_says_whole(client: OpenAI, fields: dict[str, Any]) -> None:
    """Text, finish reasons, log-probabilities and usage do not depend on ``stream``."""
    fields = {"seed": 3, **fields}
    whole = _ask(client, **fields)
    chunks = _stream(client, stream_options={"include_usage": True}, **fields)
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert _text(chunks, choice.index) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
        assert all(one.finish_reason is None for one in mine[:-1])
        pieces = [one.logprobs for one in mine if one.logprobs is not None]
        assert bool(pieces) == (choice.logprobs is not None)
        if choice.logprobs is not None:
            assert all(piece.tokens for piece in pieces)
            for column in ("tokens", "token_logprobs", "text_offset"):
                joined = [value for piece in pieces for value in getattr(piece, column)]
                assert joined == getattr(choice.logprobs, column)
            tops = [value for piece in pieces for value in piece.top_logprobs or []]
            assert tops == (choice.logprobs.top_logprobs or [])
    assert chunks[-1].usage == whole.usage


async def test_the_asynchronous_client_reads_equal_completions(daemon: RunningDaemon) -> None:
    """The asynchronous client gets equal text and usage from a stream and from a whole answer."""
    async with AsyncOpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
    ) as client:
        whole = await client.completions.create(model="fake", prompt="say 🍣 and more")
        stream = await client.completions.create(
            model="fake",
            prompt="say 🍣 and more",
            stream=True,
            stream_options={"include_usage": True},
        )
        async with stream:
            chunks = [chunk async for chunk in stream]
    assert _text(chunks, 0) == whole.choices[0].text == "🍣 and more"
    assert chunks[-1].usage == whole.usage


def test_a_completion_has_openais_shape(client: OpenAI) -> None:
    """A whole answer carries ids, times and token counts as OpenAI's API does."""
    answer = _ask(client, prompt="say hello")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == "fake"
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("say hello")
    assert answer.usage.completion_tokens == len("hello") + 1  # and the end of text


def test_choices_come_prompt_by_prompt(client: OpenAI) -> None:
    """Indices count the choices of the first prompt, then those of the second; usage adds all."""
    answer = _ask(client, prompt=["say a", "say bb", "say ccc"], n=2)
    assert [(one.index, one.text) for one in answer.choices] == [
        (0, "a"), (1, "a"), (2, "bb"), (3, "bb"), (4, "ccc"), (5, "ccc"),
    ]  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("say a" + "say bb" + "say ccc")
    assert answer.usage.completion_tokens == 2 * (2 + 3 + 4)


def test_text_and_its_token_ids_are_one_prompt(client: OpenAI) -> None:
    """A prompt sent as ids gives what the same prompt sent as text gives."""
    as_text = _ask(client, prompt="hm", max_tokens=20, seed=4)
    as_ids = _ask(client, prompt=list(b"hm"), max_tokens=20, seed=4)
    assert as_text.choices[0].text == as_ids.choices[0].text


def test_logprob_columns_line_up(client: OpenAI) -> None:
    """There is a row for each token, the one that ends the text included; offsets are where texts start."""
    answer = _ask(client, prompt="say a é", logprobs=2)
    columns = answer.choices[0].logprobs
    assert columns is not None
    assert columns.tokens == ["a", " ", "\ufffd", "\ufffd", "<end>"]
    # Both bytes are of the character that starts there.
    assert columns.text_offset == [0, 1, 2, 2, 3]
    assert columns.token_logprobs == [-0.5] * 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert columns.top_logprobs is not None
    assert [sorted(one.values()) for one in columns.top_logprobs[:2]] == [[-1.5, -0.5]] * 2


def test_logprobs_are_absent_unless_asked_for(client: OpenAI) -> None:
    """Without ``logprobs`` there are none; with 0 there are no alternatives."""
    assert _ask(client, prompt="say ab").choices[0].logprobs is None
    columns = _ask(client, prompt="say ab", logprobs=0).choices[0].logprobs
    assert columns is not None
    assert columns.tokens == ["a", "b", "<end>"]
    assert not columns.top_logprobs


def test_echo_puts_the_prompt_first(client: OpenAI) -> None:
    """With ``echo`` the text begins with the prompt, sent as text or as ids; usage is unchanged."""
    plain = _ask(client, prompt="say hi")
    for prompt in ("say hi", list(b"say hi")):
        echoed = _ask(client, prompt=prompt, echo=True)
        assert echoed.choices[0].text == "say hihi"
        assert echoed.usage == plain.usage


def test_completion_seeds_decide_sampled_text(client: OpenAI) -> None:
    """Equal seeds give equal text; other seeds, and none, give other text."""
    texts = [
        _ask(client, prompt="hm", max_tokens=30, seed=seed).choices[0].text
        for seed in (5, 5, 6, None, None)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_completion_usage_comes_last_and_only_when_asked_for(
    client: OpenAI, daemon: RunningDaemon
) -> None:
    """``include_usage`` adds one chunk without choices; in the others usage is null, else absent."""
    chunks = _stream(client, prompt="say hello", stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    body = httpx.post(
        f"{daemon.url}/v1/completions", json=completion("say hello", stream=True)
    ).content
    assert all("usage" not in event for event in sse_data(body))


def test_an_empty_suffix_asks_for_nothing(client: OpenAI) -> None:
    """Clients that always send ``suffix: ""`` get what they get without it."""
    answer = _ask(client, prompt="say hi", suffix="")
    assert answer.choices[0].text == "hi"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("say hi")


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "invalid_request"),
        (["ok", ""], "invalid_request"),
        ([], "invalid_request"),
        ([[]], "invalid_request"),
        (["text", [1]], "invalid_request"),
        ([257], "invalid_request"),
        ([[1, 2], [-1]], "invalid_request"),
        (["x"] * 129, "invalid_request"),
        ("x" * 5000, "context_length_exceeded"),
    ],
)
def test_impossible_prompts_are_refused(client: OpenAI, prompt: Any, code: str) -> None:
    """A prompt that is empty, mixed, outside the vocabulary or too long gets a 400 with its code."""
    with pytest.raises(BadRequestError) as caught:
        _ask(client, prompt=prompt)
    assert caught.value.code == code
