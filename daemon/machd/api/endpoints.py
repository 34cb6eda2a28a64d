"""The public endpoints as plain data: what each takes and every answer it can give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal

from msgspec import Struct

from machd.api.anthropic_errors import AnthropicErrorBody
from machd.api.anthropic_message import Message, StreamEvent, TokenCount
from machd.api.anthropic_request import CountTokensRequest, MessagesRequest
from machd.api.cache import CacheStats
from machd.api.capabilities import Capabilities
from machd.api.chat_completion import (
    ChatCompletion,
    ChatCompletionChunk,
    DeletedChatCompletion,
)
from machd.api.chat_request import ChatCompletionRequest
from machd.api.completion import Completion
from machd.api.completion_request import CompletionRequest
from machd.api.embeddings import EmbeddingsRequest
from machd.api.errors import ErrorBody
from machd.api.health import Health
from machd.api.infill import InfillAnswer, InfillRequest
from machd.api.models import AnthropicModel, AnthropicModelList, Model, ModelList
from machd.api.ollama_answer import (
    OllamaChatLine,
    OllamaGenerateLine,
    OllamaModelFacts,
    OllamaModelList,
    OllamaRunningModelList,
    OllamaVersion,
)
from machd.api.ollama_errors import OllamaErrorBody
from machd.api.ollama_request import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from machd.api.responses_answer import DeletedResponse, Response
from machd.api.responses_events import ResponseEvent
from machd.api.responses_request import ResponsesRequest
from machd.api.server_info import ServerProperties, ServerVersion, Slot, Welcome
from machd.api.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)

JSON = "application/json"
EVENTS = "text/event-stream"
JSON_LINES = "application/x-ndjson"
METRICS_TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer that an endpoint can give.

    Attributes:
        body: The type on the wire, a union of types, or a list; None where none describes it. Of a
            stream, the type of each event's data or of each line.
    """

    status: int
    body: type[Struct] | type[list[Any]] | UnionType | None
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method on one path.

    Attributes:
        name: The operation's id, in snake case.
        path: With ``{parameter}`` for a segment that the client fills in.
        request: The body it takes; None without one.
        aliases: Other paths with the same handler, for clients whose base URL lacks ``/v1``.
        generates: Whether it runs the model, so that the answer tells how in its headers.
        public: Whether it answers without an API key even where keys are required.
    """

    name: str
    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    answers: tuple[Answer, ...]
    request: type[Struct] | None = None
    aliases: tuple[str, ...] = ()
    generates: bool = False
    public: bool = False


def _errors(*statuses: int) -> tuple[Answer, ...]:
    return tuple(Answer(status, ErrorBody) for status in statuses)


# 401, 403, 421 and 503: the key, the Origin, the Host and the room are looked at first of all.
_READING = _errors(401, 403, 421, 503)
_POSTING = _errors(400, 401, 403, 404, 408, 413, 415, 421, 500, 503)
_GENERATING = _errors(400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503, 504)
_LOOKING_UP = _errors(401, 403, 404, 421, 503)
_OPEN = _errors(403, 421)


def _in_anthropics_words(errors: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(Answer(one.status, AnthropicErrorBody) for one in errors)


def _in_ollamas_words(errors: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(Answer(one.status, OllamaErrorBody) for one in errors)


PUBLIC_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        name="create_chat_completion",
        method="post",
        path="/v1/chat/completions",
        aliases=("/chat/completions",),
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
        name="get_chat_completion",
        method="get",
        path="/v1/chat/completions/{id}",
        aliases=("/chat/completions/{id}",),
        summary="A chat completion that was made with store: true",
        answers=(Answer(200, ChatCompletion), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="delete_chat_completion",
        method="delete",
        path="/v1/chat/completions/{id}",
        aliases=("/chat/completions/{id}",),
        summary="Forget a stored chat completion",
        answers=(Answer(200, DeletedChatCompletion), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="create_completion",
        method="post",
        path="/v1/completions",
        aliases=("/completions",),
        summary="Continue a text",
        request=CompletionRequest,
        answers=(Answer(200, Completion), Answer(200, Completion, EVENTS), *_GENERATING),
        generates=True,
    ),
    Endpoint(
        name="create_infill",
        method="post",
        path="/infill",
        summary="Write what stands between a prefix and a suffix, in llama.cpp's words",
        request=InfillRequest,
        answers=(Answer(200, InfillAnswer), Answer(200, InfillAnswer, EVENTS), *_GENERATING),
        generates=True,
    ),
    Endpoint(
        name="create_response",
        method="post",
        path="/v1/responses",
        aliases=("/responses",),
        summary="Answer, perhaps after an earlier response",
        request=ResponsesRequest,
        answers=(Answer(200, Response), Answer(200, ResponseEvent, EVENTS), *_GENERATING),
        generates=True,
    ),
    Endpoint(
        name="get_response",
        method="get",
        path="/v1/responses/{id}",
        aliases=("/responses/{id}",),
        summary="A stored response",
        answers=(Answer(200, Response), *_READING, *_errors(400, 404)),
    ),
    Endpoint(
        name="delete_response",
        method="delete",
        path="/v1/responses/{id}",
        aliases=("/responses/{id}",),
        summary="Forget a stored response",
        answers=(Answer(200, DeletedResponse), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="create_message",
        method="post",
        path="/v1/messages",
        aliases=("/messages",),
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
        aliases=("/messages/count_tokens",),
        summary="Tokens of the prompt that a conversation would have",
        request=CountTokensRequest,
        answers=(Answer(200, TokenCount), *_in_anthropics_words(_POSTING)),
    ),
    Endpoint(
        name="create_ollama_chat",
        method="post",
        path="/api/chat",
        summary="Continue a conversation, in Ollama's words",
        request=OllamaChatRequest,
        answers=(
            Answer(200, OllamaChatLine),
            Answer(200, OllamaChatLine, JSON_LINES),
            *_in_ollamas_words(_GENERATING),
        ),
        generates=True,
    ),
    Endpoint(
        name="create_ollama_generate",
        method="post",
        path="/api/generate",
        summary="Answer or continue a text, in Ollama's words",
        request=OllamaGenerateRequest,
        answers=(
            Answer(200, OllamaGenerateLine),
            Answer(200, OllamaGenerateLine, JSON_LINES),
            *_in_ollamas_words(_GENERATING),
        ),
        generates=True,
    ),
    Endpoint(
        name="show_ollama_model",
        method="post",
        path="/api/show",
        summary="What is known of the served model, in Ollama's words",
        request=OllamaShowRequest,
        answers=(Answer(200, OllamaModelFacts), *_in_ollamas_words(_POSTING)),
    ),
    Endpoint(
        name="list_ollama_models",
        method="get",
        path="/api/tags",
        summary="The models that are served, in Ollama's words",
        answers=(Answer(200, OllamaModelList), *_in_ollamas_words(_READING)),
    ),
    Endpoint(
        name="list_running_ollama_models",
        method="get",
        path="/api/ps",
        summary="The models in memory, in Ollama's words",
        answers=(Answer(200, OllamaRunningModelList), *_in_ollamas_words(_READING)),
    ),
    Endpoint(
        name="get_ollama_version",
        method="get",
        path="/api/version",
        summary="The version of Ollama's API that is spoken",
        answers=(Answer(200, OllamaVersion), *_in_ollamas_words(_READING)),
    ),
    Endpoint(
        name="create_embeddings",
        method="post",
        path="/v1/embeddings",
        aliases=("/embeddings",),
        summary="Vectors of texts; no model that can be served offers them yet",
        request=EmbeddingsRequest,
        answers=_POSTING,
    ),
    Endpoint(
        name="list_models",
        method="get",
        path="/v1/models",
        aliases=("/models",),
        summary="The models that are served",
        answers=(
            Answer(200, ModelList),
            Answer(200, AnthropicModelList),
            *_READING,
            *_in_anthropics_words(_READING),
        ),
    ),
    Endpoint(
        name="get_model",
        method="get",
        path="/v1/models/{id}",
        aliases=("/models/{id}",),
        summary="One model",
        answers=(
            Answer(200, Model),
            Answer(200, AnthropicModel),
            *_LOOKING_UP,
            *_in_anthropics_words(_LOOKING_UP),
        ),
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
        name="get_tokenizer_info",
        method="get",
        path="/tokenizer_info",
        summary="Special tokens and chat template of the model",
        answers=(Answer(200, TokenizerInfoResponse), *_READING),
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
        name="get_root",
        method="get",
        path="/",
        summary="Where the API begins",
        answers=(Answer(200, Welcome), *_OPEN, *_errors(503)),
        public=True,
    ),
    Endpoint(
        name="get_version",
        method="get",
        path="/version",
        summary="machd's version, in vLLM's shape",
        answers=(Answer(200, ServerVersion), *_READING),
    ),
    Endpoint(
        name="get_properties",
        method="get",
        path="/props",
        summary="The daemon and its model, in llama.cpp's shape",
        answers=(Answer(200, ServerProperties), *_READING),
    ),
    Endpoint(
        name="get_slots",
        method="get",
        path="/slots",
        summary="The slots and which of them are at work, in llama.cpp's shape",
        answers=(Answer(200, list[Slot]), *_READING),
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

PUBLIC_ROUTES: tuple[Endpoint, ...] = tuple(
    replace(endpoint, path=path, aliases=())
    for endpoint in PUBLIC_ENDPOINTS
    for path in (endpoint.path, *endpoint.aliases)
)
"""Every method and path that is served: each alias is an endpoint of its own here."""
