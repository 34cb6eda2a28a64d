"""A request's model and its leases, which end with its answer."""

from __future__ import annotations

from urllib.parse import parse_qs

from litestar.types import Scope

from machd.http.authentication import client_name
from machd.http.stamps import arrived_s, request_id
from machd.served.lease import Lease
from machd.served.waiting_request import Asker

_LEASES_KEY = "machd_model_leases"
_NAME_KEY = "machd_model_name"


def note_model(scope: Scope, name: str) -> None:
    """Note which model a request is for, before it is known whether that one takes it."""
    scope["state"][_NAME_KEY] = name


def noted_model(scope: Scope) -> str | None:
    """Return the model that a request is for; None while that is not known."""
    name: str | None = scope["state"].get(_NAME_KEY)
    return name


def keep(scope: Scope, lease: Lease) -> None:
    """Have a lease end when the request's answer has."""
    scope["state"].setdefault(_LEASES_KEY, []).append(lease)


def asked_autoload(scope: Scope) -> bool | None:
    """Return what ``autoload`` in a request's query says, read as llama.cpp does; None where it is not there."""
    given = parse_qs(scope.get("query_string", b"")).get(b"autoload")
    return None if given is None else given[-1] in {b"true", b"1"}


def asker_of(scope: Scope, adapter: str | None) -> Asker:
    """Return a request as operators see it while it waits for its model.

    The endpoint's name is made of its path, as ``/v1/chat/completions`` is ``chat_completions`` and ``/api/chat`` is
    ``ollama_chat``: which dialect answers is known later.
    """
    path = str(scope["path"]).removeprefix("/v1/").replace("/api/", "ollama/", 1)
    return Asker(
        request_id(scope),
        path.strip("/").replace("/", "_"),
        client_name(scope),
        arrived_s(scope),
        adapter,
    )


def end_leases(scope: Scope) -> None:
    """Give back what the request has held."""
    for lease in scope["state"].pop(_LEASES_KEY, ()):
        lease.close()
