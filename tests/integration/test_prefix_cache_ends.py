"""The prefix cache while a daemon starts and while it stops."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.serve_process import ServeProcess
from support.engines.fake_engine import FakeEngine, spelled

from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.engine import Engine
from machd.engine_process.inbox import Inbox, Message, Stop
from machd.engine_process.loop import EngineLoop
from machd.scheduler.events import Event
from machd.scheduler.scheduler import Scheduler


def test_answer_is_on_disk_when_a_stop_follows_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans that write the last answer are made although the stop came before them."""
    take, put = EngineLoop._take_messages, Inbox.put
    is_stop_there = threading.Event()

    def hold_and_take(
        loop: EngineLoop, engine: Engine, scheduler: Scheduler, *, wait_s: float
    ) -> list[Event]:
        if scheduler.running_count:
            has_run.append(True)
        if has_run and not scheduler.running_count:
            assert is_stop_there.wait(CEILING_S), "the daemon is stopped once it has answered"
        return take(loop, engine, scheduler, wait_s=wait_s)

    def watched_put(inbox: Inbox, message: Message) -> None:
        put(inbox, message)
        if isinstance(message, Stop):
            is_stop_there.set()

    monkeypatch.setattr(EngineLoop, "_take_messages", hold_and_take)
    monkeypatch.setattr(Inbox, "put", watched_put)
    disk: dict[bytes, Any] = {}
    has_run: list[bool] = []
    flags = {"cache.memory_mb": 100, "cache.disk_dir": str(tmp_path), "model.path": "fake"}
    engine = FakeEngine(spelled("hello there general"), disk=disk)
    with RunningDaemon(lambda: engine, flags) as daemon:
        body = {"model": "fake", "prompt": "x" * 30, "max_tokens": 8}
        httpx.post(f"{daemon.url}/v1/completions", json=body).raise_for_status()
        daemon.stop()
    saved: list[SavedBlock] = [one for one, _ in disk.values()]
    assert sum(len(one.token_ids) for one in saved) == 30 + 8 - 1


def test_reload_while_the_model_loads_keeps_the_cache_limit(tmp_path: Path) -> None:
    """The limits of changed settings follow from the machine's memory, not from zero."""
    model, settings = tmp_path / "tiny", tmp_path / "machd.toml"
    write_tiny_llama(model)
    text = f'[model]\npath = "{model}"\n[cache]\nmax_entries = '
    settings.write_text(text + "100\n")
    daemon = ServeProcess("--config", str(settings))
    with daemon.started():
        daemon.wait_for("daemon.listening")
        settings.write_text(text + "101\n")
        daemon.process.send_signal(signal.SIGHUP)
        url = str(daemon.wait_for("daemon.ready")["url"])

        def prefix() -> dict[str, Any]:
            stats: dict[str, Any] = httpx.get(f"{url}/v1/cache/stats").json()["prefix"]
            return stats

        body = {"model": "tiny", "prompt": "one two three " * 20, "max_tokens": 2}
        httpx.post(f"{url}/v1/completions", json=body).raise_for_status()
        wait_until(lambda: prefix()["blocks"] > 0, "something is kept")
        assert prefix()["limit_bytes"] > 0
