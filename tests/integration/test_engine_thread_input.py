"""Clients' input reaches the engine thread only if the engine can compute it.

An assertion or a lost exception there ends the daemon for all clients. So each test here asks the same
daemon afterwards, and looks for failures of the engine in its log.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.bad_requests import (
    CHAT,
    COMPLETIONS,
    INFILL,
    MESSAGES,
    OLLAMA_CHAT,
    RESPONSES,
)
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.tiny_models import VOCABULARY_TOKENS, TinyKind

from machd.engine.protocol.engine import Engine

_GENERATE = "/api/generate"
_BARE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_ENGINE_FAILURES = (
    "engine.step_failed",
    "engine.stopped",
    "row.failed",
    "scheduler.invariant_broken",
)
_REQUESTS = 160
_CLIENTS = 4
_FLAGS: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 4,
    "continuous_batching.window_ms": 0,
    "continuous_batching.prefill_chunk_tokens": 16,
    "speculation.mode": "ngram",
    "limits.max_tokens_default": 6,
    "limits.max_queue": 64,
}


def _bare_engine() -> Engine:
    """A tiny model of 128 tokens, all ASCII, whose template adds nothing to what messages say."""
    from support.engines.tiny_models import tiny_model  # noqa: PLC0415

    from machd.engine.assembly import make_engine  # noqa: PLC0415 - mlx belongs to the engine thread
    from machd.engine.tokenizer.tokenizer import MlxTokenizer  # noqa: PLC0415 - the same

    model = tiny_model(TinyKind.STANDARD)
    assert isinstance(model.tokenizer, MlxTokenizer)
    model.tokenizer.wrapped._tokenizer.chat_template = _BARE_TEMPLATE
    return make_engine(model)


@pytest.fixture(name="http", scope="module")
def _http() -> Iterator[httpx.Client]:
    """A client of a daemon with that model, which batches and drafts."""
    with (
        RunningDaemon(_bare_engine, _FLAGS) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _engine_works_afterwards(http: httpx.Client) -> Iterator[None]:
    """The engine has not failed in a test, and answers after it."""
    with capture_logs() as events:
        yield
        answer = http.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert [one for one in events if one["event"] in _ENGINE_FAILURES] == []


_EMPTY_TURNS: dict[str, tuple[dict[str, object], str]] = {
    CHAT: ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    COMPLETIONS: ({"prompt": ["a", ""]}, "prompt"),
    RESPONSES: ({"input": "", "store": False}, "input"),
    MESSAGES: ({"messages": [{"role": "user", "content": ""}], "max_tokens": 2}, "messages"),
    OLLAMA_CHAT: ({"messages": [{"role": "user", "content": ""}]}, "messages"),
    # Text that a raw prompt's tokenizer has no token for; an empty one asks whether the model is loaded.
    _GENERATE: ({"prompt": "é", "raw": True}, "prompt"),
}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", _EMPTY_TURNS)
def test_prompt_without_tokens_is_a_400_that_names_its_field(
    http: httpx.Client,
    path: str,
    is_stream: bool,  # noqa: FBT001
) -> None:
    """A prompt of no token is refused in every dialect, before the engine sees it."""
    body, param = _EMPTY_TURNS[path]
    answer = http.post(path, json=body | {"stream": is_stream})
    assert answer.status_code == 400, answer.text
    assert f"{param}: the prompt holds no token" in answer.text


def test_generated_requests_never_fail_the_engine(http: httpx.Client) -> None:
    """Fields at the edges of their ranges, together and beside others, get an answer or a 400."""
    rng = random.Random(42)
    requests = [_request(rng) for _ in range(_REQUESTS)]

    def send(request: tuple[str, dict[str, object]]) -> httpx.Response:
        return http.post(request[0], json=request[1])

    with ThreadPoolExecutor(_CLIENTS) as clients:
        answers = list(clients.map(send, requests))
    wrong = [
        (json.dumps(request)[:600], answer.status_code, answer.text[:300])
        for request, answer in zip(requests, answers, strict=True)
        if answer.status_code not in (200, 400)
    ]
    assert wrong == []
    assert sum(one.status_code == 200 for one in answers) > _REQUESTS // 3


_TEXTS = ("", " ", "\n", "a", "é", "<|end|>", "ab" * 40, "x", "\u0000b", "a b c a b c a b c a")
_IDS = (0, 1, VOCABULARY_TOKENS // 2, VOCABULARY_TOKENS - 1)
_INT64 = (0, -1, 1, -(2**63), 2**63 - 1)

_Values = Callable[[random.Random], object] | tuple[object, ...]
"""A field's values: one of some, or what a function makes."""


def _some(values: tuple[int, ...]) -> _Values:
    return lambda rng: rng.sample(values, rng.randint(1, len(values)))


_SHARED: dict[str, _Values] = {
    "temperature": (
        0,
        1e-320,
        1e-7,
        1.1e-6,
        1e-3,
        1,
        2,
    ),
    "top_p": (
        0,
        1e-300,
        1e-6,
        0.5,
        1,
    ),
    "top_k": (
        -1,
        0,
        1,
        5,
        VOCABULARY_TOKENS,
        VOCABULARY_TOKENS + 1,
        2**31 - 1,
    ),
    "seed": (*_INT64,),
    "stop": (
        "a",
        ["a", "bb"],
        "é",
    ),
    "presence_penalty": (
        -2,
        0,
        2,
    ),
    "frequency_penalty": (
        -2,
        0,
        2,
    ),
}
_OPENAI: dict[str, _Values] = _SHARED | {
    "min_p": (
        0,
        1e-300,
        0.5,
        1,
    ),
    "repetition_penalty": (
        1e-300,
        0.01,
        0.5,
        1,
        2,
    ),
    "stream_interval": (
        1,
        1024,
    ),
    "priority": (
        "batch",
        -(2**31),
        2**31 - 1,
    ),
    "cache_salt": ("s",),
}
_SAMPLING: dict[str, _Values] = _OPENAI | {
    "n": (
        1,
        2,
        3,
    ),
    "logit_bias": lambda rng: {
        str(one): rng.choice((-100, 0, 100)) for one in rng.sample(_IDS, rng.randint(1, 4))
    },
    "min_tokens": (
        0,
        1,
        4,
        2**31 - 1,
    ),
    "ignore_eos": (
        True,
        False,
    ),
    "stop_token_ids": _some(_IDS),
    "allowed_token_ids": _some(_IDS),
    "prompt_logprobs": (
        0,
        1,
        20,
    ),
    "truncate_prompt_tokens": (
        -1,
        1,
        3,
        2**31 - 1,
    ),
    "include_stop_str_in_output": (True,),
    "guided_regex": (
        "a{1,3}",
        "[a-c]*",
        "(ab)+",
    ),
    "guided_json": (
        {"type": "integer"},
        {"enum": ["a", 1, None]},
    ),
    "bad_words": (
        ["a"],
        ["ab", "c"],
    ),
}
_FIELDS: dict[str, dict[str, _Values]] = {
    COMPLETIONS: _SAMPLING
    | {
        "max_tokens": (
            0,
            1,
            2,
            9,
            -1,
            2**31 - 1,
        ),
        "echo": (True,),
        "logprobs": (
            0,
            1,
            20,
        ),
    },
    CHAT: _SAMPLING
    | {
        "max_completion_tokens": (
            1,
            2,
            9,
        ),
        "logprobs": (True,),
        "prediction": ({"type": "content", "content": "ab" * 40},),
        "thinking_budget": (
            0,
            1,
            -1,
        ),
        "continue_final_message": (True,),
        "add_generation_prompt": (False,),
    },
    RESPONSES: _OPENAI
    | {
        "max_output_tokens": (
            1,
            16,
        )
    },
    MESSAGES: {
        "temperature": (
            0,
            1e-7,
            1,
        ),
        "top_p": (
            0,
            0.5,
            1,
        ),
        "top_k": (
            0,
            1,
            2**31 - 1,
        ),
        "stop_sequences": (
            ["a"],
            ["é"],
        ),
    },
    OLLAMA_CHAT: {"options": lambda rng: {"num_predict": 5, **_picked(rng, _SHARED)}},
    _GENERATE: {
        "options": lambda rng: {"num_predict": 5, **_picked(rng, _SHARED)},
        "raw": (True,),
    },
    INFILL: _SAMPLING
    | {
        "n_predict": (
            0,
            1,
            9,
        )
    },
}


def _picked(rng: random.Random, fields: dict[str, _Values]) -> dict[str, object]:
    names = rng.sample(sorted(fields), min(len(fields), rng.choice((0, 1, 1, 2, 3, 4))))
    return {name: _value(rng, fields[name]) for name in names}


def _value(rng: random.Random, values: _Values) -> object:
    return rng.choice(values) if isinstance(values, tuple) else values(rng)


def _request(rng: random.Random) -> tuple[str, dict[str, object]]:
    path = rng.choice(sorted(_FIELDS))
    body: dict[str, object] = {"max_tokens": 6} if path in (MESSAGES, INFILL) else {}
    return path, body | _picked(rng, _FIELDS[path]) | _prompt(rng, path) | {
        "stream": rng.random() < 0.2
    }


def _prompt(rng: random.Random, path: str) -> dict[str, object]:
    text = rng.choice(_TEXTS)
    if path == COMPLETIONS:
        ids = [rng.choice(_IDS) for _ in range(rng.randint(0, 20))]
        return {"prompt": rng.choice([text, [text, text], ids, [[1], ids]])}
    if path == _GENERATE:
        return {"prompt": text}
    if path == INFILL:
        return {"input_prefix": text, "input_suffix": rng.choice(_TEXTS)}
    turns = [
        {"role": role, "content": rng.choice(_TEXTS)}
        for role in ("user", "assistant", "user")[: rng.randint(1, 3)]
    ]
    return {"input" if path == RESPONSES else "messages": turns}
