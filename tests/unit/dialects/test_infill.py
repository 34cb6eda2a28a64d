"""What ``/infill`` takes: bounded, and nothing that would change the answer is dropped."""

from __future__ import annotations

import json

import pytest

from machd.dialects.infill import InfillFile, InfillRequest
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, UnsupportedParameterError


def _request(**fields: object) -> InfillRequest:
    body = {"model": "fake", "input_prefix": "a", "input_suffix": "b", **fields}
    return decode_body(json.dumps(body).encode(), InfillRequest).checked()


def test_an_editors_request_is_taken_whole() -> None:
    """What llama.vim sends with each key stroke is a request for a fill."""
    body = _request(
        id_slot=0,
        input_extra=[{"text": "t", "filename": "f", "time": 1}, {"text": "u"}],
        prompt="p",
        stop=[],
        n_indent=4,
        top_k=40,
        top_p=0.9,
        samplers=["top_k", "top_p", "infill"],
        stream=False,
        cache_prompt=True,
        t_max_prompt_ms=500,
        t_max_predict_ms=1000,
        response_fields=["content", "timings/prompt_n"],
    )
    assert body.input_extra == [InfillFile(text="t", filename="f"), InfillFile(text="u")]
    assert body.options().sampling.top_k == 40
    assert body.options().stop == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 1}, "input_suffix"),
        ({"prompt": [1]}, "prompt"),
        ({"input_extra": "a"}, "input_extra"),
        ({"input_extra": [{"filename": "f"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "t", "filename": "f" * 5000}]}, "input_extra[0].filename"),
        ({"input_extra": [{"text": ""}] * 1025}, "input_extra"),
        ({"temperature": 3}, "temperature"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, object], param: str) -> None:
    """A field of another shape or size is a 400 that names it."""
    with pytest.raises(InvalidRequestError) as caught:
        _request(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("missing", ["input_prefix", "input_suffix"])
def test_both_sides_of_the_gap_are_required(missing: str) -> None:
    """A fill without one side is a completion, which has an endpoint of its own."""
    body = {"model": "fake", "input_prefix": "a", "input_suffix": "b"}
    del body[missing]
    with pytest.raises(InvalidRequestError) as caught:
        decode_body(json.dumps(body).encode(), InfillRequest)
    assert caught.value.param == missing


def test_one_fill_is_made() -> None:
    """Several choices would need another shape of answer."""
    assert _request(n=1).options().n == 1
    with pytest.raises(UnsupportedParameterError) as caught:
        _request(n=2)
    assert caught.value.param == "n"
