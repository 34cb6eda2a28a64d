"""A real Prometheus reads the daemon: every panel has a picture, every alert has its numbers."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.clocks.polling import wait_until
from support.daemon.mixed_load import MixedLoad
from support.daemon.running_daemon import RunningDaemon
from support.engines.drafting_engine import drafting_engine
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.programs.installed_programs import needs_programs
from support.programs.prometheus_server import ALERTS, PrometheusServer

from machd.telemetry.metric_table import METRICS
from machd.telemetry.vllm_names import VLLM_NAMES, VllmName

CONFIG = Path(__file__).resolve().parents[2] / "config"
_DASHBOARD = json.loads((CONFIG / "grafana" / "machd.json").read_text("utf-8"))

pytestmark = needs_programs("prometheus")

_STEP_S = 0.004
_WINDOW = "10s"
"""Of rates: many scrapes, and no longer than the load has run when it is looked at."""

_OF_SEVERAL = re.compile("|".join(spec.name for spec in METRICS if spec.is_of_several))
"""Metrics that a daemon of one model has not; see test_admin_models.py."""

EXPRESSIONS = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in _DASHBOARD["panels"]
    for target in panel.get("targets", [])
    if "machd_rank_" not in target["expr"]  # a daemon of one process has none; see test_ranks.py
    and not _OF_SEVERAL.search(target["expr"])
]
ALERT_NAMES = [
    name
    for name, expr in re.findall(
        r"^ +- alert: (\w+)\n +expr: (.*(?:\n {10,}.*)*)", ALERTS.read_text("utf-8"), re.MULTILINE
    )
    if not _OF_SEVERAL.search(expr)
]
_COMPARISON = re.compile(r"(==|!=|>=|<=|>|<)\s*[\d.]+")


class _Faults(dict[int, Exception]):
    """Every 150th step fails."""

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and step % 150 == 149

    def __missing__(self, step: int) -> Exception:
        return RuntimeError(f"step {step} was to fail")


def _engine() -> FakeEngine:
    return drafting_engine(
        faults=FakeFaults(step_errors=_Faults()), before_step=lambda _plan: time.sleep(_STEP_S)
    )


@pytest.fixture(name="daemon", scope="module")
def _daemon() -> Iterator[RunningDaemon]:
    flags: dict[str, object] = {
        "continuous_batching.enabled": True,
        "continuous_batching.max_b": 4,
        "limits.max_queue": 6,
        "metrics.vllm_names": True,
    }
    with capture_logs(), RunningDaemon(_engine, flags) as daemon, MixedLoad(daemon.url):
        yield daemon


@pytest.fixture(name="prometheus", scope="module")
def _prometheus(daemon: RunningDaemon) -> Iterator[PrometheusServer]:
    """Has seen a fault, an abort, a rejection and whole answers."""
    awaited = (
        'machd_faults_total{scope="engine"} > 1'
        ' and on () machd_aborts_total{reason="client_disconnected"} > 1'
        ' and on () machd_rejections_total{reason="queue_full"} > 1'
        ' and on () sum(machd_requests_total{finish_reason="length"}) > 1'
    )
    with PrometheusServer(daemon.url, interval="1s") as prometheus:
        wait_until(lambda: prometheus.query(awaited) != [], awaited)
        yield prometheus


def _has_number(prometheus: PrometheusServer, expr: str) -> bool:
    return any(math.isfinite(value) for value in prometheus.query(expr))


def _health(prometheus: PrometheusServer, name: str) -> str:
    groups = prometheus.get("rules", type="alert")["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule["name"] == name)
    health: str = rule["health"]
    return health


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_every_panel_has_a_picture(prometheus: PrometheusServer, expr: str) -> None:
    """Each expression of the dashboard gives a number for a daemon at work."""
    asked = expr.replace("$__rate_interval", _WINDOW)
    asked = asked.replace("$instance", ".*").replace("$model", ".*")
    assert "$" not in asked
    wait_until(lambda: _has_number(prometheus, asked), f"{asked} has data")


@pytest.mark.parametrize("variable", [one["name"] for one in _DASHBOARD["templating"]["list"][1:]])
def test_every_variable_has_a_choice(prometheus: PrometheusServer, variable: str) -> None:
    """The choices at the top of the dashboard come from the daemon's own labels."""
    (found,) = (one for one in _DASHBOARD["templating"]["list"] if one["name"] == variable)
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", found["definition"])
    assert match is not None
    series = match[1].replace("$model", ".*")
    assert prometheus.get(f"label/{match[2]}/values", **{"match[]": series})


@pytest.mark.parametrize("name", ALERT_NAMES)
def test_every_alert_has_its_numbers(prometheus: PrometheusServer, name: str) -> None:
    """Without its thresholds an alert gives series: its names, labels and joins are the daemon's.

    That it fires when they are crossed, and only then, is proved by alerts.test.yml.
    """
    groups = prometheus.get("rules", type="alert")["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule["name"] == name)
    asked, thresholds = _COMPARISON.subn("", rule["query"])
    assert thresholds >= 1
    asked = re.sub(r"\[\d+[mh]\]", f"[{_WINDOW}]", asked)
    wait_until(lambda: _has_number(prometheus, asked), f"{asked} has data")
    wait_until(lambda: _health(prometheus, name) == "ok", f"{name} is evaluated")


def test_alerts_of_a_healthy_daemon_are_silent(prometheus: PrometheusServer) -> None:
    """Under this load only faults fire at once, which have been planted; the rest waits or is quiet."""
    wait_until(lambda: _health(prometheus, "MachdFaults") == "ok", "the alerts are evaluated")
    firing = {
        one["labels"]["alertname"]
        for one in prometheus.get("alerts")["alerts"]
        if one["state"] == "firing"
    }
    assert firing <= {"MachdFaults"}


@pytest.mark.parametrize("spec", VLLM_NAMES, ids=[spec.name for spec in VLLM_NAMES])
def test_vllms_names_are_read(prometheus: PrometheusServer, spec: VllmName) -> None:
    """A dashboard that was made for vLLM, filtered by the model's name, has every one of them."""
    kind = prometheus.get("metadata", metric=spec.name)[spec.name][0]["type"]
    suffix = "_count" if kind == "histogram" else ""
    asked = f'{spec.name}{suffix}{{model_name="fake", engine="0"}}'
    wait_until(lambda: _has_number(prometheus, asked), f"{asked} has data")
