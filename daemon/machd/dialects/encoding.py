"""Parts that endpoints of encoders share: reading a request, holding its model, computing its texts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response

from machd.dialects.bodies import read_public_body
from machd.dialects.generation import keep_loaded, leased
from machd.dialects.wire.encoder_request import EncoderRequest
from machd.engine.protocol.engine import ModelDescription
from machd.errors import InvalidRequestError
from machd.generations.encodings import Encoded, MakeInputs
from machd.generations.identity import GenerationIdentity
from machd.http.authentication import client_name, is_operator
from machd.http.context import ServerContext
from machd.http.leases import note_model
from machd.http.parts import PartsResponse
from machd.http.stream import while_connected

OVERLOADS = (429, 504)
"""Statuses of errors of an endpoint that computes, beside those of every endpoint that takes a body."""

_R = TypeVar("_R", bound=EncoderRequest)
_T = TypeVar("_T")

_INLINE_NUMBERS = 8192
"""Numbers of an answer that takes a millisecond at most to write."""

_PART_NUMBERS = 4096
"""Numbers that are written before others have their turn: half a millisecond."""

_INLINE_BODY_BYTES = 16 << 10
"""Bytes of a request that is checked about as fast as a worker thread wakes."""


@dataclass(frozen=True, slots=True)
class EncoderCall:
    """A request whose model is held until its answer has ended.

    Attributes:
        context: Of the model.
        truncates: Whether a text that is too long loses its end.
    """

    request: Request[Any, Any, Any]
    context: ServerContext
    truncates: bool

    @property
    def model(self) -> ModelDescription:
        """Description of the model."""
        return self.context.served.model

    async def encode(self, make: MakeInputs, identity: GenerationIdentity) -> Encoded:
        """Tokenise texts on a worker thread and compute them; a client that leaves before ends that.

        Raises:
            ClientDisconnectedError: The client left.
            MachdError: As of :meth:`machd.generations.encodings.Encodings.encode`.
        """
        encoding = self.context.service.encodings.encode(make, identity)
        return await while_connected(self.request.receive, encoding)

    async def write(self, numbers: int, write: Callable[[], _T]) -> _T:
        """Write an answer of so many numbers, beside the event loop if that takes long."""
        if numbers <= _INLINE_NUMBERS:
            return write()
        return await self.context.service.in_worker(write)


async def hold_encoder(
    request: Request[Any, Any, Any],
    context: ServerContext,
    type_: type[_R],
    *,
    truncates: bool | None = None,
) -> tuple[_R, EncoderCall]:
    """Read a request to an encoder, and hold its model, which is loaded if it has to be.

    ``truncates`` is the endpoint's default; ``limits.long_input_policy`` unless given.

    Raises:
        RequestError: The request is wrong by itself, or names no model that is served.
        UnavailableError: No new work is taken, or none of this client's, or the model is not loaded in time.
    """
    body = await read_public_body(request, context, type_)
    service = context.service
    service.lifecycle.check_accepting()
    model = context.find(body.model)
    note_model(request.scope, model.name)
    service.check_client(client_name(request.scope))
    is_small = (request.content_length or math.inf) <= _INLINE_BODY_BYTES
    if is_small and "content-encoding" not in request.headers:
        checked = body.checked()
    else:
        checked = await service.in_worker(body.checked)
    idle_s = None if context.models.is_one else checked.idle_s
    context = await leased(request, context, checked.model)
    if idle_s is not None and is_operator(request.scope):
        keep_loaded(context, model, idle_s)
    default = service.limits.truncates_inputs if truncates is None else truncates
    return checked, EncoderCall(request, context, checked.truncates(default=default))


def check_inputs(context: ServerContext, inputs: Sequence[object], *, param: str) -> None:
    """Raise InvalidRequestError where a request has more inputs than one may have."""
    limit = context.service.limits.max_inputs
    if len(inputs) > limit:
        raise InvalidRequestError.at(
            param,
            f"{len(inputs)} of them, and limits.max_inputs is {limit}; send them in several requests",
        )


def json_response(body: bytes) -> Response[bytes]:
    """Return an answer that is JSON already."""
    return Response(body, media_type="application/json")


async def vectors_response(
    before: bytes, vectors: Iterable[object], after: bytes, *, dimensions: int
) -> PartsResponse:
    """Return an answer with a JSON list of many vectors, written between other clients' turns.

    One call that writes millions of numbers would hold the interpreter, on whatever thread, for its whole time.

    Args:
        before: JSON before the items of the list, ``[`` included.
        vectors: The items, made as they are written.
        after: JSON behind the items.
        dimensions: Numbers of an item.
    """
    parts = list[bytes]()
    for part in _parts(vectors, max(1, _PART_NUMBERS // dimensions)):
        parts.append(part)
        await asyncio.sleep(0)
    if len(parts) > 1:
        return PartsResponse([before, *parts, after])
    return PartsResponse([b"".join((before, *parts, after))])


def around_items(answer: msgspec.Struct, field: str) -> tuple[bytes, bytes]:
    """Return an answer's JSON before and behind the items of a field whose list is empty."""
    # In a string a quote has a backslash before it, so that this is nowhere else.
    empty = f'"{field}":[]'.encode()
    before, _, after = msgspec.json.encode(answer).partition(empty)
    return before + empty[:-1], b"]" + after


def _parts(items: Iterable[object], part_items: int) -> Iterator[bytes]:
    """Yield the JSON of items in parts of so many, with commas between all of them."""
    part = list[bytes]()
    for index, item in enumerate(items):
        if index and index % part_items == 0:
            yield b",".join(part) + b","
            part.clear()
        part.append(msgspec.json.encode(item))
    if part:
        yield b",".join(part)
