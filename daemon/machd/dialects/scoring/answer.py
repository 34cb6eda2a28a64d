"""Ranks as Cohere, Jina and text-embeddings-inference write them, scores and classes as vLLM does."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from machd.dialects.wire.encoder_usage import EncoderUsage


class RankedDocument(Struct, frozen=True, kw_only=True):
    """The text of a document."""

    text: str


class RerankResult(Struct, frozen=True, kw_only=True):
    """A document's place in the request, and its score."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class ApiVersion(Struct, frozen=True, kw_only=True):
    """The version of Cohere's API."""

    version: Literal["1", "2"]


class RerankTokens(Struct, frozen=True, kw_only=True):
    """Tokens of all pairs."""

    input_tokens: int
    output_tokens: Literal[0] = 0


class RerankMeta(Struct, frozen=True, kw_only=True):
    """The usage as Cohere's clients read it."""

    api_version: ApiVersion
    tokens: RerankTokens


class RerankAnswer(Struct, frozen=True, kw_only=True):
    """The documents, the most relevant first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: EncoderUsage
    meta: RerankMeta


class TeiRank(Struct, frozen=True, kw_only=True):
    """A document's place in a request of text-embeddings-inference, and its score."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class Score(Struct, frozen=True, kw_only=True):
    """How well a pair matches."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(Struct, frozen=True, kw_only=True):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EncoderUsage


class Classification(Struct, frozen=True, kw_only=True):
    """The likeliest label of a text, and the probabilities of all, in the checkpoint's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(Struct, frozen=True, kw_only=True):
    """The classes, in the order of the texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: EncoderUsage
