"""Chat completions through OpenAI's own client, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, told
from support.engines.fake_engine import FakeEngine

_CASES = [
    pytest.param({"content": "say Hello, world."}, id="natural end"),
    pytest.param({"content": "say Größe 寿司 🍣 e\u0301 👩‍👩‍👧 ok"}, id="many bytes a character"),
    pytest.param({"content": 'say tab\tquote"back\\slash\nline\u2028end'}, id="escapes"),
    pytest.param({"content": "say "}, id="nothing"),
    pytest.param({"content": "hi", "max_tokens": 1}, id="one token"),
    pytest.param({"content": "hi", "max_tokens": 33, "temperature": 0}, id="greedy"),
    pytest.param({"content": "hi", "max_tokens": 33, "seed": 7}, id="seeded"),
    pytest.param({"content": "say one STOP two", "stop": "STOP"}, id="stopped"),
    pytest.param({"content": "say one STO two", "stop": ["STOP", "twofold"]}, id="nearly stopped"),
    pytest.param({"content": "hi", "max_tokens": 9, "n": 3, "seed": 1}, id="three choices"),
    pytest.param({"content": "say 🍣", "max_tokens": 3}, id="cut inside a character"),
    pytest.param(
        {"content": "hi", "max_tokens": 7, "logprobs": True, "top_logprobs": 2}, id="logprobs"
    ),
    pytest.param({"content": "say ab", "logprobs": True}, id="logprobs of a text that ends"),
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


def _ask(client: OpenAI, **fields: Any) -> ChatCompletion:
    answer = client.post("/chat/completions", body=chat(**fields), cast_to=ChatCompletion)
    assert isinstance(answer, ChatCompletion)
    return answer


def _stream(client: OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    known = {name: fields.pop(name) for name in ("ignore_eos", "stop_token_ids") if name in fields}
    content = fields.pop("content", "hi")
    with client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": content}],
        stream=True,
        extra_body=known,
        **fields,
    ) as stream:
        return list(stream)


def _text(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def _finish_reasons(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    return {
        choice.index: choice.finish_reason
        for chunk in chunks
        for choice in chunk.choices
        if choice.finish_reason is not None
    }


@pytest.mark.parametrize("fields", _CASES)
def test_a_stream_says_what_the_whole_answer_says(client: OpenAI, fields: dict[str, Any]) -> None:
    """Text, finish reasons, log-probabilities and usage do not depend on ``stream``."""
    fields = {"seed": 3, **fields}
    whole = _ask(client, **fields)
    chunks = _stream(client, stream_options={"include_usage": True}, **fields)
    for choice in whole.choices:
        assert _text(chunks, choice.index) == choice.message.content
        pieces = [
            one.logprobs.content
            for chunk in chunks
            for one in chunk.choices
            if one.index == choice.index and one.logprobs is not None
        ]
        assert all(pieces), "a chunk without a token has null"
        streamed = [entry for piece in pieces for entry in piece or []]
        assert streamed == ((choice.logprobs and choice.logprobs.content) or [])
    assert _finish_reasons(chunks) == {one.index: one.finish_reason for one in whole.choices}
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("fields", _CASES[:6])
async def test_the_asynchronous_client_reads_the_same(
    daemon: RunningDaemon, fields: dict[str, Any]
) -> None:
    """The asynchronous client gets equal text and usage from a stream and from a whole answer."""
    fields = {"seed": 3, **fields}
    content = fields.pop("content")
    async with AsyncOpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
    ) as client:
        whole = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": content}], **fields
        )
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": content}],
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        async with stream:
            chunks = [chunk async for chunk in stream]
    assert _text(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_an_answer_has_openais_shape(client: OpenAI) -> None:
    """A whole answer carries ids, times, roles and token counts as OpenAI's API does."""
    answer = _ask(client, content="say hello")
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.created > 1_600_000_000
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("user: say hello\nassistant: ")
    assert answer.usage.completion_tokens == len("hello") + 1  # and the end of text
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_chunks_share_an_id_and_begin_with_the_role(client: OpenAI) -> None:
    """Every chunk carries the same id and time; each choice starts with the assistant's role."""
    chunks = _stream(client, content="say hello", n=2)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    for index in range(2):
        deltas = [one.delta for chunk in chunks for one in chunk.choices if one.index == index]
        assert deltas[0].role == "assistant"
        assert all(delta.role is None for delta in deltas[1:])
    assert _ask(client).id != _ask(client).id


def test_usage_comes_last_and_only_when_asked_for(client: OpenAI, daemon: RunningDaemon) -> None:
    """``include_usage`` adds one chunk without choices; in the others usage is null, else absent."""
    chunks = _stream(client, content="say hello", stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])
    for options in (None, {"include_usage": False}):
        body = chat("say hello", stream=True, stream_options=options)
        text = httpx.post(f"{daemon.url}/v1/chat/completions", json=body).text
        assert "usage" not in text


def test_logprobs_cover_every_token(client: OpenAI) -> None:
    """One entry a token: its text, its bytes, a logarithm, and as many alternatives as asked."""
    answer = _ask(client, content="say é!", logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert bytes(one for entry in entries for one in entry.bytes or []) == "é!".encode()
    assert [entry.token for entry in entries] == ["\ufffd", "\ufffd", "!"]
    assert all(entry.logprob == -0.5 for entry in entries)
    assert all(
        [top.logprob for top in entry.top_logprobs] == [-0.5, -1.5, -2.5] for entry in entries
    )


@pytest.mark.parametrize("top", [None, 0])
def test_logprobs_without_alternatives(client: OpenAI, top: int | None) -> None:
    """``logprobs`` alone brings the chosen tokens and empty lists of alternatives."""
    answer = _ask(client, content="say ab", logprobs=True, top_logprobs=top)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert [(entry.token, entry.top_logprobs) for entry in entries] == [("a", []), ("b", [])]


def test_choices_of_one_request_differ_and_add_up(client: OpenAI) -> None:
    """``n`` choices come in index order, differ when sampled, and all count in the usage."""
    answer = _ask(client, n=4, max_tokens=20)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 80
    greedy = _ask(client, n=4, max_tokens=20, temperature=0)
    assert len({choice.message.content for choice in greedy.choices}) == 1


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", "STOP", "one "),
        ("one STOP two", ["two", "STOP"], "one "),
        ("one STOP", "STOP", "one "),
        ("STOP", "STOP", ""),
        ("aab", "ab", "a"),
        ("ends with STO", "STOP", "ends with STO"),
        ("é🍣 then", "🍣", "é"),
        ("a\nb", "\n", "a"),
    ],
)
def test_stop_strings_are_found_across_tokens(
    client: OpenAI, text: str, stop: str | list[str], expected: str
) -> None:
    """No piece of a stop string ever comes out, though each of its bytes is a token of its own."""
    answer = _ask(client, content=f"say {text}", stop=stop)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    chunks = _stream(client, content=f"say {text}", stop=stop)
    assert _text(chunks) == expected
    assert _finish_reasons(chunks) == {0: "stop"}


def test_a_stop_string_ends_only_its_own_choice(client: OpenAI) -> None:
    """Each of several sampled choices runs to its own stop or to ``max_tokens``."""
    answer = _ask(client, n=6, max_tokens=40, seed=11, stop="e")
    assert {choice.finish_reason for choice in answer.choices} == {"stop", "length"}
    for choice in answer.choices:
        content = choice.message.content
        assert content is not None
        assert "e" not in content
        assert (len(content) == 40) == (choice.finish_reason == "length")


def test_seeds_decide_sampled_text(client: OpenAI) -> None:
    """Equal seeds give equal text; other seeds, and none, give other text."""
    texts = [
        _ask(client, max_tokens=30, seed=seed).choices[0].message.content
        for seed in (5, 5, 6, -(2**63), 2**63 - 1, None, None)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 6


def test_finish_reason_tells_a_limit_from_an_end(client: OpenAI) -> None:
    """``length`` at the limit, of the request or of the settings; ``stop`` at the end of text."""
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"content": "say abc", "max_tokens": 10}, "stop", 4),
        ({"content": "say abc", "max_tokens": 4}, "stop", 4),
        ({"content": "say abc", "max_tokens": 3}, "length", 3),
        ({"content": "hi", "max_completion_tokens": 5}, "length", 5),
        ({"content": "hi"}, "length", 50),
        ({"content": "say abc", "ignore_eos": True, "max_tokens": 10}, "length", 10),
        ({"content": "say abc", "stop_token_ids": [ord("b")]}, "stop", 2),
    ]
    for fields, reason, completion_tokens in cases:
        answer = _ask(client, **fields)
        assert answer.choices[0].finish_reason == reason, fields
        assert answer.usage is not None
        assert answer.usage.completion_tokens == completion_tokens, fields


def test_messages_reach_the_template_in_order(client: OpenAI) -> None:
    """Every role, and text in parts, is rendered; the usage counts the rendered prompt."""
    answer = client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "say yes"},
        ],
    )
    rendered = "system: be brief\nuser: ab\nassistant: c\nuser: say yes\nassistant: "
    assert answer.choices[0].message.content == "yes"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rendered)


@pytest.mark.parametrize("stream", [False, True])
def test_headers_tell_how_it_was_decoded(daemon: RunningDaemon, stream: bool) -> None:  # noqa: FBT001
    """Every generated answer says its decode mode and the number of active loops."""
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=chat("say hello", stream=stream))
    assert answer.status_code == 200
    assert answer.headers["x-decode-mode"] == "single"
    assert answer.headers["x-active-loops"] == "1"
    expected = "text/event-stream; charset=utf-8" if stream else "application/json"
    assert answer.headers["content-type"] == expected


def test_one_connection_serves_many_requests(daemon: RunningDaemon) -> None:
    """A keep-alive connection takes one request after another, streamed and not."""
    with httpx.Client(base_url=daemon.url) as client:
        answers = [
            client.post("/v1/chat/completions", json=chat("say a", stream=bool(number % 2)))
            for number in range(10)
        ]
        streams = {answer.extensions["network_stream"] for answer in answers}
    assert [answer.status_code for answer in answers] == [200] * 10
    assert len(streams) == 1


def test_tokens_leave_one_by_one(client: OpenAI) -> None:
    """Pieces of a stream come in order, none of them twice and none empty but the ends."""
    text = "the quick brown fox"
    chunks = _stream(client, content=f"say {text}")
    pieces = [one.delta.content or "" for chunk in chunks for one in chunk.choices]
    assert "".join(pieces) == text
    assert all(pieces[1:-1])
    positions = [sum(map(len, pieces[:end])) for end in range(len(pieces) + 1)]
    assert all(start <= end for start, end in pairwise(positions))
