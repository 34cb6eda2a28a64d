"""KV events as they are on the wire, in msgpack, as vLLM's subscribers decode them.

Names and order of the fields are the format. A batch is an array in every version. An event is a map
with its class's name under ``type`` since vLLM 0.24, and an array that begins with that name before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from machd.link.block_events import KvEvent

EventEncoding = Literal["map", "array"]


def encoded_batch(unix_s: float, events: Sequence[KvEvent], encoding: EventEncoding) -> bytes:
    """Return the payload of one message: time, events and data-parallel rank.

    The rank is always 0: each daemon is a worker of its own.
    """
    if encoding == "map":
        return msgspec.msgpack.encode((unix_s, events, 0))
    arrays = [(type(one).__name__, *msgspec.structs.astuple(one)) for one in events]
    return msgspec.msgpack.encode((unix_s, arrays, 0))
