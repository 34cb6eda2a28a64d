"""Requests for vectors of texts."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, UnsetType

from machd.dialects.wire import bounds
from machd.dialects.wire.encoder_request import EncoderRequest
from machd.dialects.wire.generation_request import check_token_ids
from machd.dialects.wire.other_servers import FalseOnly
from machd.dialects.wire.refusal import only
from machd.engine.protocol.encoder import EncoderDescription
from machd.errors import InvalidRequestError, UnsupportedParameterError

# One list type for OpenAI's three, as in machd.dialects.completions.request.
_InputList: TypeAlias = Annotated[
    list[bounds.ContentText | bounds.TokenId | bounds.TokenIds],
    Meta(min_length=1, max_length=bounds.MAX_INPUTS),
]
Inputs: TypeAlias = bounds.ContentText | _InputList

Input: TypeAlias = str | list[int]
"""A text, or all of its token ids, special ones included."""

_Float32Only: TypeAlias = Annotated[Raw | UnsetType, only("float32")]
_LittleOnly: TypeAlias = Annotated[Raw | UnsetType, only("little", "native")]
_CheckpointsOrLength1: TypeAlias = Annotated[Raw | UnsetType, only(-1, 2)]


class AnswerForm(StrEnum):
    """Whose form an answer has, by that server's name for the texts."""

    OPENAI = "input"
    LLAMA_CPP = "content"
    TEI = "inputs"


class EmbeddingOptions(EncoderRequest, frozen=True, kw_only=True):
    """Fields of every request for vectors."""

    dimensions: bounds.Dimensions | None = None

    def check_dimensions(self, encoder: EncoderDescription) -> None:
        """Hold ``dimensions`` against the model.

        Raises:
            InvalidRequestError: Its vectors have fewer.
            UnsupportedParameterError: Its vectors may not be cut.
        """
        if self.dimensions is None or self.dimensions == encoder.dimensions:
            return
        if self.dimensions > encoder.dimensions:
            raise InvalidRequestError.at(
                "dimensions", f"the model's vectors have {encoder.dimensions}; ask for no more"
            )
        if not encoder.has_shorter_vectors:
            raise UnsupportedParameterError.at(
                "dimensions",
                f"the model's files do not say that its vectors of {encoder.dimensions} may be cut; leave it out. Where the "
                'model was trained for that, "is_matryoshka": true in its config.json allows it',
            )


class EmbeddingsRequest(EmbeddingOptions, frozen=True, kw_only=True):
    """Texts, or the ids of their tokens, to be turned into vectors.

    Attributes:
        content: llama.cpp's name for ``input``; then the answer is llama.cpp's too.
        inputs: The same of text-embeddings-inference.
        encoding_format: ``base64`` for little-endian float32 numbers.
        dimensions: Numbers that each vector is cut to, before it is normalised again.
        prompt_name: Name of a prompt of the checkpoint, which is put before each text.
        input_type: What the texts are for, such as ``query`` or ``document``: names such a prompt.
        instruction: Put before each text, in the place that the checkpoint's prompt for queries has for one.
        normalize: True divides vectors by their lengths where the checkpoint does not. llama.cpp and text-embeddings-inference
            do so unless it is false.
        embd_normalize: llama.cpp's.
    """

    input: Inputs | None = None
    content: Inputs | None = None
    inputs: Inputs | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: bounds.PromptName | None = None
    input_type: bounds.PromptName | None = None
    instruction: bounds.ContentText | None = None
    normalize: bool | None = None
    embd_normalize: _CheckpointsOrLength1 = UNSET

    embed_dtype: _Float32Only = UNSET
    endianness: _LittleOnly = UNSET
    late_chunking: FalseOnly = UNSET

    def checked(self) -> Self:
        """Check as the base class does, and that one field holds the texts."""
        super().checked()
        if [self.input, self.content, self.inputs].count(None) != len(AnswerForm) - 1:
            raise InvalidRequestError.at("input", "send one of input, content and inputs")
        self.input_list()
        return self

    @property
    def form(self) -> AnswerForm:
        """The form of the answer, which is that of the server whose name for the texts the request has."""
        if self.content is not None:
            return AnswerForm.LLAMA_CPP
        return AnswerForm.OPENAI if self.inputs is None else AnswerForm.TEI

    @property
    def inputs_param(self) -> str:
        """The field that holds the texts."""
        return self.form.value

    def input_list(self) -> Sequence[Input]:
        """Return the texts, or their token ids.

        Raises:
            InvalidRequestError: A list holds different kinds of inputs.
        """
        given: Inputs | None = getattr(self, self.inputs_param)
        assert given is not None, "checked"
        if isinstance(given, str):
            return [given]
        if len({type(one) for one in given}) > 1:
            raise InvalidRequestError.at(
                self.inputs_param,
                "texts, token ids and lists of them do not go together; send one kind",
            )
        ids = [one for one in given if isinstance(one, int)]
        return [ids] if ids else [one for one in given if not isinstance(one, int)]

    def check(self, encoder: EncoderDescription, vocabulary_tokens: int) -> None:
        """Hold the request against its model.

        Raises:
            InvalidRequestError: The model has not so many dimensions, or its tokenizer no such tokens.
            UnsupportedParameterError: Its vectors may not be cut, or are normalised and were not to be.
        """
        self.check_dimensions(encoder)
        if self.normalize is False and encoder.is_normalised:
            raise UnsupportedParameterError.at(
                "normalize", "the model's vectors have length 1; leave it out"
            )
        for index, one in enumerate(self.input_list()):
            if isinstance(one, list):
                self._check_ids(one, index, vocabulary_tokens)

    def _check_ids(self, ids: list[int], index: int, vocabulary_tokens: int) -> None:
        param = f"{self.inputs_param}[{index}]"
        if not ids:
            raise InvalidRequestError.at(param, "holds no token id")
        check_token_ids(ids, vocabulary_tokens=vocabulary_tokens, param=param)
        if self.prompt_name or self.input_type or self.instruction:
            raise UnsupportedParameterError.at(
                param, "a prompt is put before texts only; send texts, or leave the prompt out"
            )
