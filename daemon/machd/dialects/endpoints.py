"""The public endpoints, in the order of their documentation."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from litestar import Response
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler

from machd.dialects import (
    adapters,
    health,
    infill,
    inspection,
    lm_studio,
    model_feed,
    model_loading,
    models,
    server_info,
)
from machd.dialects.anthropic import handler as anthropic
from machd.dialects.chat import handler as chat
from machd.dialects.completions import handler as completions
from machd.dialects.embeddings import handler as embeddings
from machd.dialects.endpoint import endpoint
from machd.dialects.lm_studio_socket.handler import serve_lm_studio
from machd.dialects.ollama import embeddings as ollama_embeddings
from machd.dialects.ollama import handler as ollama
from machd.dialects.ollama import pull as ollama_pull
from machd.dialects.openapi import openapi_document
from machd.dialects.responses import handler as responses
from machd.dialects.scoring import handler as scoring
from machd.dialects.scoring import prediction
from machd.dialects.systemone import handler as systemone
from machd.dialects.tokens import handler as tokens
from machd.http.context import ServerContext
from machd.http.endpoint import Endpoint, endpoint_of


@endpoint("GET /openapi.json", None)
async def get_openapi(context: NamedDependency[ServerContext]) -> Response[bytes]:
    """This document."""
    document = openapi_document(PUBLIC_ENDPOINTS, version=context.versions.machd)
    return Response(msgspec.json.encode(document), media_type="application/json")


_MODULES = (
    *(chat, completions, infill, responses, anthropic, ollama, ollama_embeddings, ollama_pull),
    *(
        embeddings,
        scoring,
        prediction,
        systemone,
        models,
        tokens,
        model_loading,
        model_feed,
        adapters,
        lm_studio,
    ),
    *(inspection, server_info, health),
)
"""Modules in the order of the documentation, as the handlers in each of them are."""

PUBLIC_HANDLERS = (
    *(
        one
        for module in _MODULES
        for one in vars(module).values()
        if isinstance(one, HTTPRouteHandler)
    ),
    get_openapi,
)

PUBLIC_SOCKETS = (serve_lm_studio,)
"""Handlers of web sockets, which the documentation of the HTTP endpoints leaves out."""

SOCKET_PATHS = frozenset(path for one in PUBLIC_SOCKETS for path in one.paths)

PUBLIC_ENDPOINTS: tuple[Endpoint, ...] = tuple(map(endpoint_of, PUBLIC_HANDLERS))

PUBLIC_ROUTES: tuple[Endpoint, ...] = tuple(
    replace(one, route=f"{'|'.join(one.methods)} {path}")
    for one in PUBLIC_ENDPOINTS
    for path in (one.path, *one.aliases)
)
"""Every method and path that is served: an alias is an endpoint of its own here."""
