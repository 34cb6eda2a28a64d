"""The ZMQ sockets of KV events, and the one thread that uses them.

A subscriber gets messages of three frames: topic, sequence number (8 bytes, big-endian), payload. One
that missed some asks the replay socket from a sequence number on; the answers end with number -1.
Nothing here waits for a subscriber: ZMQ drops what one does not read, a full queue drops events. Both
show as a gap in the sequence numbers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from pathlib import Path

import structlog
import zmq

from machd.clock import Clock, Throttle
from machd.errors import ListenError
from machd.kv_events.wire import BlockStored, EventEncoding, KvEvent, encoded_batch

MAX_QUEUED_EVENTS = 10_000
_MAX_BATCH_TOKENS = 4096
_MAX_UNREAD_BATCHES = 1000
"""Of one subscriber: about 20 MB, as a batch of so many tokens has 20 KB."""

MAX_REPLAY_BATCHES = 10_000
MAX_REPLAY_BYTES = 16_777_216

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES = 8


class KvEventPublisher:
    """Owns the sockets, the thread, the queue before them and the batches to replay.

    Attributes:
        endpoint: Where subscribers connect; a port that was left to ZMQ is filled in.
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
        """Bind the sockets and start the thread.

        Raises:
            ListenError: An endpoint is taken, or is none.
        """
        self._topic = topic.encode()
        self._clock = clock
        self._report = Throttle(clock)
        self._log = structlog.get_logger("machd.kv_events")
        self._encoding = encoding
        self._queue: deque[KvEvent] = deque()
        self._lost_count = self._noted_count = self._logged_count = 0
        self._next_sequence = 0
        self._batches: deque[tuple[int, bytes]] = deque()
        self._batch_bytes = 0
        self._is_closing = False
        self._context = zmq.Context()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)  # noqa: FBT003 - the standard library's
        self._wake_out.setblocking(False)  # noqa: FBT003 - the standard library's
        try:
            self._events = self._bound(zmq.PUB, endpoint, _MAX_UNREAD_BATCHES, "endpoint")
            self.endpoint = _endpoint_of(self._events)
            self._replay, self.replay_endpoint = None, None
            if replay_endpoint is not None:
                # One whole replay fits, and what a client leaves unread is bounded all the same.
                unread = MAX_REPLAY_BATCHES + 1
                self._replay = self._bound(zmq.ROUTER, replay_endpoint, unread, "replay_endpoint")
                self.replay_endpoint = _endpoint_of(self._replay)
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="machd-kv-events", daemon=True)
        self._thread.start()

    def put(self, event: KvEvent) -> None:
        """Queue an event, or drop it where the queue is full; never waits. On the engine thread."""
        if self._is_closing or len(self._queue) >= MAX_QUEUED_EVENTS:
            self._lost_count += 1
            return
        self._queue.append(event)
        self._wake()

    def close(self, *, within_s: float) -> None:
        """Send what is queued, for ``within_s`` seconds at most, and close the sockets; blocks."""
        self._is_closing = True
        self._wake()
        self._thread.join(within_s)

    def _bound(self, kind: int, endpoint: str, max_unread: int, setting: str) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.linger = 0
        bound.sndhwm = max_unread
        bound.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ListenError(
                f"kv_events.{setting}: cannot listen on {endpoint}: {error.strerror}"
            ) from None
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).chmod(0o600)
        return bound

    def _wake(self) -> None:
        # A full pipe wakes the thread already; a closed one has none any more.
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = dict(poller.poll())
                if self._wake_out.fileno() in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_out.recv(4096)
                self._send_queue()
                if self._replay in ready:
                    self._answer_replay()
            self._send_queue()
        finally:
            self._release()

    def _release(self) -> None:
        self._context.destroy(linger=0)
        self._wake_in.close()
        self._wake_out.close()

    def _send_queue(self) -> None:
        while batch := self._take():
            self._note_lost()
            payload = encoded_batch(self._clock.unix_s(), batch, self._encoding)
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            self._events.send_multipart([self._topic, _packed(sequence), payload])
            if self._replay is not None:
                self._keep(sequence, payload)

    def _take(self) -> list[KvEvent]:
        """The oldest events; only this thread takes, so none can go in between."""
        batch: list[KvEvent] = []
        tokens = 0
        while self._queue and tokens < _MAX_BATCH_TOKENS:
            event = self._queue.popleft()
            tokens += len(event.token_ids) if isinstance(event, BlockStored) else 1
            batch.append(event)
        return batch

    def _note_lost(self) -> None:
        """Where events were dropped, leave a sequence number out, so that subscribers see it."""
        lost_count = self._lost_count
        if lost_count > self._noted_count:
            self._noted_count = lost_count
            self._next_sequence += 1
        if lost_count > self._logged_count and self._report.is_due():
            self._log.warning("kv_events.lost", count=lost_count - self._logged_count)
            self._logged_count = lost_count

    def _keep(self, sequence: int, payload: bytes) -> None:
        self._batches.append((sequence, payload))
        self._batch_bytes += len(payload)
        while len(self._batches) > MAX_REPLAY_BATCHES or self._batch_bytes > MAX_REPLAY_BYTES:
            self._batch_bytes -= len(self._batches.popleft()[1])

    def _answer_replay(self) -> None:
        """Answer one request for replay; what is none is ignored, as a stranger may send anything."""
        assert self._replay is not None, "it has sent something"
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != _SEQUENCE_BYTES:
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._batches:
            if sequence >= first:
                self._replay.send_multipart([client, b"", _packed(sequence), payload])
        self._replay.send_multipart([client, b"", _END_OF_REPLAY, b""])


def _endpoint_of(bound: zmq.Socket[bytes]) -> str:
    return bound.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")
