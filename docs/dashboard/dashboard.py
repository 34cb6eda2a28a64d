"""What an operator looks at: the rows and panels of ``config/grafana/machd.json``.

``docs/generate.py`` writes that file from here. A test asks a real Prometheus for every expression,
so that no panel stays empty for a name that has changed.
"""

from __future__ import annotations

import json

from dashboard.cache_panels import CACHES
from dashboard.engine_panels import ENGINE, FAILURES, INFOS, MODELS
from dashboard.grafana import PanelRow, Variable, grafana_dashboard
from dashboard.request_panels import BATCHING, GLANCE, LATENCY, TRAFFIC
from dashboard.speculation_panels import SPECULATION

DASHBOARD_ROWS: tuple[PanelRow, ...] = (
    GLANCE, TRAFFIC, LATENCY, BATCHING, SPECULATION, CACHES, MODELS, FAILURES, ENGINE, INFOS,
)  # fmt: skip
"""From the most to the least looked at."""

_VARIABLES = (
    # All are also those of no model: requests that were turned away before it was known for which one.
    Variable("model", "Model", "label_values(machd_model_info, model)", all_value=".*"),
    Variable("instance", "Instance", 'label_values(machd_model_info{model=~"$model"}, instance)'),
)


def dashboard_json() -> str:
    """The dashboard as Grafana imports it."""
    dashboard = grafana_dashboard(
        uid="machd-overview",
        title="machd",
        description="Traffic, latency, batching and health of machd daemons.",
        variables=_VARIABLES,
        rows=DASHBOARD_ROWS,
    )
    return json.dumps(dashboard, indent=2) + "\n"
