"""An operator's commands to a running daemon: drain, resume, abort, mode, clear, measure."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, sse_data, sse_text, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.engine.protocol.engine import ModelDescription

_CHAT = "/v1/chat/completions"


def _gated(directory: Path, gate: StepGate, **flags: object) -> AdminDaemon:
    return AdminDaemon(
        directory,
        lambda: FakeEngine(told, before_step=gate, context_tokens=100_000),
        {name.replace("__", "."): value for name, value in flags.items()},
    )


def _requests(daemon: AdminDaemon) -> list[dict[str, Any]]:
    return list(daemon.admin.get("/admin/requests").json()["requests"])


def _post(daemon: AdminDaemon, path: str, status: int = 200, **body: object) -> dict[str, Any]:
    answer = daemon.admin.post(path, json=body or None)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def _open(client: RawClient, text: str, request_id: str, *, stream: bool = True) -> None:
    body = httpx.Request("POST", "http://x", json=chat(f"say {text}", stream=stream)).content
    client.request(
        "POST", _CHAT, body, {"Content-Type": "application/json", "X-Request-Id": request_id}
    )


def test_a_drained_daemon_finishes_and_can_resume(tmp_path: Path) -> None:
    """Running and waiting requests are answered whole, new ones are refused, the process stays."""
    gate = StepGate(at_decode)
    with _gated(tmp_path, gate) as daemon, RawClient(daemon.daemon.url) as running, gate:
        _open(running, "hello", "r-1")
        running.read_until(b'"content":"h"')
        with RawClient(daemon.daemon.url) as waiting:
            _open(waiting, "later", "r-2")
            wait_until(lambda: len(_requests(daemon)) == 2, "both are open")
            for _ in range(2):  # again is no mistake
                state = _post(daemon, "/admin/drain")
                assert (state["state"], state["is_held"]) == ("draining", True)
                assert state["open_requests"] == 2
            assert daemon.http.get("/health/ready").status_code == 503
            assert daemon.http.get("/health/live").status_code == 200
            refused = daemon.http.post(_CHAT, json=chat("say no"))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
            gate.open()
            assert sse_text(running.read_answer().body) == "hello"
            assert sse_text(waiting.read_answer().body) == "later"
        wait_until(lambda: daemon.status["open_requests"] == 0, "all are answered")
        assert daemon.status["state"] == "draining"
        for _ in range(2):
            assert _post(daemon, "/admin/resume")["state"] == "ready"
        assert daemon.http.get("/health/ready").status_code == 200
        assert "yes" in daemon.http.post(_CHAT, json=chat("say yes")).text


def test_open_requests_show_how_far_their_prompts_are(tmp_path: Path) -> None:
    """While a long prompt is computed in chunks, its computed tokens grow; in the end they are all of it."""
    gate = StepGate()
    with _gated(tmp_path, gate) as daemon, RawClient(daemon.daemon.url) as client, gate:
        _open(client, "a" * 3000, "r-1")
        seen: list[int] = []
        for _ in range(4):
            gate.wait_until_held()
            gate.let()
            gate.wait_until_held()
            (one,) = _requests(daemon)
            assert one["state"] == "running"
            assert one["prefilled_tokens"] < one["prompt_tokens"]
            seen.append(one["prefilled_tokens"])
        assert seen == sorted(set(seen))
        assert seen[0] > 0
        gate.step_until(lambda: _requests(daemon)[0]["completion_tokens"] > 0, "a token")
        (one,) = _requests(daemon)
        assert one["prefilled_tokens"] == one["prompt_tokens"]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_daemon_that_stops_does_not_resume(tmp_path: Path, is_held: bool) -> None:  # noqa: FBT001
    """After SIGTERM there is no way back, also if an operator had it drained before."""
    gate = StepGate(at_decode)
    with _gated(tmp_path, gate) as daemon, RawClient(daemon.daemon.url) as stream, gate:
        _open(stream, "hello", "r-1")
        stream.read_until(b'"content":"h"')
        if is_held:
            _post(daemon, "/admin/drain")
        daemon.daemon.stop()
        wait_until(
            lambda: daemon.status["state"] == "draining" and not daemon.status["is_held"],
            "the daemon stops",
        )
        for path in ("/admin/resume", "/admin/drain"):
            answer = daemon.admin.post(path)
            assert answer.status_code == 409
            assert answer.json()["error"]["code"] == "conflict"
        gate.open()
        assert sse_text(stream.read_answer().body) == "hello"
        assert daemon.daemon.join(CEILING_S)


def test_open_requests_are_listed(tmp_path: Path) -> None:
    """The list shows each request's key and progress, and nothing of its text."""
    gate = StepGate(at_decode)
    with _gated(tmp_path, gate) as daemon, RawClient(daemon.daemon.url) as running, gate:
        assert _requests(daemon) == []
        _open(running, "a" * 500, "r-1")
        running.read_until(b'"content":"a"')
        with RawClient(daemon.daemon.url) as waiting:
            _open(waiting, "secret-word", "r-2")
            wait_until(lambda: len(_requests(daemon)) == 2, "both are open")
            first, second = _requests(daemon)
            assert (first["request_id"], first["state"]) == ("r-1", "running")
            assert first["decode_mode"] == "single"
            assert first["ttft_s"] <= first["age_s"]
            assert first["completion_tokens"] >= 1
            assert first["prompt_tokens"] == len("user: say \nassistant: ") + 500
            assert first["id"].startswith("chatcmpl-")
            assert (first["client"], first["endpoint"]) == ("anonymous", "chat_completions")
            assert (second["request_id"], second["state"]) == ("r-2", "waiting")
            assert (second["ttft_s"], second["decode_mode"]) == (None, None)
            assert second["completion_tokens"] == 0
            assert "secret-word" not in daemon.admin.get("/admin/requests").text
            gate.step_until(lambda: daemon.status["waiting"] == 1, "the engine knows of both")
            status = daemon.status
            assert (status["running"], status["waiting"], status["open_requests"]) == (1, 1, 2)
            gate.open()
            running.read_answer()
            waiting.read_answer()
        wait_until(lambda: _requests(daemon) == [], "all are answered")


def test_a_stream_is_aborted_in_the_middle(tmp_path: Path) -> None:
    """Its client gets an error event and the end; another request is not touched."""
    gate = StepGate(at_decode)
    flags = {"continuous_batching__enabled": True}
    with (
        _gated(tmp_path, gate, **flags) as daemon,
        RawClient(daemon.daemon.url) as victim,
        RawClient(daemon.daemon.url) as other,
        gate,
    ):
        _open(victim, "a" * 500, "r-1")
        _open(other, "fine", "r-2")
        wait_until(lambda: len(_requests(daemon)) == 2, "both are open")
        gate.step_until(lambda: victim.is_answered, "the victim's stream has begun")
        aborted = daemon.admin.delete("/admin/requests/r-1").json()["aborted"]
        assert len(aborted) == 1
        gate.open()
        events = sse_data(victim.read_answer().body)
        assert events[-1]["error"]["code"] == "operator_abort"
        assert sse_text(other.read_answer().body) == "fine"
        again = daemon.admin.delete(f"/admin/requests/{aborted[0]}")
        assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")


def test_one_that_waits_is_aborted_by_its_answers_id(tmp_path: Path) -> None:
    """With a status of its own, which tells clients not to ask again."""
    gate = StepGate(at_decode)
    with (
        _gated(tmp_path, gate) as daemon,
        RawClient(daemon.daemon.url) as running,
        RawClient(daemon.daemon.url) as waiting,
        gate,
    ):
        _open(running, "hello", "r-1")
        running.read_until(b'"content":"h"')
        _open(waiting, "never", "r-2", stream=False)
        wait_until(lambda: len(_requests(daemon)) == 2, "both are open")
        generation_id = _requests(daemon)[1]["id"]
        assert daemon.admin.delete(f"/admin/requests/{generation_id}").json() == {
            "aborted": [generation_id]
        }
        gate.open()
        answer = waiting.read_answer()
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "operator_abort"
        assert answer.headers["x-should-retry"] == "false"
        assert sse_text(running.read_answer().body) == "hello"


def test_requests_that_share_an_id_are_aborted_together(tmp_path: Path) -> None:
    """A client may give several requests one id; aborting the id aborts them all."""
    gate = StepGate()
    with (
        _gated(tmp_path, gate) as daemon,
        RawClient(daemon.daemon.url) as first,
        RawClient(daemon.daemon.url) as second,
        gate,
    ):
        for client in (first, second):
            _open(client, "never", "shared", stream=False)
        wait_until(lambda: len(_requests(daemon)) == 2, "both are open")
        assert len(daemon.admin.delete("/admin/requests/shared").json()["aborted"]) == 2
        gate.open()
        assert [one.read_answer().status for one in (first, second)] == [503, 503]


def test_an_unknown_id_is_not_found(tmp_path: Path) -> None:
    """404, whatever it looks like."""
    with AdminDaemon(tmp_path) as daemon:
        for name in ("nobody", "a%2Fb", "x" * 300):
            assert daemon.admin.delete(f"/admin/requests/{name}").status_code == 404


def test_the_mode_is_switched_and_nobody_is_turned_away(tmp_path: Path) -> None:
    """Running requests finish as they began, and then two run at once; and back again."""
    gate = StepGate(at_decode)
    with _gated(tmp_path, gate) as daemon, RawClient(daemon.daemon.url) as stream, gate:
        _open(stream, "hello", "r-1")
        stream.read_until(b'"content":"h"')
        mode = _post(daemon, "/admin/mode", mode="batched")
        assert (mode["requested"], mode["active"], mode["is_switching"]) == (
            "batched",
            "single",
            True,
        )
        gate.open()
        assert sse_text(stream.read_answer().body) == "hello"
        wait_until(lambda: not daemon.status["decode_mode"]["is_switching"], "it has switched")
        assert daemon.status["decode_mode"]["active"] == "batched"
        assert daemon.status["slots"] == 4
        answer = daemon.http.post(_CHAT, json=chat("say ok"))
        assert answer.headers["x-decode-mode"] == "batched"
        _post(daemon, "/admin/mode", mode="single")
        wait_until(lambda: daemon.status["decode_mode"]["active"] == "single", "it is back")
        assert _post(daemon, "/admin/mode", mode="continuous")["requested"] == "batched"
        _post(daemon, "/admin/mode", mode="single")
        assert daemon.http.post(_CHAT, json=chat("say ok")).status_code == 200


class _Unbatchable(FakeEngine):
    """A model whose caches no batch can keep."""

    @property
    def model(self) -> ModelDescription:
        layers = (LayerCacheFacts("ChunkedKVCache", mergeable=False),)
        return replace(super().model, cache=CacheFacts(layers, 1024, 0))


def test_a_mode_that_the_model_does_not_allow_is_refused(tmp_path: Path) -> None:
    """409 with the verdict's reason, and nothing is changed."""
    with AdminDaemon(tmp_path, _Unbatchable) as daemon:
        before = daemon.admin.get("/admin/config").headers["etag"]
        verdict = daemon.http.get("/v1/capabilities").json()["continuous_batching"]
        assert verdict["verdict"] == "blocked"
        error = _post(daemon, "/admin/mode", status=409, mode="batched")["error"]
        assert error["code"] == "mode_unavailable"
        assert verdict["reason"] in error["message"]
        assert daemon.admin.get("/admin/config").headers["etag"] == before
        assert daemon.status["decode_mode"]["requested"] == "single"
        assert not daemon.status["decode_mode"]["is_switching"]
        assert _post(daemon, "/admin/mode", mode="single")["active"] == "single"


def test_settings_may_ask_for_what_the_model_does_not_allow(tmp_path: Path) -> None:
    """As at start: the daemon goes on one at a time and says why, and is not for ever switching."""
    with AdminDaemon(tmp_path, _Unbatchable) as daemon:
        change = {"continuous_batching": {"enabled": True}}
        assert daemon.admin.patch("/admin/config", json=change).status_code == 200
        wait_until(lambda: not daemon.status["decode_mode"]["is_switching"], "it has settled")
        mode = daemon.status["decode_mode"]
        assert (mode["requested"], mode["active"]) == ("batched", "single")
        assert daemon.http.post(_CHAT, json=chat(max_tokens=3)).status_code == 200


@pytest.mark.parametrize("body", [{"mode": "fast"}, {}, {"mode": 1}])
def test_there_are_two_modes(tmp_path: Path, body: dict[str, object]) -> None:
    """Anything else is refused by name."""
    with AdminDaemon(tmp_path) as daemon:
        answer = daemon.admin.post("/admin/mode", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "mode"


def test_stored_responses_are_cleared(tmp_path: Path) -> None:
    """The answer says how many there were, and they are gone."""
    with AdminDaemon(tmp_path, lambda: FakeEngine(told)) as daemon:
        made = daemon.http.post("/v1/responses", json={"model": "fake", "input": "say ok"}).json()
        assert daemon.status["responses"]["count"] == 1
        cleared = _post(daemon, "/admin/cache/clear")["responses"]
        assert cleared["count"] == 1
        assert cleared["size_bytes"] > 0
        assert daemon.http.get(f"/v1/responses/{made['id']}").status_code == 404
        assert _post(daemon, "/admin/cache/clear")["responses"] == {"count": 0, "size_bytes": 0}


def test_a_probe_waits_for_an_idle_moment_and_blocks_nobody(tmp_path: Path) -> None:
    """It answers with verdicts once what ran is finished; meanwhile the daemon answers others."""
    gate = StepGate(at_decode)
    answers: list[httpx.Response] = []
    with _gated(tmp_path, gate) as daemon, RawClient(daemon.daemon.url) as stream, gate:
        _open(stream, "a" * 500, "r-1")
        stream.read_until(b'"content":"a"')
        prober = threading.Thread(
            target=lambda: answers.append(daemon.admin.post("/admin/probe", timeout=CEILING_S))
        )
        prober.start()
        wait_until(lambda: daemon.status["decode_mode"]["is_switching"], "the probe is next")
        assert not answers
        assert daemon.http.get("/health").status_code == 200
        gate.open()
        prober.join(CEILING_S)
        assert sse_text(stream.read_answer().body) == "a" * 500
        report = answers[0].json()
        assert report["capabilities"]["continuous_batching"]["verdict"] == "supported"
        assert report["decode_mode"]["active"] == "single"


def test_a_daemon_that_leaves_tells_who_waits_for_a_probe(tmp_path: Path) -> None:
    """Its engine's thread cannot: it is in a step that does not end."""
    gate = StepGate(at_decode)
    answers: list[httpx.Response] = []
    with _gated(tmp_path, gate) as daemon, RawClient(daemon.daemon.url) as stream, gate:
        _open(stream, "hello", "r-1")
        stream.read_until(b'"content":"h"')
        gate.wait_until_held()
        prober = threading.Thread(
            target=lambda: answers.append(daemon.admin.post("/admin/probe", timeout=CEILING_S))
        )
        prober.start()
        wait_until(lambda: daemon.status["decode_mode"]["is_switching"], "the probe is asked for")
        daemon.daemon.stop()
        daemon.daemon.stop()
        prober.join(CEILING_S)
        (answer,) = answers
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "drain_deadline"


def test_a_daemon_that_loads_says_so(tmp_path: Path) -> None:
    """Status answers before the model is there; what needs the model says when to come back."""
    release = threading.Event()

    def load() -> FakeEngine:
        assert release.wait(CEILING_S)
        return FakeEngine()

    daemon = RunningDaemon(
        load,
        {"admin.listen": "127.0.0.1:0"},
        environ={"XDG_RUNTIME_DIR": str(tmp_path)},
        wait_until_ready=False,
    )
    with daemon:
        token = next((tmp_path / "machd").iterdir()).read_text().strip()
        with httpx.Client(
            base_url=str(daemon.admin_url), headers={"Authorization": f"Bearer {token}"}
        ) as admin:
            status = admin.get("/admin/status").json()
            assert (status["state"], status["model"], status["decode_mode"]) == (
                "loading",
                None,
                None,
            )
            assert admin.post("/admin/drain").status_code == 409
            assert admin.post("/admin/resume").status_code == 409
            for path, body in (("/admin/mode", {"mode": "batched"}), ("/admin/probe", {})):
                answer = admin.post(path, json=body)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "not_ready"
            release.set()
            wait_until(lambda: admin.get("/health/ready").status_code == 200, "it is ready")
