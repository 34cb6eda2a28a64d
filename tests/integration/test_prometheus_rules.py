"""The alerts: what promtool says of them, and that each one leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.clocks.polling import CEILING_S
from support.programs.installed_programs import needs_programs, path_of
from support.programs.prometheus_server import ALERTS

from machd.errors import SettingsError
from machd.settings.sources import load_settings
from machd.telemetry.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ALERTS.parent
TEXT = ALERTS.read_text("utf-8")
RULES = {
    match[1]: match[0]
    for match in re.finditer(
        r"^ +- alert: (\w+)\n(?:.*\n)*?(?=^ +- alert|\Z)", TEXT, re.MULTILINE
    )
}  # fmt: skip
"""Each alert's own lines by its name."""
_PAGES = ("monitor.md", "metrics.md", "troubleshoot.md")

needs_promtool = needs_programs("promtool")
each_alert = pytest.mark.parametrize("name", RULES)


def _promtool(*arguments: str) -> str:
    done = subprocess.run(
        [path_of("promtool"), *arguments],
        cwd=FOLDER,
        env=os.environ | {"GOGC": "800", "GOMAXPROCS": "1"},  # it looks for garbage all the time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=CEILING_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _samples() -> set[str]:
    """Names that a selector may have."""
    names = {spec.name for spec in METRICS}
    histograms = {spec.name for spec in METRICS if spec.buckets}
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    return (names - histograms) | parts


@needs_promtool
def test_the_rules_and_the_example_are_valid() -> None:
    """Prometheus loads the alerts, and the example that loads them."""
    assert f"SUCCESS: {len(RULES)} rules found" in _promtool("check", "rules", "alerts.yml")
    assert "valid prometheus config" in _promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    """Each fires for the case that it is about, is quiet in the others, and none joins in."""
    _promtool("test", "rules", "alerts.test.yml")


@each_alert
def test_an_alert_has_its_own_case(name: str) -> None:
    """There is a moment at which it fires, and one at which nothing does."""
    cases = (FOLDER / "alerts.test.yml").read_text("utf-8").split("  - name: ")[1:]
    (case,) = (case for case in cases if case.startswith(f"{name}\n"))
    assert f'alertname="{name}", instance="bad"' in case
    assert "exp_samples: []" in case
    assert 'instance="good"' in case
    others = set(re.findall(r'alertname="(\w+)"', case)) - {name}
    assert others <= ({"MachdRestarted"} if name == "MachdRestartLoop" else set())


def test_no_alert_divides_by_nothing() -> None:
    """The queue's limit is at least 1, so that an empty queue is no 0/0."""
    with pytest.raises(SettingsError, match="max_queue"):
        load_settings(config_path=None, environ={}, flags={"limits.max_queue": 0})


def test_a_full_queue_says_what_it_counts() -> None:
    """limits.max_queue bounds sequences, not subscribers: the alert's text and the metric both say so."""
    assert "share a decode" in RULES["MachdQueueSaturated"]
    (limit,) = (spec for spec in METRICS if spec.name == "machd_requests_waiting_limit")
    assert limit.help.startswith("Decodes")


def test_the_last_reload_is_not_called_a_change() -> None:
    """A PATCH that was refused does not show in the gauge, so no text may say that it does."""
    dashboard = (ROOT / "config" / "grafana" / "machd.json").read_text("utf-8")
    pages = [(ROOT / "docs" / "operating" / name).read_text("utf-8") for name in _PAGES]
    for text in (TEXT, dashboard, *pages):
        assert not re.search(r"reload or\s+change", text)


def test_a_daemon_that_is_down_may_be_loading() -> None:
    """Where the service manager has the socket: the alert and the page say what to scrape."""
    assert "admin listener" in RULES["MachdDown"]
    page = (ROOT / "docs" / "operating" / "monitor.md").read_text("utf-8")
    assert "MachdDown` fires" in page
    assert "credentials_file: /etc/prometheus/machd-admin.token" in page


@each_alert
def test_an_alert_says_what_to_do(name: str) -> None:
    """Severity, a summary that names the machine, a description, and the heading to read."""
    rule = RULES[name]
    assert re.search(r"severity: (critical|warning)\n", rule)
    assert re.search(r"summary: .*\{\{ \$labels.instance \}\}", rule)
    assert re.search(r"description: >-\n +\S", rule)
    heading = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()
    assert f"{{{{ end }}}}/operating/troubleshoot/#{heading}'\n" in rule
    page = (ROOT / "docs" / "operating" / "troubleshoot.md").read_text("utf-8").lower()
    assert re.search(rf"^#+ {heading.replace('-', ' ')}$", page, re.MULTILINE)


@each_alert
def test_an_alert_is_on_the_page(name: str) -> None:
    """The page of alerts has each alert's condition and severity."""
    severity = re.search(r"severity: (\w+)", RULES[name])
    assert severity is not None
    page = (ROOT / "docs" / "operating" / "monitor.md").read_text("utf-8")
    assert f"| `{name}` | {severity[1]} |" in page


@each_alert
def test_an_alert_asks_for_metrics_that_exist(name: str) -> None:
    """Whatever it names is in the table."""
    asked = set(re.findall(r"\bmachd_\w+", RULES[name]))
    assert asked <= _samples()
    assert asked or name == "MachdDown"
