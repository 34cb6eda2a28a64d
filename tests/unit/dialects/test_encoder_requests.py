"""Requests to encoders: what they take, what they refuse by name, and the inputs that they make."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from machd.dialects.embeddings.request import EmbeddingsRequest
from machd.dialects.input_making import beginning, make_inputs, make_pairs
from machd.dialects.scoring.handler import ranked
from machd.dialects.scoring.request import RerankRequest, ScoreRequest
from machd.dialects.wire.decoding import decode_body
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.encoder import EncoderDescription, EncoderInput, EncoderTask
from machd.errors import ContextLengthExceededError, InvalidRequestError

_MAX_TOKENS = 8
_ENCODER = EncoderDescription(
    EncoderTask.EMBED, "mean", is_normalised=True, dimensions=4, max_input_tokens=_MAX_TOKENS
)


class _Bytes:
    """A token a byte, and none besides."""

    def encode(self, texts: Sequence[str], *, truncates: bool) -> list[EncoderInput]:
        return [self._input(one.encode(), truncates=truncates) for one in texts]

    def take(self, token_ids: Sequence[Sequence[int]], *, truncates: bool) -> list[EncoderInput]:
        return [self._input(bytes(one), truncates=truncates) for one in token_ids]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncates: bool
    ) -> list[EncoderInput]:
        return self.encode([one + other for one, other in pairs], truncates=truncates)

    def _input(self, data: bytes, *, truncates: bool) -> EncoderInput:
        if len(data) > _MAX_TOKENS and not truncates:
            raise ContextLengthExceededError(
                context_tokens=_MAX_TOKENS, prompt_tokens=len(data), asked_tokens=0, param="input"
            )
        return EncoderInput(tuple(data[:_MAX_TOKENS]))


def _embeddings(**fields: object) -> EmbeddingsRequest:
    return decode_body(json.dumps(fields).encode(), EmbeddingsRequest).checked()


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_form_of_input_is_taken(given: object, inputs: list[object]) -> None:
    """OpenAI's four forms, under llama.cpp's name too."""
    assert list(_embeddings(input=given).input_list()) == inputs
    assert list(_embeddings(content=given).input_list()) == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "a", "content": "a"}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": [1, [1]]}, "input"),
        ({"input": ["a", [1]], "truncate": "START"}, "truncate"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": [None]}, "input[0]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
        ({"input": "a", "truncate": "MIDDLE"}, "truncate"),
        ({"input": "a", "truncate": False, "truncate_prompt_tokens": -1}, "truncate"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "endianness": "big"}, "endianness"),
        ({"input": "a", "messages": [{"role": "user"}]}, "messages"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"input": "a", "embd_normalize": 0}, "embd_normalize"),
        ({"input": "a", "late_chunking": True}, "late_chunking"),
    ],
)
def test_what_is_wrong_by_itself_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidRequestError) as refused:
        _embeddings(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("truncate", "default", "cuts"),
    [
        (None, False, False),
        (None, True, True),
        (True, False, True),
        ("END", False, True),
        (False, True, False),
        ("NONE", True, False),
    ],
)
def test_truncation_is_the_requests_or_else_the_default(
    truncate: object, *, default: bool, cuts: bool
) -> None:
    """Booleans and Cohere's words mean the same."""
    assert _embeddings(input="a", truncate=truncate).truncates(default=default) is cuts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": [7, 300]}, "input[0]"),
        ({"input": [[7], []]}, "input[1]"),
        ({"input": [[7]], "instruction": "find"}, "input[0]"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    """Vectors are cut only where the checkpoint allows it, and token ids are the tokenizer's own."""
    with pytest.raises(InvalidRequestError) as refused:
        _embeddings(**fields).check(_ENCODER, 256)
    assert refused.value.param == param


def test_the_input_that_is_too_long_is_named() -> None:
    """The first one of several, and the field alone where there is one."""
    for texts, param in ((["a", "b" * 9, "c" * 9], "input[1]"), (["b" * 9], "input")):
        with pytest.raises(ContextLengthExceededError) as refused:
            make_inputs(
                _Bytes(),
                inputs=texts,
                prompt="",
                truncates=False,
                param="input",
            )
        assert refused.value.param == param


def test_prompts_stand_before_texts_and_count() -> None:
    """The model reads prompt and text as one."""
    (made,) = make_inputs(_Bytes(), inputs=["b"], prompt="a", truncates=False, param="input")
    assert bytes(made.token_ids) == b"ab"


def test_the_pair_that_is_too_long_is_named() -> None:
    """The error says which document."""
    with pytest.raises(ContextLengthExceededError) as refused:
        make_pairs(_Bytes(), pairs=[("a", "b"), ("a", "b" * 8)], truncates=False, param="documents")
    assert refused.value.param == "documents[1]"


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 100])
def test_a_beginning_is_the_longest_that_fits(tokens: int) -> None:
    """No character is cut through, and one more would be too much."""
    text = "aé寿bcd"  # 1, 2, 3 and then 1 byte a character
    cut = beginning(FakeTokenizer(), text, tokens)
    assert text.startswith(cut)
    assert len(cut.encode()) <= tokens
    assert cut == text or len(text[: len(cut) + 1].encode()) > tokens


def _score(**fields: object) -> ScoreRequest:
    return decode_body(json.dumps(fields).encode(), ScoreRequest).checked()


@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, [("a", "b")]),
        ({"text_1": "a", "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        ({"queries": ["a", "b"], "documents": ["c", "d"]}, [("a", "c"), ("b", "d")]),
        ({"data_1": ["a"], "data_2": ["c", "d"]}, [("a", "c"), ("a", "d")]),
    ],
)
def test_scores_are_of_one_text_with_each_or_of_equally_many(
    fields: dict[str, object], pairs: list[tuple[str, str]]
) -> None:
    """The two sides have the names that vLLM gives them."""
    assert _score(**fields).pairs() == pairs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ({"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
        ({"text_1": [], "text_2": "c"}, "text_1"),
    ],
)
def test_texts_that_make_no_pairs_are_refused(fields: dict[str, object], param: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidRequestError) as refused:
        _score(**fields)
    assert refused.value.param == param


def test_documents_are_texts_or_objects_with_one() -> None:
    """Cohere's and Jina's forms; other fields of an object are ignored."""
    body = {"query": "q", "documents": ["a", {"text": "b", "id": 7}]}
    assert decode_body(json.dumps(body).encode(), RerankRequest).document_texts == ["a", "b"]


def test_equal_scores_keep_their_order() -> None:
    """The highest first; 0 and no number mean all."""
    assert ranked([0.1, 0.9, 0.1, 0.9], None) == [1, 3, 0, 2]
    assert ranked([0.1, 0.9, 0.1, 0.9], 0) == [1, 3, 0, 2]
    assert ranked([0.1, 0.9, 0.1, 0.9], 3) == [1, 3, 0]
