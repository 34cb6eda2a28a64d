"""A running daemon as operators see it: phases, reasons to wait, finished requests, memory, the log, the overview."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.checkpoints.served_adapters import write_adapter
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon, sse_events
from support.daemon.serve_process import ServeProcess
from support.daemon.several_models import several_models
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat, told
from support.engines.fake_adapters import FakeAdapterRoom
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.admin.overview_feed import INTERVAL_S
from machd.engine.protocol.adapters import Holding
from machd.engine.protocol.step import StepPlan
from machd.request.adapter import Adapter

_CHAT = "/v1/chat/completions"
_BATCHED = {"continuous_batching.enabled": True, "continuous_batching.window_ms": 0}
_SECRET = "xyzzy-plugh"


def _daemon(
    directory: Path, before_step: Callable[[StepPlan], None], **flags: object
) -> AdminDaemon:
    return AdminDaemon(
        directory,
        lambda: FakeEngine(told, before_step=before_step, context_tokens=100_000),
        {name.replace("__", "."): value for name, value in flags.items()} | _BATCHED,
    )


def _environ(directory: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(directory), "HOME": str(directory)}


def _admin(url: str | None, directory: Path) -> httpx.Client:
    """Return a client of the admin API with the token that a daemon has left under a directory."""
    assert url is not None
    path = directory / "machd" / f"admin-{url.rpartition(':')[2]}.token"
    headers = {"Authorization": f"Bearer {path.read_text().strip()}"}
    return httpx.Client(base_url=url, headers=headers, timeout=CEILING_S)


def _requests(admin: httpx.Client) -> dict[str, dict[str, Any]]:
    """``GET /admin/requests``, by request id."""
    listed = admin.get("/admin/requests").json()["requests"]
    return {one["request_id"]: one for one in listed}


def _open(client: RawClient, request_id: str, letters: int = 400, **fields: object) -> None:
    body = chat(f"say {'a' * letters}", stream=True) | fields
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    client.request("POST", _CHAT, json.dumps(body).encode(), headers)


def test_a_request_in_prefill_shows_how_far_it_is_and_a_time_left_that_shrinks(
    tmp_path: Path,
) -> None:
    """Of its prompt so many tokens, at a rate; with the first token all that is over, and tokens have a rate."""
    gate, is_slow = StepGate(at_decode), threading.Event()

    def pace(plan: StepPlan) -> None:
        time.sleep(0.03 if plan.prefill and not is_slow.is_set() else 0.0)
        gate(plan)

    with _daemon(tmp_path, pace) as daemon, RawClient(daemon.daemon.url) as client, gate:
        _open(client, "r-1", 30_000)
        seen: list[dict[str, Any]] = []

        def look() -> bool:
            one = _requests(daemon.admin).get("r-1")
            if one is not None and one["prefill_left_s"] is not None:
                seen.append(one)
            return one is not None and one["phase"] == "decode"

        gate.step_until(look, "its first token has been read")
        assert len(seen) > 3
        done = [one["prefilled_tokens"] for one in seen]
        assert done == sorted(done)
        assert all(one["phase"] == "prefill" and one["waits_for"] is None for one in seen)
        assert all(one["prefill_tokens_per_s"] > 0 for one in seen)
        early, late = seen[0], seen[-1]
        assert early["prefilled_tokens"] < late["prefilled_tokens"] <= late["prompt_tokens"]
        assert late["prefill_left_s"] < early["prefill_left_s"]
        gate.step_until(lambda: _requests(daemon.admin)["r-1"]["completion_tokens"] > 3, "tokens")
        one = _requests(daemon.admin)["r-1"]
        assert (one["phase"], one["prefill_left_s"]) == ("decode", None)
        assert one["prefilled_tokens"] == one["prompt_tokens"]
        assert one["tokens_per_s"] > 0


def _waits(admin: httpx.Client, request_ids: Sequence[str]) -> list[tuple[str, str | None]]:
    """Phase and reason of each."""
    listed = _requests(admin)
    return [
        (listed[one]["phase"], listed[one]["waits_for"]) for one in request_ids if one in listed
    ]


@pytest.mark.parametrize(
    ("flags", "max_tokens", "expected"),
    [
        (
            {"continuous_batching.max_b": 1},
            2000,
            [("decode", None), ("waiting", "slot"), ("waiting", "slot")],
        ),
        (
            {"continuous_batching.max_b": 4, "continuous_batching.kv_budget_gb": 0.001},
            400,
            [("decode", None), ("waiting", "memory"), ("waiting", "turn")],
        ),
    ],
    ids=["slots", "memory"],
)
def test_a_waiting_request_says_what_it_waits_for(
    tmp_path: Path,
    flags: dict[str, object],
    max_tokens: int,
    expected: list[tuple[str, str | None]],
) -> None:
    """No free slot; or no room in the KV budget for the first, and the ones behind it wait for their turn."""
    gate = StepGate(at_decode)
    names = [f"r-{number}" for number in range(3)]
    clients_open: list[RawClient] = []
    with _daemon(tmp_path, gate, **flags) as daemon, gate, ExitStack() as clients:
        for name in names:
            client = clients.enter_context(RawClient(daemon.daemon.url))
            clients_open.append(client)
            _open(client, name, max_tokens=max_tokens)
            wait_until(lambda: len(_requests(daemon.admin)) == len(clients_open), f"{name} is open")
        gate.step_until(lambda: _waits(daemon.admin, names) == expected, str(expected))


class _LoadingRoom(FakeAdapterRoom):
    """Adapters that are never in memory."""

    def hold(self, adapters: Sequence[Adapter]) -> Holding:
        """Hold no adapter, and rows without one."""
        return Holding.LOADING if adapters else Holding.HELD


def test_a_request_whose_adapter_is_not_there_waits_for_it(tmp_path: Path) -> None:
    """By the adapter's name; requests for the model itself run meanwhile."""
    write_adapter(tmp_path / "adapters" / "style", 1)
    gate, room = StepGate(at_decode), _LoadingRoom()

    def make() -> FakeEngine:
        engine = FakeEngine(told, before_step=gate)
        engine.adapter_room = room
        return engine

    flags = _BATCHED | {"adapters.directory": str(tmp_path / "adapters")}
    with AdminDaemon(tmp_path, make, flags) as daemon, gate, ExitStack() as clients:
        for name in ("style", "fake"):
            client = clients.enter_context(RawClient(daemon.daemon.url))
            _open(client, f"r-{name}", model=name)
        expected = [("waiting", "adapter"), ("decode", None)]
        gate.step_until(
            lambda: _waits(daemon.admin, ["r-style", "r-fake"]) == expected, "one waits, one runs"
        )
        listed = _requests(daemon.admin)
        assert (listed["r-style"]["adapter"], listed["r-fake"]["adapter"]) == ("style", None)


def test_a_request_whose_model_loads_is_listed_and_can_be_ended(tmp_path: Path) -> None:
    """It waits for its model, before there is an answer; an operator's abort reaches its client."""
    models = {"alpha": "size=35000000", "beta": "size=35000000&load_s=30"}
    flags = {"admin.listen": "127.0.0.1:0"}
    with (
        capture_logs(),
        several_models(tmp_path, models, flags=flags, environ=_environ(tmp_path)) as daemon,
        _admin(daemon.admin_url, tmp_path) as admin,
        RawClient(daemon.url) as client,
    ):
        body = json.dumps(chat("say hello", model="beta")).encode()
        sent = {"Content-Type": "application/json", "X-Request-Id": "r-cold"}
        client.request("POST", _CHAT, body, sent)
        wait_until(lambda: "r-cold" in _requests(admin), "it is listed")
        one = _requests(admin)["r-cold"]
        assert (one["state"], one["phase"], one["waits_for"]) == ("waiting", "waiting", "model")
        assert (one["model"], one["endpoint"]) == ("beta", "chat_completions")
        assert admin.get("/admin/status").json()["open_requests"] == 1
        overview = admin.get("/admin/overview").json()
        assert [one["waits_for"] for one in overview["requests"]] == ["model"]
        assert {one["name"] for one in overview["models"]} == {"alpha", "beta"}
        assert admin.delete(f"/admin/requests/{one['id']}").json() == {"aborted": [one["id"]]}
        assert client.read_answer().json()["error"]["code"] == "operator_abort"
        wait_until(lambda: not _requests(admin), "it has left")


def test_requests_wait_for_their_model_while_its_engine_process_is_replaced(tmp_path: Path) -> None:
    """A request that had tokens waits again, and goes on once another process has loaded the model."""
    flags = {"admin.listen": "127.0.0.1:0", "model.path": "fake?load_s=3"} | _BATCHED
    with (
        capture_logs(),
        SupervisedDaemon(flags, environ=_environ(tmp_path)) as daemon,
        _admin(daemon.admin_url, tmp_path) as admin,
        RawClient(daemon.url) as client,
    ):
        _open(client, "r-1", 3000)
        wait_until(lambda: _waits(admin, ["r-1"]) == [("decode", None)], "it has tokens")
        daemon.processes[-1].kill()
        wait_until(lambda: _waits(admin, ["r-1"]) == [("waiting", "model")], "it waits")
        assert admin.get("/admin/overview").json()["state"]["state"] == "restarting"
        wait_until(lambda: _waits(admin, ["r-1"]) == [("decode", None)], "it goes on")


def test_finished_requests_and_the_log_have_no_word_of_users(tmp_path: Path) -> None:
    """What a request was, how long it took and how it ended; of a daemon as it is started by operators."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with (
        ServeProcess("--continuous-batching", environ=environ) as daemon,
        _admin(daemon.admin_url, tmp_path) as admin,
    ):
        body = {
            "messages": [{"role": "user", "content": _SECRET}],
            "max_tokens": 4,
            "temperature": 0,
            "user": _SECRET,
        }
        _, answer = (httpx.post(daemon.url + _CHAT, json=body, timeout=CEILING_S) for _ in range(2))
        assert answer.status_code == 200
        text = answer.json()["choices"][0]["message"]["content"]
        finished = admin.get("/admin/requests/finished")
        newest, older = finished.json()["requests"]
        assert newest["id"] == answer.json()["id"]
        assert newest["finished_at"] >= older["finished_at"]
        assert newest["completion_tokens"] == 4
        assert newest["ttft_ms"] <= newest["latency_ms"]
        log = admin.get("/admin/log?level=info")
        events = {one["event"]: one for one in log.json()["events"]}
        assert events["request.finished"]["fields"]["completion_tokens"] == "4"
        assert "daemon.ready" in events
        written = {str(one["event"]) for one in daemon.events}
        assert set(events) == written, "of both processes"
        assert admin.get("/admin/log?level=none").status_code == 400
        for told_ in (finished.text, log.text, admin.get("/admin/overview").text):
            assert _SECRET not in told_
            assert not text.strip() or text not in told_
        memory = admin.get("/admin/memory").json()
        now = memory["now"]
        assert now["weights_bytes"] > 90_000_000
        assert now["process_bytes"] > now["weights_bytes"]
        assert now["total_bytes"] >= now["available_bytes"] > 0
        assert now["kv_budget_bytes"] > 0
        assert memory["history"][0].keys() == now.keys()


def test_watchers_see_changes_at_once_and_at_most_four_overviews_a_second(tmp_path: Path) -> None:
    """However many steps there are; finished requests come beside them, and each once."""
    with _daemon(tmp_path, lambda _plan: None) as daemon:
        stop = threading.Event()

        def load() -> None:
            with suppress(httpx.HTTPError):
                while not stop.is_set():
                    daemon.http.post(_CHAT, json=chat("say hello"))

        loading = threading.Thread(target=load)
        with daemon.admin.stream("GET", "/admin/overview/events") as stream:
            assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
            events = sse_events(stream)
            assert next(events)[0] == "overview"
            loading.start()
            start_s = time.monotonic()
            overviews: list[dict[str, Any]] = []
            finished: list[dict[str, Any]] = []
            while len(overviews) < 8:
                name, event = next(events)
                (overviews if name == "overview" else finished).append(event)
            seconds_s = time.monotonic() - start_s
            stop.set()
        loading.join(CEILING_S)
        assert len(overviews) <= seconds_s / INTERVAL_S + 2
        times = [one["at"] for one in overviews]
        assert all(later - one >= 0.9 * INTERVAL_S for one, later in pairwise(times))
        assert finished
        ids = [one["id"] for one in finished]
        assert len(set(ids)) == len(ids)
        assert overviews[0].keys() == {"at", "state", "models", "requests", "memory"}
        assert daemon.admin.get("/admin/overview").json().keys() == overviews[0].keys()
