"""Answers go on when the process that computes them ends, and a request that ends it twice is to blame."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.cached_answers import Answer, Asked, ask, ask_streamed
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import scrape
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

from machd.errors import EngineFaultError, MachdError
from machd.link.port import EngineListener, EnginePort, OpenEngine
from machd.link.snapshot import LoopSnapshot
from machd.served.supervised_engine import SupervisedEngine
from machd.settings.model import Settings

_FLAGS: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 16,
    "cache.prefix": False,  # what is reused of a prompt is not seen by the scripted engine
}
_TEXT = "one answer that goes on and on, whatever becomes of the process which computes it " * 3
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}},
    "required": ["name"],
    "additionalProperties": False,
}
_QUESTIONS = (
    Asked(chat(f"say {_TEXT}")),
    Asked(chat(f"say {_TEXT}", logprobs=True, top_logprobs=2)),
    Asked(chat("letters", max_tokens=200, temperature=1, seed=3)),
    Asked(chat("letters", max_tokens=200, seed=4, stop=["zzzz"])),
    Asked(chat(f"say {_TEXT}", stop=["becomes of the proc"])),
    Asked(
        chat(
            "letters",
            max_tokens=300,
            seed=6,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _SCHEMA},
            },
        )
    ),
    Asked({"model": "fake", "prompt": "letters", "max_tokens": 150, "n": 3, "seed": 5}),
)


_STALL_S = 5.0
"""Longer than a busy machine keeps a process from its processor."""


_CLASHING = Asked(chat("clash, and say one more thing"))


@pytest.fixture(name="expected", scope="module")
def _expected() -> list[Answer]:
    """The undisturbed answers: to each question, and to the one that clashes with others."""
    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:
        return [ask(daemon.url, one) for one in (*_QUESTIONS, _CLASHING)]


@pytest.fixture(name="daemon")
def _daemon(request: pytest.FixtureRequest) -> Iterator[SupervisedDaemon]:
    stalls = "SIGSTOP" in request.node.name
    flags = {"engine.stall_timeout_s": _STALL_S} if stalls else {}
    with capture_logs(), SupervisedDaemon(_FLAGS | flags) as daemon:
        yield daemon


def _kill(daemon: SupervisedDaemon, number: signal.Signals) -> None:
    os.kill(daemon.processes[-1].pid, number)


def _is_ready(daemon: SupervisedDaemon) -> bool:
    with RawClient(daemon.url) as client:
        client.request("GET", "/health/ready")
        return client.read_answer().status == HTTPStatus.OK


def _running(daemon: SupervisedDaemon) -> float:
    return scrape(daemon.url, "machd_active_loops") if _is_ready(daemon) else 0.0


class _CountsAtReady(SupervisedDaemon):
    """Attributes: counts: The front's, at the moment at which the model was said to be ready."""

    counts: LoopSnapshot

    def _open_engine(self) -> OpenEngine:
        opened = super()._open_engine()

        def note(engine: EnginePort) -> None:
            self.counts = engine.snapshot

        def open_engine(settings: Settings, listener: EngineListener) -> EnginePort:
            engine = opened(settings, listener)
            engine.loaded.add_done_callback(lambda _loaded: note(engine))
            return engine

        return open_engine


def test_a_model_that_is_ready_has_counts() -> None:
    """A question right after readiness is not answered with a model without slots."""
    with capture_logs(), _CountsAtReady(_FLAGS) as daemon:
        assert daemon.counts.slot_count == 16
        assert daemon.counts.taken_unix_s > 0


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        # Below a request is what crashes the process.
        pytest.param(signal.SIGSEGV, marks=pytest.mark.long),
        signal.SIGSTOP,
    ],
    ids=lambda one: one.name,
)
def test_answers_are_whole_when_the_engine_process_ends_again_and_again(
    daemon: SupervisedDaemon, expected: list[Answer], number: signal.Signals
) -> None:
    """Every kind of answer, streamed and not, says what it says undisturbed, with the same usage."""
    undisturbed = expected[: len(_QUESTIONS)]
    with ThreadPoolExecutor(2 * len(_QUESTIONS)) as pool:
        plain = [pool.submit(ask, daemon.url, one) for one in _QUESTIONS]
        of_one = [one for one in _QUESTIONS if "n" not in one.fields]
        streamed = [pool.submit(ask_streamed, daemon.url, one) for one in of_one]
        for _ in range(3):
            # A suspect runs alone until it has a token, and would be to blame for the next end.
            wait_until(lambda: _running(daemon) > 1, "answers are being made")
            threading.Event().wait(0.1)
            _kill(daemon, number)
            # What hangs lives for seconds, and a look at the process costs less than a request.
            process = daemon.processes[-1]
            wait_until(lambda: process.poll() is not None, "the process has ended")  # noqa: B023 - at once
            wait_until(lambda: not _is_ready(daemon), "routers are told")
            assert httpx.get(f"{daemon.url}/health/live").status_code == 200
        said = [one.result(CEILING_S).said for one in plain]
        texts = [one.result(CEILING_S).texts for one in streamed]

    assert said == [one.said for one in undisturbed]
    assert texts == [
        one.texts for one, asked in zip(undisturbed, _QUESTIONS, strict=True) if asked in of_one
    ]
    reason = "stall" if number is signal.SIGSTOP else "exit"
    assert scrape(daemon.url, "machd_engine_restarts_total", reason=reason) == 3
    assert len(daemon.processes) == 4


def test_a_request_that_ends_two_processes_is_ended_and_its_neighbours_are_whole(
    daemon: SupervisedDaemon, expected: list[Answer]
) -> None:
    """It gets ``engine_fault``; the others do not notice."""
    others = _QUESTIONS[:4]
    with ThreadPoolExecutor(len(others)) as pool:
        answers = [pool.submit(ask, daemon.url, one) for one in others]
        wait_until(lambda: _running(daemon) > 0, "answers are being made")
        poison = httpx.post(
            f"{daemon.url}/v1/chat/completions", json=chat("poison"), timeout=CEILING_S
        )
        said = [one.result(CEILING_S).said for one in answers]

    assert (poison.status_code, poison.json()["error"]["code"]) == (503, "engine_fault")
    assert said == [one.said for one in expected[:4]]
    assert len(daemon.processes) == 3


def test_kills_from_outside_accuse_no_request(
    daemon: SupervisedDaemon, expected: list[Answer]
) -> None:
    """An answer that was alone in each of three processes that were killed is whole; after three crashes it would be to blame."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, daemon.url, _QUESTIONS[0])
        for _ in range(3):
            wait_until(lambda: _running(daemon) > 0, "the answer is being made")
            _kill(daemon, signal.SIGKILL)
            wait_until(lambda: not _is_ready(daemon), "routers are told")
        assert answer.result(CEILING_S).said == expected[0].said


def test_the_last_lines_of_a_process_that_crashes_are_logged() -> None:
    """They say where the engine thread was; a process that is killed says nothing."""
    with capture_logs() as logs, SupervisedDaemon(_FLAGS) as daemon:
        _kill(daemon, signal.SIGKILL)
        wait_until(lambda: not _is_ready(daemon), "the process has ended")
        httpx.post(f"{daemon.url}/v1/chat/completions", json=chat("poison"), timeout=CEILING_S)

    killed, *crashed = [one["last_lines"] for one in logs if one["event"] == "engine.process_ended"]
    assert killed == ()
    for lines in crashed:
        assert lines[0] == "Fatal Python error: Segmentation fault"
        assert any("in _before_step" in one for one in lines)


def test_lines_of_the_front_about_a_model_name_it() -> None:
    """So do those of its decode mode, its requests and its engine process, replaced or hung."""
    flags = _FLAGS | {"engine.stall_timeout_s": _STALL_S, "logging.level": "debug"}
    with capture_logs() as logs, SupervisedDaemon(flags) as daemon:
        for started, number in enumerate((signal.SIGKILL, signal.SIGSTOP), start=2):
            _kill(daemon, number)
            wait_until(lambda: len(daemon.processes) == started, "another is started")  # noqa: B023 - at once
            ask(daemon.url, _QUESTIONS[0])

    of_model = ("engine.", "decode_mode.", "kv_budget.", "sequence.", "speculation.", "request.finished")  # fmt: skip
    models = {one["event"]: one.get("model") for one in logs if one["event"].startswith(of_model)}
    assert models.keys() >= {
        "decode_mode.decided", "engine.process_ended", "engine.restarted", "engine.stalled",
        "kv_budget.effective", "request.finished", "sequence.admitted", "speculation.decided",
    }  # fmt: skip
    assert set(models.values()) == {"fake"}


def test_a_request_that_ends_the_process_beside_others_goes_on_alone(
    daemon: SupervisedDaemon, expected: list[Answer]
) -> None:
    """Each sequence is computed by itself, and every answer is whole, where none crashes the process alone."""
    questions = (*_QUESTIONS[:3], _CLASHING)
    with ThreadPoolExecutor(len(questions)) as pool:
        said = [one.said for one in pool.map(lambda one: ask(daemon.url, one), questions)]

    assert said == [one.said for one in (*expected[:3], expected[-1])]
    assert len(daemon.processes) == 4


def test_a_request_is_taken_while_the_engine_process_is_replaced(daemon: SupervisedDaemon) -> None:
    """It waits for the new process."""
    _kill(daemon, signal.SIGKILL)
    wait_until(lambda: not _is_ready(daemon), "routers are told")
    ready = httpx.get(f"{daemon.url}/health/ready").json()

    assert ready["state"] == "restarting"
    assert ask(daemon.url, Asked(chat("say hello"))).texts == ("hello",)


def test_an_engine_process_ends_with_its_daemon() -> None:
    """Whatever it does at that moment."""
    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:
        pid = daemon.processes[-1].pid

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_daemon_whose_engine_process_ends_again_and_again_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an answer between them a few are enough."""
    monkeypatch.setattr("machd.served.restarts._FIRST_BACKOFF_S", 0.01)
    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:
        while not daemon.join(0.2):
            if daemon.processes:
                daemon.processes[-1].kill()

    assert len(daemon.processes) == 6
    assert daemon.error is not None
    assert getattr(daemon.error, "exit_code", 0) == 70


def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, expected: list[Answer]
) -> None:
    """An answer goes on in the first one for which there is room."""
    monkeypatch.setattr("machd.served.restarts._FIRST_BACKOFF_S", 0.01)
    with capture_logs() as logs, SupervisedDaemon(_FLAGS) as daemon, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, daemon.url, _QUESTIONS[0])
        wait_until(lambda: _running(daemon) > 0, "the answer is being made")
        daemon.refused_starts = 2
        _kill(daemon, signal.SIGKILL)
        said = answer.result(CEILING_S).said

    statuses = [one["status"] for one in logs if one["event"] == "engine.process_ended"]
    assert said == expected[0].said
    assert statuses == ["SIGKILL", *2 * ["not started: Cannot allocate memory"]]
    assert len(daemon.processes) == 2


def test_a_daemon_for_whose_engine_process_there_is_no_room_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon gives up as it does where processes end again and again."""
    monkeypatch.setattr("machd.served.restarts._FIRST_BACKOFF_S", 0.01)
    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:
        daemon.refused_starts = 100
        _kill(daemon, signal.SIGKILL)
        assert daemon.join(CEILING_S)

    assert len(daemon.processes) == 1
    assert getattr(daemon.error, "exit_code", 0) == 70


def test_the_first_engine_process_has_to_start() -> None:
    """A daemon that has served nothing says what was missing."""
    daemon = SupervisedDaemon(_FLAGS)
    daemon.refused_starts = 1
    with (
        capture_logs(),
        pytest.raises(EngineFaultError, match=r"cannot be started: Cannot allocate memory"),
        daemon,
    ):
        pass


def test_an_engine_process_that_dies_while_it_is_told_to_stop_is_no_end_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its remaining work is lost, and the daemon's exit code shows that."""
    tell = SupervisedEngine.stop

    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:

        def tell_one_that_dies(engine: SupervisedEngine, error: MachdError) -> None:
            _kill(daemon, signal.SIGSTOP)
            tell(engine, error)
            _kill(daemon, signal.SIGKILL)

        monkeypatch.setattr(SupervisedEngine, "stop", tell_one_that_dies)
        daemon.stop()

    assert getattr(daemon.error, "exit_code", 0) == 70
