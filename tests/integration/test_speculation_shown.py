"""Speculation as operators see it: capabilities, status, metrics, events and the log of a daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import wait_until
from support.daemon.admin_daemon import AdminDaemon, sse_events
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import chat, told
from support.engines.drafting_engine import drafting_engine
from support.engines.fake_engine import FakeEngine
from support.engines.oracle import draft_eagerly

from machd.engine.protocol.step import StepPlan

_CHAT = "/v1/chat/completions"
_LONG_TOKENS = 3000
_BATCHED = {"continuous_batching.enabled": True, "continuous_batching.window_ms": 0}


def _slowly(_plan: StepPlan) -> None:
    time.sleep(0.004)


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every step draft, whether that pays or not."""
    draft_eagerly(monkeypatch)


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[AdminDaemon]:
    with AdminDaemon(tmp_path, partial(drafting_engine, told)) as running:
        yield running


def _capability(daemon: AdminDaemon) -> dict[str, Any]:
    return dict(daemon.http.get("/v1/capabilities").json()["speculation"])


def _counted(daemon: AdminDaemon, name: str, **labels: str) -> float:
    return scrape(daemon.daemon.url, f"machd_speculation_{name}", **labels)


def _mode(daemon: AdminDaemon, mode: str) -> float:
    return scrape(daemon.daemon.url, "machd_decode_mode", mode=mode)


def _answer(daemon: AdminDaemon, text: str = "say abcdefghij") -> httpx.Response:
    answer = daemon.http.post(_CHAT, json=chat(text))
    assert answer.status_code == 200
    return answer


def _shows(daemon: AdminDaemon, mode: str) -> None:
    wait_until(lambda: _mode(daemon, mode) == 1, f"it decodes {mode}")


def test_before_any_draft_there_is_no_acceptance(daemon: AdminDaemon) -> None:
    """Capabilities show the proposer, its maximum and the reason, with the usual verdicts."""
    shown = _capability(daemon)
    assert (shown["requested"], shown["mode"], shown["max_draft_tokens"]) == ("auto", "ngram", 8)
    assert shown["mode_reason"] == "there is a script of drafts"
    assert (shown["acceptance"], shown["drafted_tokens"], shown["accepted_tokens"]) == (None, 0, 0)
    assert shown["verdict"] == "supported"
    assert shown["batched_specdec"]["verdict"] == "supported"
    assert _counted(daemon, "mode", mode="ngram") == 1
    assert _counted(daemon, "mode", mode="off") == 0
    assert _mode(daemon, "speculative") == 1, "what a lonely request would get"


def test_every_view_has_the_same_counts(daemon: AdminDaemon) -> None:
    """Capabilities, status and metrics; half of the drafts are accepted, those of position 1."""
    answer = _answer(daemon)
    assert answer.headers["x-decode-mode"] == "speculative"
    assert answer.json()["choices"][0]["message"]["content"] == "abcdefghij"
    wait_until(lambda: _counted(daemon, "cycles_total") >= 4, "drafts are counted")
    shown, status = _capability(daemon), daemon.status["speculation"]
    cycles = status["cycles"]
    assert shown["acceptance"] == status["acceptance"] == 0.5
    assert shown["drafted_tokens"] == status["drafted_tokens"] == 2 * cycles
    assert shown["accepted_tokens"] == status["accepted_tokens"] == cycles
    assert (status["mode"], status["fallbacks"]) == ("ngram", 0)
    assert _counted(daemon, "draft_tokens_total") == 2 * cycles
    assert _counted(daemon, "accepted_tokens_total") == cycles
    for position, accepted in (("1", cycles), ("2", 0)):
        drafted = "draft_by_position_tokens_total"
        assert _counted(daemon, drafted, position=position) == cycles
        right = "accepted_by_position_tokens_total"
        assert _counted(daemon, right, position=position) == accepted


def test_another_limit_shows(daemon: AdminDaemon) -> None:
    """It is live: what is shown is what is in force."""
    change = {"speculation": {"max_draft_tokens": 3}}
    assert daemon.admin.patch("/admin/config", json=change).status_code == 200
    wait_until(lambda: _capability(daemon)["max_draft_tokens"] == 3, "3 tokens at most")
    assert daemon.status["speculation"]["max_draft_tokens"] == 3
    assert _capability(daemon)["mode"] == "ngram"


def test_steps_report_their_drafts(daemon: AdminDaemon) -> None:
    """Events of steps have the numbers of verified and of accepted drafts."""
    with daemon.admin.stream("GET", "/admin/events") as stream:
        events = sse_events(stream)
        next(events)
        _answer(daemon)
        seen = [one for name, one in takewhile(_is_under_way, events) if name == "step"]
    verified = {(one["drafted_tokens"], one["accepted_tokens"]) for one in seen}
    assert verified == {(0, 0), (2, 1)}, "the first token is never a draft"
    assert {one["forced_tokens"] for one in seen} == {0}


def _is_under_way(event: tuple[str, dict[str, Any]]) -> bool:
    return event[0] != "finished"


def test_a_hand_over_shows(tmp_path: Path) -> None:
    """Speculative alone, batched together, speculative again: in metrics, events and headers."""
    engine = partial(drafting_engine, before_step=_slowly)
    with (
        AdminDaemon(tmp_path, engine, _BATCHED) as daemon,
        daemon.admin.stream("GET", "/admin/events") as stream,
    ):
        events = sse_events(stream)
        next(events)
        with RawClient(daemon.daemon.url) as alone:
            alone.post_json(_CHAT, chat("one", stream=True, max_tokens=_LONG_TOKENS))
            alone.read_until(b"chat.completion.chunk")
            assert b"x-decode-mode: speculative" in alone.received.lower()
            assert _mode(daemon, "speculative") == 1
            with RawClient(daemon.daemon.url) as other:
                other.post_json(_CHAT, chat("two", stream=True, max_tokens=_LONG_TOKENS))
                other.read_until(b"chat.completion.chunk")
                assert b"x-decode-mode: batched" in other.received.lower()
                _shows(daemon, "batched")
            _shows(daemon, "speculative")
        changes = islice((one for name, one in events if name == "mode"), 2)
        assert [(one["previous"], one["mode"]) for one in changes] == [
            ("speculative", "batched"),
            ("batched", "speculative"),
        ]
        changed = "machd_decode_mode_changes_total"
        assert scrape(daemon.daemon.url, changed, mode="batched") == 1
        assert scrape(daemon.daemon.url, changed, mode="speculative") == 1


def test_failures_are_counted_and_logged(tmp_path: Path) -> None:
    """Its answer is the same without drafts; the log has the fault once a sequence."""
    with (
        capture_logs() as lines,
        AdminDaemon(tmp_path, partial(drafting_engine, told, fails=True)) as daemon,
    ):
        content = _answer(daemon).json()["choices"][0]["message"]["content"]
        assert content == "abcdefghij"
        wait_until(lambda: _counted(daemon, "fallbacks_total") == 1, "the failure is counted")
        assert daemon.status["speculation"]["fallbacks"] == 1
        assert daemon.status["faults"] == {"row": 0, "engine": 0, "engine_restarts": 0}
    (line,) = [one for one in lines if one["event"] == "speculation.failed"]
    assert line["log_level"] == "warning"


@pytest.mark.parametrize(
    ("mode", "is_drafting", "level", "active"),
    [
        ("auto", True, "info", "ngram"),
        ("auto", False, "info", "off"),
        ("ngram", True, "info", "ngram"),
        ("ngram", False, "warning", "off"),
        ("dflash", True, "warning", "ngram"),
    ],
)
def test_the_start_logs_the_proposer(mode: str, is_drafting: bool, level: str, active: str) -> None:  # noqa: FBT001
    """The line is a warning if another proposer than the named one is in force, or none."""
    engine = drafting_engine if is_drafting else FakeEngine
    with capture_logs() as lines, RunningDaemon(engine, {"speculation.mode": mode}):
        pass
    (line,) = [one for one in lines if one["event"] == "speculation.decided"]
    assert (line["requested"], line["active"]) == (mode, active)
    assert line["log_level"] == level
    assert line["reason"]
    assert line["max_draft_tokens"] == (8 if is_drafting else 0)
