"""KV events of a running daemon agree with what its prefix cache gives to prompts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import completion, told
from support.engines.fake_engine import FakeEngine
from support.programs.kv_subscriber import KvSubscriber

from machd.errors import ListenError, SettingsError
from machd.scheduler.prefix_cache import PrefixCache

BLOCK_SIZE = 16
_BEGINNINGS = [
    "You are a librarian, and answer in one sentence. " * 3,
    "You are a librarian, and you answer in rhymes. " * 3,
    "Translate what follows into the language of birds. " * 3,
]


def _flags(directory: Path, **more: object) -> dict[str, object]:
    return {
        "cache.memory_mb": 1,
        "cache.block_tokens": BLOCK_SIZE,
        "continuous_batching.enabled": True,
        "kv_events.endpoint": f"ipc://{directory}/e",
        "kv_events.replay_endpoint": f"ipc://{directory}/r",
        **more,
    }


def _subscriber(directory: Path) -> KvSubscriber:
    return KvSubscriber(f"ipc://{directory}/e", f"ipc://{directory}/r")


def _prompts(count: int, seed: int) -> list[str]:
    chosen = random.Random(seed)
    return [
        chosen.choice(_BEGINNINGS) + "".join(chosen.choices("abcdef ", k=chosen.randint(1, 90)))
        for _ in range(count)
    ]


def _complete(http: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=completion(prompt, max_tokens=1, **fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"])


@pytest.fixture(name="caches")
def _caches(monkeypatch: pytest.MonkeyPatch) -> list[PrefixCache]:
    """Every prefix cache that a daemon of this process makes."""
    made: list[PrefixCache] = []

    class Noted(PrefixCache):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    monkeypatch.setattr("machd.engine_process.scheduling.PrefixCache", Noted)
    return made


def _texts_in_memory(cache: PrefixCache) -> list[tuple[int, ...]]:
    """Every whole block's text up to its end, once for each namespace that has it."""
    texts: list[tuple[int, ...]] = []
    for block in cache._tree:
        text = tuple(token for one in block.path() for token in one.token_ids)
        first = block.start // BLOCK_SIZE + 1
        counts = range(first, block.stop // BLOCK_SIZE + 1) if block.is_held else ()
        texts += [text[: count * BLOCK_SIZE] for count in counts]
    return texts


def _settle(subscriber: KvSubscriber, cache: PrefixCache, *, least_blocks: int = 0) -> None:
    """Wait until nothing runs, and what the subscriber knows is what the cache has: so many blocks, or more."""

    def agrees() -> bool:
        subscriber.take_waiting()
        subscriber.replay(subscriber.next_sequence)
        try:
            expected = sorted(_texts_in_memory(cache))
        except RuntimeError:  # the engine thread has just changed the tree
            return False
        is_at_rest = not cache._rows and not cache.changes and len(expected) >= least_blocks
        return is_at_rest and sorted(subscriber.blocks.texts.values()) == expected

    wait_until(agrees, "the subscriber's view", seen=lambda: subscriber.sequences[-3:])


def test_events_agree_with_the_cache_after_random_requests(
    tmp_path: Path, caches: list[PrefixCache]
) -> None:
    """What a router foretells for a prompt is what the daemon then reuses, to the block."""
    with (
        _subscriber(tmp_path) as subscriber,
        AdminDaemon(tmp_path, lambda: FakeEngine(told), _flags(tmp_path)) as daemon,
    ):
        for prompt in _prompts(60, seed=1):
            _complete(daemon.http, prompt)
        _settle(subscriber, caches[0])
        stats = daemon.http.get("/v1/cache/stats").json()["prefix"]
        assert stats["evictions"], "blocks came and went"
        assert subscriber.blocks.texts
        tried = agreed = 0
        for prompt in _prompts(25, seed=2):
            tokens = tuple(prompt.encode())
            foretold = subscriber.blocks.found_tokens(tokens[:-1], BLOCK_SIZE)
            cached = _complete(daemon.http, prompt)["prompt_tokens_details"]["cached_tokens"]
            tried += 1
            agreed += cached // BLOCK_SIZE * BLOCK_SIZE == foretold
            _settle(subscriber, caches[0])
        assert agreed == tried
        assert subscriber.live_count, "not everything was replayed"
        assert subscriber.sequences == sorted(set(subscriber.sequences)), "no gap, no repetition"


def test_clearing_the_cache_clears_the_routers_view(
    tmp_path: Path, caches: list[PrefixCache]
) -> None:
    """AllBlocksCleared is told, and the prompts after it are stored anew."""
    with (
        _subscriber(tmp_path) as subscriber,
        AdminDaemon(tmp_path, lambda: FakeEngine(told), _flags(tmp_path)) as daemon,
    ):
        _complete(daemon.http, _BEGINNINGS[0])
        _settle(subscriber, caches[0])
        assert subscriber.blocks.texts
        clears = subscriber.blocks.clears
        daemon.admin.post("/admin/cache/clear").raise_for_status()
        _settle(subscriber, caches[0])
        assert not subscriber.blocks.texts
        assert subscriber.blocks.clears == clears + 1
        _complete(daemon.http, _BEGINNINGS[0])
        _settle(subscriber, caches[0])
        assert subscriber.blocks.texts


def test_a_late_subscriber_learns_all_by_replay(tmp_path: Path, caches: list[PrefixCache]) -> None:
    """It asks from number 0 on, and has what an early one has."""
    with (
        _subscriber(tmp_path) as early,
        AdminDaemon(tmp_path, lambda: FakeEngine(told), _flags(tmp_path)) as daemon,
    ):
        for prompt in _prompts(20, seed=3):
            _complete(daemon.http, prompt)
        _settle(early, caches[0])
        with _subscriber(tmp_path) as late:
            late.replay(0)
            assert late.blocks.texts == early.blocks.texts
            assert late.sequences[0] == 0


def test_a_stalled_subscriber_stalls_no_request(tmp_path: Path) -> None:
    """Requests are answered and all events published while a subscription is not read."""
    with (
        _subscriber(tmp_path) as stalled,
        AdminDaemon(tmp_path, lambda: FakeEngine(told), _flags(tmp_path)) as daemon,
    ):
        greetings = iter(_prompts(10_000, seed=5))

        def is_subscribed() -> bool:
            _complete(daemon.http, next(greetings))
            stalled.take_waiting()
            return stalled.live_count > 0

        wait_until(is_subscribed, "the subscription")
        for prompt in _prompts(150, seed=4):
            _complete(daemon.http, prompt)
        with _subscriber(tmp_path) as reader:
            reader.replay(0)
            assert reader.blocks.texts


def test_salts_and_keys_are_in_no_event(tmp_path: Path, caches: list[PrefixCache]) -> None:
    """Equal prompts under two salts have hashes that share nothing, and no salt is sent."""
    with (
        _subscriber(tmp_path) as subscriber,
        AdminDaemon(tmp_path, lambda: FakeEngine(told), _flags(tmp_path)) as daemon,
    ):
        for salt in ("xyzzy-salt-one", "xyzzy-salt-two"):
            _complete(daemon.http, _BEGINNINGS[0], cache_salt=salt)
        # An answer is told before the last of its blocks are kept.
        blocks = (len(_BEGINNINGS[0].encode()) - 1) // BLOCK_SIZE
        _settle(subscriber, caches[0], least_blocks=2 * blocks)
        texts = subscriber.blocks.texts
        assert len(texts) == 2 * len(set(texts.values()))
        subscriber._replay.send_multipart([b"", (0).to_bytes(8, "big")])
        frames: list[bytes] = []
        while not frames or frames[-1] != b"":
            frames = subscriber._replay.recv_multipart()
            assert b"xyzzy" not in b"".join(frames)


def test_an_open_endpoint_is_logged_as_a_warning(tmp_path: Path) -> None:
    """Any client that reaches the endpoint can read prompts."""
    flags = {"kv_events.endpoint": "tcp://0.0.0.0:0"}
    with capture_logs() as lines, RunningDaemon(flags=flags):
        pass
    (line,) = [one for one in lines if one["event"] == "kv_events.listening"]
    assert line["log_level"] == "warning"
    assert line["is_exposed"] is True
    with capture_logs() as lines, RunningDaemon(flags=_flags(tmp_path)):
        pass
    (line,) = [one for one in lines if one["event"] == "kv_events.listening"]
    assert line["log_level"] == "info"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"kv_events.endpoint": "127.0.0.1:5557"}, "is not tcp://ADDRESS:PORT or ipc://PATH"),
        ({"kv_events.endpoint": "tcp://127.0.0.1:99999"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events.endpoint": "inproc://x"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events.endpoint": "ipc://@abstract"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events.endpoint": "ipc://*"}, "is not tcp://ADDRESS:PORT"),
        ({"kv_events.replay_endpoint": "tcp://127.0.0.1:1"}, "needs events to send again"),
        (
            {"kv_events.endpoint": "tcp://127.0.0.1:1", "cache.prefix": False},
            "events are about the prefix cache",
        ),
    ],
)
def test_settings_without_sense_are_refused(flags: dict[str, object], problem: str) -> None:
    """At start, with what is wrong."""
    with pytest.raises(SettingsError) as wrong, RunningDaemon(flags=flags):
        pass
    assert problem in str(wrong.value.problems)


def test_a_taken_endpoint_stops_the_start() -> None:
    """The daemon does not serve without the events that it was told to publish."""
    flags = {"kv_events.endpoint": "tcp://127.0.0.1:0"}
    with capture_logs() as lines, RunningDaemon(flags=flags):
        (line,) = [one for one in lines if one["event"] == "kv_events.listening"]
        second = RunningDaemon(flags={"kv_events.endpoint": line["endpoint"]})
        with pytest.raises(ListenError, match=r"kv_events\.endpoint"), second:
            pass
