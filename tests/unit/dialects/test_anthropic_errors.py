"""Every operating error in Anthropic's envelope."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import get_args

import msgspec
import pytest
from anthropic.types import ErrorResponse
from anthropic.types.shared import ErrorType

from machd import errors
from machd.dialects.anthropic.errors import anthropic_error_body

_NOT_IN_THE_CLIENT = {"request_too_large"}
_FAMILIES = {
    "InvalidRequestError": "invalid_request_error",
    "UnsupportedParameterError": "invalid_request_error",
    "ContextLengthExceededError": "invalid_request_error",
    "GrammarError": "invalid_request_error",
    "ChatTemplateMissingError": "invalid_request_error",
    "AuthenticationError": "authentication_error",
    "ForbiddenOriginError": "permission_error",
    "NotFoundError": "not_found_error",
    "ModelNotServedError": "not_found_error",
    "MethodNotAllowedError": "invalid_request_error",
    "BodyTimeoutError": "timeout_error",
    "BodyTooLargeError": "request_too_large",
    "UnsupportedMediaTypeError": "invalid_request_error",
    "MisdirectedRequestError": "invalid_request_error",
    "QueueFullError": "rate_limit_error",
    "KvBudgetSpentError": "rate_limit_error",
    "KeyLimitError": "rate_limit_error",
    "OperatorAbortError": "overloaded_error",
    "TooManyInFlightError": "overloaded_error",
    "QueueTimeoutError": "overloaded_error",
    "NotReadyError": "overloaded_error",
    "DrainingError": "overloaded_error",
    "DrainDeadlineError": "overloaded_error",
    "RequestTimeoutError": "timeout_error",
    "RowFaultError": "api_error",
    "EngineFaultError": "api_error",
    "SettingsError": "api_error",
}


def _classes(
    root: type[errors.MachdError] = errors.MachdError,
) -> Iterator[type[errors.MachdError]]:
    yield root
    for one in root.__subclasses__():
        yield from _classes(one)


def _wire(error: errors.MachdError) -> dict[str, object]:
    wire = json.loads(msgspec.json.encode(anthropic_error_body(error, request_id="req-1")))
    assert isinstance(wire, dict)
    return wire


def _too_long(prompt_tokens: int, asked_tokens: int | None) -> errors.MachdError:
    return errors.ContextLengthExceededError(
        context_tokens=100, prompt_tokens=prompt_tokens, asked_tokens=asked_tokens, param="messages"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_too_long(101, 5), "prompt is too long: 101 tokens > 100 maximum"),
        (_too_long(120, None), "prompt is too long: 120 tokens > 100 maximum"),
        (
            _too_long(60, 41),
            (
                "input length and `max_tokens` exceed context limit: 60 + 41 > 100, decrease input "
                "length or `max_tokens` and try again"
            ),
        ),
    ],
)
def test_what_does_not_fit_is_said_in_words_that_clients_look_for(
    error: errors.MachdError, message: str
) -> None:
    """Agents shorten the conversation, or ask for less, by these sentences."""
    assert anthropic_error_body(error, request_id=None).error.message == message


def _made(kind: type[errors.MachdError]) -> errors.MachdError:
    if kind is errors.ContextLengthExceededError:
        return _too_long(101, 5)
    return errors.SettingsError(["wrong"]) if kind is errors.SettingsError else kind("wrong")


@pytest.mark.parametrize(
    "kind",
    [one for one in dict.fromkeys(_classes()) if one.__module__ == errors.__name__],
    ids=lambda kind: kind.__name__,
)
def test_every_error_has_a_family(kind: type[errors.MachdError]) -> None:
    """No class of the tree is without one of the families that Anthropic's clients know."""
    error = _made(kind)
    wire = _wire(error)
    assert wire.keys() == {"type", "error", "request_id"}
    assert (wire["type"], wire["request_id"]) == ("error", "req-1")
    detail = wire["error"]
    assert isinstance(detail, dict)
    assert detail.keys() == {"type", "message"}
    assert detail["message"] == error.message or kind is errors.ContextLengthExceededError
    assert detail["type"] in {*get_args(ErrorType), *_NOT_IN_THE_CLIENT}
    if detail["type"] not in _NOT_IN_THE_CLIENT:
        seen = ErrorResponse.model_validate(wire, strict=True)
        assert seen.request_id == "req-1"
    assert detail["type"] == _FAMILIES.get(kind.__name__, detail["type"])


def test_the_walk_sees_the_whole_tree() -> None:
    """The table names only existing classes, and the walk finds every class of the tree."""
    names = {one.__name__ for one in _classes()}
    assert set(_FAMILIES) <= names
    defined = inspect.getmembers(errors, inspect.isclass)
    assert {name for name, one in defined if issubclass(one, errors.MachdError)} <= names
