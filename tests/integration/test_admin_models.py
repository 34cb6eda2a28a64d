"""Operators see and steer several models: over the admin API, with ``machd ctl``, and on the metrics page."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from dashboard.dashboard import DASHBOARD_ROWS
from structlog.testing import capture_logs
from support.clients.cached_answers import Asked, ask, ask_streamed
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import sse_events
from support.daemon.forked_commands import run_machd
from support.daemon.scraping import families_of
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat
from support.programs.installed_programs import needs_programs
from support.programs.prometheus_server import ALERTS, PrometheusServer

from machd.telemetry.metric_table import METRICS

_SIZE_BYTES = 35_000_000
_TEXT = "an answer that goes on and on, whatever else is asked for " * 8


class _Operator:
    """One daemon with its admin API.

    Attributes:
        daemon: Serves the models.
        admin: Has the token.
    """

    def __init__(self, daemon: SupervisedDaemon, directory: Path) -> None:
        self.daemon = daemon
        assert daemon.admin_url is not None
        self._environ = {"XDG_RUNTIME_DIR": str(directory), "HOME": str(directory)}
        port = daemon.admin_url.rpartition(":")[2]
        token = (directory / "machd" / f"admin-{port}.token").read_text().strip()
        self.admin = httpx.Client(
            base_url=daemon.admin_url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=CEILING_S,
        )

    def models(self) -> dict[str, dict[str, Any]]:
        """``GET /admin/models``, by name."""
        answer = self.admin.get("/admin/models")
        assert answer.status_code == 200, answer.text
        return {one["name"]: one for one in answer.json()["models"]}

    def steer(self, name: str, verb: str, body: object = None) -> httpx.Response:
        """``POST /admin/models/NAME/VERB``."""
        return self.admin.post(f"/admin/models/{name}/{verb}", json=body)

    def state(self, name: str) -> str:
        """Return what a model does."""
        return str(self.models()[name]["state"])

    def ctl(self, *arguments: str, code: int = 0) -> str:
        """Return what ``machd ctl`` prints, or complains of."""
        assert self.daemon.admin_url is not None
        address = self.daemon.admin_url.removeprefix("http://")
        done = run_machd(["ctl", "--address", address, *arguments], self._environ)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def ask(self, model: str, text: str) -> tuple[str, ...]:
        """The answer's texts."""
        return ask(self.daemon.url, _asked(model, text)).texts


Make = Callable[..., _Operator]


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Iterator[Make]:
    """Makes a daemon with memory for two of its models, by the queries of their paths; the first has an alias."""

    def make(
        models: dict[str, str], flags: Mapping[str, object] | None = None, **settings: object
    ) -> _Operator:
        section = {"memory_gb": 0.1, "max_turn_s": 2.0} | settings
        lines = ["[models]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        for name, query in models.items():
            lines += [f'[models."{name}"]', f'path = "fake?{query}"']
            lines += [f'aliases = ["{name}-alias"]'] if name == "alpha" else []
        config = tmp_path / "machd.toml"
        config.write_text("\n".join(lines))
        daemon = SupervisedDaemon(
            {
                "admin.listen": "127.0.0.1:0",
                "continuous_batching.enabled": True,
                "continuous_batching.max_b": 8,
                "cache.prefix": False,
            }
            | dict(flags or {}),
            config_path=config,
            environ={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        )
        stack.enter_context(daemon)
        operator = _Operator(daemon, tmp_path)
        stack.enter_context(operator.admin)
        return operator

    with capture_logs(), ExitStack() as stack:
        yield make


def _asked(model: str, text: str = _TEXT) -> Asked:
    return Asked(chat(f"say {text}") | {"model": model})


def _has_data(prometheus: PrometheusServer, expr: str) -> bool:
    return prometheus.query(expr) != []


def _three(load_s: float = 0.0) -> dict[str, str]:
    return dict.fromkeys(("alpha", "org/beta", "gamma"), f"size={_SIZE_BYTES}&load_s={load_s}")


def test_capabilities_of_a_model_are_on_the_admin_listener(make: Make) -> None:
    """For the model that the query names, and with the token alone."""
    operator = make(_three())
    assert operator.ask("org/beta", "yes") == ("yes",)
    answer = operator.admin.get("/v1/capabilities", params={"model": "org/beta"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"]["id"] == "org/beta"
    assert httpx.get(f"{operator.daemon.admin_url}/v1/capabilities").status_code == 401


def test_the_list_says_what_each_model_takes(make: Make) -> None:
    """State, memory by kind, age and failure of each, and what is left of the budget."""
    operator = make(_three())
    before = operator.models()
    assert list(before) == ["alpha", "org/beta", "gamma"]
    assert {one["state"] for one in before.values()} == {"unloaded"}
    assert before["alpha"]["aliases"] == ["alpha-alias"]
    assert before["alpha"]["needed"] is None
    assert before["alpha"]["measured_bytes"] is None
    assert operator.ask("alpha", "yes") == ("yes",)

    answer = operator.admin.get("/admin/models").json()
    alpha = answer["models"][0]
    memory = alpha["reserved"]
    assert alpha["needed"] == memory
    assert (alpha["state"], alpha["pinned"], alpha["leases"]) == ("ready", False, 0)
    assert memory["weights_bytes"] == _SIZE_BYTES
    assert memory["kv_budget_bytes"] == 10_000 * 1024
    resident_bytes = psutil.Process(operator.daemon.processes[-1].pid).memory_info().rss
    assert 0.3 * resident_bytes < alpha["measured_bytes"] < 1.5 * resident_bytes
    assert answer["budget_bytes"] == 100_000_000
    assert answer["reserved_bytes"] == memory["total_bytes"]
    assert answer["free_bytes"] == 100_000_000 - memory["total_bytes"]
    assert alpha["idle_s"] >= 0
    assert alpha["loaded_at"].startswith("20")
    assert alpha["failure"] is None


def test_an_operator_loads_and_unloads_a_model(make: Make) -> None:
    """A load waits until the model is ready, whatever ``models.autoload`` says; names may hold slashes."""
    operator = make(_three(0.2), autoload=False)
    loaded = operator.steer("org/beta", "load")
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["state"] == "ready"
    assert operator.ask("org/beta", "yes") == ("yes",)

    assert operator.steer("org/beta", "unload").status_code == 200
    wait_until(lambda: operator.state("org/beta") == "unloaded", "the model is unloaded")
    assert operator.models()["org/beta"]["reserved"] is None
    refusal = httpx.post(
        f"{operator.daemon.url}/v1/chat/completions", json=chat("say no") | {"model": "org/beta"}
    )
    assert refusal.json()["error"]["code"] == "model_not_loaded"


def test_a_busy_model_is_suspended_at_once_and_its_answers_go_on_once_it_is_loaded(
    make: Make,
) -> None:
    """They are whole; until then the model does not come back by itself."""
    operator = make(_three())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask_streamed, operator.daemon.url, _asked("alpha"))
        wait_until(lambda: operator.state("alpha") == "ready", "the model is loaded")
        threading.Event().wait(0.2)
        assert operator.steer("alpha", "unload", {"now": True}).status_code == 200
        wait_until(lambda: operator.state("alpha") == "unloaded", "the model is suspended")
        threading.Event().wait(0.5)
        assert operator.state("alpha") == "unloaded"
        assert operator.models()["alpha"]["leases"] == 1
        assert not answer.done()
        assert operator.steer("alpha", "load").json()["state"] == "ready"
        assert answer.result(CEILING_S).texts == (_TEXT,)
    page = operator.admin.get("/metrics").text
    assert 'machd_model_suspensions_total{model="alpha"} 1.0' in page


def test_a_model_that_is_unloaded_while_busy_ends_its_answers_first(make: Make) -> None:
    """Without now, nothing is suspended."""
    operator = make(_three())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask_streamed, operator.daemon.url, _asked("alpha"))
        wait_until(lambda: operator.state("alpha") == "ready", "the model is loaded")
        assert operator.steer("alpha", "unload").json()["state"] == "ready"
        assert answer.result(CEILING_S).texts == (_TEXT,)
        wait_until(lambda: operator.state("alpha") == "unloaded", "the model is unloaded")
    assert len(operator.daemon.processes) == 1


def test_a_load_that_fails_says_why_and_is_tried_at_once(make: Make) -> None:
    """An operator hears the reason, which clients do not, and never has to wait."""
    operator = make(_three() | {"broken": "size=1000000&fails=1", "huge": "size=500000000"})
    for _ in range(2):
        refusal = operator.steer("broken", "load")
        assert refusal.status_code == 503
        error = refusal.json()["error"]
        assert error["code"] == "model_not_loaded"
        assert error["message"].endswith("could not be loaded: the fake model is damaged")
    broken = operator.models()["broken"]
    assert (broken["state"], broken["failure"]) == ("failed", "the fake model is damaged")
    assert broken["reserved"] is None
    assert "needs 0.51 GB" in operator.steer("huge", "load").json()["error"]["message"]


def test_events_tell_what_each_model_does(make: Make) -> None:
    """Every state in its order, how far a load is, and why one failed."""
    operator = make(_three() | {"broken": "size=1000000&fails=1"})
    with operator.admin.stream("GET", "/admin/events") as stream, ThreadPoolExecutor(1) as pool:
        events = (event for name, event in sse_events(stream) if name == "model")
        pool.submit(_load_and_unload, operator)
        alpha = list(_until(events, "alpha", "unloaded"))
        again = list(_until(events, "alpha", "unloaded"))
        broken = list(_until(events, "broken", "failed"))

    assert [(one["state"], one["stage"], one["progress"]) for one in alpha] == [
        ("loading", None, 0.0),
        ("loading", "waiting for memory", 0.0),
        *(("loading", "loading the weights", share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("loading", "trying the model", 1.0),
        ("ready", None, None),
        ("suspending", None, None),
        ("unloaded", None, None),
    ]
    assert [one | {"at": 0} for one in again] == [one | {"at": 0} for one in alpha]
    assert {one["model"] for one in alpha} == {"alpha"}
    assert {one["failure"] for one in alpha} == {None}
    assert broken[-1]["failure"] == "the fake model is damaged"


def _load_and_unload(operator: _Operator) -> None:
    for _ in range(2):
        operator.steer("alpha", "load")
        operator.steer("alpha", "unload")
        wait_until(lambda: operator.state("alpha") == "unloaded", "the model is unloaded")
    operator.steer("broken", "load")


def _until(events: Iterator[dict[str, Any]], model: str, state: str) -> Iterator[dict[str, Any]]:
    """Give events up to one that says that a model is in a state."""
    for event in events:
        yield event
        if (event["model"], event["state"]) == (model, state):
            return


def test_lists_tell_how_far_a_load_is(make: Make) -> None:
    """``GET /v1/models``, ``GET /admin/models`` and ``machd ctl models``, as long as it loads."""
    operator = make({"alpha": f"size={_SIZE_BYTES}", "slow": f"size={_SIZE_BYTES}&load_s=9999"})
    url = operator.daemon.url

    def listed() -> dict[str, Any]:
        models = httpx.get(f"{url}/v1/models").json()["data"]
        (slow,) = (dict(one) for one in models if one["id"] == "slow")
        return slow

    assert "progress" not in listed()
    assert operator.models()["slow"]["progress"] is None
    assert httpx.post(f"{url}/models/load", json={"model": "slow"}).json() == {"success": True}
    wait_until(lambda: listed().get("progress") == 0.25, "a quarter is loaded", seen=listed)
    slow = operator.models()["slow"]
    assert (slow["state"], slow["stage"]) == ("loading", "loading the weights")
    assert slow["progress"] == 0.25
    assert "loading the weights, 25 %" in operator.ctl("models")


def test_a_pin_holds_until_the_next_reload(make: Make) -> None:
    """A pinned model gives way to no other; a change of another setting leaves it pinned."""
    operator = make(_three())
    assert operator.steer("alpha", "load").status_code == 200
    assert operator.steer("alpha", "pin").json()["pinned"]
    for name in ("org/beta", "gamma"):
        assert operator.ask(name, "yes") == ("yes",)
    assert operator.state("alpha") == "ready"
    patched = operator.admin.patch("/admin/config", json={"limits": {"max_queue": 7}})
    assert patched.status_code == 200, patched.text
    assert operator.models()["alpha"]["pinned"]

    assert operator.admin.post("/admin/reload").status_code == 200
    assert not operator.models()["alpha"]["pinned"]
    assert operator.steer("alpha", "pin").json()["pinned"]
    assert not operator.steer("alpha", "unpin").json()["pinned"]


def test_endpoints_of_one_model_take_its_name(make: Make) -> None:
    """The default model is meant where the query names none; an unknown name is refused."""
    operator = make(_three())
    operator.steer("gamma", "load")
    status = operator.admin.get("/admin/status", params={"model": "gamma"}).json()
    assert (status["model"], status["slots"]) == ("gamma", 8)
    assert operator.admin.get("/admin/status").json()["model"] is None
    assert [one["name"] for one in status["models"]] == ["alpha", "org/beta", "gamma"]
    assert status["models"][2] == {
        "name": "gamma", "state": "ready", "pinned": False, "leases": 0,
    }  # fmt: skip
    assert operator.admin.get("/admin/status", params={"model": "delta"}).status_code == 404
    assert operator.steer("delta", "load").status_code == 404
    assert operator.steer("gamma", "sing").status_code == 404

    mode = operator.admin.post("/admin/mode", params={"model": "gamma"}, json={"mode": "single"})
    assert mode.status_code == 200, mode.text
    config = operator.admin.get("/admin/config").json()
    table = config["settings"]["models"]["gamma"]
    assert table["continuous_batching"]["enabled"] is False
    assert config["settings"]["continuous_batching"]["enabled"] is True
    assert operator.admin.post("/admin/cache/clear", params={"model": "gamma"}).status_code == 200
    probe = operator.admin.post("/admin/probe", params={"model": "alpha"})
    assert probe.json()["error"]["code"] == "model_not_loaded"


def test_blocks_on_disk_of_a_model_that_is_not_loaded_are_not_cleared(
    make: Make, tmp_path: Path
) -> None:
    """The refusal says that it is to be loaded first."""
    operator = make(_three(), {"cache.disk_dir": str(tmp_path / "blocks"), "cache.prefix": True})
    asked = {"model": "gamma", "disk": "true"}
    refused = operator.admin.post("/admin/cache/clear", params=asked)
    assert refused.status_code == 409
    assert "'gamma' is not loaded" in refused.json()["error"]["message"]
    operator.steer("gamma", "load")
    operator.steer("gamma", "unload")
    wait_until(lambda: operator.state("gamma") == "unloaded", "it is unloaded")
    again = operator.admin.post("/admin/cache/clear", params=asked)
    assert again.json()["error"]["message"] == refused.json()["error"]["message"]


def test_open_requests_name_their_model(make: Make) -> None:
    """Whichever model they are of, all are listed."""
    operator = make(_three())
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(ask_streamed, operator.daemon.url, _asked(name))
            for name in ("alpha", "gamma")
        ]

        def named() -> set[str]:
            listed = operator.admin.get("/admin/requests").json()["requests"]
            return {one["model"] for one in listed}

        wait_until(lambda: named() == {"alpha", "gamma"}, "both are listed")
        assert {one.result(CEILING_S).texts for one in answers} == {(_TEXT,)}


def test_the_metrics_page_tells_of_each_model(make: Make) -> None:
    """States, memory, loads by outcome, suspensions; a model that is not served has no old heartbeat."""
    operator = make(_three() | {"broken": "size=1000000&fails=1"}, memory_gb=0.2)
    operator.steer("alpha", "load")
    operator.steer("gamma", "load")
    operator.steer("broken", "load")
    operator.steer("gamma", "unload", {"now": True})
    wait_until(lambda: operator.state("gamma") == "unloaded", "the model is unloaded")
    threading.Event().wait(0.3)
    page = families_of(operator.admin.get("/metrics").text)

    def values(name: str, **labels: str) -> dict[str, float]:
        return {
            one.labels["model"]: one.value
            for one in page[name].samples
            if labels.items() <= one.labels.items()
        }

    assert values("machd_model_state", state="ready") == {
        "alpha": 1, "org/beta": 0, "gamma": 0, "broken": 0,
    }  # fmt: skip
    assert values("machd_model_state", state="failed")["broken"] == 1
    assert values("machd_model_reserved_bytes")["alpha"] > _SIZE_BYTES
    assert values("machd_model_reserved_bytes")["gamma"] == 0
    assert values("machd_model_loads", outcome="loaded") == {
        "alpha": 1, "org/beta": 0, "gamma": 1, "broken": 0,
    }  # fmt: skip
    assert values("machd_model_loads", outcome="failed")["broken"] == 1
    assert values("machd_model_suspensions")["gamma"] == 0  # nothing held it
    assert values("machd_model_last_load_seconds")["alpha"] > 0
    assert values("machd_engine_heartbeat_age_seconds")["gamma"] == 0
    assert values("machd_engine_heartbeat_age_seconds")["org/beta"] == 0


@needs_programs("prometheus")
def test_panels_and_alerts_of_several_models_have_numbers(make: Make) -> None:
    """Each expression that a daemon of one model has no series for gives a number for one of three."""
    operator = make(_three())
    operator.steer("alpha", "load")
    of_several = re.compile("|".join(spec.name for spec in METRICS if spec.is_of_several))
    panels = [query.expr for row in DASHBOARD_ROWS for one in row.panels for query in one.queries]
    alerts = re.findall(r"^ +expr: (.*) > \d+$", ALERTS.read_text("utf-8"), re.MULTILINE)
    asked = [one for one in (*panels, *alerts) if of_several.search(one)]
    assert len(asked) == 8
    with PrometheusServer(operator.daemon.url, interval="1s") as prometheus:
        for expr in asked:
            narrow = re.sub(r"\[.*?\]", "[10s]", expr).replace('"$instance"', '".*"')
            whole = narrow.replace('"$model"', '".*"')
            wait_until(partial(_has_data, prometheus, whole), f"{whole} has data")


def test_a_refusal_counts_for_the_model_that_was_asked_for(make: Make) -> None:
    """Its label is the model's name, and not empty."""
    operator = make(_three(), autoload=False)
    answer = httpx.post(
        f"{operator.daemon.url}/v1/chat/completions", json=chat("say no") | {"model": "gamma"}
    )
    assert answer.status_code == 503
    page = families_of(operator.admin.get("/metrics").text)
    counted = {
        one.labels["model"]: one.value
        for one in page["machd_rejections"].samples
        if one.labels["reason"] == "model_not_loaded"
    }
    assert counted == {"alpha": 0, "org/beta": 0, "gamma": 1}


def test_ctl_shows_and_steers_models(make: Make) -> None:
    """The real command against a daemon with three models, in words and as JSON."""
    operator = make(_three() | {"broken": "size=1000000&fails=1"})
    assert operator.ctl("load", "org/beta") == "org/beta is ready\n"
    assert operator.ctl("pin", "org/beta") == "org/beta is pinned until the next reload\n"
    assert "could not be loaded: the fake model is damaged" in operator.ctl(
        "load", "broken", code=1
    )

    lines = operator.ctl("models").splitlines()
    assert lines[0].split() == ["MODEL", "STATE", "IDLE", "LEASES", "NEEDS", "MEASURED", "SIZE"]
    assert lines[1].split() == ["alpha", "unloaded", "-", "0", "-", "-", "-"]
    assert lines[2] == "  also alpha-alias"
    assert lines[3].split()[:3] == ["org/beta", "ready,", "pinned"]
    assert lines[3].split()[-2:] == ["MB", "-"]
    assert "the fake model is damaged" in "\n".join(lines)
    assert lines[-1].endswith("of 100.0 MB reserved")

    shown = json.loads(operator.ctl("models", "--json"))
    assert [one["name"] for one in shown["models"]] == ["alpha", "org/beta", "gamma", "broken"]
    assert operator.ctl("unpin", "org/beta") == "org/beta is no longer pinned\n"
    assert operator.ctl("unload", "org/beta", "--now").startswith("org/beta is ")
    wait_until(lambda: operator.state("org/beta") == "unloaded", "the model is unloaded")
    assert "org/beta: unloaded" in operator.ctl("status")
    assert "serves" in operator.ctl("load", "delta", code=1)
