"""What machd's ``/v1/cache/stats`` say, read from outside."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from machd_bench.server import Server

_SETTLED_AFTER_S = 0.2
_READINGS_AT_MOST = 25


class PrefixStats(Struct, frozen=True):
    """The part ``prefix``."""

    bytes: int = 0
    bytes_saved: int = 0
    shared_blocks: int = 0
    evictions: int = 0


class KvStats(Struct, frozen=True):
    """The part ``kv``."""

    reserved_bytes: int = 0


class CacheStats(Struct, frozen=True):
    """What is read of it; a part that the server does not have is None."""

    prefix: PrefixStats | None = None
    kv: KvStats | None = None


async def read_cache(server: Server) -> CacheStats:
    """What it says now; nothing if it is not machd."""
    return await server.look_up("/v1/cache/stats", CacheStats) or CacheStats()


async def read_settled_prefix(server: Server) -> PrefixStats | None:
    """The prefix cache once it stays as it is: what an answer leaves is kept after its end."""
    reading = (await read_cache(server)).prefix
    for _ in range(_READINGS_AT_MOST):
        before = reading
        await asyncio.sleep(_SETTLED_AFTER_S)
        reading = (await read_cache(server)).prefix
        if reading == before:
            break
    return reading
