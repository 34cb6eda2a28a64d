"""The panels about the machine room: failures, the engine, and what runs."""

from __future__ import annotations

from dashboard.grafana import PanelKind, PanelRow, Query
from dashboard.promql import by_instance, by_model, label_table, of, panel, rate, rates_by, total

FAILURES = PanelRow(
    "Faults and aborts",
    (
        panel(
            "Faults",
            "Failures of machd's own a second: of one request's row, or of the engine. The log "
            "has each with its traceback.",
            "cps",
            rates_by("scope", "machd_faults_total"),
            is_stacked=True,
        ),
        panel(
            "Engine processes replaced",
            "By why: it ended (exit), its engine gave up (fault), or it was killed because a step hung (stall). Requests go "
            "on in the next one.",
            "short",
            Query(
                f"sum by (reason, model) (increase({of('machd_engine_restarts_total')}[$__rate_interval]))",
                "{{reason}} {{model}}",
            ),
            is_stacked=True,
        ),
        panel(
            "Aborts by reason",
            "Requests that ended early. client_disconnected is normal where people press stop; "
            "request_timeout and client_stalled are not.",
            "reqps",
            rates_by("reason", "machd_aborts_total"),
            is_stacked=True,
        ),
        panel(
            "Broken invariants",
            "Moments at which the scheduler's books did not add up. Above 0 is a bug to report.",
            "short",
            total("machd_invariant_violations_total", "since the start"),
        ),
    ),
)

MODELS = PanelRow(
    "Models",
    (
        panel(
            "State of each model",
            "Of several models: which are ready, which load, which have failed. Where none is shown, the daemon has one "
            "model.",
            "bool_yes_no",
            Query(f"max by (model, state) ({of('machd_model_state')}) == 1", "{{model}} {{state}}"),
            kind=PanelKind.STATES,
        ),
        panel(
            "Memory that is reserved",
            "Weights, working memory and KV budget of each model; together at most models.memory_gb.",
            "bytes",
            Query(f"sum by (model) ({of('machd_model_reserved_bytes')})", "{{model}}"),
            is_stacked=True,
        ),
        panel(
            "Requests that hold a model",
            "Those that wait for its load included.",
            "short",
            Query(f"sum by (model) ({of('machd_model_leases')})", "{{model}}"),
            is_stacked=True,
        ),
        panel(
            "Loads",
            "By outcome. A failed or refused one is retried by a later request; the log has why.",
            "short",
            Query(
                f"sum by (outcome, model) (increase({of('machd_model_loads_total')}[$__rate_interval]))",
                "{{outcome}} {{model}}",
            ),
            is_stacked=True,
        ),
        panel(
            "Suspensions",
            "Times that a busy model gave way. Many of them: the models in use do not fit together.",
            "short",
            Query(
                f"sum by (model) (increase({of('machd_model_suspensions_total')}[$__rate_interval]))",
                "{{model}}",
            ),
            is_stacked=True,
        ),
        panel(
            "Time of the last load",
            "From the grant of the memory until the model was ready.",
            "s",
            by_model("machd_model_last_load_seconds"),
        ),
    ),
)

ENGINE = PanelRow(
    "Engine and process",
    (
        panel(
            "Engine heartbeat",
            "Since the engine thread last began a step. A step may take seconds; a line that only "
            "rises is a hung engine.",
            "s",
            by_model("machd_engine_heartbeat_age_seconds"),
        ),
        panel(
            "Event loop lag",
            "How late the event loop woke up. Above a tenth of a second, streams stutter.",
            "s",
            by_instance("machd_event_loop_lag_seconds"),
        ),
        panel(
            "Memory",
            "What MLX holds in the engine process, by kind, and the process that answers, which only Linux tells.",
            "bytes",
            Query(f"sum by (kind) ({of('machd_mlx_memory_bytes')})", "MLX {{kind}}"),
            total("process_resident_memory_bytes", "front"),
        ),
        panel(
            "Memory of ranks",
            "What MLX holds on each rank, weights included, and what its process can still take. The tightest "
            "rank decides what a step may have; no line without ranks.",
            "bytes",
            Query(of("machd_rank_memory_bytes"), "{{model}} rank {{rank}} {{kind}}"),
        ),
        panel(
            "Heartbeat of ranks",
            "Since each rank last answered rank 0, twice a second when nothing runs. A line that only rises is a "
            "rank that hangs.",
            "s",
            Query(
                f"time() - {of('machd_rank_heartbeat_timestamp_seconds')}",
                "{{model}} rank {{rank}}",
            ),
        ),
        panel(
            "Processor",
            "Cores in use by the process that answers, without the engine process; only Linux tells.",
            "short",
            Query(f"sum by (instance) ({rate('process_cpu_seconds_total')})", "{{instance}}"),
        ),
        panel(
            "Settings taken on",
            "1 while the last reload of the settings went well. At 0 it was refused, and the old "
            "settings are in force.",
            "bool_yes_no",
            by_instance("machd_config_last_reload_successful"),
            kind=PanelKind.STATES,
        ),
        panel(
            "Settings taken on at",
            "When a reload was last taken on, or else the daemon started.",
            "dateTimeFromNow",
            by_instance("machd_config_last_reload_timestamp_seconds", " * 1000"),
            kind=PanelKind.NUMBER,
        ),
    ),
)

INFOS = PanelRow(
    "What runs",
    (
        label_table(
            "Capability verdicts",
            "What the loaded model can do here, and whether a rule says so or a measurement.",
            "machd_capability_info",
        ),
        label_table("Model", "What is served, and on what.", "machd_model_info"),
        label_table("Versions", "Of machd and what it stands on.", "machd_build_info", width=24),
    ),
)
