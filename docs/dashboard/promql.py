"""The queries that panels are made of, in PromQL.

Counters are shown as rates, added up over the chosen instances and models. Quantiles, means and shares have a
line for each model: one of a small and a large model together would tell of neither. They are taken over all
instances together, since quantiles of several daemons cannot be averaged.
"""

from __future__ import annotations

from dashboard.grafana import Panel, PanelKind, Query
from machd.telemetry.metric_table import METRICS

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


_OF_MODEL = {
    spec.name + part
    for spec in METRICS
    if spec.is_of_model
    for part in (("_bucket", "_sum", "_count") if spec.buckets else ("",))
}
"""Names of the series that have the label ``model``."""


def of(name: str, *matchers: str) -> str:
    """A selector of one of our metrics, on the chosen instances and of the chosen models."""
    model = ('model=~"$model"',) if name in _OF_MODEL else ()
    inside = ", ".join(('instance=~"$instance"', *model, *matchers))
    return f"{name}{{{inside}}}"


def rate(name: str, *matchers: str) -> str:
    """How fast a counter grows, a second."""
    return f"rate({of(name, *matchers)}[$__rate_interval])"


def rates_by(label: str, name: str) -> Query:
    """A line for each value of a label."""
    return Query(f"sum by ({label}) ({rate(name)})", f"{{{{{label}}}}}")


def by_instance(name: str, factor: str = "") -> Query:
    """A gauge's line for each instance, times a factor such as `` * 1000``."""
    return Query(of(name) + factor, "{{instance}}")


def by_model(name: str) -> Query:
    """A gauge's line for each model of each instance."""
    return Query(of(name), "{{model}} {{instance}}")


def by_mode(name: str, legend: str = "{{mode}} {{model}}") -> Query:
    """A line for each mode of each model that is 1 on any instance."""
    return Query(f"max by (mode, model) ({of(name)})", legend)


def share_of_rates(legend: str, part: str, whole: str) -> Query:
    """How much of one counter's growth another's is, for each model."""
    return Query(
        f"sum by (model) ({rate(part)}) / sum by (model) ({rate(whole)})", f"{legend} {{{{model}}}}"
    )


def total(name: str, legend: str, *matchers: str) -> Query:
    """A gauge, added up."""
    return Query(f"sum({of(name, *matchers)})", legend)


def total_rate(name: str, legend: str) -> Query:
    """A counter's rate, added up."""
    return Query(f"sum({rate(name)})", legend)


def mean(name: str, legend: str) -> Query:
    """What a histogram observed on average, for each model."""
    return share_of_rates(legend, f"{name}_sum", f"{name}_count")


def quantile(share: float, name: str) -> str:
    """A quantile of a histogram, for each model."""
    return f"histogram_quantile({share}, sum by (le, model) ({rate(name + '_bucket')}))"


def panel(  # noqa: PLR0913 - what a panel has, each by its name
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    kind: PanelKind = PanelKind.LINES,
    width: int = 8,
    is_stacked: bool = False,
    maximum: float | None = None,
) -> Panel:
    """A panel with a line for each query, or of another kind."""
    return Panel(title, description, unit, queries, kind, width, is_stacked, maximum)


def percentiles(title: str, name: str, description: str) -> Panel:
    """A histogram of seconds as its median, p90 and p99."""
    queries = tuple(
        Query(quantile(share, name), f"{legend} {{{{model}}}}")
        for legend, share in _QUANTILES.items()
    )
    return Panel(title, description, "s", queries, width=12)


def number(title: str, description: str, unit: str, *queries: Query) -> Panel:
    """A small panel with the newest value alone."""
    return Panel(title, description, unit, queries, PanelKind.NUMBER, width=4)


def label_table(title: str, description: str, name: str, *, width: int = 12) -> Panel:
    """A table of an info gauge's labels."""
    return panel(title, description, "none", Query(of(name)), kind=PanelKind.TABLE, width=width)
