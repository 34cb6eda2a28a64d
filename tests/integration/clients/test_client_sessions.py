"""Sessions of coding clients, as they were recorded: a daemon's diagnosis, and the report of ``machd check --cache-report``."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from support.clients.recorded_sessions import LONGEST_KEPT_CHARS, NAMES, SESSIONS, read_session
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine, spelled
from support.every_run import sampled

from machd.cli.cache_report import CacheReporter, replayed
from machd.cli.recorded_requests import recorded_requests
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits

_CONTEXT_TOKENS = 1 << 20
_ROOM = {"cache.memory_mb": 10_000, "limits.max_tokens_policy": "clamp"}
"""Limits that hold a session of a made-up model, of which a token takes a kibibyte in no real memory."""

_KINDS = {"positions": BlockCosts(1024), "state": BlockCosts(1024, 4096)}


@pytest.mark.parametrize(
    ("name", "kind"),
    sampled(
        [*((one, "positions") for one in NAMES), ("claude_code", "state")],
        # One of each API, and of each kind of cache.
        [("codex", "positions"), ("opencode", "positions"), ("claude_code", "state")],
    ),
)
def test_cache_report_tells_what_a_daemon_tells(name: str, kind: str, tmp_path: Path) -> None:
    """The report finds as many tokens of each request of a session as a daemon, for the same reason, with caches of either kind."""
    bodies = [
        (one.path, {**one.body, "stream": False, "model": "fake"}) for one in read_session(name)
    ]
    for _, body in bodies:
        body.pop("stream_options", None)
    file = tmp_path / "requests.jsonl"
    lines = [json.dumps({"path": path, "body": body}) for path, body in bodies]
    file.write_text("\n".join(lines), "utf-8")

    def engine() -> FakeEngine:
        is_stateful = kind == "state"
        return FakeEngine(spelled(""), context_tokens=_CONTEXT_TOKENS, is_stateful=is_stateful)

    told = []
    with RunningDaemon(engine, _ROOM) as daemon, httpx.Client(timeout=CEILING_S) as client:
        for path, body in bodies:
            answer = client.post(f"{daemon.url}{path}", json=body)
            assert answer.status_code == 200, answer.text
            told.append(answer.headers["x-cache-diagnosis"])
    limits = PrefixLimits(max_bytes=10_000_000_000)
    shape = PrefixConfig(b"", 256, _KINDS[kind])
    reporter = CacheReporter(engine(), shape, limits, is_shared=False)
    report = replayed(reporter, recorded_requests(file))

    assert told == [
        f"{one.reason}; cached_tokens={one.found_tokens}; parted_at_tokens={one.parted_at_tokens}"
        for one in report.lookups
    ]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_session_has_ten_requests_of_one_session(name: str) -> None:
    """A session has ten requests with tools or more, and each of these goes on where the one before it ended."""
    bodies = [one.body for one in read_session(name)]
    rounds = [len(one.get("messages") or one["input"]) for one in bodies if one.get("tools")]

    assert len(rounds) >= 10
    assert sorted(set(rounds)) == rounds


@pytest.mark.parametrize("name", NAMES)
def test_recorded_session_holds_no_texts_of_its_client(name: str) -> None:
    """The file of a session has none of its client's longer texts, only arguments that the script has made up."""
    texts = [
        text
        for line in (SESSIONS / f"{name}.jsonl").read_text("utf-8").splitlines()
        for key, text in _texts("", json.loads(line))
        if key != "arguments"
    ]

    assert [one for one in texts if len(one) > LONGEST_KEPT_CHARS and " " in one] == []


def _texts(key: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [(key, value)]
    if isinstance(value, list):
        return [text for one in value for text in _texts(key, one)]
    if isinstance(value, dict):
        return [text for name, one in value.items() for text in _texts(name, one)]
    return []
