"""A subscriber of KV events, written from the format and not from machd's own classes.

The fields are those that vLLM documents for its subscribers, with the types that these decode.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from support.clocks.polling import CEILING_S


class Stored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    """Blocks that a worker has now."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    """Blocks that a worker has no more."""

    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    """A worker that has none."""


class Batch(msgspec.Struct, array_like=True):
    """One message's payload."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


_BATCH = msgspec.msgpack.Decoder(Batch)


class WorkerBlocks:
    """A router's view of a worker: the text of every block, by hash. It notes what makes no sense."""

    def __init__(self) -> None:
        """Start knowing nothing."""
        self.texts: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}
        self.clears = 0

    def apply(self, event: Any) -> None:
        """Take in an event: one decoded here, or one of machd's before it is encoded."""
        match type(event).__name__.removeprefix("Block"):
            case "Stored":
                self._store(event)
            case "Removed":
                for one in event.block_hashes:
                    assert one in self.texts, "what is removed was stored"
                    assert one not in self.parents.values(), "children go before their parents"
                    del self.texts[one], self.parents[one]
            case _:
                self.clears += 1
                self.texts.clear()
                self.parents.clear()

    def _store(self, event: Any) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes), "blocks have one size"
        for at, one in enumerate(event.block_hashes):
            assert one not in self.texts, "a block is stored once"
            assert parent is None or parent in self.texts, "parents are stored before children"
            before = () if parent is None else self.texts[parent]
            self.texts[one] = before + tuple(event.token_ids[at * size : (at + 1) * size])
            self.parents[one] = parent
            parent = one

    def found_tokens(self, prompt: tuple[int, ...], block_size: int) -> int:
        """Tokens of a prompt's beginning that the worker has in whole blocks."""
        known = set(self.texts.values())
        found = 0
        while prompt[: found + block_size] in known and found + block_size <= len(prompt):
            found += block_size
        return found


class KvSubscriber:
    """Two sockets: a subscription, and one for replay. A context manager.

    It does as a router does: what came before its subscription, or was dropped, it asks for.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """Connect; endpoints need not be bound yet."""
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.subscribe(topic)
        self._events.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._has_replay = replay_endpoint is not None
        if replay_endpoint is not None:
            self._replay.connect(replay_endpoint)
        self.blocks = WorkerBlocks()
        self.sequences: list[int] = []
        self.topics: set[bytes] = set()
        self.next_sequence = 0
        self.live_count = 0

    def __enter__(self) -> KvSubscriber:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close both sockets."""
        self._context.destroy(linger=0)

    def take_waiting(self) -> list[Batch]:
        """Take in what has arrived; never waits."""
        batches: list[Batch] = []
        while self._events.poll(0):
            topic, sequence, payload = self._events.recv_multipart()
            self.topics.add(topic)
            self.live_count += 1
            if self._has_replay and int.from_bytes(sequence, "big") > self.next_sequence:
                batches += self.replay(self.next_sequence)
            batches += self._take(sequence, payload)
        return batches

    def replay(self, first: int) -> list[Batch]:
        """Ask for the batches from a sequence number on, and take them in."""
        self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[Batch] = []
        while True:
            assert self._replay.poll(int(CEILING_S * 1000)), "the replay ends"
            empty, sequence, payload = self._replay.recv_multipart()
            assert empty == b""
            if sequence == (-1).to_bytes(8, "big", signed=True):
                assert payload == b""
                return batches
            batches += self._take(sequence, payload)

    def _take(self, sequence: bytes, payload: bytes) -> list[Batch]:
        """Take in a batch, unless it is known."""
        assert len(sequence) == 8
        number = int.from_bytes(sequence, "big")
        if number < self.next_sequence:
            return []
        batch = _BATCH.decode(payload)
        self.sequences.append(number)
        self.next_sequence = number + 1
        for event in batch.events:
            self.blocks.apply(event)
        return [batch]
