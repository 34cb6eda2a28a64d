"""Decoding of clients' images and videos, beside the event loop.

Each file takes a turn, with clients in rotation. A decoding for which no request waits any more is killed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from machd.engine.protocol.media import Media, MediaBounds, MediaProcessor
from machd.errors import OverloadedError
from machd.generations.media_fetch import FetchRules, fetch
from machd.generations.turns import Turns
from machd.generations.workers import Workers
from machd.request.media import MediaSource

_THREADS = 2
"""One process decodes; meanwhile another file may be fetched."""


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Limits of a request's images and videos.

    Attributes:
        fetch: Allowed URLs, and the largest size of a file.
        bounds: Limits of decoding.
    """

    fetch: FetchRules
    bounds: MediaBounds


class Decodings:
    """Running and waiting decodings. Lives on the event loop."""

    def __init__(self) -> None:
        """Start the threads.

        Raises:
            RuntimeError: The system has no room for them.
        """
        self._workers = Workers(_THREADS, name="machd-images")
        self._turns = Turns(_THREADS)

    async def decode(
        self,
        source: MediaSource,
        processor: MediaProcessor,
        rules: MediaRules,
        *,
        client: str,
        namespace: str,
        wait_s: float,
    ) -> Media:
        """Fetch, decode and process an image or a video; cancel it to stop waiting.

        Args:
            source: The file as the client sent it.
            processor: The model's processor.
            rules: Limits.
            client: Client in whose turn it is decoded.
            namespace: Only requests of one namespace share the results for a file.
            wait_s: Longest wait for a turn.

        Raises:
            InvalidRequestError: It cannot be used.
            OverloadedError: No turn came in time, or there is no room for the process.
        """
        is_gone = threading.Event()
        decode = partial(
            decode_media, source, processor, rules, namespace, lambda: not is_gone.is_set()
        )
        try:
            async with self._turns.of(client, wait_s=wait_s):
                return await asyncio.get_running_loop().run_in_executor(self._workers, decode)
        except TimeoutError:
            raise OverloadedError(
                f"{source.param}: other images and videos took more than {wait_s:g} s; try again later"
            ) from None
        finally:
            is_gone.set()

    def close(self) -> None:
        """Shut the threads down."""
        self._workers.shutdown()


def decode_media(
    source: MediaSource,
    processor: MediaProcessor,
    rules: MediaRules,
    namespace: str,
    is_wanted: Callable[[], bool] | None = None,
) -> Media:
    """Fetch, decode and process an image or a video; for a worker thread.

    Raises:
        InvalidRequestError: It cannot be used; the message names its field and says why.
        OverloadedError: The system has no room for the process that decodes.
    """
    fetched = fetch(source, rules.fetch)
    return processor.process(fetched, rules.bounds, namespace, is_wanted)
