"""Ollama's API: ``/api/chat``, ``/api/generate``, and what it says of the served model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from machd.dialects.bodies import read_public_body
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import converse, identify, read_generation
from machd.dialects.ollama import answer
from machd.dialects.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
)
from machd.dialects.ollama.stream import OllamaChatDialect, OllamaDialect, OllamaGenerateDialect
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.tokenizer import Tokenizer
from machd.generations.generation import GenerationIdentity
from machd.http.cold_stream import ColdRequest
from machd.http.context import ServerContext
from machd.http.endpoint import JSON_LINES
from machd.reading.conversation import PreparedConversation
from machd.reading.guidance import NO_GUIDANCE, Guidance

_API_VERSION = "0.13.5"
"""The version of Ollama whose API this is: some clients refuse a server that names an older one, Codex
one before 0.13.4."""

_NEVER = "2318-01-01T00:00:00Z"
"""When the model is unloaded; Ollama writes a time 292 years ahead for a model that it keeps."""


@endpoint(
    "POST /api/chat",
    answer.OllamaChatLine,
    takes=OllamaChatRequest,
    streams=answer.OllamaChatLine,
    stream_type=JSON_LINES,
    errors=(answer.OllamaErrorBody,),
    cold=lambda cold: _cold(OllamaChatDialect, cold),
)
async def create_ollama_chat(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a conversation, in Ollama's words."""
    body, context = await read_generation(request, context, OllamaChatRequest)
    service = context.service
    identity = identify(request, context, endpoint="ollama_chat", prefix="ollama-")
    dialect = _dialect(OllamaChatDialect, context, identity, body)
    if not body.asks_for_text:
        return _loaded(dialect)
    conversation = await service.in_worker(body.conversation)
    preparing = service.prepare(conversation, client=identity.client)
    return await converse(request, context, identity, preparing, body.generation(), dialect)


@endpoint(
    "POST /api/generate",
    answer.OllamaGenerateLine,
    takes=OllamaGenerateRequest,
    streams=answer.OllamaGenerateLine,
    stream_type=JSON_LINES,
    errors=(answer.OllamaErrorBody,),
    cold=lambda cold: _cold(OllamaGenerateDialect, cold),
)
async def create_ollama_generate(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Answer or continue a text, in Ollama's words."""
    body, context = await read_generation(request, context, OllamaGenerateRequest)
    identity = identify(request, context, endpoint="ollama_generate", prefix="ollama-")
    dialect = _dialect(OllamaGenerateDialect, context, identity, body)
    if not body.asks_for_text:
        return _loaded(dialect)
    return await converse(
        request,
        context,
        identity,
        _prepared(context, body, identity),
        body.generation(),
        dialect,
        prompt_param="prompt",
    )


@endpoint(
    "POST /api/show",
    answer.OllamaModelFacts,
    takes=OllamaShowRequest,
    errors=(answer.OllamaErrorBody,),
)
async def show_ollama_model(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> answer.OllamaModelFacts:
    """Describe the served model, in Ollama's words."""
    body = await read_public_body(request, context, OllamaShowRequest)
    context = context.of(context.find(body.model or body.name))
    model = context.served.model
    return answer.OllamaModelFacts(
        details=_details(model),
        model_info={
            "general.architecture": model.architecture,
            "general.parameter_count": model.parameters,
            f"{model.architecture}.context_length": model.context_tokens,
            f"{model.architecture}.vocab_size": model.vocabulary_tokens,
        },
        capabilities=_capabilities(context.served.tokenizer),
        modified_at=_timestamp(model.created_unix_s),
    )


@endpoint("GET /api/tags", answer.OllamaModelList, errors=(answer.OllamaErrorBody,))
async def list_ollama_models(context: NamedDependency[ServerContext]) -> answer.OllamaModelList:
    """The models that are served, in Ollama's words."""
    model = context.served.model
    return answer.OllamaModelList(
        models=[
            answer.OllamaModel(
                name=model.model_id,
                model=model.model_id,
                modified_at=_timestamp(model.created_unix_s),
                size=model.weights_bytes,
                digest=_digest(model),
                details=_details(model),
            )
        ]
    )


@endpoint("GET /api/ps", answer.OllamaRunningModelList, errors=(answer.OllamaErrorBody,))
async def list_running_ollama_models(
    context: NamedDependency[ServerContext],
) -> answer.OllamaRunningModelList:
    """The models in memory, in Ollama's words."""
    model = context.served.model
    return answer.OllamaRunningModelList(
        models=[
            answer.OllamaRunningModel(
                name=model.model_id,
                model=model.model_id,
                size=model.weights_bytes,
                digest=_digest(model),
                details=_details(model),
                expires_at=_NEVER,
                size_vram=0 if model.backend == "cpu" else model.weights_bytes,
                context_length=model.context_tokens,
            )
        ]
    )


@endpoint("GET /api/version", answer.OllamaVersion, errors=(answer.OllamaErrorBody,))
async def get_ollama_version(context: NamedDependency[ServerContext]) -> answer.OllamaVersion:
    """The version of Ollama's API that is spoken."""
    return answer.OllamaVersion(version=_API_VERSION, machd=context.versions.machd)


def _dialect(
    kind: type[OllamaDialect],
    context: ServerContext,
    identity: GenerationIdentity,
    body: OllamaRequest,
) -> OllamaDialect:
    return kind(
        context.served.model.model_id,
        _timestamp(identity.created_unix_s),
        context.served.tokenizer if body.logprobs else None,
    )


def _cold(kind: type[OllamaDialect], cold: ColdRequest) -> OllamaDialect:
    """A dialect that writes lines without text: no client of Ollama's skips a comment or an empty line."""
    return kind(cold.model.shown_name, _timestamp(cold.context.clock.unix_s()), None)


def _loaded(dialect: OllamaDialect) -> ASGIApp:
    return ASGIResponse(body=dialect.loaded(), media_type="application/json")


async def _prepared(
    context: ServerContext, body: OllamaGenerateRequest, identity: GenerationIdentity
) -> PreparedConversation:
    """Render a prompt, or tokenise it as it stands where it is raw or the model has no template."""
    service = context.service
    needs_template = bool(body.system or body.images)
    if not body.raw and (context.served.tokenizer.has_chat_template or needs_template):
        conversation = await service.in_worker(body.conversation)
        return await service.prepare(conversation, client=identity.client)
    prompt = await service.in_worker(
        context.served.tokenizer.encode, body.prompt or "", add_special_tokens=True
    )
    constraint = body.constraint()
    if constraint is None:
        return PreparedConversation(tuple(prompt), NO_GUIDANCE)
    guidance = Guidance(grammar=await service.compile(constraint, client=identity.client))
    return PreparedConversation(tuple(prompt), guidance)


def _details(model: ModelDescription) -> answer.OllamaModelDetails:
    return answer.OllamaModelDetails(
        family=model.architecture,
        families=[model.architecture],
        parameter_size=_parameter_size(model.parameters),
        quantization_level=model.quantization or model.dtype,
    )


def _parameter_size(parameters: int) -> str:
    """A number of parameters as Ollama writes it, such as ``134.52M`` or ``8.0B``."""
    if parameters >= 10**9:
        return f"{parameters / 10**9:.1f}B"
    if parameters >= 10**6:
        return f"{parameters / 10**6:.2f}M"
    return str(parameters)


def _capabilities(tokenizer: Tokenizer) -> list[answer.OllamaCapability]:
    found: list[answer.OllamaCapability] = ["completion"]
    if tokenizer.has_chat_template:
        found.append("tools")
    if tokenizer.chat_format.reasoning_markers is not None:
        found.append("thinking")
    return found


def _digest(model: ModelDescription) -> str:
    """The same for the same model under the same engine; no hash of the weights."""
    return hashlib.sha256(model.model_id.encode() + b"\0" + model.block_key).hexdigest()


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
