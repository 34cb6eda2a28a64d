"""A counter that another part counts: its values are read at a scrape, as those of gauges are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class ReadCounter(Collector):
    """One family. A series is there from the moment that its label is known, at zero if need be."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        """Show nothing yet but a series without labels, where there are none."""
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._reads: dict[tuple[str, ...], Callable[[], float]] = {}
        self._read_all: Callable[[], Mapping[str, float]] = dict
        if not self._labels:
            self._reads[()] = _nothing

    def add(self, *values: str) -> None:
        """Begin the series with these values of the labels."""
        self._reads.setdefault(values, _nothing)

    def watch(self, read: Callable[[], float], **labels: str) -> None:
        """Read a series' value at every scrape; it never falls as long as the daemon runs."""
        self._reads[tuple(labels[name] for name in self._labels)] = read

    def watch_all(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Read all values of the one label together, where those that there are may become more."""
        self._read_all = read

    def collect(self) -> Iterator[Metric]:
        """The family as it is now."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, read in self._reads.items():
            family.add_metric(values, read())
        for value, count in self._read_all().items():
            family.add_metric((value,), count)
        yield family


def _nothing() -> float:
    return 0.0
