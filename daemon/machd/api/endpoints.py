"""The public endpoints as plain data: what each takes and every answer it can give."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Literal

from msgspec import Struct

from machd.api.anthropic_errors import AnthropicErrorBody
from machd.api.anthropic_message import Message, StreamEvent, TokenCount
from machd.api.anthropic_request import CountTokensRequest, MessagesRequest
from machd.api.cache import CacheStats
from machd.api.capabilities import Capabilities
from machd.api.chat_completion import ChatCompletion, ChatCompletionChunk
from machd.api.chat_request import ChatCompletionRequest
from machd.api.completion import Completion
from machd.api.completion_request import CompletionRequest
from machd.api.embeddings import EmbeddingsRequest
from machd.api.errors import ErrorBody
from machd.api.health import Health
from machd.api.models import Model, ModelList
from machd.api.responses_answer import DeletedResponse, Response
from machd.api.responses_events import ResponseEvent
from machd.api.responses_request import ResponsesRequest
from machd.api.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = ["EVENTS", "JSON", "METRICS_TEXT", "PUBLIC_ENDPOINTS", "Answer", "Endpoint"]

JSON = "application/json"
EVENTS = "text/event-stream"
METRICS_TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that an endpoint can give.

    Attributes:
        body: The type on the wire, or a union of types; None where none describes it. Of an event
            stream, the type of each event's data.
    """

    status: int
    body: type[Struct] | UnionType | None
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method on one path.

    Attributes:
        name: The operation's id, in snake case.
        path: With ``{parameter}`` for a segment that the client fills in.
        request: The body it takes; None without one.
        generates: Whether it runs the model, so that the answer tells how in its headers.
        public: Whether it answers without an API key even where keys are required.
    """

    name: str
    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    answers: tuple[Answer, ...]
    request: type[Struct] | None = None
    generates: bool = False
    public: bool = False


def _errors(*statuses: int) -> tuple[Answer, ...]:
    return tuple(Answer(status, ErrorBody) for status in statuses)


# 401, 403, 421 and 503: the key, the Origin, the Host and the room are looked at first of all.
_READING = _errors(401, 403, 421, 503)
_POSTING = _errors(400, 401, 403, 404, 408, 413, 415, 421, 500, 503)
_GENERATING = _errors(400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503, 504)
_OPEN = _errors(403, 421)


def _in_anthropics_words(errors: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(Answer(one.status, AnthropicErrorBody) for one in errors)


PUBLIC_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        name="create_chat_completion",
        method="post",
        path="/v1/chat/completions",
        summary="Continue a conversation",
        request=ChatCompletionRequest,
        answers=(
            Answer(200, ChatCompletion),
            Answer(200, ChatCompletionChunk, EVENTS),
            *_GENERATING,
        ),
        generates=True,
    ),
    Endpoint(
        name="create_completion",
        method="post",
        path="/v1/completions",
        summary="Continue a text",
        request=CompletionRequest,
        answers=(Answer(200, Completion), Answer(200, Completion, EVENTS), *_GENERATING),
        generates=True,
    ),
    Endpoint(
        name="create_response",
        method="post",
        path="/v1/responses",
        summary="Answer, perhaps after an earlier response",
        request=ResponsesRequest,
        answers=(Answer(200, Response), Answer(200, ResponseEvent, EVENTS), *_GENERATING),
        generates=True,
    ),
    Endpoint(
        name="get_response",
        method="get",
        path="/v1/responses/{id}",
        summary="A stored response",
        answers=(Answer(200, Response), *_READING, *_errors(400, 404)),
    ),
    Endpoint(
        name="delete_response",
        method="delete",
        path="/v1/responses/{id}",
        summary="Forget a stored response",
        answers=(Answer(200, DeletedResponse), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="create_message",
        method="post",
        path="/v1/messages",
        summary="Continue a conversation, in Anthropic's words",
        request=MessagesRequest,
        answers=(
            Answer(200, Message),
            Answer(200, StreamEvent, EVENTS),
            *_in_anthropics_words(_GENERATING),
        ),
        generates=True,
    ),
    Endpoint(
        name="count_message_tokens",
        method="post",
        path="/v1/messages/count_tokens",
        summary="Tokens of the prompt that a conversation would have",
        request=CountTokensRequest,
        answers=(Answer(200, TokenCount), *_in_anthropics_words(_POSTING)),
    ),
    Endpoint(
        name="create_embeddings",
        method="post",
        path="/v1/embeddings",
        summary="Vectors of texts; no model that can be served offers them yet",
        request=EmbeddingsRequest,
        answers=_POSTING,
    ),
    Endpoint(
        name="list_models",
        method="get",
        path="/v1/models",
        summary="The models that are served",
        answers=(Answer(200, ModelList), *_READING),
    ),
    Endpoint(
        name="get_model",
        method="get",
        path="/v1/models/{id}",
        summary="One model",
        answers=(Answer(200, Model), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="tokenize",
        method="post",
        path="/tokenize",
        summary="Token ids of a text or a conversation",
        request=TokenizeRequest,
        answers=(Answer(200, TokenizeResponse), *_POSTING),
    ),
    Endpoint(
        name="detokenize",
        method="post",
        path="/detokenize",
        summary="Text of token ids",
        request=DetokenizeRequest,
        answers=(Answer(200, DetokenizeResponse), *_POSTING),
    ),
    Endpoint(
        name="get_capabilities",
        method="get",
        path="/v1/capabilities",
        summary="What the loaded model can do here, and why",
        answers=(Answer(200, Capabilities), *_READING),
    ),
    Endpoint(
        name="get_cache_stats",
        method="get",
        path="/v1/cache/stats",
        summary="What the caches hold",
        answers=(Answer(200, CacheStats), *_READING),
    ),
    Endpoint(
        name="get_health",
        method="get",
        path="/health",
        summary="The same as /health/live",
        answers=(Answer(200, Health), *_OPEN, Answer(503, Health)),
        public=True,
    ),
    Endpoint(
        name="get_health_live",
        method="get",
        path="/health/live",
        summary="Whether the engine's heartbeat is fresh",
        answers=(Answer(200, Health), *_OPEN, Answer(503, Health)),
        public=True,
    ),
    Endpoint(
        name="get_health_ready",
        method="get",
        path="/health/ready",
        summary="Whether the daemon accepts work",
        answers=(Answer(200, Health), *_OPEN, Answer(503, Health)),
        public=True,
    ),
    Endpoint(
        name="get_metrics",
        method="get",
        path="/metrics",
        summary="Metrics in Prometheus' text format",
        answers=(Answer(200, None, METRICS_TEXT), *_READING),
    ),
    Endpoint(
        name="get_openapi",
        method="get",
        path="/openapi.json",
        summary="This document",
        answers=(Answer(200, None), *_READING),
    ),
)
