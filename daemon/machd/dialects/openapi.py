"""The OpenAPI 3.1 document, built from the endpoints and their types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from inspect import cleandoc
from typing import TypeAlias

import msgspec

from machd.http.endpoint import EVENTS, JSON, Answer, Endpoint
from machd.scheduler.events import DecodeMode
from machd.served.turns import ModelState

Json: TypeAlias = dict[str, object]
_Type: TypeAlias = object
"""A type that msgspec encodes or decodes."""

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")

_ID: Json = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_SOME: Json = {"type": "integer", "minimum": 1}
_TEXT: Json = {"type": "string"}

_DESCRIBED: dict[str, tuple[str, Json]] = {
    "X-Request-Id": ("The request's id, as the log has it.", _ID),
    "X-Decode-Mode": (
        "How the answer's first token was made.",
        {"type": "string", "enum": list(DecodeMode)},
    ),
    "X-Active-Loops": ("Generation loops active in the scheduler.", _COUNT),
    "X-Coalesced": ("Id of the request whose decode was shared; only where one was.", _ID),
    "X-Cache-Diagnosis": (
        "Why the prefix cache had no more of the prompt, and which rules took texts out of it; not there where that was not known.",
        _TEXT,
    ),
    "X-Model-State": (
        "What the model did where the stream began before it was ready; other headers are left out there.",
        {"type": "string", "enum": list(ModelState)},
    ),
    "X-Dropped-Messages": (
        "Oldest messages that were left out to make the rest fit; only where some were.",
        _SOME,
    ),
    "X-Dropped-Tools": (
        "Types of tools that the model was not shown; only where there are some.",
        _TEXT,
    ),
    "X-Omitted-Images": (
        "Images and videos in results of tools that a model of text was not shown.",
        _SOME,
    ),
    "X-Ignored-Schema-Keywords": (
        "Keywords of the schema that no grammar holds; only where there are some.",
        _TEXT,
    ),
    "Retry-After": ("Whole seconds after which to try again.", _COUNT),
}
HEADERS: dict[str, Json] = {
    name: {"description": text, "schema": schema} for name, (text, schema) in _DESCRIBED.items()
}
_EVERY_ANSWER = ("X-Request-Id",)
_GENERATED_ANSWER = tuple(name for name in HEADERS if name != "Retry-After")
_LATER = ("X-Request-Id", "Retry-After")


def openapi_document(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, object]:
    """Describe endpoints as ``GET /openapi.json`` does, ready to be encoded; ``version`` is machd's own."""
    types = _types(endpoints)
    references, components = msgspec.json.schema_components(types, ref_template=_REF)
    for component in components.values():
        # Docstrings keep their indentation up to Python 3.12 and lose it from 3.13 on.
        component["description"] = cleandoc(component["description"])
    schemas = dict(zip(types, references, strict=True))
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "machd",
            "summary": "An OpenAI-compatible inference daemon for MLX",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        # Either nothing or a key: whether keys are required is the operator's to say.
        "security": [{}, {"api_key": []}, {"x_api_key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": HEADERS,
            "securitySchemes": {
                "api_key": {"type": "http", "scheme": "bearer"},
                "x_api_key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _types(endpoints: Iterable[Endpoint]) -> list[_Type]:
    """Every type that the endpoints name, once each, in their order."""
    named: dict[_Type, None] = {}
    for endpoint in endpoints:
        for body in (endpoint.request, *(answer.body for answer in endpoint.answers)):
            if body is not None:
                named[body] = None
    return list(named)


def _operation(endpoint: Endpoint, schemas: dict[_Type, Json]) -> Json:
    operation: Json = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": _responses(endpoint, schemas),
    }
    if endpoint.aliases:
        operation["description"] = f"Also at {', '.join(endpoint.aliases)}."
    if parameters := _PARAMETER.findall(endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    if endpoint.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": schemas[endpoint.request]}},
        }
    if endpoint.public:
        operation["security"] = []
    return operation


def _responses(endpoint: Endpoint, schemas: dict[_Type, Json]) -> Json:
    statuses = sorted({answer.status for answer in endpoint.answers})
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "headers": {
                name: {"$ref": f"#/components/headers/{name}"}
                for name in _header_names(endpoint, status)
            },
            "content": _content(
                [answer for answer in endpoint.answers if answer.status == status], schemas
            ),
        }
        for status in statuses
    }


def _content(answers: Iterable[Answer], schemas: dict[_Type, Json]) -> Json:
    """The bodies of one status: one of several shapes where a media type has several."""
    shapes: dict[str, list[Json]] = {}
    for answer in answers:
        shapes.setdefault(answer.media_type, []).append(_schema(answer, schemas))
    return {
        media_type: {"schema": found[0] if len(found) == 1 else {"anyOf": found}}
        for media_type, found in shapes.items()
    }


def _header_names(endpoint: Endpoint, status: int) -> tuple[str, ...]:
    if status == HTTPStatus.OK:
        return _GENERATED_ANSWER if endpoint.generates else _EVERY_ANSWER
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return _LATER
    return _EVERY_ANSWER


def _schema(answer: Answer, schemas: dict[_Type, Json]) -> Json:
    if answer.body is None:
        return {"type": "object" if answer.media_type == JSON else "string"}
    if answer.media_type == EVENTS:
        # One event, in the words of OpenAPI 3.2; 3.1 has none for "a stream of".
        return {
            "type": "object",
            "required": ["data"],
            "properties": {
                "event": {"type": "string"},
                "data": {
                    "anyOf": [
                        {"const": "[DONE]"},
                        {
                            "type": "string",
                            "contentMediaType": JSON,
                            "contentSchema": schemas[answer.body],
                        },
                    ]
                },
            },
        }
    return schemas[answer.body]
