"""The panels about requests: how many there are, how long they take, how they share steps."""

from __future__ import annotations

from dashboard.grafana import PanelKind, PanelRow, Query
from dashboard.promql import (
    by_instance,
    by_mode,
    mean,
    number,
    of,
    panel,
    percentiles,
    quantile,
    rate,
    rates_by,
    total,
    total_rate,
)

GLANCE = PanelRow(
    "At a glance",
    (
        number(
            "State",
            "What each daemon is doing. Only ready ones take requests.",
            "none",
            Query(f"{of('machd_state')} == 1", "{{state}} {{instance}}"),
        ),
        number(
            "Requests",
            "Requests that ended, a second, whatever their end.",
            "reqps",
            total_rate("machd_requests_total", "requests"),
        ),
        number(
            "Generated tokens",
            "Tokens of answers, a second. A request's tokens count when it ends.",
            "short",
            total_rate("machd_generation_tokens_total", "tokens/s"),
        ),
        number(
            "First token, median",
            "Half of the requests had their first token sooner.",
            "s",
            Query(quantile(0.5, "machd_time_to_first_token_seconds"), "p50 {{model}}"),
        ),
        number(
            "KV cache in use",
            "Of each model's budget, on the fullest daemon.",
            "percentunit",
            Query(f"max by (model) ({of('machd_kv_cache_usage_ratio')})", "used {{model}}"),
        ),
        number(
            "Up since",
            "When each daemon started. A recent time that nobody can explain is a crash.",
            "dateTimeFromNow",
            by_instance("machd_start_time_seconds", " * 1000"),
        ),
    ),
)

TRAFFIC = PanelRow(
    "Traffic",
    (
        panel(
            "Requests by how they ended",
            "stop and length are whole answers. abort: the client left or a limit ended it; "
            "reject: turned away; error: a failure of machd's own, see the log.",
            "reqps",
            rates_by("finish_reason", "machd_requests_total"),
            is_stacked=True,
        ),
        panel(
            "Running and waiting",
            "Sequences that are answered, and those that wait for a slot. A queue that does not "
            "empty again means more load than the machine can take.",
            "short",
            total("machd_requests_running", "running"),
            total("machd_requests_waiting", "waiting"),
            total("machd_http_requests_in_flight", "HTTP requests open"),
        ),
        panel(
            "Rejections by reason",
            "Requests turned away before they ran. queue_full and queue_timeout: too much load; "
            "key_limit: one client asks for more than it may.",
            "reqps",
            rates_by("reason", "machd_rejections_total"),
            is_stacked=True,
        ),
        panel(
            "Tokens a second",
            "Tokens of answers and of prompts; cached are prompt tokens that were not "
            "computed again.",
            "short",
            total_rate("machd_generation_tokens_total", "generated"),
            total_rate("machd_prompt_tokens_total", "prompt"),
            total_rate("machd_prompt_tokens_cached_total", "prompt, cached"),
            width=12,
        ),
        panel(
            "Texts to embed or classify",
            "Inputs of requests for embeddings, scores and classes, a second; a request may have "
            "many.",
            "short",
            total_rate("machd_encoder_inputs_total", "texts"),
            width=12,
        ),
        panel(
            "Requests by endpoint",
            "Which API clients speak.",
            "reqps",
            rates_by("endpoint", "machd_requests_total"),
            width=12,
            is_stacked=True,
        ),
    ),
)

LATENCY = PanelRow(
    "Latency",
    (
        percentiles(
            "Time to first token",
            "machd_time_to_first_token_seconds",
            "From arrival to the first token. If it grows with the queue time, load is the cause; "
            "if without, prompts have become longer.",
        ),
        percentiles(
            "Between tokens",
            "machd_inter_token_latency_seconds",
            "How smooth streams are. A p99 far above the median comes from prompts that are read "
            "while others decode.",
        ),
        percentiles(
            "Whole request",
            "machd_request_duration_seconds",
            "From arrival to the end; grows with the length of answers.",
        ),
        percentiles(
            "Queue",
            "machd_request_queue_time_seconds",
            "From arrival to a slot. The first to grow when there is more load than slots.",
        ),
    ),
)

BATCHING = PanelRow(
    "Batching",
    (
        panel(
            "Batch width",
            "Rows that decoded in one step, how often. Wider batches make more tokens of the same "
            "memory traffic.",
            "short",
            Query(
                f"sum by (le) (increase({of('machd_batch_width_bucket')}[$__rate_interval]))",
                "{{le}}",
            ),
            kind=PanelKind.HEATMAP,
        ),
        panel(
            "Rows and slots",
            "Mean width of a step, against the slots there are and those in use.",
            "short",
            mean("machd_batch_width", "mean width"),
            total("machd_slots", "slots in use", 'state="occupied"'),
            total("machd_slots", "slots free", 'state="free"'),
        ),
        panel(
            "Step duration, median",
            "How long an engine step takes: reading a prompt, decoding, or both.",
            "s",
            Query(
                "histogram_quantile(0.5, sum by (le, phase, model) "
                f"({rate('machd_step_duration_seconds_bucket')}))",
                "{{phase}} {{model}}",
            ),
        ),
        panel(
            "Decode mode",
            "The mode of the moment; whether the daemon batches at all; and whether it was asked to. "
            "Where the last two differ, the model may not be batched: the table of verdicts says why.",
            "none",
            by_mode("machd_decode_mode", "now: {{mode}} {{model}}"),
            by_mode("machd_decode_mode_active", "at most: {{mode}} {{model}}"),
            by_mode("machd_decode_mode_requested", "asked: {{mode}} {{model}}"),
            kind=PanelKind.STATES,
        ),
        panel(
            "Tokens a step",
            "Tokens computed in one step on average, of prompts and of answers.",
            "short",
            mean("machd_step_tokens", "tokens"),
        ),
        panel(
            "Shared decodes",
            "Requests a second that were answered from the decode of an identical one.",
            "reqps",
            total_rate("machd_coalesced_requests_total", "coalesced"),
        ),
        panel(
            "Resumed sequences",
            "Sequences a second that had lost their slots and went on, by reason: memory, fault, config, restart.",
            "ops",
            rates_by("reason", "machd_sequences_resumed_total"),
        ),
    ),
)
