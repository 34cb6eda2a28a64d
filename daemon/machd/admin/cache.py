"""``POST /admin/cache/clear`` and ``POST /admin/cache/warm``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog
from litestar import Request, post
from litestar.di import NamedDependency

from machd.admin.cache_wire import (
    MAX_WARM_BODY_BYTES,
    CacheCleared,
    CacheWarmed,
    WarmedPrompt,
    WarmPrompt,
    WarmRequest,
)
from machd.admin.config import body_timeout_s
from machd.admin.context import AdminContext
from machd.admin.status import stored_responses
from machd.admin.warming import Warmed, Warmer
from machd.dialects.wire.errors import error_body
from machd.engine.protocol.engine import MemoryReading
from machd.errors import ConflictError, InvalidRequestError, NotFoundError, UnavailableError
from machd.http.authentication import ANONYMOUS
from machd.http.bodies import read_json
from machd.http.departure import while_connected
from machd.http.stamps import request_id

_CLEAR_TIMEOUT_S = 20.0
"""How long the engine may take to come by: it looks at what it is told between two steps."""

_READ_TIMEOUT_S = 3.0
"""How long a look at the disk may take afterwards: memory is read once a second while steps run."""

_POLL_S = 0.02

_FLAGS = {"true": True, "false": False}


@post("/admin/cache/clear", status_code=200)
async def clear_cache(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> CacheCleared:
    """Forget the stored responses and the prefix cache; what is on disk only with ``disk=true``."""
    is_disk_included = _FLAGS.get(request.query_params.get("disk", "false"))
    if is_disk_included is None:
        raise InvalidRequestError("disk: send true or false, or leave it out", param="disk")
    if is_disk_included:
        _check_disk(admin)
    responses = stored_responses(admin)
    admin.responses.clear()
    cleared = await _clear_prefixes(admin, is_disk_included=is_disk_included)
    structlog.get_logger("machd.admin").info(
        "cache.cleared",
        responses=responses.count,
        blocks=cleared.blocks,
        deleted_blocks=cleared.deleted_blocks,
        disk_bytes=cleared.disk_bytes,
    )
    return CacheCleared(
        responses=responses,
        blocks=cleared.blocks,
        deleted_blocks=cleared.deleted_blocks,
        deleted_bytes=cleared.deleted_bytes,
        disk_bytes=cleared.disk_bytes,
    )


@post("/admin/cache/warm", status_code=200, request_max_body_size=MAX_WARM_BODY_BYTES)
async def warm_cache(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> CacheWarmed:
    """Compute prompts one after the other; a client that leaves ends it.

    A prompt that fails says so in its place, and the others are computed all the same.
    """
    body = WarmRequest.decoded(await read_json(request, timeout_s=body_timeout_s(admin)))
    admin.lifecycle.check_accepting()
    _check_cache(admin)
    warmer = Warmer(
        admin.service,
        admin.clock,
        client=_client(admin, body.client),
        salt=body.cache_salt,
        request_id=request_id(request.scope),
        limit_bytes=lambda: _limit_bytes(admin),
    )
    warmed = _wire(await while_connected(request.receive, _warm(warmer, body.prompts)))
    structlog.get_logger("machd.admin").info(
        "cache.warmed",
        prompts=len(warmed.prompts),
        failed=warmed.failed,
        prompt_tokens=warmed.prompt_tokens,
        cached_tokens=warmed.cached_tokens,
        duration_s=warmed.duration_s,
    )
    return warmed


@dataclass(frozen=True, slots=True)
class _Cleared:
    """What left the prefix cache, and what is still on disk; see :class:`CacheCleared`."""

    blocks: int = 0
    deleted_blocks: int = 0
    deleted_bytes: int = 0
    disk_bytes: int | None = None


async def _clear_prefixes(admin: AdminContext, *, is_disk_included: bool) -> _Cleared:
    """Have the engine's thread forget; nothing where there is no prefix cache.

    Raises:
        UnavailableError: The engine does not come by. It does what it was told when it does.
    """
    before = admin.loop.snapshot
    if before.prefix is None:
        return _Cleared()
    readings: list[MemoryReading] = []

    def note(_done: Future[int]) -> None:
        # On the engine's thread: whatever it reads after this one is of a time after the clearing.
        readings.append(admin.loop.snapshot.memory)

    cleared = admin.loop.clear_prefixes(is_disk_included=is_disk_included)
    cleared.add_done_callback(note)
    # Shielded: who waits no longer must not cancel what the engine's thread is to resolve.
    done = asyncio.wrap_future(cleared)
    try:
        async with asyncio.timeout(_CLEAR_TIMEOUT_S):
            blocks = await asyncio.shield(done)
    except TimeoutError:
        raise UnavailableError(
            f"the engine has been busy for {_CLEAR_TIMEOUT_S:g} s; the prefix cache is cleared as "
            "soon as its step is over"
        ) from None
    disk = before.memory.disk
    if disk is None:
        return _Cleared(blocks)
    await _read_again(admin, readings[0])
    after = admin.loop.snapshot
    assert after.prefix is not None, "it is there as long as the model"
    assert after.memory.disk is not None, "it is there as long as the engine"
    disk_bytes = after.memory.disk.bytes
    if not is_disk_included:
        return _Cleared(blocks, disk_bytes=disk_bytes)
    # Never less than nothing: what was answered meanwhile is written, too.
    return _Cleared(
        blocks,
        deleted_blocks=max(before.prefix.saved_blocks - after.prefix.saved_blocks, 0),
        deleted_bytes=max(disk.bytes - disk_bytes, 0),
        disk_bytes=disk_bytes,
    )


async def _read_again(admin: AdminContext, reading: MemoryReading) -> None:
    """Wait until the engine's thread has read its memory anew; where it is busy, not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READ_TIMEOUT_S):
            while admin.loop.snapshot.memory is reading:  # noqa: ASYNC110 - a thread's, that sets no event
                await asyncio.sleep(_POLL_S)


def _check_disk(admin: AdminContext) -> None:
    """Refuse where there is a directory that this daemon does not use.

    Raises:
        NotReadyError, EngineFaultError: There is no model to speak of.
        ConflictError: There is; the message says what to do.
    """
    section = admin.configuration.settings.cache
    if not section.disk_dir or admin.loop.snapshot.memory.disk is not None:
        return
    model = admin.service.model
    why = f"{model.model_id} has no prefix cache" if section.prefix else "cache.prefix is off"
    raise ConflictError(
        f"{why}, so that cache.disk_dir is not used, and nothing was cleared: delete what that "
        "directory holds yourself, or clear without disk"
    )


def _check_cache(admin: AdminContext) -> None:
    """Refuse where nothing would be kept.

    Raises:
        NotReadyError, EngineFaultError: There is no model to speak of.
        ConflictError: There is no prefix cache, or no room in it; the message says why.
    """
    model = admin.service.model
    if not admin.configuration.settings.cache.prefix:
        raise ConflictError(
            "cache.prefix is off, so that nothing would be kept; turn it on and restart the daemon"
        )
    if admin.loop.snapshot.prefix is None:
        verdicts = admin.loop.judge(model)
        raise ConflictError(
            f"this model's prompts cannot be kept, so that there is no prefix cache: "
            f"{verdicts.prefix_cache.reason}"
        )
    if _limit_bytes(admin) == 0:
        raise ConflictError(
            "the prefix cache may take no memory now, so that nothing would be kept: set "
            "cache.memory_mb to more than 0, or free memory of the machine"
        )


def _limit_bytes(admin: AdminContext) -> int | None:
    """What the prefix cache may take now; None where there is none, or only texts are limited."""
    prefix = admin.loop.snapshot.prefix
    return None if prefix is None else prefix.limit_bytes


def _client(admin: AdminContext, asked: str | None) -> str:
    """In whose name the prompts are computed.

    Raises:
        NotFoundError: No API key is called that.
        ConflictError: Every key keeps its prompts to itself, and none is named.
    """
    names = admin.client_names() or frozenset({ANONYMOUS})
    if asked is not None:
        if asked not in names:
            raise NotFoundError("client: no API key has this name", param="client")
        return asked
    is_shared = admin.configuration.settings.cache.namespace == "shared"
    if is_shared or names == {ANONYMOUS}:
        return ANONYMOUS
    raise ConflictError(
        "every API key keeps its prompts to itself (cache.namespace is key): name the key whose "
        "requests are to find these as client",
        param="client",
    )


async def _warm(warmer: Warmer, prompts: Sequence[WarmPrompt]) -> list[Warmed]:
    return [await warmer.warm(prompt) for prompt in prompts]


def _wire(warmed: Sequence[Warmed]) -> CacheWarmed:
    return CacheWarmed(
        prompts=[
            WarmedPrompt(
                prompt_tokens=one.prompt_tokens,
                cached_tokens=one.cached_tokens,
                duration_s=round(one.duration_s, 6),
                error=None if one.error is None else error_body(one.error).error,
            )
            for one in warmed
        ],
        prompt_tokens=sum(one.prompt_tokens for one in warmed),
        cached_tokens=sum(one.cached_tokens for one in warmed),
        failed=sum(one.error is not None for one in warmed),
        duration_s=round(sum(one.duration_s for one in warmed), 6),
    )
