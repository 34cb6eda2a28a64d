"""Metrics of a daemon at work."""

from __future__ import annotations

from dataclasses import replace

from machd.engine.protocol.step import SampledToken
from machd.errors import EngineFaultError, MachdError, RowFaultError
from machd.generations.record import RequestRecord
from machd.process.lifecycle import State
from machd.scheduler.events import (
    DecodeMode,
    Event,
    FinishReason,
    OutputGenerated,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    StepCompleted,
)
from machd.telemetry.metrics import Metrics
from machd.telemetry.model_metrics import ModelMetrics
from support.daemon.scraping import metrics_of_one_model

RECORD = RequestRecord(
    request_id="r",
    endpoint="chat_completions",
    decode_mode=DecodeMode.SINGLE,
    prompt_tokens=10,
    first_prompt_tokens=10,
    cached_tokens=4,
    completion_tokens=6,
    queue_s=0.4,
    prefill_s=0.7,
    ttft_s=1.1,
    decode_s=2.0,
    duration_s=3.1,
    finish_reason="stop",
    error_code=None,
    client="anonymous",
    images=2,
    videos=1,
)


def token(sequence_id: str, at_s: float) -> OutputGenerated:
    """A token of a sequence."""
    return OutputGenerated(sequence_id, SampledToken(0, 97), at_s)


def end(
    sequence_id: str, reason: FinishReason = FinishReason.STOP, error: MachdError | None = None
) -> SequenceFinished:
    """The end of a sequence."""
    return SequenceFinished(sequence_id, reason, error, 1, 0, 1, 9.0)


def busy_metrics() -> Metrics:
    """Metrics of a daemon at work that serves one model."""
    metrics, model = metrics_of_one_model()
    metrics.set_info("machd_build_info", version="1", mlx="2", mlx_lm="3", python="3.11")
    metrics.watch_state(lambda: State.READY)
    make_busy(model)
    return metrics


def make_busy(model: ModelMetrics) -> None:
    """Show every kind of series that a model can have."""
    model.set_info(
        "machd_model_info",
        architecture="llama",
        kv_cache_kind="standard",
        dtype="float32",
        backend="cpu",
    )
    model.set_info(
        "machd_capability_info", feature="continuous_batching", verdict="supported", source="rule"
    )
    model.watch_decode_mode(lambda: DecodeMode.SINGLE)
    for name, label, values in [
        ("machd_slots", "state", ["occupied", "free"]),
        ("machd_kv_cache_bytes", "state", ["budget", "reserved", "used"]),
        ("machd_mlx_memory_bytes", "kind", ["active", "peak", "cache"]),
    ]:
        for value in values:
            model.watch(name, lambda: 1.0, **{label: value})
    events: list[Event] = [
        SequenceQueued("a", 0),
        SequenceAdmitted("a", 0, DecodeMode.SINGLE, 1, 1.0),
        *(token("a", at_s) for at_s in (1.0, 1.5)),
        StepCompleted(1, 0, 0.1),
        StepCompleted(0, 8, 0.1),
        StepCompleted(1, 8, 0.1),
        end("a", FinishReason.ERROR, RowFaultError("x")),
        end("b", FinishReason.ERROR, EngineFaultError("x")),
    ]
    model.on_events(events)
    model.on_request(RECORD)
    model.on_request(replace(RECORD, finish_reason="abort", error_code="client_disconnected"))
    model.on_request(replace(RECORD, coalesced_with="req-leader"))
    model.count_rejection("queue_full")
