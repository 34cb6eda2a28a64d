"""Clients that leave, and clients that stop reading, at every point of a request's life."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import wait_until
from support.daemon.connection_ages import ConnectionAges
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import chat, completion, sse_text, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode, at_prefill
from support.every_run import sampled

from machd.engine.protocol.step import StepPlan

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_ENDLESS = 50_000
_CONTEXT_TOKENS = 1_000_000

_WAYS = {"reset": RawClient.reset, "close": RawClient.close}
_LEAVING = pytest.mark.parametrize("leave", _WAYS.values(), ids=list(_WAYS))


@pytest.fixture(autouse=True, scope="module")
def _frozen_before() -> None:
    """Spare what earlier tests keep from being looked through after each test of these."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_loose_ends(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test may leave a task behind, or make the server log a failure of its own."""
    caplog.set_level(logging.WARNING)
    with capture_logs() as events:
        yield
    gc.collect()
    assert [one.getMessage() for one in caplog.get_records("call")] == []
    assert [one for one in events if one["log_level"] in ("error", "critical")] == []


def _start(gate: StepGate, **flags: object) -> RunningDaemon:
    settings = {name.replace("__", "."): value for name, value in flags.items()}
    return RunningDaemon(
        lambda: FakeEngine(told, before_step=gate, context_tokens=_CONTEXT_TOKENS), settings
    )


def _disconnects(url: str) -> float:
    return scrape(url, "machd_aborts_total", reason="client_disconnected")


def _wait_until_noticed(url: str, count: int = 1) -> None:
    wait_until(lambda: _disconnects(url) == count, "the daemon notices that the client has left")


def _check_served(daemon: RunningDaemon) -> None:
    """A request of three steps is served, and nothing is left running or waiting."""
    with RawClient(daemon.url) as client:
        client.post_json(_CHAT, chat("hi", max_tokens=3))
        answer = client.read_answer()
    assert answer.status == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    wait_until(lambda: is_idle(daemon.url), "nothing runs and nothing waits")


@dataclass(frozen=True)
class _Phase:
    """A point in a request's life: what is asked, which steps are held, and how many pass first."""

    name: str
    body: dict[str, object]
    holds: Callable[[StepPlan], bool]
    passed: int


_PHASES = [
    _Phase("first step", chat("hi", stream=True, max_tokens=_ENDLESS), at_prefill, 0),
    _Phase("prefill", chat("x" * 2000, stream=True, max_tokens=_ENDLESS), at_prefill, 1),
    _Phase("last chunk", chat("x" * 1000, stream=True, max_tokens=_ENDLESS), at_prefill, 1),
    _Phase("first decode", chat("hi", stream=True, max_tokens=_ENDLESS), at_decode, 0),
    _Phase("decode", chat("hi", stream=True, max_tokens=_ENDLESS), at_decode, 3),
    _Phase("last token", chat("hi", stream=True, max_tokens=5), at_decode, 3),
    _Phase("end of text", chat("say abc", stream=True), at_decode, 2),
    _Phase("whole, prefill", chat("x" * 2000, max_tokens=_ENDLESS), at_prefill, 1),
    _Phase("whole, decode", chat("hi", max_tokens=_ENDLESS), at_decode, 3),
    _Phase("whole, last token", chat("hi", max_tokens=5), at_decode, 3),
]


_EVERY_RUN = {f"{one.name}, {list(_WAYS)[place % 2]}" for place, one in enumerate(_PHASES)}
"""Every phase in one way, each way in each kind of phase."""


@pytest.mark.parametrize(
    ("phase", "leave"),
    sampled(
        [(phase, leave) for phase in _PHASES for leave in _WAYS.values()],
        _EVERY_RUN,
        [f"{phase.name}, {way}" for phase in _PHASES for way in _WAYS],
    ),
)
def test_a_client_that_leaves_frees_its_slot_before_the_next_step(
    phase: _Phase, leave: Callable[[RawClient], None]
) -> None:
    """Its departure is noticed while a step runs, counted, and not one more step is made for it."""
    gate = StepGate(phase.holds)
    with _start(gate) as daemon, RawClient(daemon.url) as client, gate:
        client.post_json(_CHAT, phase.body)
        for _ in range(phase.passed):
            gate.wait_until_held()
            gate.let()
        gate.wait_until_held()
        leave(client)
        _wait_until_noticed(daemon.url)
        steps = gate.step_count
        gate.open()
        _check_served(daemon)
        assert gate.step_count == steps + 3
        assert _disconnects(daemon.url) == 1


@_LEAVING
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_never_prefilled(
    stream: bool,  # noqa: FBT001
    leave: Callable[[RawClient], None],
) -> None:
    """A client that leaves while waiting is removed from the queue; the next one is served in turn."""
    gate = StepGate()
    with (
        _start(gate) as daemon,
        RawClient(daemon.url) as running,
        RawClient(daemon.url) as leaving,
        RawClient(daemon.url) as behind,
        gate,
    ):
        running.post_json(_CHAT, chat("hi", stream=True, max_tokens=_ENDLESS))
        gate.wait_until_held()
        leaving.post_json(_CHAT, chat("hi", stream=stream, max_tokens=_ENDLESS))
        gate.step_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 1, "the first one waits"
        )
        behind.post_json(_CHAT, chat("say behind"))
        gate.step_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 2, "the second one waits"
        )
        leave(leaving)
        _wait_until_noticed(daemon.url)
        gate.step_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 1, "one is out of the queue"
        )
        assert scrape(daemon.url, "machd_requests_running") == 1
        assert gate.prefill_count == 1
        running.reset()
        _wait_until_noticed(daemon.url, 2)
        gate.open()
        assert b"behind" in behind.read_answer().body
        assert gate.prefill_count == 2
        _check_served(daemon)


def test_leaving_frees_every_choice_of_a_request() -> None:
    """With several prompts and choices, those that run and those that wait end together."""
    gate = StepGate(at_decode)
    with _start(gate) as daemon, RawClient(daemon.url) as client, gate:
        client.post_json(
            _COMPLETIONS, completion(["a", "b"], n=3, stream=True, max_tokens=_ENDLESS)
        )
        gate.wait_until_held()
        wait_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 5, "the other choices wait"
        )
        client.reset()
        _wait_until_noticed(daemon.url)
        steps = gate.step_count
        gate.open()
        _check_served(daemon)
        assert gate.step_count == steps + 3


def test_a_pipelining_client_that_leaves_is_noticed_at_the_next_write() -> None:
    """A second request behind the first hides the end of the connection until something is sent."""
    gate = StepGate(at_decode)
    with (
        _start(gate, streaming__keepalive_s=0.02) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, chat("hi", stream=True, max_tokens=_ENDLESS))
        client.post_json(_CHAT, chat("hi", stream=True, max_tokens=_ENDLESS))
        gate.wait_until_held()
        client.reset()
        _wait_until_noticed(daemon.url)
        gate.open()
        _check_served(daemon)


@_LEAVING
@pytest.mark.parametrize("sent", [0.0, 0.5], ids=["no body", "half a body"])
def test_a_client_that_leaves_while_sending_is_forgotten(
    sent: float, leave: Callable[[RawClient], None]
) -> None:
    """An unfinished body opens no generation, and counts as no failure."""
    with RunningDaemon() as daemon:
        for _ in range(5):
            with RawClient(daemon.url) as client:
                body = b'{"model": "fake", "messages": ['
                client.request(
                    "POST",
                    _CHAT,
                    body[: int(len(body) * sent)],
                    {"Content-Type": "application/json", "Content-Length": "1000"},
                )
                leave(client)
        _check_served(daemon)
        assert scrape(daemon.url, "machd_requests_total", finish_reason="abort") == 0


def test_fifty_departures_leave_nothing_behind() -> None:
    """After many clients left in many ways, threads and file descriptors are as before."""
    process = psutil.Process()

    def threads() -> list[str]:
        pools = ("machd-tokeniser", "asyncio_")  # bounded, and filled as they are needed
        return sorted(one.name for one in threading.enumerate() if not one.name.startswith(pools))

    with _start(_open_gate()) as daemon:
        for _ in range(5):
            _check_served(daemon)
        fds, names = process.num_fds(), threads()
        for number in range(50):
            _leave_somehow(daemon.url, number)
        _check_served(daemon)
        wait_until(lambda: process.num_fds() <= fds, "file descriptors are as before")
        assert threads() == names
        # Of those who left at once, some were never heard.
        wait_until(lambda: _ended(daemon.url) >= 6 + 30, "everyone who was served is counted")
        assert scrape(daemon.url, "machd_requests_total", finish_reason="error") == 0


def _ended(url: str) -> float:
    reasons = ("stop", "length", "abort", "error", "reject")
    return sum(scrape(url, "machd_requests_total", finish_reason=reason) for reason in reasons)


def _open_gate() -> StepGate:
    gate = StepGate()
    gate.open()
    return gate


def _leave_somehow(url: str, number: int) -> None:
    """Ten ways to leave: by reset or in order, after nothing, a token, many tokens or the last."""
    leave = RawClient.reset if number % 2 else RawClient.close
    point = number // 2 % 5
    with RawClient(url) as client:
        endless = chat("hi", stream=point != 4, max_tokens=_ENDLESS, n=1 + number % 3)
        match point:
            case 0:
                client.post_json(_CHAT, endless)
            case 1:
                client.post_json(_CHAT, endless)
                client.read_until(b'"content":"')
            case 2:
                client.post_json(_CHAT, endless)
                while client.received.count(b'"content":"') < 20:
                    client.receive()
            case 3:
                client.post_json(_CHAT, chat("hi", stream=True, max_tokens=5))
                client.read_until(b'"finish_reason":"length"')
            case _:
                client.post_json(_CHAT, endless)
        leave(client)


def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled client loses its stream and its connection; another stream is whole."""
    ages = ConnectionAges(monkeypatch)
    stall_s = 30.0  # the default of limits.client_stall_timeout_s
    with (
        _start(_open_gate()) as daemon,
        RawClient(daemon.url, receive_buffer_bytes=4096) as slow,
        RawClient(daemon.url) as other,
    ):
        _check_served(daemon)
        other.post_json(_CHAT, chat("say warm", stream=True))
        other.read_answer()
        other.received = b""
        slow.post_json(
            _CHAT, chat("hi", stream=True, max_tokens=900_000, logprobs=True, top_logprobs=20)
        )
        slow.read_until(b'"content":"')

        def is_dropped() -> bool:
            ages.advance(stall_s / 4)
            return scrape(daemon.url, "machd_aborts_total", reason="client_stalled") == 1

        text = "unhurried " * 20  # the kernel holds all of it while the test does not read
        other.post_json(_CHAT, chat(f"say {text}", stream=True))
        wait_until(is_dropped, "the slow client is dropped")
        assert sse_text(other.read_answer().body) == text
        wait_until(lambda: is_idle(daemon.url), "nothing runs and nothing waits")
        wait_until(
            lambda: not slow.is_held,
            "the stalled connection is closed, though its client never reads",
        )
