"""The examples of config/scale/ name settings, variables, endpoints and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest

from machd.cli.commands import command_line
from machd.dialects.endpoints import PUBLIC_ROUTES
from machd.settings.keys import setting_keys
from machd.telemetry.metric_table import METRICS

yaml = pytest.importorskip("yaml")

SCALE = Path(__file__).resolve().parents[2] / "config" / "scale"
FILES = sorted(SCALE.iterdir())

_KEYS = {key.dotted for key in setting_keys()}
_SECTIONS = {key.partition(".")[0] for key in _KEYS}
_VARIABLES = {name for key in setting_keys() for name in key.environment_names}
_DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(_SECTIONS))})\.[a-z_]+(?![\w./(-])")
_VARIABLE = re.compile(r"LME_[A-Z0-9_]+")
_PATH = re.compile(r"(?<![\w.])/(?:health|metrics|v1)\b[\w/]*")

_LEAVING_S = 20
"""What a stop needs besides its notice and its drain."""


def _documents() -> dict[str, Any]:
    text = (SCALE / "kubernetes.yaml").read_text("utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def _pod() -> dict[str, Any]:
    pod: dict[str, Any] = _documents()["Deployment"]["spec"]["template"]["spec"]
    return pod


def _variables() -> dict[str, str]:
    return {one["name"]: one["value"] for one in _pod()["containers"][0]["env"]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_in_an_example_exist(file: Path) -> None:
    """Every setting, variable and endpoint that an example names is one of machd's."""
    text = file.read_text("utf-8")
    paths = {route.path for route in PUBLIC_ROUTES}
    assert set(_DOTTED.findall(text)) <= _KEYS
    assert set(_VARIABLE.findall(text)) <= _VARIABLES
    assert set(_PATH.findall(text)) <= paths


def test_the_container_runs_a_command_of_machd() -> None:
    """The first argument of the pod's container, and of the image, is a command."""
    image = (SCALE.parents[1] / "Containerfile").read_text("utf-8")
    assert 'ENTRYPOINT ["machd"]\nCMD ["serve"]' in image
    assert _pod()["containers"][0]["args"][0] in command_line.list_commands(
        click.Context(command_line)
    )


def test_the_autoscaler_follows_a_metric_of_machd() -> None:
    """The autoscaler's metric is exported."""
    metrics = _documents()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    names = {one["pods"]["metric"]["name"] for one in metrics}
    assert names
    assert names <= {spec.name for spec in METRICS}


def test_every_object_selects_the_pods_of_the_deployment() -> None:
    """Service, disruption budget and monitor select the labels that the pods have."""
    documents = _documents()
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert documents["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert documents[kind]["spec"]["selector"]["matchLabels"] == labels


def test_a_pod_has_time_for_its_notice_and_its_drain() -> None:
    """The grace period is as long as a stop takes, and readiness fails before the notice is over."""
    variables = _variables()
    notice_s = float(variables["LME_LIMITS_DRAIN_NOTICE_S"])
    drain_s = float(variables["LME_LIMITS_DRAIN_TIMEOUT_S"])
    probe = _pod()["containers"][0]["readinessProbe"]
    noticed_s = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert _pod()["terminationGracePeriodSeconds"] >= notice_s + drain_s + _LEAVING_S
    assert noticed_s < notice_s


def test_the_proxies_have_the_same_three_workers() -> None:
    """The proxies send to the ports that the page's workers listen on."""
    page = (SCALE.parents[1] / "docs" / "operating" / "scale.md").read_text("utf-8")
    ports = set(re.findall(r"--port (809\d)", page))
    for name, pattern in (
        ("nginx.conf", r"server 127\.0\.0\.1:(\d+)"),
        ("haproxy.cfg", r"server \w+ 127\.0\.0\.1:(\d+)"),
    ):
        assert set(re.findall(pattern, (SCALE / name).read_text("utf-8"))) == ports, name
