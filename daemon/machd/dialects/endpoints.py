"""The public endpoints, in the order of their documentation."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from litestar import Response
from litestar.di import NamedDependency

from machd.dialects.anthropic.handler import count_message_tokens, create_message
from machd.dialects.chat.handler import (
    create_chat_completion,
    delete_chat_completion,
    get_chat_completion,
)
from machd.dialects.completions.handler import create_completion
from machd.dialects.embeddings import create_embeddings
from machd.dialects.endpoint import endpoint
from machd.dialects.health import get_health, get_health_live, get_health_ready
from machd.dialects.infill import create_infill
from machd.dialects.inspection import get_cache_stats, get_capabilities, get_metrics
from machd.dialects.models import get_model, list_models
from machd.dialects.ollama.handler import (
    create_ollama_chat,
    create_ollama_generate,
    get_ollama_version,
    list_ollama_models,
    list_running_ollama_models,
    show_ollama_model,
)
from machd.dialects.openapi import openapi_document
from machd.dialects.responses.handler import create_response, delete_response, get_response
from machd.dialects.server_info import get_properties, get_root, get_slots, get_version
from machd.dialects.tokens.handler import detokenize, get_tokenizer_info, tokenize
from machd.http.context import ServerContext
from machd.http.endpoint import Endpoint, endpoint_of


@endpoint("GET /openapi.json", None)
async def get_openapi(context: NamedDependency[ServerContext]) -> Response[bytes]:
    """This document."""
    document = openapi_document(PUBLIC_ENDPOINTS, version=context.versions.machd)
    return Response(msgspec.json.encode(document), media_type="application/json")


PUBLIC_HANDLERS = (
    create_chat_completion,
    get_chat_completion,
    delete_chat_completion,
    create_completion,
    create_infill,
    create_response,
    get_response,
    delete_response,
    create_message,
    count_message_tokens,
    create_ollama_chat,
    create_ollama_generate,
    show_ollama_model,
    list_ollama_models,
    list_running_ollama_models,
    get_ollama_version,
    create_embeddings,
    list_models,
    get_model,
    tokenize,
    detokenize,
    get_tokenizer_info,
    get_capabilities,
    get_cache_stats,
    get_root,
    get_version,
    get_properties,
    get_slots,
    get_health,
    get_health_live,
    get_health_ready,
    get_metrics,
    get_openapi,
)

PUBLIC_ENDPOINTS: tuple[Endpoint, ...] = tuple(map(endpoint_of, PUBLIC_HANDLERS))

PUBLIC_ROUTES: tuple[Endpoint, ...] = tuple(
    replace(one, route=f"{'|'.join(one.methods)} {path}")
    for one in PUBLIC_ENDPOINTS
    for path in (one.path, *one.aliases)
)
"""Every method and path that is served: an alias is an endpoint of its own here."""
