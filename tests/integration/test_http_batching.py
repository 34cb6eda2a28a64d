"""Continuous batching over HTTP: side by side, shared decodes, the KV budget, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import Page, is_idle, scrape
from support.engines.dialogue import completion, sse_data, sse_text, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.engine.protocol.engine import ModelDescription

_PATH = "/v1/completions"
_BATCHED: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.window_ms": 0,
}
_KIB = 1024  # what the fake engine takes for a token
_TINY_BUDGET = _BATCHED | {"continuous_batching.kv_budget_gb": 0.001}  # 976 tokens

# A step is let go every few milliseconds while a request is on its way: one that is to arrive
# while another runs needs that one to be long.
_LONG_TOKENS = 600


class _OtherModel(FakeEngine):
    """A fake engine whose description differs."""

    def __init__(self, **differences: Any) -> None:
        super().__init__(told)
        self._differences = differences

    @property
    def model(self) -> ModelDescription:
        return replace(super().model, **self._differences)


def _cache(*layers: LayerCacheFacts) -> CacheFacts:
    return CacheFacts(layers, _KIB, 0)


def _gated(gate: StepGate) -> Callable[[], FakeEngine]:
    return lambda: FakeEngine(told, before_step=gate)


def _body(prompt: str = "hi", **fields: object) -> dict[str, object]:
    return completion(
        prompt, **({"temperature": 0, "max_tokens": _LONG_TOKENS, "stream": True} | fields)
    )


def _head(client: RawClient) -> dict[str, str]:
    """The headers of a response that has begun."""
    head = client.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")[0].decode("latin-1")
    return {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])
    }


def _answer(daemon: RunningDaemon, body: dict[str, object], **headers: str) -> httpx.Response:
    return httpx.post(f"{daemon.url}{_PATH}", json=body, headers=headers, timeout=CEILING_S)


def _capabilities(daemon: RunningDaemon) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{daemon.url}/v1/capabilities").json()
    return answer


# --- side by side -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_batched", [True, False], ids=["batched", "single"])
def test_a_second_stream_begins_before_the_first_ends_only_in_a_batch(is_batched: bool) -> None:  # noqa: FBT001
    """Batched, the second one's first byte is sent while the first still runs; single, after it."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(_gated(gate), _BATCHED if is_batched else {}) as daemon,
        RawClient(daemon.url) as first,
        RawClient(daemon.url) as second,
        gate,
    ):
        first.post_json(_PATH, _body("first"))
        gate.wait_until_held()
        second.post_json(_PATH, _body("second"))
        wait_until(
            lambda: (
                scrape(daemon.url, "machd_requests_waiting")
                + scrape(daemon.url, "machd_requests_running")
                + second.is_answered
                >= 1
            ),
            "the second request has arrived",
        )
        gate.step_until(lambda: second.is_answered, "the second request is answered")
        running = scrape(daemon.url, "machd_requests_running")
        heads = [_head(first), _head(second)]
        if is_batched:
            assert running == 2
            assert b"[DONE]" not in first.received
        else:
            assert running == 1
            first.read_until(b"[DONE]")  # although no step may run
        gate.open()
        for client in (first, second):
            client.read_until(b"[DONE]")
        wait_until(lambda: is_idle(daemon.url), "the daemon is idle")
        width_sum = scrape(daemon.url, "machd_batch_width_sum")
        width_count = scrape(daemon.url, "machd_batch_width_count")

    mode = "batched" if is_batched else "single"
    assert [head["x-decode-mode"] for head in heads] == [mode, mode]
    assert [head["x-active-loops"] for head in heads] == ["1", "2" if is_batched else "1"]
    assert (width_sum > width_count) == is_batched


def test_choices_decode_side_by_side_and_are_the_same() -> None:
    """Several prompts with ``n`` choices each give the texts, indices and usage of single flight."""
    body = completion(["one", "three"], n=3, seed=5, max_tokens=12)
    answers = []
    for flags in ({}, _BATCHED):
        with RunningDaemon(lambda: FakeEngine(told), flags) as daemon:
            answers.append(_answer(daemon, body).json())
            stream = _answer(
                daemon, body | {"stream": True, "stream_options": {"include_usage": True}}
            )
            events = sse_data(stream.content)
            texts = [
                "".join(
                    choice["text"]
                    for event in events
                    for choice in event["choices"]
                    if choice["index"] == index
                )
                for index in range(6)
            ]
            assert texts == [choice["text"] for choice in answers[-1]["choices"]]
            assert events[-1]["usage"] == answers[-1]["usage"]
            widest = scrape(daemon.url, "machd_batch_width_bucket", le="1.0")
            steps = scrape(daemon.url, "machd_batch_width_count")
            assert (widest < steps) == bool(flags)

    single, batched = answers
    assert [choice["index"] for choice in batched["choices"]] == list(range(6))
    assert len({choice["text"] for choice in batched["choices"]}) == 6
    assert batched["choices"] == single["choices"]
    assert batched["usage"] == single["usage"]
    assert batched["usage"]["prompt_tokens"] == len("one") + len("three")
    assert batched["usage"]["completion_tokens"] == 6 * 12


def test_queue_and_slots_bound_one_request() -> None:
    """An idle daemon takes as many completions as both hold; one more can never run: 400."""
    flags = _BATCHED | {"limits.max_queue": 2, "continuous_batching.max_b": 3}
    with RunningDaemon(lambda: FakeEngine(told), flags) as daemon:
        fits = _answer(daemon, _body(n=5, stream=False, temperature=1, max_tokens=3))
        too_many = _answer(daemon, _body(n=6, stream=False, temperature=1, max_tokens=3))

    assert fits.status_code == 200
    assert too_many.status_code == 400
    assert "6 completions" in too_many.json()["error"]["message"]
    assert "room for 5" in too_many.json()["error"]["message"]


def test_who_is_in_a_hurry_goes_first() -> None:
    """A waiting interactive request is started before a batch one that came earlier."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(_gated(gate), _BATCHED | {"continuous_batching.max_b": 1}) as daemon,
        RawClient(daemon.url) as running,
        RawClient(daemon.url) as patient,
        RawClient(daemon.url) as urgent,
        gate,
    ):
        running.post_json(_PATH, _body("running"))
        gate.wait_until_held()
        patient.post_json(_PATH, _body("patient", priority="batch"))
        gate.step_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 1, "the first one waits"
        )
        urgent.post_json(_PATH, _body("urgent", priority="interactive"))
        gate.step_until(lambda: urgent.is_answered, "the urgent one is answered")
        assert not patient.is_answered
        gate.open()
        patient.read_until(b"[DONE]")


# --- shared decodes ---------------------------------------------------------------------------


def test_identical_requests_share_a_decode_and_are_told() -> None:
    """A follower gets the whole text, its leader's id in a header, and takes no slot."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(_gated(gate), _BATCHED) as daemon,
        RawClient(daemon.url) as leader,
        RawClient(daemon.url) as follower,
        gate,
    ):
        headers = {"Content-Type": "application/json", "X-Request-Id": "the-leader"}
        body = httpx.Request("POST", "http://x", json=_body("same")).content
        leader.request("POST", _PATH, body, headers)
        gate.wait_until_held()
        follower.post_json(_PATH, _body("same", seed=7))
        gate.step_until(lambda: follower.is_answered, "the follower is answered")
        assert scrape(daemon.url, "machd_requests_running") == 2
        assert scrape(daemon.url, "machd_active_loops") == 1
        assert scrape(daemon.url, "machd_slots", state="occupied") == 1
        assert scrape(daemon.url, "machd_slots", state="free") == 3
        gate.open()
        heads = [_head(leader), _head(follower)]
        for client in (leader, follower):
            client.read_until(b"[DONE]\n\n")
        wait_until(
            lambda: scrape(daemon.url, "machd_coalesced_requests_total") == 1, "it is counted"
        )

    assert "x-coalesced" not in heads[0]
    assert heads[1]["x-coalesced"] == "the-leader"
    assert heads[1]["x-active-loops"] == "1"
    assert len(sse_text(leader.body)) == _LONG_TOKENS
    assert sse_text(follower.body) == sse_text(leader.body)


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        ({}, {}, {"max_tokens": _LONG_TOKENS - 1}),
        ({}, {"temperature": 1}, {"temperature": 1}),
        ({}, {"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 2}),
        ({"continuous_batching.coalesce": False}, {}, {}),
    ],
    ids=["another length", "no seed", "another seed", "switched off"],
)
def test_what_differs_or_must_not_share_decodes_for_itself(
    flags: dict[str, object], first: dict[str, object], second: dict[str, object]
) -> None:
    """Only what is sure to be the same text is decoded once."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(_gated(gate), _BATCHED | flags) as daemon,
        RawClient(daemon.url) as one,
        RawClient(daemon.url) as other,
        gate,
    ):
        one.post_json(_PATH, _body("same", **first))
        gate.wait_until_held()
        other.post_json(_PATH, _body("same", **second))
        gate.step_until(lambda: other.is_answered, "the second is answered")
        gate.open()
        head = _head(other)
        assert "x-coalesced" not in head
        assert head["x-active-loops"] == "2"


def test_clients_with_different_keys_share_nothing(tmp_path: Path) -> None:
    """Requests of different keys are never coalesced, so latency does not reveal other keys' requests."""
    keys = {"alice": "a" * 16, "bob": "b" * 16}
    file = tmp_path / "keys"
    file.write_text("".join(f"{name}:{key}\n" for name, key in keys.items()), encoding="utf-8")
    gate = StepGate(at_decode)
    with (
        RunningDaemon(
            _gated(gate),
            _BATCHED | {"auth.api_keys_file": str(file), "metrics.public": True},
        ) as daemon,
        ThreadPoolExecutor(3) as pool,
        gate,
    ):
        bearer = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        first = pool.submit(_answer, daemon, _body("same"), **bearer["alice"])
        gate.wait_until_held()
        others = [pool.submit(_answer, daemon, _body("same"), **bearer[one]) for one in keys]
        gate.step_until(
            lambda: (
                Page(httpx.get(f"{daemon.url}/metrics", headers=bearer["bob"]).text).value(
                    "machd_requests_running"
                )
                == 3
            ),
            "all three run",
        )
        gate.open()
        first.result(CEILING_S)
        alice, bob = (other.result(CEILING_S) for other in others)

    assert "x-coalesced" in alice.headers
    assert "x-coalesced" not in bob.headers


# --- the KV budget ----------------------------------------------------------------------------


def test_cache_stats_are_live_in_a_batch() -> None:
    """While sequences run the status stays ok, and the numbers are those of the moment."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(_gated(gate), _TINY_BUDGET) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        idle = httpx.get(f"{daemon.url}/v1/cache/stats").json()
        client.post_json(_PATH, _body("hi"))
        gate.wait_until_held()
        held = httpx.get(f"{daemon.url}/v1/cache/stats").json()
        metrics = {
            state: scrape(daemon.url, "machd_kv_cache_bytes", state=state)
            for state in ("budget", "reserved", "used")
        }
        ratio = scrape(daemon.url, "machd_kv_cache_usage_ratio")
        gate.open()
        client.read_until(b"[DONE]")
        wait_until(lambda: is_idle(daemon.url), "the daemon is idle")
        wait_until(
            lambda: httpx.get(f"{daemon.url}/v1/cache/stats").json()["kv"] == idle["kv"],
            "everything is given back",
        )

    assert idle["kv"] == {"budget_bytes": 1_000_000, "reserved_bytes": 0, "used_bytes": 0}
    assert held["status"] == "ok"
    assert held["kv"]["reserved_bytes"] == (2 + _LONG_TOKENS) * _KIB
    assert datetime.fromisoformat(held["as_of"]) >= datetime.fromisoformat(idle["as_of"])
    assert {f"{state}_bytes": value for state, value in metrics.items()} == held["kv"]
    assert ratio == held["kv"]["used_bytes"] / 1_000_000


def test_who_does_not_fit_yet_waits() -> None:
    """Under defer a second request waits for what the first holds, and both end well."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(_gated(gate), _TINY_BUDGET) as daemon,
        RawClient(daemon.url) as first,
        RawClient(daemon.url) as second,
        gate,
    ):
        first.post_json(_PATH, _body("one"))
        gate.wait_until_held()
        second.post_json(_PATH, _body("two"))
        gate.step_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 1, "the second waits"
        )
        assert scrape(daemon.url, "machd_slots", state="free") == 3
        gate.open()
        for client in (first, second):
            client.read_until(b"[DONE]\n\n")
            assert len(sse_text(client.body)) == _LONG_TOKENS
        assert _head(second)["x-active-loops"] == "1"


def test_who_does_not_fit_now_is_turned_away_under_reject() -> None:
    """429 with its own code and a Retry-After that is kept; the first one is not disturbed."""
    gate = StepGate(at_decode)
    flags = _TINY_BUDGET | {"continuous_batching.kv_policy": "reject"}
    with (
        RunningDaemon(_gated(gate), flags) as daemon,
        RawClient(daemon.url) as first,
        ThreadPoolExecutor(1) as pool,
        gate,
    ):
        first.post_json(_PATH, _body("one"))
        gate.wait_until_held()
        waiting = pool.submit(_answer, daemon, _body("two"))
        gate.step_until(waiting.done, "the second is answered")
        refused = waiting.result()
        gate.open()
        first.read_until(b"[DONE]\n\n")
        wait_until(lambda: is_idle(daemon.url), "the daemon is idle")
        again = _answer(daemon, _body("two"))
        rejections = scrape(daemon.url, "machd_rejections_total", reason="kv_budget_spent")

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "kv_budget_spent"
    assert int(refused.headers["retry-after"]) >= 1
    assert rejections == 1
    assert len(sse_text(first.body)) == _LONG_TOKENS
    assert again.status_code == 200


@pytest.mark.parametrize("policy", ["defer", "reject"])
def test_what_can_never_fit_is_refused_with_the_numbers(policy: str) -> None:
    """A request larger than the whole budget is a 400 on an idle daemon, whatever the policy."""
    flags = _TINY_BUDGET | {
        "continuous_batching.kv_policy": policy,
        "limits.max_tokens_policy": "refuse",
    }
    with RunningDaemon(lambda: FakeEngine(told), flags) as daemon:
        refused = _answer(daemon, _body("hi", max_tokens=975))
        fits = _answer(daemon, _body("hi", max_tokens=974))

    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["code"] == "kv_budget_exceeded"
    assert error["param"] == "max_tokens"
    assert str(977 * _KIB) in error["message"]
    assert "1000000" in error["message"]
    assert fits.status_code == 200


@pytest.mark.parametrize(
    ("device_memory_bytes", "budget_bytes", "level"),
    [(0, 1_000_000, "info"), (10_000_000, 1_000_000, "info"), (100_000, 60_000, "warning")],
    ids=["unknown", "large", "small"],
)
def test_the_budget_is_at_most_its_share_of_the_device(
    device_memory_bytes: int, budget_bytes: int, level: str
) -> None:
    """The effective value is logged at the start, as a warning where it is less than was asked."""
    flags = _BATCHED | {"continuous_batching.kv_budget_gb": 0.001}
    with (
        capture_logs() as lines,
        RunningDaemon(
            lambda: _OtherModel(device_memory_bytes=device_memory_bytes), flags
        ) as daemon,
    ):
        stats = httpx.get(f"{daemon.url}/v1/cache/stats").json()
        told_bytes = _capabilities(daemon)["device"]["memory_bytes"]

    (line,) = (one for one in lines if one["event"] == "kv_budget.effective")
    assert stats["kv"]["budget_bytes"] == line["effective_bytes"] == budget_bytes
    assert line["asked_bytes"] == 1_000_000
    assert line["log_level"] == level
    assert told_bytes == line["device_memory_bytes"] == (device_memory_bytes or None)


# --- the decision -----------------------------------------------------------------------------

_KV = LayerCacheFacts("KVCache")
_WINDOW = LayerCacheFacts("RotatingKVCache", window_tokens=8)
_CHUNKED = LayerCacheFacts("ChunkedKVCache", mergeable=False)


@pytest.mark.parametrize(
    ("layers", "verdict", "is_asked", "mode"),
    [
        ([_KV], "supported", True, "batched"),
        ([_KV], "supported", False, "single"),
        ([_WINDOW, _KV], "unknown", True, "single"),
        ([_WINDOW, _KV], "unknown", False, "single"),
        ([_CHUNKED], "blocked", True, "single"),
    ],
)
def test_the_mode_is_what_was_asked_for_where_it_is_right(
    layers: list[LayerCacheFacts],
    verdict: str,
    is_asked: bool,  # noqa: FBT001
    mode: str,
) -> None:
    """Capabilities, metrics, log and headers tell one decision; a model that cannot is served alone."""
    flags = {"continuous_batching.enabled": is_asked}
    with (
        capture_logs() as lines,
        RunningDaemon(lambda: _OtherModel(cache=_cache(*layers)), flags) as daemon,
    ):
        capabilities = _capabilities(daemon)
        answer = _answer(daemon, _body("say hello"))
        active = scrape(daemon.url, "machd_decode_mode_active", mode=mode)
        info = scrape(
            daemon.url,
            "machd_capability_info",
            feature="continuous_batching",
            verdict=verdict,
            source="rule",
        )

    decision = capabilities["decode_mode"]
    (line,) = (one for one in lines if one["event"] == "decode_mode.decided")
    requested = "batched" if is_asked else "single"
    assert (decision["requested"], decision["active"]) == (requested, mode)
    assert decision["reason"]
    assert capabilities["continuous_batching"]["verdict"] == verdict
    assert capabilities["continuous_batching"]["source"] == "rule"
    assert capabilities["continuous_batching"]["reason"]
    assert capabilities["max_b"] == (4 if mode == "batched" else 1)
    assert (line["requested"], line["active"]) == (requested, mode)
    assert line["reason"] == decision["reason"]
    assert line["log_level"] == ("info" if requested == mode else "warning")
    assert answer.status_code == 200
    assert answer.headers["x-decode-mode"] == mode
    assert (active, info) == (1, 1)
