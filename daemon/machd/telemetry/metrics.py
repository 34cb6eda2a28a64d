"""Prometheus collectors made from the metric table, and what feeds them.

A counter whose labels have few values that are known beforehand has every one of them from the
start: a rate needs the zero before the first event, or the first event is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from machd.engine.protocol.step import SampledToken
from machd.errors import AbortError, MachdError, RowFaultError, UnavailableError
from machd.generations.record import RequestRecord
from machd.link.port import RestartReason
from machd.request.media import MediaKind
from machd.scheduler.events import (
    DecodeMode,
    DecodeModeChanged,
    EngineFaulted,
    Event,
    FinishReason,
    InvariantBroken,
    OutputGenerated,
    SequenceFinished,
    SequenceResumed,
    StepCompleted,
    SuspendReason,
)
from machd.telemetry.metric_table import METRICS, MetricKind, MetricSpec
from machd.telemetry.model_label import ModelCollectors
from machd.telemetry.vllm_names import VllmNames

_UNKNOWN = "unknown"
"""The reason of an abort that has no code."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of :meth:`Metrics.render`: the text format that every Prometheus reads."""


class Metrics:
    """All collectors on a registry of their own. Observes events and requests on the event loop."""

    def __init__(self) -> None:
        """Make every collector of the table, at zero; those of the model are shown once it has a name."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each counter's birth doubles the page for nobody
        self._registry = CollectorRegistry()
        self._model = ModelCollectors()
        self._counters: dict[str, Counter] = {}
        self._read_counters: dict[str, ReadCounter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in METRICS:
            self._make(spec)
        for name, values in _known_values().items():
            for value in values:
                if name in self._counters:
                    self._counters[name].labels(value)
                else:
                    self._read_counters[name].add(value)
        self._registry.register(self._model)
        ProcessCollector(registry=self._registry)  # shows nothing where there is no /proc
        GCCollector(registry=self._registry)
        self._vllm_names = VllmNames(
            {**self._counters, **self._read_counters, **self._gauges, **self._histograms},
            lambda: self._model.model_id,
        )
        self._exports_vllm_names = False
        self._last_token_s: dict[str, float] = {}

    def render(self) -> bytes:
        """The page that Prometheus scrapes. Reads frozen snapshots only; wakes nothing."""
        return generate_latest(self._registry)

    def name_model(self, model_id: str) -> None:
        """Export what is of the model under its name from now on, what was counted before included."""
        self._model.model_id = model_id

    def count_of(self, name: str, **labels: str) -> int:
        """Return the value of a counter of the model's, exported or not; ``labels`` are all but the model's."""
        return int(self._model.registry.get_sample_value(name, labels) or 0)

    def export_vllm_names(self, *, on: bool) -> None:
        """Export what vLLM has a name for under that name as well, or not."""
        if on == self._exports_vllm_names:
            return
        change = self._registry.register if on else self._registry.unregister
        change(self._vllm_names)
        self._exports_vllm_names = on

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

    def on_events(self, events: Sequence[Event]) -> None:
        """Count a step's events."""
        for event in events:
            match event:
                case OutputGenerated(output=SampledToken()):
                    self._observe_token(event)
                case SequenceFinished(sequence_id):
                    self._last_token_s.pop(sequence_id, None)
                case StepCompleted():
                    self._observe_step(event)
                case _:
                    self._count(event)

    def on_request(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        mode = record.decode_mode.value if record.decode_mode else "none"
        self._counters["machd_requests_total"].labels(
            record.endpoint, record.finish_reason, mode
        ).inc()
        if record.finish_reason == FinishReason.ABORT.value:
            self._counters["machd_aborts_total"].labels(record.error_code or _UNKNOWN).inc()
        if record.error_code == RowFaultError.code:
            self.count_fault("row")
        if record.decode_mode is None:
            return  # it never ran: it took no time of the engine's and no tokens
        if record.coalesced_with is not None:
            self._counters["machd_coalesced_requests_total"].inc()
        self._counters["machd_prompt_tokens_total"].inc(record.prompt_tokens)
        self._counters["machd_prompt_tokens_cached_total"].inc(record.cached_tokens)
        self._counters["machd_generation_tokens_total"].inc(record.completion_tokens)
        media = self._counters["machd_prompt_media_total"]
        media.labels(MediaKind.IMAGE.value).inc(record.images)
        media.labels(MediaKind.VIDEO.value).inc(record.videos)
        self._observe("machd_request_duration_seconds", record.duration_s)
        for name, seconds_s in (
            ("machd_request_queue_time_seconds", record.queue_s),
            ("machd_time_to_first_token_seconds", record.ttft_s),
            ("machd_request_prefill_time_seconds", record.prefill_s),
            ("machd_request_decode_time_seconds", record.decode_s),
        ):
            if seconds_s is not None:
                self._observe(name, seconds_s)

    def count_fault(self, scope: str) -> None:
        """Count a failure of machd's own: of one ``row`` or of the ``engine``."""
        self._counters["machd_faults_total"].labels(scope).inc()

    def count_restart(self, reason: str) -> None:
        """Count an engine process that another one replaces."""
        self._counters["machd_engine_restarts_total"].labels(reason).inc()

    def count_rejection(self, code: str) -> None:
        """Count a request that was turned away; ``code`` is an error class's stable code."""
        self._counters["machd_rejections_total"].labels(code).inc()

    def _count(self, event: Event) -> None:
        match event:
            case DecodeModeChanged():
                self._counters["machd_decode_mode_changes_total"].labels(event.mode).inc()
            case SequenceResumed():
                self._counters["machd_sequences_resumed_total"].labels(event.reason).inc()
            case EngineFaulted():
                self.count_fault("engine")
            case InvariantBroken():
                self._counters["machd_invariant_violations_total"].inc()
            case _:
                pass

    def _observe_token(self, token: OutputGenerated) -> None:
        last_s = self._last_token_s.get(token.sequence_id)
        # Tokens that come at once have no gap: accepted drafts, and those that one
        # who joins a decode has missed.
        if last_s is not None and token.at_s > last_s:
            self._observe("machd_inter_token_latency_seconds", token.at_s - last_s)
        self._last_token_s[token.sequence_id] = token.at_s

    def _observe_step(self, step: StepCompleted) -> None:
        if step.prefill_tokens and step.batch_width:
            phase = "mixed"
        else:
            phase = "prefill" if step.prefill_tokens else "decode"
        self._histograms["machd_step_duration_seconds"].labels(phase).observe(step.duration_s)
        ahead_tokens = step.forced_tokens + step.drafted_tokens  # right or not, they are computed
        self._observe("machd_step_tokens", step.prefill_tokens + step.batch_width + ahead_tokens)
        if step.batch_width:
            self._observe("machd_batch_width", step.batch_width)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _make(self, spec: MetricSpec) -> None:
        registry = self._model.registry if spec.is_of_model else self._registry
        labels = spec.counted_labels
        match spec.kind:
            case MetricKind.COUNTER if spec.is_read:
                counter = ReadCounter(spec.name, spec.help, labels)
                registry.register(counter)
                self._read_counters[spec.name] = counter
            case MetricKind.COUNTER:
                self._counters[spec.name] = Counter(spec.name, spec.help, labels, registry=registry)
            case MetricKind.GAUGE:
                self._gauges[spec.name] = Gauge(spec.name, spec.help, labels, registry=registry)
            case MetricKind.HISTOGRAM:
                self._histograms[spec.name] = Histogram(
                    spec.name, spec.help, labels, registry=registry, buckets=spec.buckets
                )


def _known_values() -> dict[str, list[str]]:
    """Return the values of a counter's label, by the counter's name."""
    return {
        "machd_faults_total": ["row", "engine"],
        "machd_engine_restarts_total": list(RestartReason),
        "machd_decode_mode_changes_total": list(DecodeMode),
        "machd_prefix_cache_hits_total": ["full", "prefix"],
        "machd_sequences_resumed_total": list(SuspendReason),
        "machd_block_files_total": ["written", "loaded", "damaged", "dropped"],
        "machd_rejections_total": _codes(UnavailableError),
        "machd_aborts_total": [*_codes(AbortError), _UNKNOWN],
    }


def _codes(base: type[MachdError]) -> list[str]:
    return sorted({one.code for one in base.__subclasses__()})


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
