"""Answers of a certain shape, through OpenAI's own client: any text becomes what was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel
from support.clients.explosive_constraints import FORTY_PATTERNS
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, completion, sse_text, told
from support.engines.fake_engine import FakeEngine

from machd.engine.grammar.grammar_processes import GrammarBounds

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_ENTITY = re.compile(r'\{"name": ".*", "age": -?\d+\}', re.DOTALL)

_SHAPES = [
    pytest.param({"response_format": {"type": "json_object"}}, re.compile(r"\{.*\}"), id="object"),
    pytest.param(
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "entity", "schema": _SCHEMA, "strict": True},
            }
        },
        _ENTITY,
        id="schema",
    ),
    pytest.param({"guided_json": _SCHEMA}, _ENTITY, id="guided schema"),
    pytest.param({"guided_json": json.dumps(_SCHEMA)}, _ENTITY, id="guided schema as text"),
    pytest.param({"guided_regex": "[0-9]{3}"}, re.compile(r"\d{3}"), id="regex"),
    pytest.param({"guided_choice": ["yes", "no"]}, re.compile("yes|no"), id="choice"),
    pytest.param({"guided_grammar": 'start: "x" "y"+'}, re.compile("xy+"), id="grammar"),
    pytest.param({"structured_outputs": {"json": _SCHEMA}}, _ENTITY, id="newer schema"),
    pytest.param(
        {"structured_outputs": {"choice": ["yes", "no"]}}, re.compile("yes|no"), id="newer choice"
    ),
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for the module; its model says what it is told, as far as a grammar lets it."""
    with RunningDaemon(lambda: FakeEngine(told), {"limits.max_tokens_default": 200}) as running:
        yield running


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[OpenAI]:
    """OpenAI's client, which never tries again."""
    with OpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
    ) as opened:
        yield opened


@pytest.mark.parametrize("said", ["say nothing of the sort", 'say {"name": "é", "age": 3}'])
@pytest.mark.parametrize(("fields", "pattern"), _SHAPES)
def test_a_completion_has_the_shape(
    http: httpx.Client, fields: dict[str, Any], pattern: re.Pattern[str], said: str
) -> None:
    """Whatever the model would have said, the whole text has the shape, streamed or not."""
    whole = http.post("/v1/completions", json=completion(said, **fields)).json()
    assert pattern.fullmatch(whole["choices"][0]["text"])
    assert whole["choices"][0]["finish_reason"] == "stop"
    stream = http.post("/v1/completions", json=completion(said, stream=True, **fields))
    assert sse_text(stream.content) == whole["choices"][0]["text"]


@pytest.mark.parametrize("said", ["say nothing of the sort", 'say {"name": "é", "age": 3}'])
@pytest.mark.parametrize(("fields", "pattern"), _SHAPES)
def test_a_chat_completion_has_the_shape(
    http: httpx.Client, fields: dict[str, Any], pattern: re.Pattern[str], said: str
) -> None:
    """The same in a conversation."""
    fields = {"reasoning_effort": "none", **fields}
    whole = http.post("/v1/chat/completions", json=chat(said, **fields)).json()
    assert pattern.fullmatch(whole["choices"][0]["message"]["content"])
    assert whole["choices"][0]["finish_reason"] == "stop"
    stream = http.post("/v1/chat/completions", json=chat(said, stream=True, **fields))
    assert sse_text(stream.content) == whole["choices"][0]["message"]["content"]


def test_what_already_fits_is_not_changed(http: httpx.Client) -> None:
    """A grammar only forbids: a model that keeps to the shape says what it wants."""
    text = '{"name": "Ada", "age": 36}'
    body = chat(f"say {text}", guided_json=_SCHEMA)
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == text


def test_every_choice_has_the_shape(http: httpx.Client) -> None:
    """Each of ``n`` rows is held to the grammar by itself."""
    body = chat("hi", guided_regex="[a-z]{5}[0-9]", n=4, seed=1, reasoning_effort="none")
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    texts = [one["message"]["content"] for one in choices]
    assert all(re.fullmatch("[a-z]{5}[0-9]", text) for text in texts)
    assert len(set(texts)) == 4


def test_a_row_beside_it_is_free(http: httpx.Client) -> None:
    """A grammar holds for its own request."""
    http.post("/v1/completions", json=completion("say free", guided_choice=["bound"]))
    answer = http.post("/v1/completions", json=completion("say free")).json()
    assert answer["choices"][0]["text"] == "free"


def test_the_client_parses_what_it_asked_for(client: OpenAI) -> None:
    """``chat.completions.parse`` sends a strict schema and gets an object of its own type."""

    class Entity(BaseModel):
        name: str
        age: int

    answer = client.chat.completions.parse(
        model="fake",
        messages=[{"role": "user", "content": 'say {"name": "Ada", "age": 36}'}],
        response_format=Entity,
    )
    assert answer.choices[0].message.parsed == Entity(name="Ada", age=36)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"$ref": "#/nowhere"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_compiled_is_a_400(
    client: OpenAI,
    fields: dict[str, object],
    param: str,
    stream: bool,  # noqa: FBT001
) -> None:
    """The compiler's complaint reaches the client with the field, before any stream begins."""
    asked: tuple[tuple[str, dict[str, object]], ...] = (
        ("/chat/completions", chat("hi", stream=stream, **fields)),
        ("/completions", completion("hi", stream=stream, **fields)),
    )
    for path, body in asked:
        with pytest.raises(BadRequestError) as caught:
            client.post(path, body=body, cast_to=object)
        assert caught.value.code == "invalid_grammar"
        assert caught.value.param == param


def test_a_shape_that_is_cut_short_says_so(http: httpx.Client) -> None:
    """``max_tokens`` ends a constrained answer too, and the finish reason tells."""
    body = completion("say no", guided_regex="[a-z]{50}", max_tokens=5)
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (5, "length")


def test_other_clients_schemas_are_served_while_one_compiles() -> None:
    """Forty patterns hold up no other schema, and their compilation ends when their client leaves."""
    # Within these bounds nothing but the client's leaving ends it.
    engine = FakeEngine(told, grammar_bounds=GrammarBounds(compile_s=600.0, memory_bytes=1 << 40))
    patterns = {"allOf": [{"type": "string", "pattern": "^ab*$"}, {"maxLength": 3}]}
    with RunningDaemon(lambda: engine) as daemon:
        with RawClient(daemon.url) as attacker:
            explosive = completion("say it", guided_json=FORTY_PATTERNS)
            attacker.post_json("/v1/completions", explosive)
            wait_until(lambda: engine.grammars.process_count == 1, "the compilation has begun")
            for schema in (_SCHEMA, patterns):
                body = completion("say abb", guided_json=schema)
                url = f"{daemon.url}/v1/completions"
                assert httpx.post(url, json=body, timeout=CEILING_S).status_code == 200
            assert engine.grammars.process_count == 2, "the second grammar is kept"
        wait_until(lambda: engine.grammars.process_count == 1, "the compilation has ended")
