"""Numbers from a daemon's metrics page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from machd.telemetry.metric_table import MODEL_LABEL
from machd.telemetry.metrics import Metrics
from machd.telemetry.model_metrics import ModelMetrics
from support.clients.raw_client import RawClient


class Page:
    """A scraped page of one model, by series. The label that names the model is left out of them."""

    def __init__(self, page: Metrics | str) -> None:
        """Parse a page, or that of a daemon that has a model and these metrics."""
        if isinstance(page, Metrics):
            (model,) = page.models
            model.name_model("m")
            page = page.render().decode()
        self.text = page
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}

    @cached_property
    def families(self) -> dict[str, Metric]:
        """All of it."""
        return families_of(self.text)

    def value(self, name: str, **labels: str) -> float | None:
        """One series' value; None while it does not exist."""
        return self._values_of(name).get(_labels(labels))

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of a metric by its label values."""
        return {
            tuple(value for _, value in labels): number
            for labels, number in self._values_of(name).items()
        }

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        """Series that are not at zero."""
        return {labels: value for labels, value in self.series(name).items() if value}

    def _values_of(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        if name not in self._values:
            self._values[name] = {
                _labels(sample.labels): sample.value for sample in _samples(self.text, name)
            }
        return self._values[name]


def metrics_of_one_model() -> tuple[Metrics, ModelMetrics]:
    """Metrics of a daemon that serves one model, and the model's."""
    metrics = Metrics()
    return metrics, metrics.add_model()


def families_of(text: str) -> dict[str, Metric]:
    """A page's families by name, a counter's without ``_total``; every label is there."""
    return {one.name: one for one in text_string_to_metric_families(text)}


def read_page(url: str) -> Page:
    """The page of a daemon that serves."""
    return Page(_text(url))


def scrape(url: str, name: str, **labels: str) -> float:
    """The sum of all series with these labels; 0 while there is none."""
    return _total(_text(url), name, labels)


def is_idle(url: str) -> bool:
    """Return whether nothing runs and nothing waits; a slot is given back a moment after its request has ended."""
    text = _text(url)
    requests = ("machd_requests_running", "machd_requests_waiting")
    slots = _total(text, "machd_slots", {"state": "occupied"})
    return not (slots or any(_total(text, name, {}) for name in requests))


def _labels(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(one for one in labels.items() if one[0] != MODEL_LABEL))


def _text(url: str) -> str:
    with RawClient(url) as client:
        client.request("GET", "/metrics", headers={"Connection": "close"})
        answer = client.read_answer()
    assert answer.status == 200, answer
    return answer.body.decode()


def _total(text: str, name: str, labels: dict[str, str]) -> float:
    return sum(
        float(sample.value)
        for sample in _samples(text, name)
        if labels.items() <= sample.labels.items()
    )


def _samples(text: str, name: str) -> list[Sample]:
    # Tests ask hundreds of times while they wait: the whole page takes 20 ms to parse.
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(name)]
    return [
        sample
        for family in text_string_to_metric_families("".join(lines))
        for sample in family.samples
        if sample.name == name
    ]
