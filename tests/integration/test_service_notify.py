"""What a service manager hears of a real process, from its start to its end."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from dialogue import chat
from notify_socket import NotifySocket
from polling import CEILING_S, wait_until
from scraping import scrape
from service_daemon import ServiceDaemon

from machd.clock import SystemClock

_CHAT = "/v1/chat/completions"
_INTERVAL_S = 2.0


@pytest.fixture(name="ear")
def _ear() -> Iterator[NotifySocket]:
    with NotifySocket() as ear:
        yield ear


def _environ(ear: NotifySocket, **more: str) -> dict[str, str]:
    interval_us = round(_INTERVAL_S * 1_000_000)
    return {"NOTIFY_SOCKET": ear.path, "WATCHDOG_USEC": str(interval_us), **more}


def _ask(url: str, content: str, **fields: object) -> httpx.Response:
    return httpx.post(url + _CHAT, json=chat(content, **fields), timeout=CEILING_S)


def test_from_loading_to_the_end(ear: NotifySocket) -> None:
    """Loading asks for time, READY comes once requests are answered, and a stop says how long."""
    flags = {"limits.drain_timeout_s": 30}
    with ServiceDaemon(flags, _environ(ear, LOAD_S="0.5")) as daemon:
        ear.wait_for("STATUS", "loading the model")
        assert int(ear.values("EXTEND_TIMEOUT_USEC")[0]) >= 10_000_000
        assert not ear.values("READY")
        assert not ear.values("WATCHDOG")
        url = daemon.read_url()
        assert _ask(url, "say hi").status_code == 200

        daemon.terminate()
        assert daemon.wait() == 0
        stopping = ear.wait_for("STOPPING", "1")
    assert int(stopping.fields["EXTEND_TIMEOUT_USEC"]) > 30_000_000
    assert stopping.fields["STATUS"] == "draining, 0 requests open"
    assert len(ear.values("READY")) == 1


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
        environ = _environ(ear, LOAD_S="0.3")
        with ServiceDaemon(flags, environ, descriptors=handed):
            ear.wait_for("READY", "1")
            answer = _ask(f"http://127.0.0.1:{port}", "say at once")
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"]["content"] == "at once"


def test_a_stalled_engine_stops_the_watchdog(tmp_path: Path) -> None:
    """Signs of life come every quarter, and none later than half the interval after a stall.

    They come again when the engine moves again.
    """
    stall = tmp_path / "stall"
    clock = SystemClock()
    with NotifySocket() as ear, ServiceDaemon(environ=_environ(ear, STALL_FILE=str(stall))) as one:
        url = one.read_url()
        wait_until(lambda: len(ear.values("WATCHDOG")) >= 4, "an idle daemon lives")
        signs = [sign.at_s for sign in ear.all_of("WATCHDOG")]
        assert max(b - a for a, b in itertools.pairwise(signs)) < _INTERVAL_S / 2

        stall.touch()
        asking = threading.Thread(target=_ask, args=(url, "say hello"))
        asking.start()
        # The step that hangs began before the request could be seen as running.
        wait_until(lambda: scrape(url, "machd_requests_running") == 1, "the request runs")
        stalled_s = clock.monotonic_s()

        def silent() -> bool:
            return clock.monotonic_s() - ear.all_of("WATCHDOG")[-1].at_s > _INTERVAL_S

        wait_until(silent, "the signs of life stop")
        last_s = ear.all_of("WATCHDOG")[-1].at_s
        assert last_s - stalled_s < _INTERVAL_S / 2
        assert httpx.get(f"{url}/v1/models").status_code == 200, "the event loop still runs"

        stall.unlink()
        wait_until(lambda: ear.all_of("WATCHDOG")[-1].at_s > last_s, "the engine lives again")
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
    """Slots, waiting requests and what is open while it drains are told, once a second at most."""
    flags = {"continuous_batching.max_b": 2, "limits.drain_timeout_s": 20}
    with ServiceDaemon(flags, _environ(ear)) as daemon:
        url = daemon.read_url()
        ear.wait_for("READY", "1")
        asking = [
            threading.Thread(target=_ask, args=(url, f"hi {i}"), kwargs={"max_tokens": 500})
            for i in range(3)
        ]
        for thread in asking:
            thread.start()
        ear.wait_for("STATUS", "2 of 2 slots, 1 waiting")
        daemon.terminate()
        ear.wait_for("STATUS", "draining, 3 requests open")
        for thread in asking:
            thread.join(CEILING_S)
        assert daemon.wait() == 0
    told = [one.at_s for one in ear.heard if set(one.fields) == {"STATUS"}]
    assert all(b - a > 0.8 for a, b in itertools.pairwise(told))


def test_a_hung_engine_ends_the_process_with_70(tmp_path: Path) -> None:
    """Where nobody watches the daemon ends itself, so that launchd's KeepAlive restarts it."""
    stall = tmp_path / "stall"
    stall.touch()
    flags = {"engine.stall_timeout_s": 1.0}
    with ServiceDaemon(flags, {"STALL_FILE": str(stall)}) as daemon:
        answer = _ask(daemon.read_url(), "say hello", stream=True)
        assert "engine_fault" in answer.text
        assert daemon.wait() == 70
