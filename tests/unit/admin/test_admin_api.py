"""The admin API's wire types: strict, and errors with every detail in the envelope clients know."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from machd.admin.config import ConfigPatch, LogLevelRequest
from machd.admin.endpoints import ADMIN_ENDPOINTS
from machd.admin.errors import AdminErrorBody, admin_error_body
from machd.admin.status import ModeRequest
from machd.dialects.endpoints import PUBLIC_ENDPOINTS
from machd.dialects.wire.decoding import decode_body
from machd.errors import (
    ConflictError,
    InvalidRequestError,
    MachdError,
    RestartRequiredError,
    SettingsError,
)


def _wire(error: MachdError) -> dict[str, Any]:
    body = msgspec.json.encode(admin_error_body(error))
    assert msgspec.json.decode(body, type=AdminErrorBody) == admin_error_body(error)
    return dict(msgspec.json.decode(body)["error"])


def test_an_error_carries_what_an_operator_needs() -> None:
    """Keys that need a restart, problems of settings; and nothing of it with other errors."""
    assert _wire(RestartRequiredError(("a.b", "c.d")))["keys"] == ["a.b", "c.d"]
    assert _wire(SettingsError(["one", "two"]))["problems"] == ["one", "two"]
    assert _wire(SettingsError(["one"]))["type"] == "invalid_request_error"
    assert _wire(ConflictError("no")) == {
        "message": "no",
        "type": "invalid_request_error",
        "param": None,
        "code": "conflict",
    }


@pytest.mark.parametrize(
    ("type_", "body"),
    [
        (ModeRequest, b'{"mode": "speculative"}'),
        (ModeRequest, b"{}"),
        (LogLevelRequest, b'{"level": "INFO"}'),
        (LogLevelRequest, b'{"level": 10}'),
        (ConfigPatch, b'{"a": 1}'),
        (ConfigPatch, b'{"a": {"b": {"c": {"d": {"e": 1}}}}}'),
        (ConfigPatch, b'{"a": {"b": [1]}}'),
        (ConfigPatch, b"[]"),
        (ConfigPatch, b'{"' + b"a" * 65 + b'": {}}'),
    ],
)
def test_what_is_sent_is_taken_strictly(type_: Any, body: bytes) -> None:
    """No other words, no other shapes."""
    with pytest.raises(InvalidRequestError):
        decode_body(body, type_)


def test_a_patch_has_the_values_that_settings_have() -> None:
    """Each kind keeps its type; null is there to take one back."""
    body = b'{"a": {"b": true, "c": 1, "d": 1.5, "e": "x", "f": ["y"], "g": null}}'
    kept = decode_body(body, ConfigPatch)
    assert kept == {"a": {"b": True, "c": 1, "d": 1.5, "e": "x", "f": ["y"], "g": None}}
    assert [type(one) for one in kept["a"].values()] == [bool, int, float, str, list, type(None)]


def test_admin_endpoints_are_named_once_and_are_none_of_the_public_ones() -> None:
    """One name and one method of a path each; the two listeners share health, metrics and capabilities alone."""
    names = [one.name for one in ADMIN_ENDPOINTS]
    assert len(set(names)) == len(names)
    places = {(one.method, one.path) for one in ADMIN_ENDPOINTS}
    assert len(places) == len(names)
    shared = {path for _, path in places} & {one.path for one in PUBLIC_ENDPOINTS}
    with_token = {"/metrics", "/v1/capabilities"}
    assert shared == {"/health", "/health/live", "/health/ready"} | with_token
    assert {one.path for one in ADMIN_ENDPOINTS if one.public} == shared - with_token
