"""The page that Prometheus scrapes: metrics of the daemon, and of every model that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from machd.generations.record import RequestRecord
from machd.process.lifecycle import State
from machd.telemetry.collectors import Collectors
from machd.telemetry.metric_table import DAEMON_METRICS, MODEL_LABEL, MODEL_METRICS, MetricSpec
from machd.telemetry.model_metrics import ModelMetrics
from machd.telemetry.vllm_names import VllmNames

_REJECTIONS = "machd_rejections_total"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of :meth:`Metrics.render`: the text format that every Prometheus reads."""


class Metrics(Collectors):
    """The daemon's own collectors, and those of its models. Lives on the event loop."""

    def __init__(self) -> None:
        """Make the daemon's collectors, at zero; there is no model yet."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each counter's birth doubles the page for nobody
        super().__init__(DAEMON_METRICS)
        self._models: list[ModelMetrics] = []
        self._no_model = Collectors(one for one in MODEL_METRICS if one.name == _REJECTIONS)
        self._registry = CollectorRegistry()
        for collector in self._by_name.values():
            self._registry.register(collector)
        self._registry.register(_ModelFamilies(self._models, self._no_model))
        ProcessCollector(registry=self._registry)  # shows nothing where there is no /proc
        GCCollector(registry=self._registry)
        self._vllm_names = VllmNames(self._models)
        self._exports_vllm_names = False

    @property
    def models(self) -> tuple[ModelMetrics, ...]:
        """Those of the models, in the order of the page."""
        return tuple(self._models)

    def add_model(self) -> ModelMetrics:
        """Make the collectors of one more model; it is on the page once it has a name."""
        self._models.append(ModelMetrics())
        return self._models[-1]

    def model(self, model_id: str | None) -> ModelMetrics | None:
        """Return those of the model that is exported under this name; None where there is none."""
        return next((one for one in self._models if one.model_id == model_id), None)

    def forget_model(self, model: ModelMetrics) -> None:
        """Export a model no longer. One that is loaded again goes on counting if it is not forgotten."""
        self._models.remove(model)

    def render(self) -> bytes:
        """The page that Prometheus scrapes. Reads frozen snapshots only; wakes nothing."""
        return generate_latest(self._registry)

    def count_of(self, name: str, **labels: str) -> int:
        """Return the sum of a counter's series that have these labels, over all models, exported or not."""
        return sum(one.count_of(name, **labels) for one in self._models)

    def export_vllm_names(self, *, on: bool) -> None:
        """Export what vLLM has a name for under that name as well, or not."""
        if on == self._exports_vllm_names:
            return
        change = self._registry.register if on else self._registry.unregister
        change(self._vllm_names)
        self._exports_vllm_names = on

    def watch_state(self, read: Callable[[], State]) -> None:
        """Follow the daemon's state."""
        self.watch_one_of("machd_state", "state", list(State), read)

    def on_request(self, record: RequestRecord) -> None:
        """Count a request that ended for the model that the record names."""
        model = self.model(record.model)
        if model is not None:
            model.on_request(record)

    def count_rejection(self, code: str, model_id: str | None = None) -> None:
        """Count a request that was turned away.

        It counts for its model, or for the only one; where several could have answered it, the label is empty.

        Args:
            code: An error class's stable code.
            model_id: Of the model that it was for; None where that is not known.
        """
        model = self._models[0] if len(self._models) == 1 else self.model(model_id)
        (model or self._no_model).count(_REJECTIONS, code)


class _ModelFamilies(Collector):
    """Families of the models' metrics, each once, with the series of every model that has a name."""

    def __init__(self, models: Sequence[ModelMetrics], no_model: Collectors) -> None:
        """Show these models, as they are at a scrape, and what was for none of several."""
        self._models = models
        self._no_model = no_model

    def collect(self) -> Iterator[Metric]:
        """Every family as it is now, each series with the label."""
        labelled: list[tuple[str, Collectors]] = [
            (one.model_id, one) for one in self._models if one.model_id is not None
        ]
        are_several = len(self._models) > 1
        if are_several:
            labelled.append(("", self._no_model))
        for spec in MODEL_METRICS:
            if are_several or not spec.is_of_several:
                yield _family(spec, labelled)


def _family(spec: MetricSpec, labelled: Sequence[tuple[str, Collectors]]) -> Metric:
    family = Metric(spec.family_name, spec.help, spec.kind.value)
    family.samples = [
        one._replace(labels={MODEL_LABEL: model_id, **one.labels})
        for model_id, collectors in labelled
        for one in collectors.samples(spec.name)
    ]
    return family
