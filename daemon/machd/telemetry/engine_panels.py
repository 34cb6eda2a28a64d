"""The panels about the machine room: caches, failures, the engine, and what runs."""

from __future__ import annotations

from machd.telemetry.grafana import Panel, PanelKind, PanelRow, Query
from machd.telemetry.promql import of, rate, rates_by, total, total_rate

__all__ = ["CACHES", "ENGINE", "FAILURES", "INFOS"]

CACHES = PanelRow(
    "KV cache, prefix cache, speculation",
    (
        Panel(
            "KV cache",
            "Bytes that running sequences hold and were promised, and the budget. Requests wait "
            "while what they need is more than the budget has left.",
            "bytes",
            tuple(
                total("machd_kv_cache_bytes", state, f'state="{state}"')
                for state in ("budget", "reserved", "used")
            ),
        ),
        Panel(
            "Prompt tokens that were cached",
            "The share of prompt tokens that were not computed again.",
            "percentunit",
            (
                Query(
                    f"sum({rate('machd_prompt_tokens_cached_total')}) / "
                    f"sum({rate('machd_prompt_tokens_total')})",
                    "cached",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Prefix cache",
            "Prompts that were looked up, and found whole or in part. 0 until there is one.",
            "reqps",
            (
                total_rate("machd_prefix_cache_queries_total", "looked up"),
                rates_by("kind", "machd_prefix_cache_hits_total"),
            ),
        ),
        Panel(
            "Prefix cache and stored responses",
            "Bytes that are kept for later requests.",
            "bytes",
            (
                total("machd_prefix_cache_bytes", "prefix cache"),
                total("machd_stored_response_bytes", "stored responses"),
            ),
        ),
        Panel(
            "Stored responses",
            "Responses that later requests may refer to.",
            "short",
            (total("machd_stored_responses", "responses"),),
        ),
        Panel(
            "Speculation",
            "Tokens guessed ahead, and those that were right. 0 until there is speculation.",
            "short",
            (
                total_rate("machd_speculation_draft_tokens_total", "guessed"),
                total_rate("machd_speculation_accepted_tokens_total", "right"),
            ),
        ),
    ),
)

FAILURES = PanelRow(
    "Faults and aborts",
    (
        Panel(
            "Faults",
            "Failures of machd's own a second: of one request's row, or of the engine. The log "
            "has each with its traceback.",
            "cps",
            (rates_by("scope", "machd_faults_total"),),
            is_stacked=True,
        ),
        Panel(
            "Aborts by reason",
            "Requests that ended early. client_disconnected is normal where people press stop; "
            "request_timeout and client_stalled are not.",
            "reqps",
            (rates_by("reason", "machd_aborts_total"),),
            is_stacked=True,
        ),
        Panel(
            "Broken invariants",
            "Moments at which the scheduler's books did not add up. Above 0 is a bug to report.",
            "short",
            (total("machd_invariant_violations_total", "since the start"),),
        ),
    ),
)

ENGINE = PanelRow(
    "Engine and process",
    (
        Panel(
            "Engine heartbeat",
            "Since the engine thread last began a step. A step may take seconds; a line that only "
            "rises is a hung engine.",
            "s",
            (Query(of("machd_engine_heartbeat_age_seconds"), "{{instance}}"),),
        ),
        Panel(
            "Event loop lag",
            "How late the event loop woke up. Above a tenth of a second, streams stutter.",
            "s",
            (Query(of("machd_event_loop_lag_seconds"), "{{instance}}"),),
        ),
        Panel(
            "Memory",
            "What MLX holds, by kind, and the whole process, which only Linux tells.",
            "bytes",
            (
                Query(f"sum by (kind) ({of('machd_mlx_memory_bytes')})", "MLX {{kind}}"),
                total("process_resident_memory_bytes", "process"),
            ),
        ),
        Panel(
            "Processor",
            "Cores in use by the process; only Linux tells.",
            "short",
            (Query(f"sum by (instance) ({rate('process_cpu_seconds_total')})", "{{instance}}"),),
        ),
        Panel(
            "Settings taken on",
            "1 while the last reload of the settings went well. At 0 it was refused, and the old "
            "settings are in force.",
            "bool_yes_no",
            (Query(of("machd_config_last_reload_successful"), "{{instance}}"),),
            PanelKind.STATES,
        ),
        Panel(
            "Settings taken on at",
            "When a reload was last taken on, or else the daemon started.",
            "dateTimeFromNow",
            (Query(f"{of('machd_config_last_reload_timestamp_seconds')} * 1000", "{{instance}}"),),
            PanelKind.NUMBER,
        ),
    ),
)

INFOS = PanelRow(
    "What runs",
    (
        Panel(
            "Capability verdicts",
            "What the loaded model can do here, and whether a rule says so or a measurement.",
            "none",
            (Query(of("machd_capability_info")),),
            PanelKind.TABLE,
            width=12,
        ),
        Panel(
            "Model",
            "What is served, and on what.",
            "none",
            (Query(of("machd_model_info")),),
            PanelKind.TABLE,
            width=12,
        ),
        Panel(
            "Versions",
            "Of machd and what it stands on.",
            "none",
            (Query(of("machd_build_info")),),
            PanelKind.TABLE,
            width=24,
        ),
    ),
)
