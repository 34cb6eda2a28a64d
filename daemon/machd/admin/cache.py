"""``POST /admin/cache/clear``: forgets what is kept for later requests."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import Any

import structlog
from litestar import Request
from litestar.di import NamedDependency
from msgspec import Struct

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.admin.status import StoredResponses, stored_responses
from machd.engine.protocol.memory import MemoryReading
from machd.errors import ConflictError, InvalidRequestError, UnavailableError


class CacheCleared(Struct, frozen=True, kw_only=True):
    """Result of a clearing.

    Attributes:
        blocks: Of the prefix cache, that left memory or the disk, each counted once; those of
            running sequences stay.
        deleted_blocks: Those that were deleted on disk, a file each.
        deleted_bytes: What their files took.
        disk_bytes: What this model's files on disk take afterwards; null without a disk tier.
    """

    responses: StoredResponses
    blocks: int
    deleted_blocks: int = 0
    deleted_bytes: int = 0
    disk_bytes: int | None = None


_CLEAR_TIMEOUT_S = 20.0
"""How long the engine may take to come by: it looks at what it is told between two steps."""

_READ_TIMEOUT_S = 3.0
"""How long a look at the disk may take afterwards: memory is read once a second while steps run."""

_POLL_S = 0.02

_FLAGS = {"true": True, "false": False}


@endpoint("POST /admin/cache/clear", CacheCleared, also=(400, 409))
async def clear_cache(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> CacheCleared:
    """Forget the stored responses, the prefix cache and an encoder's vectors, with disk=true also on disk.

    Of several models, what is kept is that of the default one, or of the one that the query names; responses are all.
    """
    is_disk_included = _FLAGS.get(request.query_params.get("disk", "false"))
    if is_disk_included is None:
        raise InvalidRequestError.at("disk", "send true or false, or leave it out")
    if is_disk_included:
        _check_disk(admin)
    responses = stored_responses(admin)
    admin.responses.clear()
    admin.served.vectors.clear()
    with contextlib.closing(admin.model.hold()):  # it stays loaded until that is done
        cleared = await _clear_prefixes(admin, responses, is_disk_included=is_disk_included)
    structlog.get_logger("machd.admin").info(
        "cache.cleared",
        responses=responses.count,
        blocks=cleared.blocks,
        deleted_blocks=cleared.deleted_blocks,
        disk_bytes=cleared.disk_bytes,
    )
    return cleared


async def _clear_prefixes(
    admin: AdminContext, responses: StoredResponses, *, is_disk_included: bool
) -> CacheCleared:
    """Have the engine's thread forget; nothing where there is no prefix cache.

    Raises:
        UnavailableError: The engine does not come by. It does what it was told when it does.
    """
    before = admin.served.snapshot
    if before.prefix is None:
        return CacheCleared(responses=responses, blocks=0)
    readings: list[MemoryReading] = []

    def note(_done: Future[int]) -> None:
        # On the engine's thread: whatever it reads after this one is of a time after the clearing.
        readings.append(admin.served.snapshot.memory)

    cleared = admin.served.link.clear_prefixes(is_disk_included=is_disk_included)
    cleared.add_done_callback(note)
    # Shielded: a request that waits no longer must not cancel what the engine's thread is to resolve.
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
        return CacheCleared(responses=responses, blocks=blocks)
    await _read_again(admin, readings[0])
    after = admin.served.snapshot
    assert after.prefix is not None, "it is there as long as the model"
    assert after.memory.disk is not None, "it is there as long as the engine"
    disk_bytes = after.memory.disk.bytes
    if not is_disk_included:
        return CacheCleared(responses=responses, blocks=blocks, disk_bytes=disk_bytes)
    # Never less than nothing: what was answered meanwhile is written, too.
    return CacheCleared(
        responses=responses,
        blocks=blocks,
        deleted_blocks=max(before.prefix.saved_blocks - after.prefix.saved_blocks, 0),
        deleted_bytes=max(disk.bytes - disk_bytes, 0),
        disk_bytes=disk_bytes,
    )


async def _read_again(admin: AdminContext, reading: MemoryReading) -> None:
    """Wait until the engine's thread has read its memory anew; where it is busy, not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_READ_TIMEOUT_S):
            while admin.served.snapshot.memory is reading:  # noqa: ASYNC110 - a thread's, that sets no event
                await asyncio.sleep(_POLL_S)


def _check_disk(admin: AdminContext) -> None:
    """Raise ConflictError where there is a directory that this daemon does not use, or not now."""
    section = admin.settings.cache
    if not section.disk_dir or admin.served.snapshot.memory.disk is not None:
        return
    if not (admin.model.is_one or admin.model.is_ready):
        raise ConflictError(
            f"the model {admin.model.name!r} is not loaded, and nothing was cleared: load it first, or clear "
            "without disk"
        )
    model = admin.served.model
    why = f"{model.model_id} has no prefix cache" if section.prefix else "cache.prefix is off"
    raise ConflictError(
        f"{why}, so that cache.disk_dir is not used, and nothing was cleared: delete what that "
        "directory holds yourself, or clear without disk"
    )
