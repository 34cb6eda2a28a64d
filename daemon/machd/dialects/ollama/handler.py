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
from machd.dialects.generation import converse, hold, identify, read_asked
from machd.dialects.listed_adapters import ShownAdapter, listed_adapters
from machd.dialects.listed_models import ListedModel, listed_model, listed_models, parameter_size
from machd.dialects.ollama import answer
from machd.dialects.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
)
from machd.dialects.ollama.stream import OllamaChatDialect, OllamaDialect, OllamaGenerateDialect
from machd.engine.protocol.encoder import EncoderTask
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.tokenizer import Tokenizer
from machd.generations.identity import GenerationIdentity
from machd.http.authentication import require_operator
from machd.http.cold_stream import ColdRequest
from machd.http.context import ServerContext
from machd.http.endpoint import JSON_LINES
from machd.reading.conversation import PreparedConversation
from machd.reading.guidance import NO_GUIDANCE, Guidance
from machd.reading.prompt_places import TextPlaces
from machd.served.named_model import NamedModel
from machd.settings.models import OLLAMA_TAG

_API_VERSION = "0.13.5"
"""The version of Ollama whose API this is: some clients refuse a server that names an older one, Codex
one before 0.13.4."""

_NEVER = "2318-01-01T00:00:00Z"
"""When the model is unloaded; Ollama writes a time 292 years ahead for a model that it keeps."""

_LONGEST_S = 1e9
"""Of a time to live that is told; a longer one is for ever."""


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
    asked = await read_asked(request, context, OllamaChatRequest)
    if (unloaded := _unloaded(OllamaChatDialect, request, context, asked)) is not None:
        return unloaded
    body, context = await hold(request, context, asked)
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
    asked = await read_asked(request, context, OllamaGenerateRequest)
    if (unloaded := _unloaded(OllamaGenerateDialect, request, context, asked)) is not None:
        return unloaded
    body, context = await hold(request, context, asked)
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
    asked = context.find_asked(body.model or body.name)
    found = context.models[asked.model_name]
    listed = listed_model(context, found)
    parent = "" if asked.adapter is None else listed.name
    if listed.description is None:
        return answer.OllamaModelFacts(
            details=_details(None, parent),
            model_info={},
            capabilities=["completion"],
            modified_at=_timestamp(listed.created_unix_s),
        )
    context = context.of(found)
    model = context.served.model
    return answer.OllamaModelFacts(
        details=_details(model, parent),
        model_info={
            "general.architecture": model.architecture,
            "general.parameter_count": model.parameters,
            f"{model.architecture}.context_length": model.context_tokens,
            f"{model.architecture}.vocab_size": model.vocabulary_tokens,
            **_embedding_length(model),
        },
        capabilities=_capabilities(model, context.served.tokenizer),
        modified_at=_timestamp(model.created_unix_s),
    )


@endpoint("GET /api/tags", answer.OllamaModelList, errors=(answer.OllamaErrorBody,))
async def list_ollama_models(context: NamedDependency[ServerContext]) -> answer.OllamaModelList:
    """The models that are served, then their adapters, in Ollama's words."""
    adapters = await listed_adapters(context)
    return answer.OllamaModelList(
        models=[
            answer.OllamaModel(
                name=_tagged(one),
                model=_tagged(one),
                modified_at=_timestamp(one.created_unix_s),
                size=one.size_bytes or 0,
                digest=_digest(one),
                details=_details(one.description),
            )
            for one in listed_models(context)
        ]
        + [_adapter(one) for one in adapters]
    )


@endpoint("GET /api/ps", answer.OllamaRunningModelList, errors=(answer.OllamaErrorBody,))
async def list_running_ollama_models(
    context: NamedDependency[ServerContext],
) -> answer.OllamaRunningModelList:
    """The models in memory, in Ollama's words."""
    return answer.OllamaRunningModelList(
        models=[
            answer.OllamaRunningModel(
                name=_tagged(one),
                model=_tagged(one),
                size=one.description.weights_bytes,
                digest=_digest(one),
                details=_details(one.description),
                expires_at=_expiry(context, one.model),
                size_vram=0 if one.description.backend == "cpu" else one.description.weights_bytes,
                context_length=one.description.context_tokens,
            )
            for one in listed_models(context)
            if one.description is not None and (one.is_one or one.model.is_ready)
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
        context.answer_name,
        _timestamp(identity.created_unix_s),
        context.served.tokenizer if body.logprobs else None,
        tells_cache=bool(body.return_cache_diagnosis),
    )


def _cold(kind: type[OllamaDialect], cold: ColdRequest) -> OllamaDialect:
    """A dialect that writes lines without text: no client of Ollama's skips a comment or an empty line."""
    return kind(cold.name, _timestamp(cold.context.clock.unix_s()), None)


def _loaded(dialect: OllamaDialect, reason: answer.DoneReason = "load") -> ASGIApp:
    return ASGIResponse(body=dialect.loaded(reason), media_type="application/json")


def _unloaded(
    kind: type[OllamaDialect],
    request: Request[Any, Any, Any],
    context: ServerContext,
    body: OllamaRequest,
) -> ASGIApp | None:
    """Unload one of several models for a request that asks for that, and for no text; None for every other request.

    Ollama's ``server/routes.go`` answers so; Open WebUI's ``/api/unload`` and ``ollama stop`` send it.

    Raises:
        OperatorRequiredError: A request without text says how long the model stays loaded, and is no operator's.
    """
    if context.models.is_one or body.asks_for_text or body.idle_s is None:
        return None
    require_operator(request.scope)
    if body.idle_s > 0:
        return None
    model = context.find(body.model)
    model.unload()
    created_at = _timestamp(int(context.clock.unix_s()))
    return _loaded(kind(model.shown_name, created_at, None), "unload")


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
    places = None
    if body.return_cache_diagnosis:
        token_bytes = context.served.tokenizer.token_bytes
        places = await service.in_worker(
            lambda: TextPlaces.of(body.prompt or "", [token_bytes(one) for one in prompt])
        )
    guidance = NO_GUIDANCE
    if (constraint := body.constraint()) is not None:
        guidance = Guidance(grammar=await service.compile(constraint, client=identity.client))
    return PreparedConversation(tuple(prompt), guidance, places=places)


def _adapter(shown: ShownAdapter) -> answer.OllamaModel:
    name = _with_tag(shown.name, has_tag=shown.base.is_one or ":" in shown.name)
    return answer.OllamaModel(
        name=name,
        model=name,
        modified_at=_timestamp(shown.created_unix_s),
        size=shown.size_bytes,
        digest=hashlib.sha256(f"{_digest(shown.base)}\0{shown.name}".encode()).hexdigest(),
        details=_details(shown.base.description, shown.base.name),
    )


def _details(model: ModelDescription | None, parent: str = "") -> answer.OllamaModelDetails:
    """The kind of a model, or of an adapter's model, which is its ``parent``."""
    if model is None:
        return answer.OllamaModelDetails(
            parent_model=parent, family="", families=[], parameter_size="", quantization_level=""
        )
    return answer.OllamaModelDetails(
        parent_model=parent,
        family=model.architecture,
        families=[model.architecture],
        parameter_size=parameter_size(model.parameters),
        quantization_level=model.quantization or model.dtype,
    )


def _expiry(context: ServerContext, model: NamedModel) -> str:
    """When a model is unloaded unless a request comes; :data:`_NEVER` where it stays loaded.

    The time of a model that answers has not begun: its whole time to live is ahead, as in Ollama.
    """
    residence = model.residence
    if residence.is_pinned or residence.ttl_s is None or residence.ttl_s > _LONGEST_S:
        return _NEVER
    left_s = residence.ttl_s - (model.idle_s or 0.0)
    return _timestamp(context.clock.unix_s() + max(0.0, left_s))


def _capabilities(model: ModelDescription, tokenizer: Tokenizer) -> list[answer.OllamaCapability]:
    if model.encoder is not None:
        return ["embedding"] if model.encoder.task is EncoderTask.EMBED else []
    found: list[answer.OllamaCapability] = ["completion"]
    if tokenizer.has_chat_template:
        found.append("tools")
    if tokenizer.chat_format.reasoning_markers is not None:
        found.append("thinking")
    return found


def _embedding_length(model: ModelDescription) -> dict[str, int | str]:
    if model.encoder is None or model.encoder.task is not EncoderTask.EMBED:
        return {}
    return {f"{model.architecture}.embedding_length": model.encoder.dimensions}


def _tagged(listed: ListedModel) -> str:
    """The name of one of several models with a tag, as Ollama's always have one.

    Open WebUI unloads a model only if it finds the name with a tag in the list (``unload_model`` in its
    ``backend/open_webui/routers/ollama.py``).
    """
    return _with_tag(listed.name, has_tag=listed.is_one or ":" in listed.name)


def _with_tag(name: str, *, has_tag: bool) -> str:
    return name if has_tag else f"{name}{OLLAMA_TAG}"


def _digest(listed: ListedModel) -> str:
    """The same for the same model; no hash of the weights."""
    if listed.is_one and listed.description is not None:
        key = listed.description.model_id.encode() + b"\0" + listed.description.block_key
    else:
        key = f"{listed.model.name}\0{listed.model.files}".encode()
    return hashlib.sha256(key).hexdigest()


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
