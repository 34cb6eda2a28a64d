"""The OpenAPI document is whole: every endpoint, every reference, every status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from machd.dialects.endpoints import PUBLIC_ENDPOINTS, PUBLIC_ROUTES
from machd.dialects.openapi import openapi_document
from machd.http.endpoint import EVENTS, JSON_LINES, Endpoint

DOCUMENT: dict[str, Any] = json.loads(
    json.dumps(openapi_document(PUBLIC_ENDPOINTS, version="1.2.3"))
)

_CONTRACT = {
    ("post", "/v1/chat/completions"),
    ("get", "/v1/chat/completions/{id}"),
    ("delete", "/v1/chat/completions/{id}"),
    ("post", "/v1/completions"),
    ("post", "/v1/responses"),
    ("get", "/v1/responses/{id}"),
    ("delete", "/v1/responses/{id}"),
    ("post", "/v1/messages"),
    ("post", "/v1/messages/count_tokens"),
    ("post", "/api/chat"),
    ("post", "/api/generate"),
    ("post", "/api/show"),
    ("post", "/api/pull"),
    ("get", "/api/tags"),
    ("get", "/api/ps"),
    ("get", "/api/version"),
    ("post", "/v1/embeddings"),
    ("post", "/embedding"),
    ("post", "/api/embed"),
    ("post", "/api/embeddings"),
    ("post", "/v1/rerank"),
    ("post", "/v2/rerank"),
    ("post", "/v1/score"),
    ("post", "/v1/classify"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{id}"),
    ("post", "/tokenize"),
    ("post", "/v1/systemone"),
    ("post", "/detokenize"),
    ("post", "/infill"),
    ("get", "/"),
    ("get", "/version"),
    ("post", "/models/load"),
    ("post", "/models/unload"),
    ("get", "/models/sse"),
    ("get", "/api/v1/models"),
    ("post", "/v1/load_lora_adapter"),
    ("post", "/v1/unload_lora_adapter"),
    ("get", "/lora-adapters"),
    ("post", "/lora-adapters"),
    ("post", "/api/v1/models/load"),
    ("post", "/api/v1/models/unload"),
    ("get", "/api/v0/models"),
    ("get", "/api/v0/models/{id}"),
    ("get", "/props"),
    ("get", "/slots"),
    ("get", "/tokenizer_info"),
    ("get", "/v1/capabilities"),
    ("get", "/v1/cache/stats"),
    ("get", "/health"),
    ("get", "/health/live"),
    ("get", "/health/ready"),
    ("get", "/lmstudio-greeting"),
    ("get", "/metrics"),
    ("get", "/openapi.json"),
}


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _resolve(reference: str) -> object:
    node: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        node = node[step]
    return node


def test_every_public_endpoint_is_described() -> None:
    """The document has the contract's endpoints and no other."""
    described = {(method, path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert described == _CONTRACT


def test_document_has_the_required_members() -> None:
    """The document has all that OpenAPI 3.1 requires."""
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"]["title"] == "machd"
    assert DOCUMENT["info"]["version"] == "1.2.3"


def test_every_reference_resolves_and_every_schema_is_used() -> None:
    """No reference points at nothing, and nothing lies there unreferenced."""
    references = set(_references(DOCUMENT))
    assert all(_resolve(reference) for reference in references)
    used = {one.rsplit("/", 1)[1] for one in references if "/schemas/" in one}
    assert used == set(DOCUMENT["components"]["schemas"])


@pytest.mark.parametrize("endpoint", PUBLIC_ENDPOINTS, ids=lambda one: one.name)
def test_operations_are_well_formed(endpoint: Endpoint) -> None:
    """Each operation has an id, described responses, and a parameter for each hole in its path."""
    operation = DOCUMENT["paths"][endpoint.path][endpoint.method]
    assert operation["operationId"] == endpoint.name
    assert "200" in operation["responses"]
    assert all(answer["description"] for answer in operation["responses"].values())
    holes = [one["name"] for one in operation.get("parameters", [])]
    assert endpoint.path.count("{") == len(holes)
    assert all("{" + hole + "}" in endpoint.path for hole in holes)
    assert ("requestBody" in operation) == (endpoint.method == "post")


def test_operation_ids_are_unique() -> None:
    """Generated clients get one function for each operation."""
    names = [endpoint.name for endpoint in PUBLIC_ENDPOINTS]
    assert len(set(names)) == len(names)


def test_generating_endpoints_offer_both_forms_and_all_refusals() -> None:
    """A stream and a whole answer, an overload status and a deadline status."""
    for endpoint in PUBLIC_ENDPOINTS:
        if endpoint.generates:
            responses = DOCUMENT["paths"][endpoint.path][endpoint.method]["responses"]
            assert {EVENTS, JSON_LINES} & responses["200"]["content"].keys()
            assert {"400", "401", "404", "413", "415", "429", "503", "504"} <= set(responses)
            assert "X-Decode-Mode" in responses["200"]["headers"]
            assert "X-Coalesced" in responses["200"]["headers"]
            assert "Retry-After" in responses["429"]["headers"]


def test_events_are_described_as_what_they_are() -> None:
    """An event is an object whose data is text, and that text is JSON of a type that is named."""
    path = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    event = path["responses"]["200"]["content"][EVENTS]["schema"]
    done, data = event["properties"]["data"]["anyOf"]
    assert done == {"const": "[DONE]"}
    assert event["required"] == ["data"]
    assert (data["type"], data["contentMediaType"]) == ("string", "application/json")
    assert data["contentSchema"] == {"$ref": "#/components/schemas/ChatCompletionChunk"}


def test_aliases_are_told_and_stand_in_no_path_of_their_own() -> None:
    """An operation's description names its other paths, and no path is described twice."""
    for endpoint in PUBLIC_ENDPOINTS:
        operation = DOCUMENT["paths"][endpoint.path][endpoint.method]
        told = operation.get("description", "")
        assert all(alias in told for alias in endpoint.aliases)
        assert not DOCUMENT["paths"].keys() & set(endpoint.aliases)


def test_every_alias_is_the_path_without_v1() -> None:
    """Aliases serve clients whose base URL lacks /v1, and nothing else."""
    for endpoint in PUBLIC_ENDPOINTS:
        assert endpoint.aliases in ((), (endpoint.path.removeprefix("/v1"),))
    places = [(one.method, one.path) for one in PUBLIC_ROUTES]
    assert len(set(places)) == len(places)


def test_a_body_of_several_shapes_is_described_with_all_of_them() -> None:
    """The list of models has OpenAI's shape and Anthropic's, and so have its errors."""
    responses = DOCUMENT["paths"]["/v1/models"]["get"]["responses"]
    for status, names in (
        ("200", ["ModelList", "AnthropicModelList"]),
        ("401", ["ErrorBody", "AnthropicErrorBody"]),
    ):
        shapes = responses[status]["content"]["application/json"]["schema"]["anyOf"]
        assert [one["$ref"].rsplit("/", 1)[1] for one in shapes] == names


def test_descriptions_are_not_indented() -> None:
    """The text is the same whether Python strips docstrings or not."""
    for schema in DOCUMENT["components"]["schemas"].values():
        assert all(
            not line.startswith("    Attributes") for line in schema["description"].split("\n")
        )
