"""Requests made from the OpenAPI document itself: no failure of ours, no answer outside of it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from hypothesis.internal import charmap
from jsonschema import Draft202012Validator
from msgspec import Struct
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import CacheConfig, SchemathesisConfig
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine

from machd.dialects.endpoints import PUBLIC_ENDPOINTS
from machd.http.endpoint import EVENTS, JSON_LINES, Endpoint

# Each strategy for text asks for the characters of UTF-8 anew, a fifth of the time that all of them take.
vars(charmap)["intervals_from_codec"] = cache(charmap.intervals_from_codec)

_MODEL = "fake"
_LIMITS: dict[str, object] = {"limits.max_tokens_default": 4, "limits.max_n": 4}
_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    allow_header_conformance,
]
_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
_MODES = {"as described": GenerationMode.POSITIVE, "otherwise": GenerationMode.NEGATIVE}
_COUNTING = ("/v1/messages/count_tokens", "/tokenize")
"""Take conversations, which are wrong in the same ways in requests that are answered."""

_ERROR_BODIES = ("ErrorBody", "AnthropicErrorBody", "OllamaErrorBody")
"""What ends a stream that cannot go on."""

_EVENT_DATA = re.compile(r"^data: (.*)$", re.MULTILINE)


@pytest.fixture(name="url", scope="module")
def _url() -> Iterator[str]:
    """A daemon with a short context, so that what asks for endless text gets little."""
    with RunningDaemon(lambda: FakeEngine(context_tokens=256), _LIMITS) as daemon:
        yield daemon.url


@pytest.fixture(name="document", scope="module")
def _document(url: str) -> dict[str, Any]:
    """Return what the daemon says of itself."""
    document: dict[str, Any] = requests.get(f"{url}/openapi.json", timeout=CEILING_S).json()
    return document


@pytest.fixture(name="schema", scope="module")
def _schema(url: str) -> BaseSchema:
    """The same, read by Schemathesis, which keeps no files here."""
    config = SchemathesisConfig(cache=CacheConfig(enabled=False))
    return schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)


def _operations() -> list[Any]:
    """Endpoints with the ways to ask them; a request that takes nothing cannot be wrong."""
    return [
        pytest.param(
            one,
            mode,
            id=f"{one.method} {one.path}-{name}",
            marks=pytest.mark.long
            if one.path in _COUNTING and mode is GenerationMode.NEGATIVE
            else (),
        )
        for one in PUBLIC_ENDPOINTS
        for name, mode in _MODES.items()
        if one.request is not None or mode is not GenerationMode.NEGATIVE
    ]


@pytest.mark.parametrize(("endpoint", "mode"), _operations())
@pytest.mark.parametrize("examples", [3, pytest.param(100, marks=pytest.mark.long)])
def test_every_answer_is_one_that_is_described(
    schema: BaseSchema,
    document: dict[str, Any],
    url: str,
    endpoint: Endpoint,
    mode: GenerationMode,
    examples: int,
) -> None:
    """Whatever is sent, the answer is no 500, and its status, type, headers and body are described."""
    operation = schema[endpoint.path][endpoint.method]
    statuses: Counter[int] = Counter()

    @settings(_SETTINGS, max_examples=examples)
    @given(case=operation.as_strategy(generation_mode=mode), rng=strategies.randoms())
    def ask(case: Case[Any], rng: random.Random) -> None:
        if isinstance(endpoint.request, type):
            _tame(case, endpoint.request, rng)
        answer = case.call(base_url=url, timeout=CEILING_S)
        statuses[answer.status_code] += 1
        _check(case, answer, document, endpoint)

    ask()
    if endpoint.generates and mode is GenerationMode.POSITIVE:
        assert statuses[200], "nothing that was sent has been right"
    print(f"{endpoint.name} {mode.value}: {dict(statuses)}")  # noqa: T201


def test_what_is_there_is_answered_as_described(
    schema: BaseSchema, document: dict[str, Any], url: str
) -> None:
    """Paths with an id that exists: a model, and a response that is read and then forgotten."""
    body = {"model": _MODEL, "input": "hi"}
    stored = requests.post(f"{url}/v1/responses", json=body, timeout=CEILING_S).json()["id"]
    for method, path, id_ in (
        ("get", "/v1/models/{id}", _MODEL),
        ("get", "/v1/responses/{id}", stored),
        ("delete", "/v1/responses/{id}", stored),
    ):
        endpoint = next(one for one in PUBLIC_ENDPOINTS if (one.method, one.path) == (method, path))
        case = schema[path][method].Case(path_parameters={"id": id_})
        answer = case.call(base_url=url, timeout=CEILING_S)
        assert answer.status_code == 200
        _check(case, answer, document, endpoint)


def _tame(case: Case[Any], request: type[Struct], rng: random.Random) -> None:
    """Most requests name the model that is served, and some ask for little: others only see 4xx."""
    if not isinstance(case.body, dict):
        return
    if isinstance(case.body.get("model"), str) and rng.random() < 0.9:
        case.body["model"] = _MODEL
    required = {field.name for field in msgspec.structs.fields(request) if field.required}
    optional = sorted(case.body.keys() - required)
    if rng.random() < 0.6:
        for name in rng.sample(optional, max(0, len(optional) - rng.randint(0, 2))):
            del case.body[name]
        if "stream" in request.__struct_fields__ and rng.random() < 0.5:
            case.body["stream"] = True


def _check(case: Case[Any], answer: Any, document: dict[str, Any], endpoint: Endpoint) -> None:
    media_type = answer.headers.get("Content-Type", [""])[0].partition(";")[0]
    if media_type in (EVENTS, JSON_LINES):
        case.validate_response(answer, checks=_CHECKS)
        _check_stream(answer.text, media_type, document, endpoint)
    else:
        case.validate_response(answer, checks=[*_CHECKS, response_schema_conformance])


def _check_stream(text: str, media_type: str, document: dict[str, Any], endpoint: Endpoint) -> None:
    """Every line, or every event's data around ``[DONE]``, is what the document says."""
    operation = document["paths"][endpoint.path][endpoint.method]
    described = operation["responses"]["200"]["content"][media_type]["schema"]
    contents = [described] if media_type == JSON_LINES else _contents(described)
    errors = [{"$ref": f"#/components/schemas/{name}"} for name in _ERROR_BODIES]
    validator = Draft202012Validator(
        {"anyOf": [*contents, *errors], "components": document["components"]}
    )
    lines = text.splitlines() if media_type == JSON_LINES else _EVENT_DATA.findall(text)
    for data in lines:
        if data != "[DONE]":
            validator.validate(json.loads(data))


def _contents(schema: object) -> list[Any]:
    """Return what an event's schema says about the JSON in its data."""
    if isinstance(schema, list):
        return [found for one in schema for found in _contents(one)]
    if not isinstance(schema, dict):
        return []
    own = [schema["contentSchema"]] if "contentSchema" in schema else []
    return own + [found for one in schema.values() for found in _contents(one)]
