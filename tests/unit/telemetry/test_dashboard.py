"""The dashboard file: that it is the code's, that Grafana can lay it out, and what it asks for."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from dashboard.dashboard import DASHBOARD_ROWS, dashboard_json

from machd.telemetry.metric_table import METRICS

FILE = Path(__file__).resolve().parents[3] / "config" / "grafana" / "machd.json"
DASHBOARD: dict[str, Any] = json.loads(dashboard_json())
PANELS: list[dict[str, Any]] = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
EXPRESSIONS = sorted({target["expr"] for panel in PANELS for target in panel["targets"]})

each_panel = pytest.mark.parametrize("panel", PANELS, ids=[one["title"] for one in PANELS])


def test_the_file_is_what_the_code_says() -> None:
    """What is imported is what these tests look at."""
    assert FILE.read_text("utf-8") == dashboard_json(), "run `make docs`"


def test_it_names_no_machine() -> None:
    """The data source and the instance are chosen at the top; there is no address anywhere."""
    assert not re.search(r"https?://|localhost|127\.0\.0\.1|:\d{4}\b", dashboard_json())
    sources = re.findall(r'"uid": "([^"]*)"', dashboard_json())
    assert set(sources) == {"machd-overview", "${datasource}"}
    names = [one["name"] for one in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "model", "instance"]


def test_ids_and_titles_are_unique() -> None:
    """Links to a panel stay what they are, and a person can name each."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert ids == list(range(1, len(ids) + 1))
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(ids)


def test_no_panel_lies_on_another() -> None:
    """Places are within the 24 columns and apart."""
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below, (one, other)


@each_panel
def test_a_panel_explains_itself(panel: dict[str, Any]) -> None:
    """It has a description, a unit, and a query for each line."""
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert [one["refId"] for one in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_a_query_is_of_the_chosen_instances_and_models(expr: str) -> None:
    """Every selector is narrowed, by the model where it has that label, and every window is Grafana's."""
    selectors = re.findall(r"\b((?:machd|process)_\w+)(\{[^}]*\})?", expr)
    assert selectors
    of_model = {spec.name for spec in METRICS if spec.is_of_model}
    for name, matchers in selectors:
        assert 'instance=~"$instance"' in matchers
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert ('model=~"$model"' in matchers) is (family in of_model)
    assert set(re.findall(r"\[(.*?)\]", expr)) <= {"$__rate_interval"}


@pytest.mark.parametrize(
    "expr", [one for one in EXPRESSIONS if re.search(r"quantile| / |max", one)]
)
def test_what_cannot_be_added_up_is_shown_for_each_model(expr: str) -> None:
    """A quantile, a mean or a share of two models together tells of neither."""
    is_stack = "machd_prefix_cache_hits_total" in expr  # its areas make up one share of all prompts
    groups = re.findall(r"(?:sum|max)(?: by \((.*?)\))?\s*\(", expr)
    assert groups
    assert is_stack or all("model" in one.split(", ") for one in groups)


def test_all_models_are_also_none() -> None:
    """Requests that were turned away before any of several models was known have an empty label."""
    (variable,) = (one for one in DASHBOARD["templating"]["list"] if one["name"] == "model")
    assert re.fullmatch(variable["allValue"], "")


def test_the_dashboard_shows_every_metric() -> None:
    """Every metric has a panel, except those that another metric shows better."""
    shown = set(re.findall(r"\bmachd_\w+", " ".join(EXPRESSIONS)))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    table = {spec.name for spec in METRICS}
    assert shown <= table
    assert table - shown == {
        "machd_active_loops",  # the slots in use
        "machd_requests_waiting_limit",  # for the alert
        "machd_generations_open",  # for the alert, beside the slots
        "machd_request_prefill_time_seconds",  # the first token without the queue
        "machd_request_decode_time_seconds",  # the whole without the first token
    }


def test_the_picture_is_of_panels_that_exist() -> None:
    """The script of the page's picture names panels of the dashboard."""
    script = (FILE.parents[2] / "docs" / "panels.py").read_text("utf-8")
    (listed,) = re.findall(r"^_TITLES = \((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    titles = set(re.findall(r'"(.+?)"', listed))
    assert titles
    assert titles <= {panel["title"] for panel in PANELS}


def test_rows_have_titles_and_panels() -> None:
    """There is no empty heading."""
    assert all(row.title and row.panels for row in DASHBOARD_ROWS)
