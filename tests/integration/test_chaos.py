"""Hundreds of clients, two in five of which disconnect, against a daemon that batches."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import threading
from collections.abc import Iterator

import psutil
import pytest
from structlog.testing import capture_logs
from support.clients.chaos_clients import Answer, Errand, Town, answer_of, errands, valid_requests
from support.clients.raw_client import RawAnswer
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.tiny_models import TinyKind

from machd.engine.protocol.engine import Engine
from machd.engine_process.loop import EngineLoop

_CROWD = 64
_FEW = 10
"""Clients at once: in a crowd most wait in the queue, a few are served as they come."""

_REQUESTS_PER_CLIENT = 0.08
_SLOTS = 8
_LIMITS: dict[str, object] = {
    "limits.max_queue": 512,
    "limits.max_body_bytes": 20_000,
    "server.port": 0,
}
_BATCHING: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": _SLOTS,
    "continuous_batching.window_ms": 1,
    "continuous_batching.prefill_chunk_tokens": 32,
}


@pytest.fixture(autouse=True)
def _no_loose_ends(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No task is left behind, and no failure of the server's own is logged."""
    gc.collect()  # what the tests before have left is not this one's
    caplog.set_level(logging.WARNING)
    with capture_logs() as events:
        yield
    gc.collect()
    assert [one.getMessage() for one in caplog.get_records("call")] == []
    assert [one for one in events if one["log_level"] in ("error", "critical")] == []


@pytest.fixture(name="checked_steps")
def _checked_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Hold the scheduler against its invariants after every step; counts the checks."""
    checks = [0]
    note = EngineLoop._note

    def checked(self: EngineLoop, engine: Engine, scheduler: object, *, idle: bool) -> None:
        scheduler.check_invariants()  # type: ignore[attr-defined]
        checks[0] += 1
        note(self, engine, scheduler, idle=idle)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineLoop, "_note", checked)
    return checks


def _engine() -> Engine:
    """The standard tiny model, made on the thread that calls this."""
    from support.engines.tiny_models import tiny_model  # noqa: PLC0415

    from machd.engine.assembly import make_engine  # noqa: PLC0415 - mlx belongs to the engine thread

    return make_engine(tiny_model(TinyKind.STANDARD))


def _run(
    url: str, groups: list[list[Errand]], max_clients: int
) -> list[tuple[Errand, RawAnswer | None]]:
    async def run() -> list[tuple[Errand, RawAnswer | None]]:
        async with asyncio.timeout(CEILING_S):
            return await Town(url, max_clients=max_clients).run(groups)

    return asyncio.run(run())


def _answers(url: str, groups: list[list[Errand]], max_clients: int) -> list[Answer]:
    """The answers of clients that all stay."""
    pairs = _run(url, groups, max_clients)
    return [answer_of(answer) for _, answer in pairs if answer is not None]


def _wait_until_idle(url: str) -> None:
    """Wait for each gauge: they are read one after the other."""
    wait_until(lambda: is_idle(url), "nothing runs and nothing waits")
    wait_until(lambda: scrape(url, "machd_kv_cache_bytes", state="used") == 0, "no KV is in use")


def _threads() -> list[str]:
    pools = ("machd-tokeniser", "asyncio_")  # bounded, and filled as they are needed
    return sorted(one.name for one in threading.enumerate() if not one.name.startswith(pools))


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.long)])
def test_clients_by_the_hundred_leave_nothing_behind(checked_steps: list[int], count: int) -> None:
    """Clients that stay get an empty daemon's answer; slots, KV, threads and files come back."""
    rng = random.Random(20)
    requests = valid_requests(int(count * _REQUESTS_PER_CLIENT), rng)
    alone = _answers_alone(requests)
    groups = errands(requests, count, rng)
    process = psutil.Process()
    with RunningDaemon(_engine, {**_LIMITS, **_BATCHING}) as daemon:
        url = daemon.url
        warm = _answers(url, _everyone_stays(requests), _CROWD)
        assert warm == alone
        _wait_until_idle(url)
        fds, threads = process.num_fds(), _threads()

        half = len(groups) // 2
        pairs = _run(url, groups[:half], _CROWD) + _run(url, groups[half:], _FEW)

        _wait_until_idle(url)
        assert scrape(url, "machd_kv_cache_bytes", state="reserved") == 0
        assert scrape(url, "machd_slots", state="free") == _SLOTS
        wait_until(lambda: process.num_fds() <= fds, "file descriptors are as before")
        assert _threads() == threads
        assert scrape(url, "machd_requests_total", finish_reason="error") == 0
        assert scrape(url, "machd_invariant_violations_total") == 0
        assert scrape(url, "machd_faults_total") == 0
        _check_variety(url, count)
        assert _answers(url, _everyone_stays(requests[::4]), 1) == alone[::4]
    assert len(pairs) == count
    _check(pairs, alone)
    assert sum(errand.conduct.leaves for errand, _ in pairs) >= 0.37 * count
    assert checked_steps[0] > count


def _check_variety(url: str, count: int) -> None:
    """Hold what has happened against what was meant to: departures everywhere, wide batches."""
    aborted_running = scrape(
        url, "machd_requests_total", finish_reason="abort", decode_mode="batched"
    )
    aborted_waiting = scrape(url, "machd_requests_total", finish_reason="abort", decode_mode="none")
    admitted = scrape(url, "machd_request_queue_time_seconds_count")
    prefilled = scrape(url, "machd_request_prefill_time_seconds_count")
    assert aborted_waiting > count / 40
    assert admitted - prefilled > count / 100, "departures during prefill"
    assert aborted_running - (admitted - prefilled) > count / 40, "departures during decode"
    assert scrape(url, "machd_coalesced_requests_total") > count / 40
    steps = scrape(url, "machd_batch_width_count")
    narrow = scrape(url, "machd_batch_width_bucket", le="2.0")
    assert steps - narrow > count / 10, "steps of three rows or more"


def _everyone_stays(requests: list[tuple[str, dict[str, object]]]) -> list[list[Errand]]:
    return [
        [Errand(path, json.dumps(body).encode(), request=number)]
        for number, (path, body) in enumerate(requests)
    ]


def _answers_alone(requests: list[tuple[str, dict[str, object]]]) -> list[Answer]:
    """Return the answers of a daemon that decodes one request at a time."""
    with RunningDaemon(_engine, _LIMITS) as daemon:
        return _answers(daemon.url, _everyone_stays(requests), 1)


def _check(pairs: list[tuple[Errand, RawAnswer | None]], alone: list[Answer]) -> None:
    """Clients that stayed have whole and right answers."""
    for errand, answer in pairs:
        assert (answer is None) == errand.conduct.leaves
        if answer is not None:
            assert answer.status == errand.status, (errand, answer)
            if errand.request is not None:
                assert answer_of(answer) == alone[errand.request], errand
