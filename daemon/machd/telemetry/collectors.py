"""Collectors made from rows of the metric table, and what counts, sets and reads them.

A counter whose labels have few values that are known beforehand has every one of them from the
start: a rate needs the zero before the first event, or the first event is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric, Sample
from prometheus_client.registry import Collector

from machd.errors import AbortError, MachdError, ModelNotLoadedError, UnavailableError
from machd.link.port import RestartReason
from machd.scheduler.events import CacheReason, DecodeMode, SuspendReason
from machd.telemetry.metric_table import MetricKind, MetricSpec

UNKNOWN_REASON = "unknown"
"""The reason of an abort that has no code."""


class Collectors:
    """The collectors of some rows of the metric table, without the label ``model``."""

    def __init__(self, specs: Iterable[MetricSpec]) -> None:
        """Make a collector of each row, at zero."""
        self._counters: dict[str, Counter] = {}
        self._read_counters: dict[str, ReadCounter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in specs:
            self._make(spec)
        self._by_name: dict[str, Collector] = {
            **self._counters,
            **self._read_counters,
            **self._gauges,
            **self._histograms,
        }

    def samples(self, name: str) -> Iterator[Sample]:
        """Every series of a metric as it is now; none for a metric that is not among these."""
        if name in self._by_name:
            for family in self._by_name[name].collect():
                yield from family.samples

    def count_of(self, name: str, **labels: str) -> int:
        """Return the sum of a counter's series that have these labels."""
        return int(
            sum(one.value for one in self.samples(name) if labels.items() <= one.labels.items())
        )

    def set_info(self, name: str, **labels: str) -> None:
        """Set an info gauge's one series to 1."""
        gauge = self._gauges[name]
        gauge.clear()
        gauge.labels(**labels).set(1)

    def forget(self, name: str) -> None:
        """Drop every series of a gauge."""
        self._gauges[name].clear()

    def watch(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Read the value of a gauge, or of a counter of that kind, at every scrape."""
        if name in self._read_counters:
            self._read_counters[name].watch(read, **labels)
            return
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def watch_all(self, name: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Read a counter of that kind for all values of its label together, at every scrape."""
        self._read_counters[name].watch_all(read)

    def watch_one_of(
        self, name: str, label: str, values: Sequence[str], read: Callable[[], str]
    ) -> None:
        """One series for each value; 1 on the one that ``read`` returns, else 0."""

        def is_value(value: str) -> Callable[[], float]:
            return lambda: float(read() == value)

        for value in values:
            self.watch(name, is_value(value), **{label: value})

    def begin(self, name: str, *values: str) -> None:
        """Show a counter's series with these values of the labels from now on, at zero if need be."""
        self._counters[name].labels(*values)

    def count(self, name: str, *values: str) -> None:
        """Add 1 to the series of a counter that has these values of the labels."""
        counter = self._counters[name]
        (counter.labels(*values) if values else counter).inc()

    def _make(self, spec: MetricSpec) -> None:
        name, labels = spec.name, spec.counted_labels
        known_values = _KNOWN_VALUES.get(name, ())
        match spec.kind:
            case MetricKind.COUNTER if spec.is_read:
                read_counter = ReadCounter(name, spec.help, labels)
                for value in known_values:
                    read_counter.add(value)
                self._read_counters[name] = read_counter
            case MetricKind.COUNTER:
                counter = Counter(name, spec.help, labels, registry=None)
                for value in known_values:
                    counter.labels(value)
                self._counters[name] = counter
            case MetricKind.GAUGE:
                self._gauges[name] = Gauge(name, spec.help, labels, registry=None)
            case MetricKind.HISTOGRAM:
                self._histograms[name] = Histogram(
                    name, spec.help, labels, registry=None, buckets=spec.buckets
                )


class ReadCounter(Collector):
    """A counter whose values another part counts; read at a scrape, as those of gauges are.

    A series is there from the moment that its label is known, at zero if need be.
    """

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


def _codes(base: type[MachdError]) -> list[str]:
    """Codes of the errors of one kind."""
    return sorted({one.code for one in base.__subclasses__()})


_KNOWN_VALUES: Mapping[str, Sequence[str]] = {
    "machd_faults_total": ["row", "engine"],
    "machd_engine_restarts_total": list(RestartReason),
    "machd_decode_mode_changes_total": list(DecodeMode),
    "machd_prefix_cache_hits_total": ["full", "prefix"],
    "machd_prefix_cache_misses_total": [one for one in CacheReason if one is not CacheReason.WHOLE],
    "machd_sequences_resumed_total": list(SuspendReason),
    "machd_block_files_total": ["written", "loaded", "damaged", "dropped"],
    # One of several models may be without a load; see begin.
    "machd_rejections_total": [
        code for code in _codes(UnavailableError) if code != ModelNotLoadedError.code
    ],
    "machd_aborts_total": [*_codes(AbortError), UNKNOWN_REASON],
}
"""Values of a counter's label, by the counter's name."""
