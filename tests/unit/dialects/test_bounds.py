"""No request field is unbounded, and the OpenAPI schemas say the same bounds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from machd.admin.endpoints import ADMIN_ENDPOINTS
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.endpoints import PUBLIC_ENDPOINTS
from machd.dialects.wire.bounds import MAX_TOOLS
from machd.http.endpoint import Endpoint

REQUEST_TYPES = sorted(
    {one.request for one in PUBLIC_ENDPOINTS if one.request is not None},
    key=str,
)


def _has_no_end(node: inspect.Type) -> bool:
    """Return whether a client could send something endless right at this node."""
    match node:
        case inspect.IntType() | inspect.FloatType():
            return (node.ge is None and node.gt is None) or (node.le is None and node.lt is None)
        case inspect.StrType() | inspect.ListType() | inspect.DictType():
            return node.max_length is None
        case inspect.RawType() | inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            return False
        case inspect.StructType() | inspect.UnionType() | inspect.Metadata():
            return False
        case _:
            return True


def _under(node: inspect.Type) -> Iterator[tuple[str, inspect.Type]]:
    """The nodes right under one, each with its step of the path."""
    match node:
        case inspect.Metadata(type=inner):
            yield "", inner
        case inspect.UnionType(types=types):
            yield from (("", one) for one in types)
        case inspect.StructType(fields=fields):
            yield from ((f".{field.name}", field.type) for field in fields)
        case inspect.ListType(item_type=item):
            yield "[]", item
        case inspect.DictType(key_type=key, value_type=value):
            yield " key", key
            yield " value", value
        case _:
            return


def _unbounded(node: inspect.Type, where: str) -> Iterator[str]:
    """Places under a type where a client could send something endless."""
    if _has_no_end(node):
        yield where
    for step, inner in _under(node):
        yield from _unbounded(inner, where + step)


@pytest.mark.parametrize("request_type", REQUEST_TYPES)
def test_every_request_field_is_bounded(request_type: type[msgspec.Struct]) -> None:
    """Every number has two ends; every text, list and mapping a greatest length."""
    found = list(_unbounded(inspect.type_info(request_type), request_type.__name__))
    assert found == []


@pytest.mark.parametrize(
    "endpoint",
    [one for one in ADMIN_ENDPOINTS if one.request is not None],
    ids=lambda one: str(one.name),
)
def test_what_an_operator_sends_is_bounded_too(endpoint: Endpoint) -> None:
    """The admin API has no open ends either."""
    assert list(_unbounded(inspect.type_info(endpoint.request), endpoint.name)) == []


def test_the_walk_finds_what_is_unbounded() -> None:
    """The walk itself is not blind: it finds each kind of hole."""

    class Open(msgspec.Struct):
        number: int
        ratio: float | None
        text: str
        many: list[bool]
        pairs: dict[str, bool]

    node = inspect.type_info(Open)
    assert list(_unbounded(node, "")) == [
        ".number",
        ".ratio",
        ".text",
        ".many",
        ".pairs",
        ".pairs key",
    ]


def test_schema_carries_the_bounds() -> None:
    """The published schema has all limits of decoding."""
    _, components = msgspec.json.schema_components([ChatCompletionRequest])
    fields = components["ChatCompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    assert fields["messages"]["maxItems"] == 8192
    assert fields["modalities"]["enum"] == [None, [], {}, ["text"]]
    variables = fields["chat_template_kwargs"]["anyOf"][0]["propertyNames"]
    assert "enable_thinking" in variables["enum"]
    assert fields["tools"]["anyOf"][0]["maxItems"] == MAX_TOOLS
