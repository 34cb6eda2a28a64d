"""Notifications to a service manager from a real process, from its start to its end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.daemon.service_daemon import ServiceDaemon
from support.engines.dialogue import chat
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate
from support.programs.notify_socket import NotifySocket

from machd.clock import SystemClock

_CHAT = "/v1/chat/completions"
_INTERVAL_S = 0.2


@pytest.fixture(name="ear")
def _ear() -> Iterator[NotifySocket]:
    with NotifySocket() as ear:
        yield ear


def _environ(ear: NotifySocket, **more: str) -> dict[str, str]:
    interval_us = round(_INTERVAL_S * 1_000_000)
    return {"NOTIFY_SOCKET": ear.path, "WATCHDOG_USEC": str(interval_us), **more}


def _ask(url: str, content: str, **fields: object) -> httpx.Response:
    return httpx.post(url + _CHAT, json=chat(content, **fields), timeout=CEILING_S)


def test_from_loading_to_the_end(ear: NotifySocket, tmp_path: Path) -> None:
    """Loading asks for time, READY and signs of life come after it, and a stop says how long."""
    loading = tmp_path / "loading"
    loading.touch()
    flags = {"limits.drain_timeout_s": 30}
    with ServiceDaemon(flags, _environ(ear, LOAD_FILE=str(loading))) as daemon:
        ear.wait_for("STATUS", "loading the model")
        assert int(ear.values("EXTEND_TIMEOUT_USEC")[0]) >= 10_000_000
        assert not ear.values("READY")
        assert not ear.values("WATCHDOG")
        loading.unlink()
        url = daemon.read_url()
        assert _ask(url, "say hi").status_code == 200
        ear.wait_for("WATCHDOG", "1")

        daemon.terminate()
        assert daemon.wait() == 0
        stopping = ear.wait_for("STOPPING", "1")
    assert int(stopping.fields["EXTEND_TIMEOUT_USEC"]) > 30_000_000
    assert stopping.fields["STATUS"] == "draining, 0 requests open"
    assert len(ear.values("READY")) == 1


def test_stopping_is_said_when_the_notice_begins(ear: NotifySocket) -> None:
    """STOPPING goes out with the signal, and asks for the time of the notice and of the drain."""
    flags = {"limits.drain_timeout_s": 30, "limits.drain_notice_s": 3600}
    with ServiceDaemon(flags, _environ(ear)) as daemon:
        url = daemon.read_url()
        daemon.terminate()
        stopping = ear.wait_for("STOPPING", "1")
        assert int(stopping.fields["EXTEND_TIMEOUT_USEC"]) > 3_630_000_000
        assert stopping.fields["STATUS"].startswith("leaving, ")
        assert _ask(url, "say hi").status_code == 200
        daemon.terminate()
        assert daemon.wait() == 0


@pytest.mark.parametrize("is_inherited", [False, True])
def test_ready_comes_when_the_first_request_would_be_answered(
    ear: NotifySocket, *, is_inherited: bool
) -> None:
    """A request sent in the moment of READY is answered with 200, on either kind of socket."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        if is_inherited:
            listening.listen()
            handed, flags = [listening.fileno()], {}
        else:
            listening.close()
            handed, flags = [], {"server.port": port}
        with ServiceDaemon(flags, _environ(ear), descriptors=handed):
            ear.wait_for("READY", "1")
            answer = _ask(f"http://127.0.0.1:{port}", "say at once")
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"]["content"] == "at once"


def test_a_stalled_engine_stops_the_watchdog(ear: NotifySocket) -> None:
    """Signs of life come each quarter of the interval, none while a step hangs, and again after it."""
    clock, gate = ManualClock(), StepGate()

    def signs() -> int:
        return len(ear.values("WATCHDOG"))

    with (
        RunningDaemon(
            lambda: FakeEngine(before_step=gate), environ=_environ(ear), clock=clock
        ) as daemon,
        gate,
    ):
        for count in range(1, 5):
            wait_until(lambda count=count: signs() == count, "an idle daemon lives")  # type: ignore[misc]
            clock.advance(_INTERVAL_S / 4)
        asking = threading.Thread(target=_ask, args=(daemon.url, "say hello"))
        asking.start()
        gate.wait_until_held()
        wait_until(lambda: signs() == 5, "the last quarter's sign of life")
        statuses = len(ear.values("STATUS"))
        clock.advance(10 * _INTERVAL_S)
        wait_until(lambda: len(ear.values("STATUS")) > statuses, "the daemon looks at itself")
        assert signs() == 5
        assert httpx.get(f"{daemon.url}/v1/models").status_code == 200, "the event loop still runs"

        gate.open()
        wait_until(lambda: signs() > 5, "the engine lives again")
        asking.join(CEILING_S)


def test_a_reload_is_reported_whatever_comes_of_it(ear: NotifySocket, tmp_path: Path) -> None:
    """SIGHUP is answered by RELOADING with the time, then READY; a refusal shows in the status."""
    config = tmp_path / "machd.toml"
    config.write_text("[limits]\nmax_n = 3\n")
    clock = SystemClock()
    with ServiceDaemon(environ=_environ(ear), config_path=config) as daemon:
        daemon.read_url()
        before_us = clock.monotonic_s() * 1_000_000
        config.write_text("[limits]\nmax_n = 4\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(ear.values("READY")) == 2, "the reload is over")
        reloading = ear.wait_for("RELOADING", "1")
        assert before_us < int(reloading.fields["MONOTONIC_USEC"]) < clock.monotonic_s() * 1_000_000
        assert "refused" not in ear.all_of("READY")[-1].fields["STATUS"]

        config.write_text("[limits]\nmax_n = 0\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(ear.values("READY")) == 3, "the second reload is over")
        assert "the last reload was refused" in ear.all_of("READY")[-1].fields["STATUS"]
        order = [name for one in ear.heard for name in ("RELOADING", "READY") if name in one.fields]
        assert order == ["READY", "RELOADING", "READY", "RELOADING", "READY"]


def test_the_status_follows_the_work(ear: NotifySocket) -> None:
    """Slots, waiting requests and what is open while the daemon drains are told."""
    flags = {"continuous_batching.max_b": 2}
    with ServiceDaemon(flags, _environ(ear)) as daemon:
        url = daemon.read_url()
        ear.wait_for("READY", "1")
        asking = [
            threading.Thread(target=_ask, args=(url, f"hi {i}"), kwargs={"max_tokens": 90_000})
            for i in range(3)
        ]
        for thread in asking:
            thread.start()
        ear.wait_for("STATUS", "2 of 2 slots, 1 waiting")
        daemon.terminate()
        ear.wait_for("STATUS", "draining, 3 requests open")
        daemon.terminate()
        for thread in asking:
            thread.join(CEILING_S)
        assert daemon.wait() == 0


def test_a_hung_engine_ends_the_process_with_70(tmp_path: Path) -> None:
    """A daemon without a watchdog ends itself, so that launchd's KeepAlive restarts it."""
    stall, config = tmp_path / "stall", tmp_path / "machd.toml"
    stall.touch()
    config.write_text("[engine]\nstall_timeout_s = 3600\n")
    with (
        ServiceDaemon(environ={"STALL_FILE": str(stall)}, config_path=config) as daemon,
        RawClient(daemon.read_url()) as client,
    ):
        client.post_json(_CHAT, chat("say hello", stream=True))
        wait_until(lambda: scrape(daemon.url, "machd_requests_running") == 1, "the step hangs")
        # From here on nothing in the daemon has to be quick.
        config.write_text("[engine]\nstall_timeout_s = 1\n")
        daemon.process.send_signal(signal.SIGHUP)
        assert b"engine_fault" in client.read_to_end()
        assert daemon.wait() == 70
