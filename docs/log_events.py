"""Every event that machd logs, in one table: documentation and tests read it.

A test walks the sources for calls of loggers and holds them against this table, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event.

    Attributes:
        name: What happened, dotted, as the line's ``event`` has it.
        levels: Those it is logged at, the usual one first.
        fields: What a line may hold beside the envelope; ``exception`` is a traceback.
        meaning: When it is logged.
        advice: What to do about it; empty where there is nothing to be done.
    """

    name: str
    levels: tuple[str, ...]
    fields: tuple[str, ...]
    meaning: str
    advice: str = ""


_REPORT = "A bug of machd's: report it with the traceback, which holds nothing that a client sent."

LOG_EVENTS: tuple[LogEvent, ...] = (
    # The daemon
    LogEvent(
        "daemon.listening",
        ("info",),
        ("url", "admin_url", "is_inherited"),
        "The addresses are bound, or were inherited; the model is still loading.",
    ),
    LogEvent("daemon.ready", ("info",), ("url", "model"), "Requests are taken."),
    LogEvent(
        "daemon.held",
        ("info",),
        ("open_requests",),
        "An operator asked for a drain: nothing new is taken, and the process stays.",
        "`POST /admin/resume` takes new work again.",
    ),
    LogEvent("daemon.resumed", ("info",), (), "An operator lets new work in again."),
    LogEvent(
        "daemon.leaving",
        ("info",),
        ("notice_s", "open_requests"),
        "A stop was asked for: `/health/ready` says 503, and work is taken for `limits.drain_notice_s`.",
    ),
    LogEvent(
        "daemon.draining",
        ("info",),
        ("open_requests",),
        "A stop was asked for; what is open may end within `limits.drain_timeout_s`.",
    ),
    LogEvent("daemon.stopped", ("info",), (), "Everything has ended."),
    # Settings and keys
    LogEvent(
        "settings.changed",
        ("info",),
        ("kind", "changed"),
        "A reload or a change over the admin API was taken on; `changed` names the keys.",
    ),
    LogEvent(
        "settings.renamed",
        ("warning",),
        ("given", "now"),
        "A setting is given under the name that it had before. It works.",
        "Write `now` in place of `given`.",
    ),
    LogEvent(
        "settings.refused",
        ("error",),
        ("kind", "problems"),
        "A reload or a change was refused; the old settings stay.",
        "Mend what `problems` names, and reload.",
    ),
    LogEvent(
        "settings.change_failed",
        ("error",),
        ("exception",),
        "Settings could not be read or prepared for a reason that machd does not know.",
        _REPORT,
    ),
    LogEvent(
        "settings.not_taken_on",
        ("error",),
        ("exception",),
        "Settings that had been accepted could not be taken on; the old ones are back.",
        _REPORT,
    ),
    LogEvent(
        "api_keys.exposed",
        ("warning",),
        ("path", "mode", "advice"),
        "Every user of the machine can read the file with the API keys.",
        "Do what `advice` says.",
    ),
    # The model and how it is decoded
    LogEvent(
        "blas.measured",
        ("info",),
        ("backend", "library", "one_row_ms", "sixteen_rows_ms", "reason"),
        "What multiplies matrices, and why the BLAS was chosen; without machd's own kernels also how it takes a batch.",
    ),
    LogEvent(
        "blas.refused",
        ("warning",),
        ("library", "reason"),
        "A BLAS library multiplies wrongly on this CPU and was not loaded; another one or mlx's own serves.",
        "Install another version of it or another library.",
    ),
    LogEvent(
        "blas.slow",
        ("warning",),
        ("advice",),
        "The BLAS gains nothing from a batch.",
        "Do what `advice` says.",
    ),
    LogEvent(
        "kernels.missing",
        ("warning",),
        ("advice",),
        "MLX computes on this CPU, because machd's own kernels are not installed: answers take several times as long.",
        "Do what `advice` says.",
    ),
    LogEvent(
        "model.note",
        ("warning",),
        ("note",),
        "Something about the model that its operator should know.",
        "Read `note`.",
    ),
    LogEvent(
        "model.load_failed",
        ("critical",),
        ("exception",),
        "Loading failed, and not for a reason that the operator can mend.",
        _REPORT,
    ),
    LogEvent(
        "model.downloading",
        ("info",),
        ("model", "revision"),
        "An operator has a model fetched from the hub.",
    ),
    LogEvent(
        "model.downloaded",
        ("info",),
        ("model", "revision", "bytes"),
        "Every file of the model is on this machine, and its hash is right; `bytes` are those of all files.",
    ),
    LogEvent(
        "model.download_failed",
        ("warning",),
        ("model", "error", "exception"),
        "The download ended without the model, or was stopped; what has come is kept.",
        "Do what `error` says, and ask for it again.",
    ),
    LogEvent(
        "adapter.refused",
        ("error",),
        ("name", "error"),
        "The files of a LoRA adapter cannot be used. Requests that name it get 503 `adapter_not_loaded`, and no list has it.",
        "Do what `error` says; the next request finds the mended files.",
    ),
    LogEvent(
        "model.loading",
        ("info",),
        (),
        "Of several models: its engine process starts, opens the files, and waits for memory.",
    ),
    LogEvent(
        "model.ready",
        ("info",),
        (),
        "Of several models: it is loaded, and its requests are computed.",
    ),
    LogEvent(
        "model.suspending",
        ("info",),
        ("leases",),
        "Of several models: it gives way to another one, or is idle for too long. `leases` requests hold it; "
        "their answers go on when it is loaded again.",
    ),
    LogEvent(
        "model.failed",
        ("error",),
        ("error",),
        "Of several models: it could not be loaded, or needs more memory than there is. Others are served; a "
        "request tries it again after 10 s.",
        "`error` says why, with the figures.",
    ),
    LogEvent("probe.started", ("info",), (), "The loaded model is measured, alone and in batches."),
    LogEvent(
        "probe.finished",
        ("info",),
        ("duration_s", "passed", "failed", "unsupported", "no_data", "errored", "measuring"),
        "What is known of the model, as counts of checks, and how long that took: at the start, and when "
        "a measurement beside the daemon ends. `measuring`: checks that run beside the daemon.",
    ),
    LogEvent(
        "probe.answered",
        ("debug",),
        ("probe", "outcome", "detail", "measured_on"),
        "One thing that is known, and which model showed it.",
    ),
    LogEvent(
        "capability.changed",
        ("info",),
        ("feature", "verdict", "previous", "reason"),
        "A measurement beside the daemon changed what is known; the feature is on or off by it now.",
    ),
    LogEvent(
        "probe.failed",
        ("error",),
        ("duration_s", "advice", "exception"),
        "Measuring raised; what the rules say of the model stands.",
        "Do what `advice` says, and report the traceback.",
    ),
    LogEvent(
        "encoder.described",
        ("info",),
        ("task", "pooling", "dimensions", "max_input_tokens"),
        "The model makes vectors or labels of texts, and generates none: what its own files say of that.",
    ),
    LogEvent(
        "decode_mode.decided",
        ("info", "warning"),
        ("requested", "active", "reason", "verdict", "source", "evidence"),
        "How requests are decoded, and why; a warning where it is not as was asked.",
        "`reason` says what stands against batching this model.",
    ),
    LogEvent(
        "decode_mode.changed",
        ("debug",),
        ("previous", "mode"),
        "From this step on tokens are made in another way, because requests have come or gone.",
    ),
    LogEvent(
        "speculation.decided",
        ("info", "warning"),
        ("requested", "active", "max_draft_tokens", "reason"),
        "The proposer of draft tokens, and why; a warning where one was asked for by name and does "
        "not.",
        "`reason` says what stands against it; `speculation.mode = auto` takes what there is.",
    ),
    LogEvent(
        "kv_budget.effective",
        ("info", "warning"),
        ("asked_bytes", "effective_bytes", "device_memory_bytes"),
        "What a batch may hold in its KV cache; a warning where it is less than was asked for.",
        "Ask for less, or give the device more memory.",
    ),
    LogEvent(
        "scheduler.config_changed",
        ("info",),
        ("mode", "slots"),
        "A change of the settings was taken on once nothing ran.",
    ),
    LogEvent(
        "scheduler.config_not_changed",
        ("error",),
        ("exception",),
        "A change of how requests are scheduled failed; they are scheduled as before.",
        _REPORT,
    ),
    # Requests
    LogEvent(
        "sequence.admitted",
        ("debug",),
        (
            "request_id",
            "slot_index",
            "decode_mode",
            "prompt_tokens",
            "max_tokens",
            "active_loops",
            "active_limit",
        ),
        "A sequence got a slot, or joined the decode of an identical one. `active_loops` sequences decode "
        "now, of `active_limit` at most.",
    ),
    LogEvent(
        "sequence.resumed",
        ("info",),
        ("request_id", "reason", "completion_tokens"),
        "A sequence that had lost its slot goes on behind its `completion_tokens`, which were computed again: it was "
        "suspended for `memory`, for another `config`, or after a `fault` of the engine, or by a `restart` of the engine "
        "process.",
    ),
    LogEvent(
        "sequence.coalesced",
        ("info",),
        ("request_id", "coalesced_with", "fanout"),
        "A sequence shares the decode of the request that `coalesced_with` names; `fanout` sequences "
        "read it now.",
    ),
    LogEvent(
        "request.finished",
        ("info",),
        (
            "request_id",
            "endpoint",
            "decode_mode",
            "prompt_tokens",
            "cached_tokens",
            "cache_reason",
            "cache_parted_at_tokens",
            "normalised",
            "images",
            "videos",
            "inputs",
            "completion_tokens",
            "total_tokens",
            "queue_ms",
            "ttft_ms",
            "prompt_tps",
            "generation_tps",
            "total_tps",
            "latency_ms",
            "finish_reason",
            "error",
            "client",
            "coalesced_with",
            "trace_id",
        ),
        "A request for a generation, or to an embedding model or classifier, which has `inputs`, ended, well or not; one "
        "line each. `cache_reason` and `cache_parted_at_tokens` are of the first prompt: why the prefix cache had no more of "
        "it, and how many tokens it has in common with a kept text; null where it never began. `normalised` names the rules of "
        "`cache.normalise` that took something out of it.",
    ),
    LogEvent(
        "request.unknown_fields",
        ("debug",),
        ("request_id", "fields"),
        "Fields that machd does not know were ignored; `fields` holds their names.",
    ),
    LogEvent(
        "request.tools_left_out",
        ("debug",),
        ("request_id", "kinds"),
        "Tools that only the client's own service could run were left out.",
    ),
    LogEvent(
        "request.failed",
        ("error",),
        ("exception",),
        "A request could not be answered; its client got a 500.",
        _REPORT,
    ),
    LogEvent(
        "row.failed",
        ("error",),
        ("slot_index", "exception"),
        "One request's row failed, or the writing of its answer; no other is touched.",
        _REPORT,
    ),
    LogEvent(
        "speculation.failed",
        ("warning",),
        ("slot_index", "exception"),
        "Drafting tokens failed for one request, which goes on without and gets the same "
        "answer, later.",
        "Report it with the traceback; `speculation.mode = off` until then, if there are many.",
    ),
    LogEvent(
        "output.unreadable",
        ("error",),
        ("cause",),
        "What a model wrote could not be read as calls or thoughts; it was answered as text.",
        "Report the model's name and its template.",
    ),
    LogEvent(
        "requests.aborted",
        ("warning",),
        ("ids",),
        "An operator ended requests.",
    ),
    LogEvent(
        "cache.cleared",
        ("info",),
        ("responses", "blocks", "deleted_blocks", "disk_bytes"),
        "An operator had the stored responses and the prefix cache dropped; `deleted_blocks` were "
        "deleted on disk, and `disk_bytes` are still there.",
    ),
    LogEvent(
        "cache.warmed",
        ("info",),
        ("prompts", "failed", "prompt_tokens", "cached_tokens", "duration_s"),
        "An operator had prompts computed and kept: those of one request, of which "
        "`machd ctl cache warm` sends several for a long file.",
    ),
    # The disk tier of the prefix cache
    LogEvent(
        "blocks.found",
        ("info",),
        ("count", "bytes", "damaged", "useless", "stale"),
        "What `cache.disk_dir` had at the start, and what was deleted there: files that are damaged, "
        "those that no text leads to, and those of other models or versions that the budget has no "
        "room for.",
    ),
    LogEvent(
        "blocks.not_used",
        ("warning",),
        ("advice",),
        "`cache.disk_dir` is set while `cache.prefix` is off: nothing is written there, and nothing "
        "read or deleted.",
        "Do what `advice` says.",
    ),
    LogEvent(
        "blocks.not_written",
        ("warning",),
        ("count", "cause", "advice"),
        "Blocks did not get to the disk; once a minute at most, with their number.",
        "Do what `advice` says; requests are not affected.",
    ),
    LogEvent(
        "blocks.damaged",
        ("warning",),
        ("count", "advice"),
        "Files were not what had been written, and were deleted: those found at the start, and later "
        "once a minute at most, with the number of all of them so far.",
        "Do what `advice` says; the prompts are computed instead.",
    ),
    LogEvent(
        "ranks.not_joined",
        ("warning",),
        ("rank", "attempt", "cause"),
        "The ranks did not find each other; they try again, three times in all.",
        "See that every rank runs, and that nothing but ranks connects to the ports of the host file.",
    ),
    LogEvent(
        "ranks.joined",
        ("info",),
        ("rank", "ranks", "backend"),
        "All ranks are connected and have the same versions, settings and model.",
    ),
    LogEvent(
        "ranks.loading",
        ("info",),
        ("loaded_bytes", "total_bytes"),
        "Weights that each rank has loaded, and those that it will have, in the order of ranks.",
    ),
    LogEvent(
        "experts.on_disk",
        ("info",),
        ("capacity_bytes", "in_memory", "experts"),
        "The model's experts stay on disk (`experts.resident_gb`): `in_memory` of `experts` are in a bank "
        "of so many bytes.",
    ),
    LogEvent(
        "experts.unreadable",
        ("error",),
        ("layer", "expert", "problem", "advice"),
        "An expert could not be read from the model's files; once for each expert.",
        "Do what `advice` says; requests that do not need it are not affected.",
    ),
    LogEvent(
        "blocks.change_failed",
        ("error",),
        ("count", "exception"),
        "A block could not be copied, cut, saved or loaded, and is lost; once a minute at most, with "
        "the number of all since the start.",
        "Give the daemon more memory if the traceback says that there was none; else report it. "
        "Requests are not affected.",
    ),
    # The engine
    LogEvent(
        "engine.step_failed",
        ("error",),
        ("in_a_row", "exception"),
        "A step of the whole batch failed. Its requests go on from their tokens, one at a time at first; one that fails alone as "
        "well gets an error.",
        _REPORT,
    ),
    LogEvent(
        "engine.memory_short",
        ("warning",),
        ("needed_bytes", "left_bytes", "given"),
        "A step, or an image to encode, did not fit into the memory that is left, and something was given up for it: `adapters` "
        "that no request uses, `blocks` of the prefix cache, the slot of a request, which goes on later (`suspended`), or a request (`ended`, with "
        "`overloaded`).",
        "Lower `continuous_batching.kv_budget_gb`, `continuous_batching.max_b` or "
        "`cache.memory_percent`, or give the daemon more memory.",
    ),
    LogEvent(
        "memory.not_read",
        ("warning",),
        ("exception",),
        "The system did not tell how much memory is left; the last reading stands until it does.",
        "See what the exception says; running out of file descriptors is the usual cause.",
    ),
    LogEvent(
        "engine.stalled",
        ("critical",),
        ("heartbeat_age_s",),
        "A step took longer than `engine.stall_timeout_s`. The engine process is killed and replaced; with ranks the daemon ends.",
        "Raise that setting if the device is slow; otherwise look at the device.",
    ),
    LogEvent(
        "engine.stopped",
        ("critical",),
        ("error", "exception"),
        "The engine gave up. If `engine.process_ended` follows, its process is replaced; else engine processes have ended too "
        "often, and the daemon ends.",
        _REPORT,
    ),
    LogEvent(
        "engine.process_ended",
        ("error",),
        ("reason", "status", "sequences", "last_lines"),
        "The engine process has ended: by itself or by a signal (`exit`), because its engine gave up (`fault`), or killed after "
        "`engine.stalled` (`stall`). `status` is its signal (`SIGKILL`), its `exit status 70`, or why the system did not start it "
        "(`not started: Cannot allocate memory`). Its `sequences` go on in the next process. `last_lines` are the last that it wrote to standard "
        "error beside its log (at most 200 and 16 KiB; a terminal has them above the event): what a library says before it ends a process, "
        "and after a crash where each thread was.",
        "`SIGKILL` with `exit` is most often the kernel's OOM killer: give the daemon more memory. Report other signals, with the event and the model.",
    ),
    LogEvent(
        "engine.restarted",
        ("info",),
        ("sequences", "pid"),
        "Another engine process has loaded the model and computes; `sequences` were open and go on in it.",
    ),
    LogEvent(
        "grammar.not_compiled",
        ("error",),
        ("exception",),
        "A constraint made the compiler fail; its request gets `engine_fault`.",
        _REPORT,
    ),
    LogEvent(
        "scheduler.invariant_broken",
        ("error",),
        ("detail", "exception"),
        "The scheduler's books do not add up at an idle moment.",
        _REPORT,
    ),
    # Traces
    LogEvent(
        "kv_events.listening",
        ("info", "warning"),
        ("endpoint", "replay_endpoint", "is_exposed"),
        "KV events are published there; a warning where other machines can connect.",
        "Whoever connects reads the prompts' tokens: see that only routers can.",
    ),
    LogEvent(
        "kv_events.connection_refused",
        ("warning",),
        ("endpoint", "connections"),
        "All connections of an endpoint were taken when another one came; once a minute at most. One was closed.",
        "See who connects: a router needs one connection, and nobody else should reach the endpoint.",
    ),
    LogEvent(
        "kv_events.lost",
        ("warning",),
        ("count",),
        "Events were dropped, because they came faster than they could be sent.",
        "Routers see a gap, and foretell too much or too little until the blocks change; requests are not affected.",
    ),
    LogEvent(
        "spans.lost",
        ("warning",),
        ("count", "cause", "advice"),
        "Spans did not reach the collector; once a minute at most, with their number.",
        "See that `tracing.otlp_endpoint` answers; requests are not affected.",
    ),
)
