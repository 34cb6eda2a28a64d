"""Log-probabilities of prompts on the wire: in OpenAI's columns, in vLLM's maps, and for no completion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import completion, sse_data, told
from support.engines.fake_engine import FakeEngine

_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(name="client", scope="module", params=["single", "batched"])
def _client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of one daemon that answers one request at a time, and of one that batches."""
    flags = {"continuous_batching.enabled": request.param == "batched", "cache.memory_mb": 64}
    with (
        RunningDaemon(lambda: FakeEngine(told), flags) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


def _ask(client: httpx.Client, body: dict[str, object], path: str = "/v1/completions") -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _refusal(client: httpx.Client, body: dict[str, object], path: str = "/v1/completions") -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def _chat(**fields: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": "hm"}], **fields}


def test_echo_with_logprobs_has_a_row_for_each_token(client: httpx.Client) -> None:
    """Columns cover prompt and completion; the first prompt token has no log-probability."""
    (choice,) = _ask(client, completion("hm é", echo=True, logprobs=2, max_tokens=3))["choices"]
    columns = choice["logprobs"]
    assert choice["text"].startswith("hm é")
    assert {len(columns[name]) for name in _COLUMNS} == {5 + 3}
    assert columns["tokens"][:5] == ["h", "m", " ", "\ufffd", "\ufffd"]
    assert columns["text_offset"] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    assert all(one <= 0 for one in columns["token_logprobs"][1:])
    for logprob, top in zip(
        columns["token_logprobs"][1:], columns["top_logprobs"][1:], strict=True
    ):
        assert max(top.values()) == logprob, (
            "lm-eval compares them to see whether a token is likeliest"
        )


def test_echo_with_logprobs_counts_the_token_that_ends_the_text(client: httpx.Client) -> None:
    """The end of the text has a row too: lm-eval drops one row for each token generated."""
    answer = _ask(client, completion("say ", echo=True, logprobs=1, max_tokens=1))
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == 1
    assert choice["text"] == "say "
    assert choice["finish_reason"] == "stop"
    assert {len(choice["logprobs"][name]) for name in _COLUMNS} == {len("say ") + 1}
    assert choice["logprobs"]["text_offset"][-1] == len("say ")


def test_request_as_lm_eval_sends_it_is_answered(client: httpx.Client) -> None:
    """Batched prompts of token ids with a seed: a choice for each, in order, as long as its prompt."""
    prompts = [list(b"The sky is blue"), list(b"The sky is"), list(b"T")]
    answer = _ask(
        client,
        completion(prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True),
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        columns = choice["logprobs"]
        assert len(columns["token_logprobs"]) == len(prompt) + 1
        assert columns["tokens"][:-1] == [chr(one) for one in prompt]


def test_every_choice_repeats_the_prompts_columns(client: httpx.Client) -> None:
    """With ``n`` each choice begins with the same rows."""
    choices = _ask(client, completion("hm", n=3, echo=True, logprobs=0, max_tokens=2))["choices"]
    rows = [[choice["logprobs"][name][:2] for name in _COLUMNS[:2]] for choice in choices]
    assert rows == [rows[0]] * 3
    assert all(choice["logprobs"]["top_logprobs"] is None for choice in choices)


def test_stream_begins_with_the_prompts_columns(client: httpx.Client) -> None:
    """The first event of a choice holds the echo and its rows, whatever the model does next."""
    body = completion("hm", n=2, echo=True, logprobs=1, max_tokens=3, stream=True)
    events = sse_data(client.post("/v1/completions", json=body).content)
    for index in (0, 1):
        pieces = [one for event in events for one in event["choices"] if one["index"] == index]
        assert pieces[0]["text"].startswith("hm")
        assert pieces[0]["logprobs"]["tokens"][:2] == ["h", "m"]
        assert pieces[0]["logprobs"]["token_logprobs"][0] is None
        tokens = [token for piece in pieces for token in piece["logprobs"]["tokens"]]
        assert "".join(tokens) == "".join(piece["text"] for piece in pieces)
        assert len(tokens) == 2 + 3


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"n": 2}])
def test_no_completion_is_a_completion_of_no_tokens(
    client: httpx.Client, fields: dict[str, object]
) -> None:
    """``max_tokens: 0`` ends with ``length``, no token and the prompt's usage."""
    answer = _ask(client, completion("hm", max_tokens=0, **fields))
    for choice in answer["choices"]:
        assert choice["text"] == ("hm" if "echo" in fields else "")
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] is None or len(choice["logprobs"]["tokens"]) == 2
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 2


def test_prompt_logprobs_have_vllms_shape(client: httpx.Client) -> None:
    """Null, then token ids to log-probability, rank and text: the prompt's own, then the likeliest."""
    (choice,) = _ask(client, completion("abc", prompt_logprobs=2, max_tokens=1))["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert choice["logprobs"] is None
    for letter, entry in zip("bc", others, strict=True):
        own, alternative = entry.items()
        assert own == (
            str(ord(letter)),
            {"logprob": own[1]["logprob"], "rank": 1, "decoded_token": letter},
        )
        assert alternative[1]["rank"] == 2
        assert alternative[1]["decoded_token"] == chr(int(alternative[0]))
        assert alternative[1]["logprob"] < own[1]["logprob"] <= 0


def test_prompt_logprobs_and_echo_each_have_their_alternatives(client: httpx.Client) -> None:
    """Both may be asked for at once, with numbers of their own."""
    (choice,) = _ask(
        client, completion("abc", prompt_logprobs=0, echo=True, logprobs=3, max_tokens=1)
    )["choices"]
    assert [len(one) for one in choice["prompt_logprobs"][1:]] == [1, 1]
    assert [len(one) for one in choice["logprobs"]["top_logprobs"][1:3]] == [3, 3]


def test_prompt_logprobs_of_a_chat_completion_are_the_answers(client: httpx.Client) -> None:
    """Prompt log-probabilities stand beside the choices, as in vLLM, and only where asked for."""
    asked = _ask(client, _chat(prompt_logprobs=1, max_tokens=2, n=2), path="/v1/chat/completions")
    assert len(asked["prompt_logprobs"]) == asked["usage"]["prompt_tokens"]
    assert asked["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in _ask(client, _chat(max_tokens=2), path="/v1/chat/completions")
    (choice,) = _ask(client, completion("hm", max_tokens=2))["choices"]
    assert "prompt_logprobs" not in choice


def test_scored_prompts_are_computed_again_and_still_found(client: httpx.Client) -> None:
    """A scored prompt reuses nothing; a plain one after it reuses what it has computed."""
    text = "The same long beginning of a prompt, which is kept. " * 8
    scored = completion(text, echo=True, logprobs=1, max_tokens=1, temperature=0)
    first, second = (_ask(client, scored) for _ in range(2))
    assert first["choices"][0]["logprobs"] == second["choices"][0]["logprobs"]
    for answer in (first, second):
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    plain = _ask(client, completion(text, max_tokens=1))
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == len(text) - 1


@pytest.mark.parametrize("asked", [-1, 21])
def test_prompt_logprobs_out_of_bounds_are_refused_by_name(
    client: httpx.Client, asked: int
) -> None:
    """The whole vocabulary, and more than 20 alternatives, is a 400 on ``prompt_logprobs``."""
    body = completion("hm", prompt_logprobs=asked)
    assert _refusal(client, body)["param"] == "prompt_logprobs"
    chat = _chat(prompt_logprobs=asked)
    assert _refusal(client, chat, "/v1/chat/completions")["param"] == "prompt_logprobs"


def test_prompt_logprobs_in_a_stream_are_refused_by_name(client: httpx.Client) -> None:
    """Chunks have no place for them."""
    body = completion("hm", prompt_logprobs=0, stream=True)
    assert _refusal(client, body)["param"] == "prompt_logprobs"
    chat = _chat(prompt_logprobs=0, stream=True)
    assert _refusal(client, chat, "/v1/chat/completions")["param"] == "prompt_logprobs"


def test_more_prompt_logprobs_than_one_answer_holds_are_refused(client: httpx.Client) -> None:
    """An answer's size is bounded although prompts, choices and alternatives multiply."""
    body = completion(["x" * 4000] * 8, n=2, echo=True, logprobs=20, max_tokens=1)
    error = _refusal(client, body)
    assert error["param"] == "prompt_logprobs"
    assert "262144" in error["message"]


def test_chat_completion_needs_a_token(client: httpx.Client) -> None:
    """``max_tokens: 0`` is of use for prompts alone; in a chat completion it is a 400."""
    error = _refusal(client, _chat(max_tokens=0), "/v1/chat/completions")
    assert error["param"] == "max_tokens"


def test_tokenizer_info_says_what_a_remote_tokenizer_reads(client: httpx.Client) -> None:
    """Special tokens by role, null where there is none, and the template."""
    info = client.get("/tokenizer_info").json()
    assert info == {
        "tokenizer_class": "FakeTokenizer",
        "model_max_length": 4096,
        "chat_template": None,
        "bos_token": None,
        "eos_token": "<end>",
        "pad_token": None,
        "unk_token": None,
    }
