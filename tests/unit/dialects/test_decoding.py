"""Decoding: every mistake names its place, says what was expected and quotes nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.completions.request import CompletionRequest
from machd.dialects.tokens.request import DetokenizeRequest, TokenizeRequest
from machd.dialects.wire.decoding import decode_body, expected_values, unknown_fields
from machd.errors import InvalidRequestError, RequestError

_MESSAGES = [{"role": "user", "content": "hi"}]
_REQUESTS = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def _body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": _MESSAGES, **fields}).encode()


def _refusal(body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decode_body(body, ChatCompletionRequest)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 0}, "n", "n: expected `integer` >= 1"),
        ({"n": "1"}, "n", "n: expected `integer | null`, got `string`"),
        ({"temperature": True}, "temperature", "temperature: expected `number | null`, got `bool"),
        ({"messages": []}, "messages", "messages: expected `array` of length >= 1"),
        (
            {"messages": [{"role": "root", "content": ""}]},
            "messages[0].role",
            'messages[0].role: expected one of "assistant", "developer", "function", "system", "tool", "user"',
        ),
        (
            {"messages": [*_MESSAGES, {"role": "tool"}]},
            "messages[1].tool_call_id",
            "messages[1].tool_call_id: required, but missing",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias, as a key: expected `integer`"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "logit_bias: expected `number` <= 100.0"),
        ({"stop": ["a", ""]}, "stop[1]", "stop[1]: expected `string` of length >= 1"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "stream_opt"),
    ],
)
def test_wrong_field_is_named(fields: dict[str, object], param: str, message: str) -> None:
    """``param`` is spelled as OpenAI spells it, and the message says what was expected."""
    refusal = _refusal(_body(**fields))
    assert refusal.param == param
    assert refusal.message.startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "The body is empty"),
        (b"[]", "The body: expected `object`, got `array`"),
        (b"{", "The body is not valid JSON: it ends too early"),
        (b'{"model": NaN}', "The body is not valid JSON: invalid character (byte 10)"),
        (b'{"model": "\\ud800"}', "The body is not valid JSON: it ends too early, or in half"),
        (b'{"zz": "\xff"}', "The body is not valid UTF-8 (byte 8)"),
        (b"[" * 200_000, "The body: expected `object`"),
        (b'{"zz": ' + b"[" * 200_000, "The body is nested too deeply"),
    ],
)
def test_wrong_bytes_are_explained(body: bytes, message: str) -> None:
    """Where no field is to blame there is no ``param``, and the message tells the position."""
    refusal = _refusal(body)
    assert refusal.param is None
    assert refusal.message.startswith(message)


def test_missing_field_is_named() -> None:
    """The field that is not there is the ``param``."""
    assert _refusal(b'{"model": "m"}').param == "messages"


def test_number_without_a_fraction_is_an_integer() -> None:
    """``4.0`` is taken where an integer is expected, and ``4.5`` is refused."""
    body = _body(max_tokens=4.0, seed=2.0, logit_bias={"1": 1.0}, tools=[])
    assert decode_body(body, ChatCompletionRequest).max_tokens == 4
    refusal = _refusal(_body(max_tokens=4.5))
    assert refusal.param == "max_tokens"
    assert refusal.message.startswith("max_tokens: expected `integer")
    assert _refusal(_body(max_tokens=4.0, n="1")).param == "n"
    assert _refusal(_body(max_tokens=1e300)).param == "max_tokens"


@given(secret=st.text(min_size=12))
def test_client_text_is_not_quoted(secret: str) -> None:
    """Whatever a client writes where it does not belong stays out of the message."""
    for fields in (
        {"messages": [{"role": "x" + secret}]},
        {"messages": [{"role": "user", "content": [{"type": "x" + secret}]}]},
        {"temperature": secret},
        {"logit_bias": {"x" + secret: 1}},
        {"metadata": {secret: 1}},
    ):
        assert secret not in _refusal(_body(**fields)).message


def test_place_in_a_quoted_value_is_not_believed() -> None:
    """A value that looks like the end of msgspec's message cannot forge ``param``."""
    forged = "x' - at `$.secret`"
    assert _refusal(_body(messages=[{"role": forged}])).param == "messages[0].role"


def test_last_duplicate_counts() -> None:
    """A repeated key has the meaning of its last occurrence, yet none may be wrong."""
    twice = _body(n=1)[:-1] + b', "n": 2}'
    assert decode_body(twice, ChatCompletionRequest).n == 2
    assert _refusal(_body(n=0)[:-1] + b', "n": 2}').param == "n"


def test_unknown_fields_are_bounded_and_loggable() -> None:
    """Known names are left out, unlike names become ``?``, and there are never more than 32."""
    body = _body(**{"zz": 1, "top_k": 1, "a\nb": 2, "é": 3, "l" * 65: 4, "x.y-z_1": 5})
    assert unknown_fields(body, ChatCompletionRequest) == ("?", "x.y-z_1", "zz")
    many = _body(**{f"f{i}": i for i in range(1000)})
    assert len(unknown_fields(many, ChatCompletionRequest)) == 32


def test_unknown_fields_are_accepted() -> None:
    """An unknown field of any shape is no error."""
    body = _body(zz={"deep": [1, {"x": None}]}, yy=[], xx="text")
    assert decode_body(body, ChatCompletionRequest).checked().model == "m"


def test_expected_values_follow_the_type() -> None:
    """Tags of unions are found by their path, through lists and whatever the index."""
    assert "text" in expected_values(ChatCompletionRequest, ".messages[7].content[3].type")
    assert expected_values(ChatCompletionRequest, ".model") == ()
    assert expected_values(ChatCompletionRequest, ".no.such[0].place") == ()


def _status(body: bytes, request_type: type) -> int | None:
    """The status of a refusal; None for a body that is taken."""
    try:
        decode_body(body, request_type)
    except RequestError as error:
        return error.http_status
    return None


@pytest.mark.parametrize("request_type", _REQUESTS)
@given(body=st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(request_type: type, body: bytes) -> None:
    """No bytes make decoding raise anything but a request error."""
    assert _status(body, request_type) in (None, 400)


@pytest.mark.parametrize("request_type", _REQUESTS)
@given(document=_json)
def test_any_json_is_decoded_or_refused(request_type: type, document: object) -> None:
    """No document makes decoding raise anything but a request error."""
    assert _status(json.dumps(document).encode(), request_type) in (None, 400)


@given(
    field=st.sampled_from(ChatCompletionRequest.__struct_encode_fields__),
    value=_json,
)
def test_any_value_of_any_field_is_taken_or_refused(field: str, value: object) -> None:
    """Whatever a field holds, a request either has options and messages or is refused."""
    body = _body(**{field: value})
    try:
        request = decode_body(body, ChatCompletionRequest).checked()
    except RequestError:
        return
    assert request.options().n >= 1
    assert request.template_messages()
    assert unknown_fields(body, ChatCompletionRequest) == ()
