"""Requests made from the OpenAPI document itself: no failure of ours, no answer outside of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from running_daemon import RunningDaemon
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

from machd.api.endpoints import EVENTS, PUBLIC_ENDPOINTS, Endpoint
from machd.engine.fake import FakeEngine

_MODEL = "fake"
_TIMEOUT_S = 20.0
_LIMITS: dict[str, object] = {"limits.max_tokens_default": 4, "limits.max_n": 4}
_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    allow_header_conformance,
]
_SETTINGS = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
_MODES = [
    pytest.param(GenerationMode.POSITIVE, id="as described"),
    pytest.param(GenerationMode.NEGATIVE, id="otherwise"),
]
_EVENT_DATA = re.compile(r"^data: (.*)$", re.MULTILINE)


@pytest.fixture(name="url", scope="module")
def _url() -> Iterator[str]:
    """A daemon with a short context, so that what asks for endless text gets little."""
    with RunningDaemon(lambda: FakeEngine(context_tokens=256), _LIMITS) as daemon:
        yield daemon.url


@pytest.fixture(name="document", scope="module")
def _document(url: str) -> dict[str, Any]:
    """What the daemon says of itself."""
    document: dict[str, Any] = requests.get(f"{url}/openapi.json", timeout=_TIMEOUT_S).json()
    return document


@pytest.fixture(name="schema", scope="module")
def _schema(url: str) -> BaseSchema:
    """The same, read by Schemathesis, which keeps no files here."""
    config = SchemathesisConfig(cache=CacheConfig(enabled=False))
    return schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)


def _endpoints() -> list[Any]:
    return [pytest.param(one, id=f"{one.method} {one.path}") for one in PUBLIC_ENDPOINTS]


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("endpoint", _endpoints())
def test_every_answer_is_one_that_is_described(
    schema: BaseSchema,
    document: dict[str, Any],
    url: str,
    endpoint: Endpoint,
    mode: GenerationMode,
) -> None:
    """Whatever is sent, the answer is no 500, and its status, type, headers and body are described."""
    operation = schema[endpoint.path][endpoint.method]
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
        pytest.skip("it takes nothing that could be wrong")
    statuses: Counter[int] = Counter()

    @_SETTINGS
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        _name_model(case)
        answer = case.call(base_url=url, timeout=_TIMEOUT_S)
        statuses[answer.status_code] += 1
        if answer.headers.get("Content-Type", [""])[0].startswith(EVENTS):
            case.validate_response(answer, checks=_CHECKS)
            _check_events(answer.text, document, endpoint)
        else:
            case.validate_response(answer, checks=[*_CHECKS, response_schema_conformance])

    ask()
    print(f"{endpoint.name} {mode.value}: {dict(statuses)}")  # noqa: T201


def _name_model(case: Case) -> None:
    """Most requests name the model that is served: others see nothing but 404."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = _MODEL


def _check_events(text: str, document: dict[str, Any], endpoint: Endpoint) -> None:
    """Every event's data is what the document says, up to ``[DONE]``."""
    operation = document["paths"][endpoint.path][endpoint.method]
    described = operation["responses"]["200"]["content"][EVENTS]["schema"]
    error = {"$ref": "#/components/schemas/ErrorBody"}
    validator = Draft202012Validator(
        {"anyOf": [described, error], "components": document["components"]}
    )
    for data in _EVENT_DATA.findall(text):
        if data != "[DONE]":
            validator.validate(json.loads(data))
