"""Errors in the form of LM Studio's protocol."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from machd.errors import MachdError
from machd.http.inner_request import AnsweredError


class _ErrorFacts(Struct, frozen=True):
    message: str
    code: str | None = None


class _OpenAIBody(Struct, frozen=True):
    error: _ErrorFacts | str


class UnknownModelError(AnsweredError):
    """A client names a model that is not served."""

    def __init__(self, error: AnsweredError, name: str, loaded: list[str]) -> None:
        """Take over the error of an answer; ``loaded`` are names of loaded models, which the client shows."""
        super().__init__(error.status, error.body)
        self.name = name
        self.loaded = loaded


def told(error: MachdError | AnsweredError) -> dict[str, object]:
    """Write an error as a client reads it: its title is shown, its code can be told by programs."""
    if isinstance(error, MachdError):
        return _form(str(error), error.code, error.http_status)
    try:
        facts = msgspec.json.decode(error.body, type=_OpenAIBody).error
    except msgspec.DecodeError:
        facts = "the server failed to answer this request"
    if isinstance(facts, str):  # Ollama's
        return _form(facts, None, error.status)
    form = _form(facts.message, facts.code, error.status)
    if isinstance(error, UnknownModelError):
        # By this code the clients know the error.
        form["displayData"] = {
            "code": "generic.noModelMatchingQuery",
            "query": {"identifier": error.name},
            "loadedModelsSample": error.loaded,
            "totalLoadedModels": len(error.loaded),
        }
    return form


def _form(message: str, code: str | None, status: int) -> dict[str, object]:
    return {
        "title": message,
        "rootTitle": message,
        "errorData": {"code": code, "status": status},
    }
