"""The label ``model``: what is counted for one model is exported under its name.

Values are counted without the label, so that counting costs nothing for it; a scrape adds it.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from machd.telemetry.metric_table import MODEL_LABEL


class ModelCollectors(Collector):
    """The collectors of one model, its engine and its requests.

    Attributes:
        registry: Where they are registered, without the label.
        model_id: The label's value. Until it is known the families have no series: one without the label, or
            with another value, would be another series, which ends when the right one begins.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_id: str | None = None

    def collect(self) -> Iterator[Metric]:
        """Every family as it is now, each series with the label."""
        for family in self.registry.collect():
            family.samples = [
                one._replace(labels={MODEL_LABEL: self.model_id, **one.labels})
                for one in family.samples
                if self.model_id is not None
            ]
            yield family
