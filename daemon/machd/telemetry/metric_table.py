"""Every metric machd exports, in one table: collectors, documentation and tests read it.

Buckets are vLLM's, so that existing dashboards and recording rules keep their meaning. Labels have
fixed sets of values; nothing that a client sends becomes one. What is of a model, its engine or its
requests, has the label ``model``; what is of the daemon alone has not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

MODEL_LABEL = "model"
"""Names the served model, as ``/v1/models`` does."""

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_WIDTH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class MetricKind(StrEnum):
    """Prometheus metric types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric family.

    Attributes:
        name: As exported, except that a counter's ``_total`` is part of the name here.
        labels: Names of the labels as exported, :data:`MODEL_LABEL` first if it is there.
        buckets: Upper bounds of a histogram, in the metric's unit.
        is_read: Whether a counter is counted elsewhere, and read at a scrape as gauges are.
        is_of_several: Whether it is exported only by a daemon of several models.
    """

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    is_read: bool = False
    is_of_several: bool = False

    @property
    def family_name(self) -> str:
        """The name without what prometheus_client adds to a counter's."""
        is_counter = self.kind is MetricKind.COUNTER
        return self.name.removesuffix("_total") if is_counter else self.name

    @property
    def is_of_model(self) -> bool:
        """Whether its series are a model's."""
        return MODEL_LABEL in self.labels

    @property
    def counted_labels(self) -> tuple[str, ...]:
        """Labels besides the model's, by which values are counted or read."""
        return tuple(one for one in self.labels if one != MODEL_LABEL)


def _counter(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.COUNTER, text, labels)


def _reading(name: str, text: str, *labels: str) -> MetricSpec:
    """A counter that another part counts."""
    return MetricSpec(name, MetricKind.COUNTER, text, labels, is_read=True)


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.GAUGE, text, labels)


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
) -> MetricSpec:
    return MetricSpec(name, MetricKind.HISTOGRAM, text, labels, buckets)


DAEMON_METRICS: tuple[MetricSpec, ...] = (
    _gauge("machd_build_info", "Versions; always 1.", "version", "mlx", "mlx_lm", "python"),
    _gauge("machd_state", "1 on the state that the daemon is in.", "state"),
    _gauge("machd_start_time_seconds", "When the daemon started, since the epoch."),
    _gauge("machd_http_requests_in_flight", "HTTP requests that are open, health not counted and a scrape over the public port counted."),
    _gauge("machd_stored_responses", "Responses that later requests may refer to."),
    _gauge("machd_stored_response_bytes", "Bytes of those responses."),
    _gauge("machd_event_loop_lag_seconds", "How late the event loop woke up, the last time."),
    _gauge("machd_config_last_reload_successful", "1 unless the last reload of the settings was refused."),
    _gauge("machd_config_last_reload_timestamp_seconds", "When a reload was last taken on, or the daemon started."),
)  # fmt: skip

_OF_MODEL: tuple[MetricSpec, ...] = (
    _gauge("machd_model_info", "The served model; always 1.", "architecture", "kv_cache_kind", "dtype", "backend"),
    _gauge("machd_capability_info", "What the loaded model can do here, by feature; always 1.", "feature", "verdict", "source"),
    _gauge("machd_decode_mode", "1 on the decode mode of the step under way; of an idle daemon, on that of a lonely request.", "mode"),
    _gauge("machd_decode_mode_requested", "1 on batched where the settings ask for continuous batching, else on single.", "mode"),
    _gauge("machd_decode_mode_active", "1 on batched where sequences may decode together, else on single.", "mode"),
    _counter("machd_decode_mode_changes_total", "Steps that decoded in another mode than the one before, by the mode that began.", "mode"),
    _gauge("machd_requests_running", "Sequences that are being answered, those that share a decode each."),
    _gauge("machd_requests_waiting", "Sequences that wait for a slot."),
    _gauge("machd_requests_waiting_limit", "Decodes that may wait: limits.max_queue; sequences that share one count once."),
    _gauge("machd_generations_open", "Generations that somebody reads, those that wait included, each with all its choices."),
    _gauge("machd_slots", "Slots by state.", "state"),
    _gauge("machd_active_loops", "Decodes that are running, one for each group of sequences that share it."),
    _counter("machd_requests_total", "Requests that ended.", "endpoint", "finish_reason", "decode_mode"),
    _counter("machd_rejections_total", "Requests turned away before they ran.", "reason"),
    _counter("machd_aborts_total", "Requests that ended before they were finished.", "reason"),
    _counter("machd_coalesced_requests_total", "Requests that shared the decode of an identical one."),
    _counter(
        "machd_sequences_resumed_total",
        "Sequences that lost their slots after their first token and went on in another one, by reason: memory, "
        "fault, config, or restart of the engine process.",
        "reason",
    ),
    _counter("machd_prompt_tokens_total", "Prompt tokens of requests that ended."),
    _counter("machd_prompt_tokens_cached_total", "Prompt tokens that were not computed again."),
    _counter("machd_prompt_media_total", "Images and videos in prompts of requests that ended.", "kind"),
    _counter("machd_generation_tokens_total", "Completion tokens of requests that ended."),
    _histogram("machd_time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS_S),
    _histogram("machd_inter_token_latency_seconds", "Between two tokens of a sequence.", _TOKEN_BUCKETS_S),
    _histogram("machd_request_duration_seconds", "From arrival to the end.", _REQUEST_BUCKETS_S),
    _histogram("machd_request_queue_time_seconds", "From arrival to a slot.", _REQUEST_BUCKETS_S),
    _histogram("machd_request_prefill_time_seconds", "From a slot to the first token.", _REQUEST_BUCKETS_S),
    _histogram("machd_request_decode_time_seconds", "From the first token to the end.", _REQUEST_BUCKETS_S),
    _histogram("machd_step_duration_seconds", "Wall time of an engine step.", _TOKEN_BUCKETS_S, ("phase",)),
    _histogram("machd_batch_width", "Rows that decoded in a step.", _WIDTH_BUCKETS),
    _histogram("machd_step_tokens", "Tokens computed in a step, prompt and decode.", _STEP_TOKEN_BUCKETS),
    _gauge("machd_kv_cache_bytes", "Bytes of KV cache of running sequences by state; the prefix cache is not in it.", "state"),
    _gauge("machd_kv_cache_usage_ratio", "Bytes of KV cache in use, of the budget."),
    _reading("machd_prefix_cache_queries_total", "Prompts looked up in the prefix cache."),
    _reading("machd_prefix_cache_hits_total", "Prompts found in the prefix cache: full but for the last token, or a prefix of them.", "kind"),
    _counter(
        "machd_prefix_cache_misses_total",
        "Requests that ended and whose prompt was not found whole in the prefix cache, by why.",
        "reason",
    ),
    _gauge("machd_prefix_cache_bytes", "Bytes of the prefix cache in memory; shared blocks count once."),
    _gauge("machd_prefix_cache_limit_bytes", "Bytes that it may take now; +Inf where only the number of texts is limited."),
    _gauge("machd_prefix_cache_saved_bytes", "Bytes that it would take besides if nothing were shared."),
    _gauge("machd_prefix_cache_entries", "Texts that it keeps."),
    _gauge(
        "machd_prefix_cache_blocks",
        "Its blocks: held in memory; of those pinned by running sequences, and shared by texts; and "
        "those on disk.",
        "state",
    ),
    _reading("machd_prefix_cache_evictions_total", "Blocks that made room for others."),
    _gauge("machd_block_files_bytes", "Bytes of the prefix cache on disk."),
    _gauge("machd_block_files_budget_bytes", "Bytes that it may take there; 0 without a directory."),
    _reading(
        "machd_block_files_total",
        "Blocks written to disk and loaded from there, files found damaged and deleted, and blocks "
        "dropped because writing could not keep up or failed.",
        "outcome",
    ),
    _gauge("machd_expert_bank_capacity_bytes", "Memory of the expert bank; 0 without experts on disk."),
    _reading(
        "machd_expert_bank_lookups_total",
        "Experts that a pass needed: hit was in memory, read_ahead was read ahead, miss had to be read "
        "while the pass waited.",
        "outcome",
    ),
    _reading("machd_expert_bank_read_bytes_total", "Bytes of experts read from the model's files."),
    _gauge("machd_adapters", "Adapters: loaded are in memory, and held of those are used by running sequences.", "state"),
    _gauge("machd_adapter_bytes", "Memory of adapters."),
    _reading("machd_adapter_loads_total", "Adapters that were put into memory; many times the same ones if adapters.max_loaded is too small."),
    _reading(
        "machd_encoder_lookups_total",
        "Images and videos of prompts, and an encoder's texts: hit was encoded before or for another request, miss had to be encoded.",
        "outcome",
    ),
    _reading("machd_encoder_seconds_total", "Time that encoding images and videos took on the engine's thread."),
    _gauge("machd_encoder_cache_bytes", "Memory of encoded images and videos, and of an encoder's vectors, that are kept."),
    _gauge("machd_speculation_mode", "1 on the proposer of draft tokens; off is none.", "mode"),
    _reading("machd_speculation_cycles_total", "Passes that verified drafts, each row's by itself."),
    _reading("machd_speculation_draft_tokens_total", "Draft tokens that were verified."),
    _reading("machd_speculation_accepted_tokens_total", "Those of them that were right."),
    _reading(
        "machd_speculation_draft_by_position_tokens_total",
        "Draft tokens that were verified, by how far ahead: 1 is the next token.",
        "position",
    ),
    _reading("machd_speculation_accepted_by_position_tokens_total", "Those of them that were right, all before them included.", "position"),
    _reading("machd_speculation_fallbacks_total", "Sequences that went on without drafts because their proposer failed."),
    _gauge("machd_engine_heartbeat_age_seconds", "Since the engine last began a step or found itself idle."),
    _gauge(
        "machd_rank_memory_bytes",
        "Memory of each rank: held by the array library, and what its process can still take; none without ranks.",
        "rank",
        "kind",
    ),
    _gauge("machd_rank_heartbeat_timestamp_seconds", "When each rank last answered rank 0, in seconds since 1970; none without ranks.", "rank"),
    _gauge("machd_mlx_memory_bytes", "Bytes that MLX holds, by kind.", "kind"),
    _counter("machd_faults_total", "Failures of machd's own.", "scope"),
    _counter("machd_engine_restarts_total", "Engine processes that ended and were replaced by another one, by why.", "reason"),
    _counter("machd_invariant_violations_total", "Moments at which the scheduler's books did not add up: a bug of machd's."),
    _counter("machd_encoder_inputs_total", "Texts, or pairs of texts, of requests for embeddings, scores or classes that ended."),
)  # fmt: skip

_OF_SEVERAL: tuple[MetricSpec, ...] = tuple(
    replace(one, help=f"{one.help} Only where there are several models.", is_of_several=True)
    for one in (
        _gauge("machd_model_state", "1 on the state that the model is in.", "state"),
        _gauge("machd_model_reserved_bytes", "Memory that is reserved for the model: weights, working memory and KV budget."),
        _gauge("machd_model_leases", "Requests that hold the model, those that wait for its load included."),
        _reading(
            "machd_model_loads_total",
            "Loads of the model by outcome: loaded, failed, or refused because its memory can never be free.",
            "outcome",
        ),
        _reading("machd_model_suspensions_total", "Times that the model gave way to another one, or to an operator, while requests held it."),
        _gauge("machd_model_last_load_seconds", "How long the last load took, from the grant of its memory; 0 before the first."),
    )
)  # fmt: skip

MODEL_METRICS: tuple[MetricSpec, ...] = tuple(
    replace(one, labels=(MODEL_LABEL, *one.labels)) for one in (*_OF_MODEL, *_OF_SEVERAL)
)
"""Metrics of a model, its engine and its requests."""

METRICS: tuple[MetricSpec, ...] = (*DAEMON_METRICS, *MODEL_METRICS)
"""Every metric, in the order of the page."""
