"""What is counted and read of one model: its engine, its steps, its requests.

Values are counted without the label ``model``, so that counting costs nothing for it; a scrape adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from machd.engine.protocol.step import SampledToken
from machd.errors import RowFaultError
from machd.generations.record import RequestRecord
from machd.request.media import MediaKind
from machd.scheduler.events import (
    CacheReason,
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
)
from machd.telemetry.collectors import UNKNOWN_REASON, Collectors
from machd.telemetry.metric_table import MODEL_METRICS


class ModelMetrics(Collectors):
    """The collectors of one model. Observes its events and its requests on the event loop.

    Attributes:
        model_id: The label's value, by which no other model of the daemon goes. Until it is known nothing is
            exported: a series without the label, or with another value, would be another series, which ends
            when the right one begins.
    """

    def __init__(self) -> None:
        """Make every collector of the table that a model has, at zero, for a model without a name."""
        super().__init__(MODEL_METRICS)
        self.model_id: str | None = None
        self._last_token_s: dict[str, float] = {}

    def name_model(self, model_id: str) -> None:
        """Export under this name from now on, what was counted before included."""
        self.model_id = model_id

    def watch_decode_mode(self, read: Callable[[], DecodeMode]) -> None:
        """Follow the decode mode."""
        self.watch_one_of("machd_decode_mode", "mode", list(DecodeMode), read)

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
        self.count("machd_requests_total", record.endpoint, record.finish_reason, mode)
        if record.finish_reason == FinishReason.ABORT.value:
            self.count("machd_aborts_total", record.error_code or UNKNOWN_REASON)
        if record.error_code == RowFaultError.code:
            self.count_fault("row")
        if record.inputs:
            self._observe_encoding(record)
        if record.decode_mode is None:
            return  # it never ran: it took no time of the engine's and no tokens
        if record.coalesced_with is not None:
            self.count("machd_coalesced_requests_total")
        else:
            self._count_miss(record.cache_reason)
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

    def _count_miss(self, reason: CacheReason | None) -> None:
        if reason is not None and reason is not CacheReason.WHOLE:
            self.count("machd_prefix_cache_misses_total", reason)

    def _observe_encoding(self, record: RequestRecord) -> None:
        """Count a request to an encoder, which has neither slot nor tokens of an answer."""
        self._counters["machd_encoder_inputs_total"].inc(record.inputs)
        self._counters["machd_prompt_tokens_total"].inc(record.prompt_tokens)
        self._observe("machd_request_duration_seconds", record.duration_s)

    def count_fault(self, scope: str) -> None:
        """Count a failure of machd's own: of one ``row`` or of the ``engine``."""
        self.count("machd_faults_total", scope)

    def count_restart(self, reason: str) -> None:
        """Count an engine process that another one replaces."""
        self.count("machd_engine_restarts_total", reason)

    def count_rejection(self, code: str) -> None:
        """Count a request that was turned away; ``code`` is an error class's stable code."""
        self.count("machd_rejections_total", code)

    def _count(self, event: Event) -> None:
        match event:
            case DecodeModeChanged():
                self.count("machd_decode_mode_changes_total", event.mode)
            case SequenceResumed():
                self.count("machd_sequences_resumed_total", event.reason)
            case EngineFaulted():
                self.count_fault("engine")
            case InvariantBroken():
                self.count("machd_invariant_violations_total")
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
