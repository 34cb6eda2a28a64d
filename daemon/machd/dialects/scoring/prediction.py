"""``POST /predict`` of text-embeddings-inference: classes of texts, and of pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Self, TypeAlias

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from msgspec import Meta, Struct

from machd.dialects.encoding import OVERLOADS, check_inputs, hold_encoder, json_response
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import identify
from machd.dialects.input_making import make_inputs, make_pairs
from machd.dialects.model_kinds import require
from machd.dialects.wire import bounds
from machd.dialects.wire.encoder_request import EncoderRequest
from machd.engine.protocol.encoder import Activation, EncoderDescription, EncoderTask
from machd.errors import InvalidRequestError
from machd.generations.encodings import Encoded
from machd.http.context import ServerContext
from machd.reading.vectors import activated, rows_of

_PAIR = 2
_TextOrPair: TypeAlias = Annotated[list[bounds.ContentText], Meta(min_length=1, max_length=_PAIR)]
_Inputs: TypeAlias = Annotated[
    list[bounds.ContentText | _TextOrPair], Meta(min_length=1, max_length=bounds.MAX_INPUTS)
]


class PredictRequest(EncoderRequest, frozen=True, kw_only=True):
    """Texts that are to be classified.

    Attributes:
        inputs: A text, a pair of texts as a list of two, or a list of lists of one text or two each.
        raw_scores: True gives logits in place of probabilities.
    """

    inputs: bounds.ContentText | _Inputs
    raw_scores: bool | None = None

    def checked(self) -> Self:
        """Check as the base class does, and the lists."""
        super().checked()
        self.texts_and_pairs()
        return self

    @property
    def is_one(self) -> bool:
        """Whether the request has one text or pair, whose classes are the whole answer."""
        return isinstance(self.inputs, str) or isinstance(self.inputs[0], str)

    def texts_and_pairs(self) -> list[list[str]]:
        """Return lists of one text each, or of two.

        Raises:
            InvalidRequestError: Texts and lists are mixed, or texts and pairs.
        """
        if isinstance(self.inputs, str):
            return [[self.inputs]]
        texts = [one for one in self.inputs if isinstance(one, str)]
        lists = [texts] if texts else [one for one in self.inputs if isinstance(one, list)]
        if len(texts) not in (0, len(self.inputs)) or len(texts) > _PAIR:
            raise InvalidRequestError.at(
                "inputs", "send a text, a pair of texts, or a list of lists of one text or two each"
            )
        if len({len(one) for one in lists}) > 1:
            raise InvalidRequestError.at("inputs", "send texts and pairs in requests of their own")
        return lists


class Prediction(Struct, frozen=True, kw_only=True):
    """A label and its probability, or its logit."""

    score: float
    label: str


@endpoint(
    "POST /predict",
    list[Prediction],
    list[list[Prediction]],
    takes=PredictRequest,
    also=OVERLOADS,
)
async def create_predictions(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[bytes]:
    """Classes of texts and of pairs of texts, in the words of text-embeddings-inference."""
    body, call = await hold_encoder(request, context, PredictRequest)
    encoder = require(call.model, EncoderTask.CLASSIFY)
    inputs = body.texts_and_pairs()
    check_inputs(call.context, inputs, param="inputs")
    if len(inputs[0]) == _PAIR:
        pairs = [(first, second) for first, second in inputs]
        make = partial(make_pairs, pairs=pairs, truncates=call.truncates, param="inputs")
    else:
        make = partial(
            make_inputs,
            inputs=[one for (one,) in inputs],
            prompt="",
            truncates=call.truncates,
            param="inputs",
        )
    encoded = await call.encode(
        make, identify(request, call.context, endpoint="classify", prefix="predict-")
    )
    activation = Activation.NONE if body.raw_scores else encoder.activation
    write = partial(_json, encoded, encoder, activation, is_one=body.is_one)
    return json_response(await call.write(len(inputs) * encoder.dimensions, write))


def _json(
    encoded: Encoded, encoder: EncoderDescription, activation: Activation, *, is_one: bool
) -> bytes:
    rows = [_predictions(activated(one, activation), encoder) for one in rows_of(encoded.values)]
    answer = [rows[place] for place in encoded.places]
    return msgspec.json.encode(answer[0] if is_one else answer)


def _predictions(scores: Sequence[float], encoder: EncoderDescription) -> list[Prediction]:
    """Return the labels of a text, the likeliest first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [Prediction(score=scores[index], label=encoder.labels[index]) for index in order]
