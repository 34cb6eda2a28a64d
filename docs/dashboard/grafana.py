"""Panels and queries as Grafana's dashboard JSON, schema 39 (Grafana 10 and later).

A dashboard is a list of rows of panels; this gives each its place, its id and the settings that
its kind takes. Nothing names a machine: the data source and the instance are variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

_COLUMNS = 24
_HEIGHT = 7
_LOW_HEIGHT = 4
_SCHEMA = 39

Json = dict[str, object]

_DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


class PanelKind(StrEnum):
    """Grafana's types of panels."""

    LINES = "timeseries"
    NUMBER = "stat"
    HEATMAP = "heatmap"
    TABLE = "table"
    STATES = "state-timeline"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression.

    Attributes:
        expr: PromQL; may use the dashboard's variables and ``$__rate_interval``.
        legend: Grafana's template of a series' name.
    """

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        description: What it shows and when to worry, a sentence or two.
        unit: Grafana's id of it.
        width: Of the 24 columns.
        is_stacked: Whether lines are areas on top of each other.
        maximum: Of the axis; None for whatever the values need.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: PanelKind = PanelKind.LINES
    width: int = 8
    is_stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one heading; they wrap."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the dashboard; ``query`` says what there is to choose from.

    Attributes:
        all_value: Regular expression that stands for all; empty for one of each value that there is.
    """

    name: str
    label: str
    query: str
    all_value: str = ""


def grafana_dashboard(
    *,
    uid: str,
    title: str,
    description: str,
    variables: Sequence[Variable],
    rows: Sequence[PanelRow],
) -> Json:
    """The whole dashboard, to be written as JSON."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["machd", "inference"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "liveNow": False,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource_variable(), *map(_variable, variables)]},
        "panels": list(_placed(rows)),
    }  # fmt: skip


def _placed(rows: Sequence[PanelRow]) -> Iterator[Json]:
    """Headings and panels from the top to the bottom, with ids that count up."""
    panel_id, y = 1, 0
    for row in rows:
        yield {
            "id": panel_id,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        panel_id, y, x = panel_id + 1, y + 1, 0
        height = _LOW_HEIGHT if _is_low(row) else _HEIGHT
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            yield {"id": panel_id, "gridPos": place, **_panel(panel)}
            panel_id, x = panel_id + 1, x + panel.width
        y += height


def _is_low(row: PanelRow) -> bool:
    return all(panel.kind is PanelKind.NUMBER for panel in row.panels)


def _panel(panel: Panel) -> Json:
    return {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": [_target(panel, index) for index in range(len(panel.queries))],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel.kind),
        **({"transformations": _TABLE_COLUMNS} if panel.kind is PanelKind.TABLE else {}),
    }


def _target(panel: Panel, index: int) -> Json:
    query = panel.queries[index]
    is_moment = panel.kind in {PanelKind.NUMBER, PanelKind.TABLE}
    formats = {PanelKind.TABLE: "table", PanelKind.HEATMAP: "heatmap"}
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": is_moment,
        "range": not is_moment,
        "format": formats.get(panel.kind, "time_series"),
    }


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit}
    if panel.kind is PanelKind.LINES:
        defaults["min"] = 0
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 20 if panel.is_stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        }
    if panel.kind is PanelKind.STATES:
        defaults["color"] = {"mode": "thresholds"}
        defaults["thresholds"] = {
            "mode": "absolute",
            "steps": [{"color": "transparent", "value": None}, {"color": "green", "value": 1}],
        }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return defaults


def _options(kind: PanelKind) -> Json:
    match kind:
        case PanelKind.LINES:
            legend: Json = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case PanelKind.NUMBER:
            reduce: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {
                "reduceOptions": reduce,
                "colorMode": "value",
                "graphMode": "none",
                "textMode": "auto",
            }
        case PanelKind.HEATMAP:
            return {
                "calculate": False,
                "cellGap": 1,
                "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
                "yAxis": {"axisPlacement": "left", "reverse": False},
            }
        case PanelKind.TABLE:
            return {"showHeader": True, "cellHeight": "sm"}
        case PanelKind.STATES:
            return {"mergeValues": True, "showValue": "never", "rowHeight": 0.8}


_TABLE_COLUMNS: list[Json] = [
    {
        "id": "organize",
        "options": {
            "excludeByName": {"Time": True, "Value": True, "__name__": True, "job": True},
            "indexByName": {},
            "renameByName": {},
        },
    }
]
"""A table shows labels: the value of an info is always 1."""


def _datasource_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
    }


def _variable(variable: Variable) -> Json:
    """One whose values come from the data source; all of them unless somebody chooses."""
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        **({"allValue": variable.all_value} if variable.all_value else {}),
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
