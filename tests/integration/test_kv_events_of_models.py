"""KV events of several models: a router knows no block of a model whose engine process has ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.clients.cached_answers import Asked, ask_streamed
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import kept_logging
from support.daemon.several_models import several_models
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat, completion
from support.programs.kv_subscriber import KvSubscriber

_PROMPT = "You are a librarian, and answer in one sentence. " * 3
_LONG = "an answer that goes on while its model is replaced " * 6
_QUERY = "size=35000000"


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[SupervisedDaemon]:
    """Two models, and memory for one of them."""
    flags = {
        "cache.prefix": True,
        "cache.memory_mb": 1,
        "cache.block_tokens": 16,
        "kv_events.endpoint": f"ipc://{tmp_path}/e",
        "admin.listen": "127.0.0.1:0",
    }
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    models = dict.fromkeys(("alpha", "beta"), _QUERY)
    section = {"memory_gb": 0.05, "max_turn_s": 0.5}
    with (
        kept_logging(),
        several_models(tmp_path, models, flags=flags, section=section, environ=environ) as daemon,
    ):
        yield daemon


@pytest.fixture(name="alpha")
def _alpha(daemon: SupervisedDaemon, tmp_path: Path) -> Iterator[KvSubscriber]:
    """A subscriber to the first model, which is loaded and has blocks."""
    with KvSubscriber(f"ipc://{tmp_path}/e", topic="alpha") as subscriber:

        def has_blocks() -> bool:
            _complete(daemon, "alpha", f"{subscriber.live_count} {_PROMPT}")
            subscriber.take_waiting()
            return bool(subscriber.blocks.texts)

        wait_until(has_blocks, "the subscription", seen=lambda: subscriber.sequences)
        yield subscriber


def _complete(daemon: SupervisedDaemon, model: str, prompt: str = _PROMPT) -> None:
    body = completion(prompt, max_tokens=1) | {"model": model}
    answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=CEILING_S)
    assert answer.status_code == 200, answer.text


def _knows_nothing(subscriber: KvSubscriber) -> bool:
    subscriber.take_waiting()
    return not subscriber.blocks.texts


def test_a_model_that_gives_way_has_no_blocks(
    daemon: SupervisedDaemon, alpha: KvSubscriber
) -> None:
    """AllBlocksCleared comes with the end of its process, under its topic alone."""
    _complete(daemon, "beta")
    wait_until(lambda: _knows_nothing(alpha), "its blocks are gone")
    assert daemon.processes[0].poll() is not None
    assert alpha.topics == {b"alpha"}

    _complete(daemon, "alpha")
    wait_until(lambda: not _knows_nothing(alpha), "it has blocks again")


def test_a_model_whose_process_is_killed_has_no_blocks(
    daemon: SupervisedDaemon, alpha: KvSubscriber
) -> None:
    """Even if no other process can take its place for now."""
    daemon.refused_starts = 1_000
    daemon.processes[0].send_signal(signal.SIGKILL)
    wait_until(lambda: _knows_nothing(alpha), "its blocks are gone")


def test_a_model_that_is_replaced_says_nothing_under_the_name_of_the_new_one(
    daemon: SupervisedDaemon, alpha: KvSubscriber, tmp_path: Path
) -> None:
    """Its answers go on, and its end clears none of the new one's blocks."""
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(
            ask_streamed, daemon.url, Asked(chat(f"say {_LONG}") | {"model": "alpha"})
        )
        wait_until(lambda: _is_running(daemon), "it is answered")
        config = tmp_path / "machd.toml"
        changed = config.read_text().replace("memory_gb = 0.05", "memory_gb = 0.1")
        config.write_text(changed.replace(_QUERY, f"{_QUERY}&other=1"))
        _reload(daemon, tmp_path)
        wait_until(lambda: len(daemon.processes) > 1, "the new one loads")
        _complete(daemon, "alpha")
        wait_until(lambda: not _knows_nothing(alpha), "the new one has blocks")
        clears = alpha.blocks.clears
        assert long.result(CEILING_S).texts == (_LONG,)
        wait_until(lambda: daemon.processes[0].poll() is not None, "the former one ends")
        _complete(daemon, "beta", "short")
        assert not _knows_nothing(alpha)
        assert alpha.blocks.clears == clears


def _reload(daemon: SupervisedDaemon, directory: Path) -> None:
    (token,) = (directory / "machd").glob("admin-*.token")
    headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
    answer = httpx.post(f"{daemon.admin_url}/admin/reload", headers=headers, timeout=CEILING_S)
    assert answer.json()["changed"], answer.text


def _is_running(daemon: SupervisedDaemon) -> bool:
    page = httpx.get(f"{daemon.url}/metrics").text
    return 'machd_requests_running{model="alpha"} 1.0' in page
