"""Caches and adapters: what one adapter has computed is found by no other, and not by the model itself.

Blocks of the scripted engine know the adapters of the row that they were copied from, and end the daemon's answers if a row
of others is opened from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.checkpoints.served_adapters import write_adapter
from support.clocks.polling import wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import completion, told
from support.engines.fake_blocks import FakeDisk
from support.engines.fake_engine import FakeEngine
from support.programs.kv_subscriber import KvSubscriber, Stored

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.engine_process.startup_guard import Measures
from machd.generations import service
from machd_probes.catalogue import STAND_IN_CHECKS

_LONG = "You are a librarian, and answer in one sentence. " * 6
_BLOCK_TOKENS = 16


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    directory = tmp_path / "adapters"
    write_adapter(directory / "support", 1)
    write_adapter(directory / "style", 2)
    write_adapter(directory / "copy", 1)
    return directory


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model have passed every check, so that rows with adapters share batches."""
    evidence = Evidence(0, 0.0, 0.0, 8)
    results = tuple(ProbeResult(name, Outcome.PASSED, "", evidence) for name in STAND_IN_CHECKS)
    measures = Measures(recall=lambda _engine: results)
    monkeypatch.setattr(RunningDaemon, "_measures", lambda _daemon: measures)


def _running(tmp_path: Path, disk: FakeDisk | None = None, **flags: object) -> AdminDaemon:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return AdminDaemon(
        tmp_path,
        lambda: FakeEngine(told, disk=disk),
        {
            "cache.memory_mb": 100,
            "continuous_batching.enabled": True,
            "adapters.directory": str(tmp_path / "adapters"),
            **named,
        },
    )


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path, directory: Path) -> Iterator[AdminDaemon]:
    del directory  # it is read at the start
    with _running(tmp_path) as running:
        yield running


def _cached(daemon: AdminDaemon, model: str, text: str = _LONG, **fields: Any) -> int:
    """Cached tokens of a completion."""
    body = completion(text, max_tokens=1, **fields) | {"model": model}
    answer = daemon.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _misses(daemon: AdminDaemon) -> list[int]:
    """Cached tokens of one prompt for the model and for each adapter, one after the other."""
    listed = daemon.http.get("/lora-adapters").json()
    [support] = [one["id"] for one in listed if one["path"] == "support"]
    half = [{"id": support, "scale": 0.5}]
    return [
        _cached(daemon, "fake"),
        _cached(daemon, "support"),
        _cached(daemon, "style"),
        _cached(daemon, "fake", lora=half),
    ]


def test_prompt_is_found_by_its_own_adapter_and_scale_alone(daemon: AdminDaemon) -> None:
    """The first of each computes it whole, the second finds it; the same content under two names shares."""
    assert _misses(daemon) == [0, 0, 0, 0]
    assert min(_misses(daemon)) == len(_LONG) - 1
    assert _cached(daemon, "copy") == len(_LONG) - 1


@pytest.mark.parametrize("is_planted", [False, True])
def test_namespace_without_the_adapter_would_be_noticed(
    daemon: AdminDaemon, monkeypatch: pytest.MonkeyPatch, *, is_planted: bool
) -> None:
    """The planted fault: with the adapters left out of the namespace, the engine is given blocks of another one."""
    if is_planted:
        whole = service.cache_namespace
        monkeypatch.setattr(
            service,
            "cache_namespace",
            lambda client, salt, *, is_shared, adapters: whole(client, salt, is_shared=is_shared),  # noqa: ARG005 - the fault
        )
    with capture_logs() as logs:
        assert _misses(daemon)[0] == 0

    failed = [one for one in logs if one["event"] == "engine.step_failed"]
    assert bool(failed) is is_planted


def test_changed_files_find_nothing_of_the_former_ones(
    daemon: AdminDaemon, directory: Path
) -> None:
    """A file that is changed back finds its own prompts again."""
    assert [_cached(daemon, "support") for _ in range(2)] == [0, len(_LONG) - 1]

    write_adapter(directory / "support", 3)

    assert _cached(daemon, "support") == 0
    write_adapter(directory / "support", 1)
    assert _cached(daemon, "support") == len(_LONG) - 1


def test_disk_tier_gives_each_adapter_its_own_prompt_after_a_restart(
    tmp_path: Path, directory: Path
) -> None:
    """The hash of the content stands in the digests of blocks, so it holds for another process."""
    disk: FakeDisk = {}
    blocks = str(tmp_path / "blocks")
    with _running(tmp_path, disk, cache__disk_dir=blocks) as first:
        assert _cached(first, "support") == 0
    assert disk

    write_adapter(directory / "style", 4)
    with _running(tmp_path, disk, cache__disk_dir=blocks) as second:
        assert [_cached(second, one) for one in ("fake", "style")] == [0, 0]
        assert _cached(second, "support") > 0


def test_warmed_prompt_is_found_by_the_adapter_that_it_was_warmed_for(
    daemon: AdminDaemon,
) -> None:
    """The query names the adapter, as requests do."""
    warmed = daemon.admin.post(
        "/admin/cache/warm", params={"model": "fake:support"}, json={"prompts": [{"prompt": _LONG}]}
    )
    assert warmed.status_code == 200, warmed.text
    assert warmed.json()["failed"] == 0

    assert _cached(daemon, "fake") == 0
    assert _cached(daemon, "style") == 0
    assert _cached(daemon, "support") == len(_LONG) - 1


def test_decisions_of_adapters_share_nothing(daemon: AdminDaemon) -> None:
    """System One's questions share the state's prompt among one another, not with another adapter's."""
    body = {
        "model": "fake",
        "state": _LONG,
        "questions": {"urgent": {"type": "noul", "instructions": "Is it urgent?"}},
    }

    def cached(model: str) -> int:
        answer = daemon.http.post("/v1/systemone", json=body | {"model": model})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return int(answer.json()["usage"]["cached_tokens"])

    own = [cached("fake"), cached("support"), cached("style")]
    assert len(set(own)) == 1
    assert cached("support") > own[1]


def test_routers_are_told_the_adapter_of_each_block(tmp_path: Path, directory: Path) -> None:
    """VLLM's fields have its name, and a number that the same content has anywhere; both are empty for the model's."""
    del directory  # it is read at the start
    endpoints = (f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    flags: dict[str, Any] = {
        "kv_events__endpoint": endpoints[0],
        "kv_events__replay_endpoint": endpoints[1],
    }
    stored: list[Any] = []
    with (
        KvSubscriber(*endpoints) as subscriber,
        _running(tmp_path, cache__block_tokens=_BLOCK_TOKENS, **flags) as daemon,
    ):
        for model in ("fake", "support", "style"):
            _cached(daemon, model)
            _cached(daemon, model, f"{_LONG} and more of it, in another block")

        def has_all() -> bool:
            batches = [*subscriber.take_waiting(), *subscriber.replay(subscriber.next_sequence)]
            stored.extend(
                one for batch in batches for one in batch.events if isinstance(one, Stored)
            )
            return len(stored) >= 6

        wait_until(has_all, "blocks of all three", seen=lambda: len(stored))

    told_of = {(one.lora_name, one.lora_id is None) for one in stored}
    assert told_of == {(None, True), ("support", False), ("style", False)}
    assert len({one.lora_id for one in stored}) == 3
    hashes = [one for event in stored for one in event.block_hashes]
    assert len(set(hashes)) == len(hashes)


def test_equal_requests_of_two_adapters_are_computed_apart(daemon: AdminDaemon) -> None:
    """Coalescing joins requests of one content and scale alone; a greedy pair of others has two answers."""
    bodies = [
        completion("letters", max_tokens=12, temperature=0) | {"model": model}
        for model in ("fake", "support", "style", "copy", "support")
    ]
    with httpx.Client(base_url=daemon.http.base_url) as http:
        texts = [
            http.post("/v1/completions", json=one).json()["choices"][0]["text"] for one in bodies
        ]

    assert len(set(texts)) == 3
    assert texts[1] == texts[3] == texts[4]
