"""Envelopes of errors: the dialect whose shapes a request's client reads.

Anthropic's below ``/v1/messages``, with or without ``/v1``, and where a list of models is asked for with
``anthropic-version``; Ollama's below ``/api``, but for LM Studio's paths; System One's at its path; OpenAI's everywhere
else.
"""

from __future__ import annotations

import re
from functools import partial

from litestar.types import Scope

from machd.dialects.anthropic.errors import anthropic_error_json
from machd.dialects.ollama.answer import ollama_error_json, ollama_not_found
from machd.dialects.systemone.answer import decision_error_json
from machd.dialects.wire.errors import error_json
from machd.errors import NotFoundError
from machd.http.envelope import Envelope

_VERSION_PREFIX = re.compile(r"^(?:/v1)+(?=/|$)")
_DOUBLED_PREFIX = re.compile(r"/v1/v1(?=/|$)")
_ANTHROPIC_HEADER = b"anthropic-version"
_OLLAMA_PATH = "/api"
_SYSTEM_ONE_PATHS = ("/v1/systemone", "/systemone")
_LM_STUDIO_PATHS = ("/api/v0/models", "/api/v1/models")


def envelope_of(scope: Scope, *, is_one: bool = True) -> Envelope:
    """Return the envelope that a request's client reads; ``is_one`` where there is one model alone."""
    if speaks_anthropic(scope):
        return _ANTHROPIC
    path = scope["path"]
    if path in _SYSTEM_ONE_PATHS:
        return _SYSTEM_ONE
    is_lm_studios = any(_is_at_or_below(path, one) for one in _LM_STUDIO_PATHS)
    if is_lm_studios or not _is_at_or_below(path, _OLLAMA_PATH):
        return _OPENAI
    return _OLLAMA if is_one else _OLLAMA_OF_SEVERAL


def speaks_anthropic(scope: Scope) -> bool:
    """Return True if a request's client reads Anthropic's shapes."""
    # With /v1 once, not at all, or twice by mistake.
    path = _VERSION_PREFIX.sub("", scope["path"])
    if _is_at_or_below(path, "/messages"):
        return True
    return _is_at_or_below(path, "/models") and any(
        name == _ANTHROPIC_HEADER for name, _ in scope["headers"]
    )


def _is_at_or_below(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent}/")


def _not_found(path: str) -> NotFoundError:
    if _DOUBLED_PREFIX.match(path):
        return NotFoundError(
            "the path begins with /v1 twice: the base URL ends in /v1, and the client adds its own; "
            "write the base URL without it, such as http://127.0.0.1:8080"
        )
    return NotFoundError("nothing is served at this path")


_OPENAI = Envelope(lambda error, _id: error_json(error), _not_found)
_SYSTEM_ONE = Envelope(lambda error, _id: decision_error_json(error), _not_found)
_OLLAMA = Envelope(lambda error, _id: ollama_error_json(error), ollama_not_found)
_OLLAMA_OF_SEVERAL = Envelope(
    lambda error, _id: ollama_error_json(error), partial(ollama_not_found, is_one=False)
)
_ANTHROPIC = Envelope(
    lambda error, request_id: anthropic_error_json(error, request_id=request_id),
    _not_found,
    id_headers=(b"x-request-id", b"request-id"),  # the second is read by Anthropic's clients
)
