"""The publisher of KV events: two ZMQ endpoints, and the one thread that serves them.

A subscriber gets messages of three frames: topic, sequence number (8 bytes, big-endian), payload. One
that missed some asks the replay endpoint from a sequence number on; the answers end with number -1.
The last batches are kept once for all: a subscriber is a position among them, so one that does not read
costs nothing, and one that is too slow continues with the oldest that is kept. A full queue drops events.
Both show as a gap in the sequence numbers.

Of several models each has a topic and sequence numbers of its own, and a request for replay names the topic in a third frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque

import structlog

from machd.clock import Clock, Throttle
from machd.kv_events.listener import ZmtpListener
from machd.kv_events.wire import EventEncoding, encoded_batch
from machd.kv_events.zmtp import ZmtpConnection, encoded_message
from machd.link.block_events import BlockStored, KvEvent

MAX_QUEUED_EVENTS = 10_000
_MAX_BATCH_TOKENS = 4096
MAX_KEPT_BATCHES = 10_000
MAX_KEPT_BYTES = 16_777_216

_LAST_SEND_S = 0.2
"""How long subscribers may take to read the last batches of a daemon that ends."""

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES = 8
_SUBSCRIBE = b"\x01"

_MAX_PREFIXES = 1_000
"""Topics that one subscriber may name."""

_MAX_PREFIX_BYTES = 2_000
"""Of one topic that a subscriber names."""


class KvEventPublisher:
    """Owns the endpoints, the thread, the queue before them and the batches that are kept.

    Attributes:
        endpoint: Where subscribers connect; a port that was left to the system is filled in.
        replay_endpoint: Where they ask for what they missed; None without replay.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Clock,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        encoding: EventEncoding = "map",
    ) -> None:
        """Bind the endpoints and start the thread.

        Raises:
            ListenError: An endpoint is taken, or is none.
        """
        self._topic = topic.encode()
        self._clock = clock
        self._report = Throttle(clock)
        self._log = structlog.get_logger("machd.kv_events")
        self._encoding = encoding
        self._queue: deque[tuple[str, KvEvent]] = deque()
        self._lost_counts, self._noted_counts = Counter[str](), Counter[str]()
        self._logged_count = 0
        self._next_sequences = Counter[str]()
        """By model; of the only one by an empty name."""
        self._batches: deque[tuple[bytes, int, bytes]] = deque()
        """Topic, sequence number and payload; the last of them has the position ``_end - 1``."""
        self._batch_bytes = 0
        self._end = 0
        self._is_closing = False
        self._woken = asyncio.Event()
        self._news = asyncio.Event()
        """Set, and replaced by another, when there is a batch more."""
        self._events = ZmtpListener(
            endpoint,
            clock,
            setting="kv_events.endpoint",
            socket_type=b"PUB",
            peer_types={b"SUB", b"XSUB"},
            talk=self._feed,
        )
        self.endpoint = self._events.endpoint
        self._replay, self.replay_endpoint = None, None
        if replay_endpoint is not None:
            try:
                self._replay = ZmtpListener(
                    replay_endpoint,
                    clock,
                    setting="kv_events.replay_endpoint",
                    socket_type=b"ROUTER",
                    peer_types={b"REQ", b"DEALER", b"ROUTER"},
                    talk=self._answer_replays,
                )
            except BaseException:
                self._events.close()
                raise
            self.replay_endpoint = self._replay.endpoint
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="machd-kv-events", daemon=True)
        self._thread.start()

    def put(self, event: KvEvent, model: str = "") -> None:
        """Queue an event, or drop it where the queue is full; never waits. On an engine thread.

        Args:
            event: Of a model's blocks.
            model: The model's name among others; empty for the only one.
        """
        if self._is_closing or len(self._queue) >= MAX_QUEUED_EVENTS:
            self._lost_counts[model] += 1
            return
        self._queue.append((model, event))
        self._wake()

    def close(self, *, within_s: float) -> None:
        """Send what is queued, for ``within_s`` seconds at most, and close the endpoints; blocks."""
        self._is_closing = True
        self._wake()
        self._thread.join(within_s)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self._woken.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._events.start()
        if self._replay is not None:
            self._replay.start()
        try:
            while not self._is_closing:
                await self._woken.wait()
                self._woken.clear()
                await self._publish_queue()
            await self._publish_queue()
            self._announce()
        finally:
            await self._events.stop(within_s=_LAST_SEND_S)
            if self._replay is not None:
                await self._replay.stop(within_s=0)

    async def _publish_queue(self) -> None:
        while self._queue:
            model, batch = self._take()
            self._note_lost(model)
            payload = encoded_batch(self._clock.unix_s(), batch, self._encoding)
            sequence = self._next_sequences[model]
            self._next_sequences[model] += 1
            self._keep(self._topic_of(model), sequence, payload)
            self._announce()
            await asyncio.sleep(0)

    def _topic_of(self, model: str) -> bytes:
        return b"@".join(part for part in (self._topic, model.encode()) if part)

    def _take(self) -> tuple[str, list[KvEvent]]:
        """The oldest events of the model that has the oldest; only this thread takes, so none can go in between."""
        model, _ = self._queue[0]
        batch: list[KvEvent] = []
        tokens = 0
        while self._queue and self._queue[0][0] == model and tokens < _MAX_BATCH_TOKENS:
            _, event = self._queue.popleft()
            tokens += len(event.token_ids) if isinstance(event, BlockStored) else 1
            batch.append(event)
        return model, batch

    def _note_lost(self, model: str) -> None:
        """Where events were dropped, leave a sequence number out, so that subscribers see it."""
        if self._lost_counts[model] > self._noted_counts[model]:
            self._noted_counts[model] = self._lost_counts[model]
            self._next_sequences[model] += 1
        lost_count = self._lost_counts.total()
        if lost_count > self._logged_count and self._report.is_due():
            self._log.warning("kv_events.lost", count=lost_count - self._logged_count)
            self._logged_count = lost_count

    def _keep(self, topic: bytes, sequence: int, payload: bytes) -> None:
        self._batches.append((topic, sequence, payload))
        self._end += 1
        self._batch_bytes += len(payload)
        while len(self._batches) > 1 and (
            len(self._batches) > MAX_KEPT_BATCHES or self._batch_bytes > MAX_KEPT_BYTES
        ):
            self._batch_bytes -= len(self._batches.popleft()[2])

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _feed(self, peer: ZmtpConnection) -> None:
        """Send a subscriber every batch from now on, until it leaves or this end does."""
        prefixes: set[bytes] = set()
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take_subscriptions(peer, prefixes))
            both.create_task(self._send_batches(peer, prefixes))

    async def _take_subscriptions(self, peer: ZmtpConnection, prefixes: set[bytes]) -> None:
        while True:
            for part in await peer.receive():
                prefix = part[1:]
                # Another one can match nothing: what one subscriber can subscribe to is bounded.
                is_bounded = len(prefix) <= _MAX_PREFIX_BYTES and len(prefixes) < _MAX_PREFIXES
                is_of_model = prefix.startswith(self._topic) and is_bounded
                if part and (
                    self._topic.startswith(prefix) or is_of_model or part[:1] != _SUBSCRIBE
                ):
                    (prefixes.add if part[:1] == _SUBSCRIBE else prefixes.discard)(prefix)

    async def _send_batches(self, peer: ZmtpConnection, prefixes: set[bytes]) -> None:
        at = self._end
        while True:
            news = self._news
            while at < self._end:
                at, topic, sequence, payload = self._batch_from(at)
                if topic.startswith(tuple(prefixes)):
                    await peer.send(encoded_message(topic, _packed(sequence), payload))
                    await asyncio.sleep(0)  # sending does not always wait
            if self._is_closing and not self._queue:
                raise ConnectionAbortedError("the daemon ends")
            await news.wait()

    async def _answer_replays(self, peer: ZmtpConnection) -> None:
        """Answer requests for replay, until the peer leaves; what is none is ignored."""
        while True:
            parts = await peer.receive()
            if len(parts) not in {2, 3} or parts[0] or len(parts[1]) != _SEQUENCE_BYTES:
                continue
            first = int.from_bytes(parts[1], "big")
            asked = parts[2] if len(parts) > 2 else self._topic
            end = self._end
            at = end - len(self._batches)
            while at < end:
                at, topic, sequence, payload = self._batch_from(at)
                if topic == asked and sequence >= first:
                    await peer.send(encoded_message(b"", _packed(sequence), payload))
                    await asyncio.sleep(0)
            await peer.send(encoded_message(b"", _END_OF_REPLAY, b""))

    def _batch_from(self, at: int) -> tuple[int, bytes, int, bytes]:
        """Return the batch at a position, or the oldest after it: the next position, topic, sequence number, payload."""
        at = max(at, self._end - len(self._batches))
        return at + 1, *self._batches[at - self._end]


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")
