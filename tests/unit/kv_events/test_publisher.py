"""The publisher sends every event once, replays the last ones and waits for no subscriber."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.programs.kv_subscriber import KvSubscriber

from machd.clock import SystemClock
from machd.errors import ListenError
from machd.kv_events import publisher as publisher_module
from machd.kv_events.publisher import KvEventPublisher
from machd.kv_events.publishing import is_reachable_from_outside, open_kv_events
from machd.kv_events.wire import encoded_batch
from machd.link.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from machd.settings.cache import CacheSettings
from machd.settings.kv_events import KvEventsSettings


@pytest.fixture(name="endpoints")
def _endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"


@pytest.fixture(name="publisher")
def _publisher(endpoints: tuple[str, str]) -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(
        endpoints[0], SystemClock(), replay_endpoint=endpoints[1], topic="kv"
    )
    yield publisher
    publisher.close(within_s=CEILING_S)


def _stored(number: int) -> BlockStored:
    return BlockStored((number,), None, (number, number), 2)


def _greet(publisher: KvEventPublisher, subscriber: KvSubscriber) -> None:
    """Publish until the subscription is in force."""

    def heard() -> bool:
        publisher.put(AllBlocksCleared())
        return bool(subscriber.take_waiting())

    wait_until(heard, "the subscription")


def test_events_reach_a_subscriber_in_order(
    publisher: KvEventPublisher, endpoints: tuple[str, str]
) -> None:
    """Three frames: the topic, a number that grows by one, the batch."""
    with KvSubscriber(*endpoints, topic="kv") as subscriber:
        _greet(publisher, subscriber)
        for number in range(5):
            publisher.put(_stored(number))
        publisher.put(BlockRemoved((2,)))
        wait_until(
            lambda: bool(subscriber.take_waiting()) or set(subscriber.blocks.texts) == {0, 1, 3, 4},
            "all events",
        )
        wait_until(
            lambda: not subscriber.take_waiting() and set(subscriber.blocks.texts) == {0, 1, 3, 4},
            "all events",
        )
        assert subscriber.topics == {b"kv"}
        first = subscriber.sequences[0]
        assert subscriber.sequences == list(range(first, first + len(subscriber.sequences)))


def test_replay_sends_everything_from_a_number_on(
    publisher: KvEventPublisher, endpoints: tuple[str, str]
) -> None:
    """A late subscriber learns all; one that missed a batch asks from there."""
    with KvSubscriber(*endpoints) as subscriber:
        for number in range(3):
            publisher.put(_stored(number))
        wait_until(lambda: publisher._next_sequences[""] > 0 and not publisher._queue, "sent")
        subscriber.replay(0)
        assert set(subscriber.blocks.texts) == {0, 1, 2}
        assert subscriber.replay(publisher._next_sequences[""]) == []
    with KvSubscriber(*endpoints) as subscriber:
        assert len(subscriber.replay(publisher._next_sequences[""] - 1)) == 1


def test_replay_forgets_the_oldest_batches(
    publisher: KvEventPublisher, endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer is bounded in batches and in bytes."""
    monkeypatch.setattr(publisher_module, "MAX_KEPT_BATCHES", 10)
    monkeypatch.setattr(publisher_module, "_MAX_BATCH_TOKENS", 1)
    for number in range(50):
        publisher.put(_stored(number))
    wait_until(lambda: publisher._next_sequences[""] == 50, "sent")
    with KvSubscriber(*endpoints) as subscriber:
        subscriber.replay(0)
        assert subscriber.sequences == list(range(40, 50))
    monkeypatch.setattr(publisher_module, "MAX_KEPT_BYTES", 0)
    publisher.put(_stored(50))
    wait_until(lambda: publisher._next_sequences[""] == 51, "sent")
    with KvSubscriber(*endpoints) as subscriber:
        subscriber.replay(0)
        assert subscriber.sequences == [50], "the last one stays"


def test_a_request_for_replay_that_is_none_is_ignored(
    publisher: KvEventPublisher, endpoints: tuple[str, str]
) -> None:
    """Strangers may send anything; the next request is answered."""
    publisher.put(_stored(1))
    wait_until(lambda: publisher._next_sequences[""] == 1, "sent")
    with KvSubscriber(*endpoints) as stranger:
        for frames in ([b""], [b"", b"12"], [b"", b"1" * 9], [b"x" * 8], [b"x", b"1" * 8]):
            stranger._replay.send_multipart(frames)
        assert len(stranger.replay(0)) == 1


def test_a_full_queue_drops_events_and_leaves_a_gap(
    endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the thread is held nothing waits and nothing grows; subscribers see a missing number."""
    monkeypatch.setattr(publisher_module, "MAX_QUEUED_EVENTS", 3)
    held, release = threading.Event(), threading.Event()

    def encode(*arguments: object) -> bytes:
        held.set()
        release.wait(CEILING_S)
        return encoded_batch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(publisher_module, "encoded_batch", encode)
    with capture_logs() as lines:
        publisher = KvEventPublisher(endpoints[0], SystemClock(), replay_endpoint=endpoints[1])
        publisher.put(_stored(0))
        assert held.wait(CEILING_S)
        for number in range(1, 10):
            publisher.put(_stored(number))
        assert len(publisher._queue) == 3
        release.set()
        with KvSubscriber(*endpoints) as subscriber:
            wait_until(lambda: publisher._next_sequences[""] == 3, "sent")
            subscriber.replay(0)
            assert subscriber.sequences == [0, 2]
            assert set(subscriber.blocks.texts) == {0, 1, 2, 3}
        publisher.close(within_s=CEILING_S)
    assert [(one["event"], one["count"]) for one in lines] == [("kv_events.lost", 6)]


def test_a_subscriber_that_reads_nothing_costs_no_other_one(
    publisher: KvEventPublisher, endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All events are sent while it stalls, and another subscriber has the last one."""
    monkeypatch.setattr(publisher_module, "_MAX_BATCH_TOKENS", 1)
    with KvSubscriber(endpoints[0]) as stalled, KvSubscriber(endpoints[0]) as reader:
        _greet(publisher, stalled)
        _greet(publisher, reader)
        begin = publisher._next_sequences[""]
        for number in range(5000):
            publisher.put(_stored(number))
            wait_until(lambda: len(publisher._queue) < 100, "room")
        wait_until(lambda: publisher._next_sequences[""] >= begin + 5000, "all sent")
        publisher.put(_stored(9999))
        wait_until(
            lambda: bool(reader.take_waiting()) or 9999 in reader.blocks.texts, "the last event"
        )


def test_close_ends_the_thread_and_frees_the_endpoints(endpoints: tuple[str, str]) -> None:
    """The same endpoints can be bound again, and late events go nowhere."""
    for _ in range(2):
        publisher = KvEventPublisher(endpoints[0], SystemClock(), replay_endpoint=endpoints[1])
        publisher.close(within_s=CEILING_S)
        assert not publisher._thread.is_alive()
        publisher.put(_stored(1))
        assert not publisher._queue


def test_an_endpoint_that_is_taken_is_named(tmp_path: Path) -> None:
    """The setting is in the message; no thread is left."""
    first = KvEventPublisher("tcp://127.0.0.1:0", SystemClock())
    before = threading.active_count()
    with pytest.raises(ListenError, match=r"kv_events\.endpoint: cannot listen on tcp://"):
        KvEventPublisher(first.endpoint, SystemClock())
    with pytest.raises(ListenError, match=r"kv_events\.replay_endpoint"):
        KvEventPublisher(f"ipc://{tmp_path}/e", SystemClock(), replay_endpoint=first.endpoint)
    assert threading.active_count() == before
    first.close(within_s=CEILING_S)


def test_a_socket_file_is_for_the_daemons_user_alone(
    publisher: KvEventPublisher,  # noqa: ARG001 - it has bound them
    endpoints: tuple[str, str],
) -> None:
    """Mode 0600 on both."""
    for one in endpoints:
        assert Path(one.removeprefix("ipc://")).stat().st_mode & 0o777 == 0o600


def test_events_of_earlier_subscribers_are_arrays() -> None:
    """A name and the fields in their order, as vLLM had them before maps."""
    events = (_stored(7), BlockRemoved((7, 8)), AllBlocksCleared())
    batch = msgspec.msgpack.decode(encoded_batch(1.5, events, "array"))
    assert batch == [
        1.5,
        [
            ["BlockStored", [7], None, [7, 7], 2, None, "GPU", None],
            ["BlockRemoved", [7, 8], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


@pytest.mark.parametrize(
    ("endpoint", "is_reachable"),
    [
        ("tcp://127.0.0.1:5557", False),
        ("tcp://[::1]:5557", False),
        ("tcp://localhost:5557", False),
        ("ipc:///run/machd/kv", False),
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://10.0.0.7:5557", True),
        ("tcp://eth0:5557", True),
    ],
)
def test_endpoints_beyond_loopback_are_known(endpoint: str, *, is_reachable: bool) -> None:
    """A warning is logged for them."""
    assert is_reachable_from_outside(endpoint) is is_reachable


def test_without_an_endpoint_nothing_is_opened() -> None:
    """The default."""
    assert open_kv_events(KvEventsSettings(), CacheSettings(), SystemClock()) is None


def test_each_of_several_models_has_a_topic_and_numbers_of_its_own(
    publisher: KvEventPublisher, endpoints: tuple[str, str]
) -> None:
    """A subscriber of one sees no gap when another's blocks change, and a replay has that topic's batches alone."""
    with (
        KvSubscriber(*endpoints, topic="kv@coder") as coder,
        KvSubscriber(endpoints[0], topic="kv@") as both,
    ):

        def heard() -> bool:
            publisher.put(AllBlocksCleared(), "coder")
            return bool(coder.take_waiting() and both.take_waiting())

        wait_until(heard, "the subscriptions")
        for number in range(6):
            publisher.put(_stored(number), ("coder", "chat")[number % 2])
        wait_until(
            lambda: not coder.take_waiting() and set(coder.blocks.texts) == {0, 2, 4},
            "the events of one model",
        )
        wait_until(
            lambda: not both.take_waiting() and both.topics == {b"kv@coder", b"kv@chat"},
            "the events of both",
        )
        assert coder.topics == {b"kv@coder"}
        first = coder.sequences[0]
        assert coder.sequences == list(range(first, first + len(coder.sequences)))

    with KvSubscriber(*endpoints) as late:
        assert late.replay(0) == [], "the topic alone is no model's"
        late._replay.send_multipart([b"", (0).to_bytes(8, "big"), b"kv@chat"])
        assert late._replay.recv_multipart()[1] == (0).to_bytes(8, "big")


def test_models_without_a_topic_go_by_their_names(endpoints: tuple[str, str]) -> None:
    """Where no topic is set the first frame is the model's name."""
    publisher = KvEventPublisher(endpoints[0], SystemClock())
    with KvSubscriber(endpoints[0], topic="cod") as subscriber:

        def heard() -> bool:
            publisher.put(AllBlocksCleared(), "coder")
            return bool(subscriber.take_waiting())

        wait_until(heard, "the subscription")
        assert subscriber.topics == {b"coder"}
    publisher.close(within_s=CEILING_S)
