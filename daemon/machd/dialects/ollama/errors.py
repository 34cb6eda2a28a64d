"""How an operating error looks in Ollama's dialect, and what is said of paths it has beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec import Struct

from machd.errors import MachdError, NotFoundError

_OTHER_MODELS = (
    "this server serves the one model that it was started with; to serve another, restart it with "
    "--model-path, and see /api/tags for the one that is served"
)
_EMBEDDINGS = "the served model offers no embeddings; ask a server whose model is made for them"

_NOT_SERVED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), _OTHER_MODELS
        ),
        **dict.fromkeys(("/api/embed", "/api/embeddings"), _EMBEDDINGS),
    }
)


class OllamaErrorBody(Struct, frozen=True, kw_only=True):
    """The body of every failure below ``/api/``, and the line that ends a stream that failed."""

    error: str


def ollama_error_body(error: MachdError) -> OllamaErrorBody:
    """The wire form of an operating error."""
    return OllamaErrorBody(error=error.message)


def ollama_error_json(error: MachdError) -> bytes:
    """Encode an error in Ollama's envelope."""
    return msgspec.json.encode(ollama_error_body(error))


def ollama_not_found(path: str) -> NotFoundError:
    """The error for a path below ``/api/`` at which nothing is served."""
    return NotFoundError(
        _NOT_SERVED.get(path)
        or "nothing is served at this path; of Ollama's API, /api/chat, /api/generate, /api/tags, "
        "/api/show, /api/ps and /api/version are"
    )
