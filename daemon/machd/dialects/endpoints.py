"""The public endpoints as plain data: what each takes and every answer it can give."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Struct

from machd.capabilities.document import Capabilities
from machd.dialects.anthropic.answer import Message, StreamEvent, TokenCount
from machd.dialects.anthropic.errors import AnthropicErrorBody
from machd.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from machd.dialects.chat.answer import (
    ChatCompletion,
    ChatCompletionChunk,
    DeletedChatCompletion,
)
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.completions.answer import Completion
from machd.dialects.completions.request import CompletionRequest
from machd.dialects.embeddings import EmbeddingsRequest
from machd.dialects.infill import InfillAnswer, InfillRequest
from machd.dialects.models import AnthropicModel, AnthropicModelList, Model, ModelList
from machd.dialects.ollama.answer import (
    OllamaChatLine,
    OllamaErrorBody,
    OllamaGenerateLine,
    OllamaModelFacts,
    OllamaModelList,
    OllamaRunningModelList,
    OllamaVersion,
)
from machd.dialects.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from machd.dialects.responses.answer import DeletedResponse, Response, ResponseEvent
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.server_info import ServerProperties, ServerVersion, Slot, Welcome
from machd.dialects.tokens.request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from machd.dialects.wire.errors import ErrorBody
from machd.http.endpoint import EVENTS, JSON_LINES, METRICS_TEXT, Answer, Endpoint
from machd.http.health import Health
from machd.serving.cache_stats import CacheStats


def _errors(*statuses: int) -> tuple[Answer, ...]:
    return tuple(Answer(status, ErrorBody) for status in statuses)


# 401, 403, 421 and 503: the key, the Origin, the Host and the room are looked at first of all.
_READING = _errors(401, 403, 421, 503)
_POSTING = _errors(400, 401, 403, 404, 408, 413, 415, 421, 500, 503)
_GENERATING = _errors(400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503, 504)
_LOOKING_UP = _errors(401, 403, 404, 421, 503)
_OPEN = _errors(403, 421)


def _in_words_of(body: type[Struct], errors: tuple[Answer, ...]) -> tuple[Answer, ...]:
    return tuple(Answer(one.status, body) for one in errors)


PUBLIC_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        name="create_chat_completion",
        route="POST /v1/chat/completions",
        summary="Continue a conversation",
        request=ChatCompletionRequest,
        answers=(
            Answer(200, ChatCompletion),
            Answer(200, ChatCompletionChunk, EVENTS),
            *_GENERATING,
        ),
    ),
    Endpoint(
        name="get_chat_completion",
        route="GET /v1/chat/completions/{id}",
        summary="A chat completion that was made with store: true",
        answers=(Answer(200, ChatCompletion), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="delete_chat_completion",
        route="DELETE /v1/chat/completions/{id}",
        summary="Forget a stored chat completion",
        answers=(Answer(200, DeletedChatCompletion), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="create_completion",
        route="POST /v1/completions",
        summary="Continue a text",
        request=CompletionRequest,
        answers=(Answer(200, Completion), Answer(200, Completion, EVENTS), *_GENERATING),
    ),
    Endpoint(
        name="create_infill",
        route="POST /infill",
        summary="Write what stands between a prefix and a suffix, in llama.cpp's words",
        request=InfillRequest,
        answers=(Answer(200, InfillAnswer), Answer(200, InfillAnswer, EVENTS), *_GENERATING),
    ),
    Endpoint(
        name="create_response",
        route="POST /v1/responses",
        summary="Answer, perhaps after an earlier response",
        request=ResponsesRequest,
        answers=(Answer(200, Response), Answer(200, ResponseEvent, EVENTS), *_GENERATING),
    ),
    Endpoint(
        name="get_response",
        route="GET /v1/responses/{id}",
        summary="A stored response",
        answers=(Answer(200, Response), *_READING, *_errors(400, 404)),
    ),
    Endpoint(
        name="delete_response",
        route="DELETE /v1/responses/{id}",
        summary="Forget a stored response",
        answers=(Answer(200, DeletedResponse), *_READING, *_errors(404)),
    ),
    Endpoint(
        name="create_message",
        route="POST /v1/messages",
        summary="Continue a conversation, in Anthropic's words",
        request=MessagesRequest,
        answers=(
            Answer(200, Message),
            Answer(200, StreamEvent, EVENTS),
            *_in_words_of(AnthropicErrorBody, _GENERATING),
        ),
    ),
    Endpoint(
        name="count_message_tokens",
        route="POST /v1/messages/count_tokens",
        summary="Tokens of the prompt that a conversation would have",
        request=CountTokensRequest,
        answers=(Answer(200, TokenCount), *_in_words_of(AnthropicErrorBody, _POSTING)),
    ),
    Endpoint(
        name="create_ollama_chat",
        route="POST /api/chat",
        summary="Continue a conversation, in Ollama's words",
        request=OllamaChatRequest,
        answers=(
            Answer(200, OllamaChatLine),
            Answer(200, OllamaChatLine, JSON_LINES),
            *_in_words_of(OllamaErrorBody, _GENERATING),
        ),
    ),
    Endpoint(
        name="create_ollama_generate",
        route="POST /api/generate",
        summary="Answer or continue a text, in Ollama's words",
        request=OllamaGenerateRequest,
        answers=(
            Answer(200, OllamaGenerateLine),
            Answer(200, OllamaGenerateLine, JSON_LINES),
            *_in_words_of(OllamaErrorBody, _GENERATING),
        ),
    ),
    Endpoint(
        name="show_ollama_model",
        route="POST /api/show",
        summary="What is known of the served model, in Ollama's words",
        request=OllamaShowRequest,
        answers=(Answer(200, OllamaModelFacts), *_in_words_of(OllamaErrorBody, _POSTING)),
    ),
    Endpoint(
        name="list_ollama_models",
        route="GET /api/tags",
        summary="The models that are served, in Ollama's words",
        answers=(Answer(200, OllamaModelList), *_in_words_of(OllamaErrorBody, _READING)),
    ),
    Endpoint(
        name="list_running_ollama_models",
        route="GET /api/ps",
        summary="The models in memory, in Ollama's words",
        answers=(Answer(200, OllamaRunningModelList), *_in_words_of(OllamaErrorBody, _READING)),
    ),
    Endpoint(
        name="get_ollama_version",
        route="GET /api/version",
        summary="The version of Ollama's API that is spoken",
        answers=(Answer(200, OllamaVersion), *_in_words_of(OllamaErrorBody, _READING)),
    ),
    Endpoint(
        name="create_embeddings",
        route="POST /v1/embeddings",
        summary="Vectors of texts; no model that can be served offers them yet",
        request=EmbeddingsRequest,
        answers=_POSTING,
    ),
    Endpoint(
        name="list_models",
        route="GET /v1/models",
        summary="The models that are served",
        answers=(
            Answer(200, ModelList),
            Answer(200, AnthropicModelList),
            *_READING,
            *_in_words_of(AnthropicErrorBody, _READING),
        ),
    ),
    Endpoint(
        name="get_model",
        route="GET /v1/models/{id}",
        summary="One model",
        answers=(
            Answer(200, Model),
            Answer(200, AnthropicModel),
            *_LOOKING_UP,
            *_in_words_of(AnthropicErrorBody, _LOOKING_UP),
        ),
    ),
    Endpoint(
        name="tokenize",
        route="POST /tokenize",
        summary="Token ids of a text or a conversation",
        request=TokenizeRequest,
        answers=(Answer(200, TokenizeResponse), *_POSTING),
    ),
    Endpoint(
        name="detokenize",
        route="POST /detokenize",
        summary="Text of token ids",
        request=DetokenizeRequest,
        answers=(Answer(200, DetokenizeResponse), *_POSTING),
    ),
    Endpoint(
        name="get_tokenizer_info",
        route="GET /tokenizer_info",
        summary="Special tokens and chat template of the model",
        answers=(Answer(200, TokenizerInfoResponse), *_READING),
    ),
    Endpoint(
        name="get_capabilities",
        route="GET /v1/capabilities",
        summary="What the loaded model can do here, and why",
        answers=(Answer(200, Capabilities), *_READING),
    ),
    Endpoint(
        name="get_cache_stats",
        route="GET /v1/cache/stats",
        summary="What the caches hold",
        answers=(Answer(200, CacheStats), *_READING),
    ),
    Endpoint(
        name="get_root",
        route="GET /",
        summary="Where the API begins",
        answers=(Answer(200, Welcome), *_OPEN, *_errors(503)),
        public=True,
    ),
    Endpoint(
        name="get_version",
        route="GET /version",
        summary="machd's version, in vLLM's shape",
        answers=(Answer(200, ServerVersion), *_READING),
    ),
    Endpoint(
        name="get_properties",
        route="GET /props",
        summary="The daemon and its model, in llama.cpp's shape",
        answers=(Answer(200, ServerProperties), *_READING),
    ),
    Endpoint(
        name="get_slots",
        route="GET /slots",
        summary="The slots and which of them are at work, in llama.cpp's shape",
        answers=(Answer(200, list[Slot]), *_READING),
    ),
    Endpoint(
        name="get_health",
        route="GET /health",
        summary="The same as /health/live",
        answers=(Answer(200, Health), *_OPEN, Answer(503, Health)),
        public=True,
    ),
    Endpoint(
        name="get_health_live",
        route="GET /health/live",
        summary="Whether the engine's heartbeat is fresh",
        answers=(Answer(200, Health), *_OPEN, Answer(503, Health)),
        public=True,
    ),
    Endpoint(
        name="get_health_ready",
        route="GET /health/ready",
        summary="Whether the daemon accepts work",
        answers=(Answer(200, Health), *_OPEN, Answer(503, Health)),
        public=True,
    ),
    Endpoint(
        name="get_metrics",
        route="GET /metrics",
        summary="Metrics in Prometheus' text format",
        answers=(Answer(200, None, METRICS_TEXT), *_READING),
    ),
    Endpoint(
        name="get_openapi",
        route="GET /openapi.json",
        summary="This document",
        answers=(Answer(200, None), *_READING),
    ),
)

PUBLIC_ROUTES: tuple[Endpoint, ...] = tuple(
    replace(endpoint, route=f"{endpoint.method} {path}")
    for endpoint in PUBLIC_ENDPOINTS
    for path in (endpoint.path, *endpoint.aliases)
)
"""Every method and path that is served: an alias is an endpoint of its own here."""
