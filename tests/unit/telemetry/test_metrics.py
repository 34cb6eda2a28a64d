"""The metric table, what events and requests make of it, and the page that Prometheus reads."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import ProcessCollector
from reference_tables import metrics_markdown
from support.clocks.polling import CEILING_S
from support.daemon.busy_metrics import RECORD, busy_metrics, end, token
from support.daemon.scraping import Page, families_of, metrics_of_one_model
from support.programs.installed_programs import needs_programs, path_of

from machd.errors import (
    EngineFaultError,
    MachdError,
    QueueFullError,
    RequestTimeoutError,
    RowFaultError,
)
from machd.process.lifecycle import State
from machd.scheduler.events import (
    DecodeMode,
    DecodeModeChanged,
    EngineFaulted,
    FinishReason,
    InvariantBroken,
    SequenceAdmitted,
    SequenceQueued,
    StepCompleted,
)
from machd.telemetry.metric_table import METRICS, MetricKind, MetricSpec
from machd.telemetry.metrics import CONTENT_TYPE, Metrics

CONTRACT: dict[str, tuple[str, ...]] = {
    "machd_build_info": ("version", "mlx", "mlx_lm", "python"),
    "machd_model_info": ("model", "architecture", "kv_cache_kind", "dtype", "backend"),
    "machd_capability_info": ("model", "feature", "verdict", "source"),
    "machd_state": ("state",),
    "machd_decode_mode": ("model", "mode"),
    "machd_decode_mode_requested": ("model", "mode"),
    "machd_decode_mode_active": ("model", "mode"),
    "machd_decode_mode_changes_total": ("model", "mode"),
    "machd_requests_running": ("model",),
    "machd_requests_waiting": ("model",),
    "machd_slots": ("model", "state"),
    "machd_active_loops": ("model",),
    "machd_requests_total": ("model", "endpoint", "finish_reason", "decode_mode"),
    "machd_rejections_total": ("model", "reason"),
    "machd_aborts_total": ("model", "reason"),
    "machd_coalesced_requests_total": ("model",),
    "machd_prompt_tokens_total": ("model",),
    "machd_prompt_tokens_cached_total": ("model",),
    "machd_encoder_inputs_total": ("model",),
    "machd_prompt_media_total": ("model", "kind"),
    "machd_generation_tokens_total": ("model",),
    "machd_time_to_first_token_seconds": ("model",),
    "machd_inter_token_latency_seconds": ("model",),
    "machd_request_duration_seconds": ("model",),
    "machd_request_queue_time_seconds": ("model",),
    "machd_request_prefill_time_seconds": ("model",),
    "machd_request_decode_time_seconds": ("model",),
    "machd_step_duration_seconds": ("model", "phase"),
    "machd_batch_width": ("model",),
    "machd_step_tokens": ("model",),
    "machd_kv_cache_bytes": ("model", "state"),
    "machd_kv_cache_usage_ratio": ("model",),
    "machd_engine_heartbeat_age_seconds": ("model",),
    "machd_event_loop_lag_seconds": (),
    "machd_mlx_memory_bytes": ("model", "kind"),
    "machd_faults_total": ("model", "scope"),
    "machd_invariant_violations_total": ("model",),
    "machd_prefix_cache_queries_total": ("model",),
    "machd_prefix_cache_hits_total": ("model", "kind"),
    "machd_prefix_cache_bytes": ("model",),
    "machd_prefix_cache_limit_bytes": ("model",),
    "machd_prefix_cache_saved_bytes": ("model",),
    "machd_prefix_cache_entries": ("model",),
    "machd_prefix_cache_blocks": ("model", "state"),
    "machd_prefix_cache_evictions_total": ("model",),
    "machd_block_files_bytes": ("model",),
    "machd_block_files_budget_bytes": ("model",),
    "machd_block_files_total": ("model", "outcome"),
    "machd_speculation_mode": ("model", "mode"),
    "machd_speculation_cycles_total": ("model",),
    "machd_speculation_draft_tokens_total": ("model",),
    "machd_speculation_accepted_tokens_total": ("model",),
    "machd_speculation_draft_by_position_tokens_total": ("model", "position"),
    "machd_speculation_accepted_by_position_tokens_total": ("model", "position"),
    "machd_speculation_fallbacks_total": ("model",),
    "machd_config_last_reload_successful": (),
    "machd_config_last_reload_timestamp_seconds": (),
}
"""Promised names with their labels."""

OF_DAEMON = {
    "machd_build_info",
    "machd_config_last_reload_successful",
    "machd_config_last_reload_timestamp_seconds",
    "machd_event_loop_lag_seconds",
    "machd_http_requests_in_flight",
    "machd_start_time_seconds",
    "machd_state",
    "machd_stored_response_bytes",
    "machd_stored_responses",
}
"""What is not of one model."""

NOT_OURS = ("process_", "python_gc_")
"""How the families begin that say something of the process, where the system knows it."""

VLLM_BUCKETS_S = {
    "machd_time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    ),
    "machd_inter_token_latency_seconds": (
        "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
    ),
    **dict.fromkeys(
        [
            "machd_request_duration_seconds",
            "machd_request_queue_time_seconds",
            "machd_request_prefill_time_seconds",
            "machd_request_decode_time_seconds",
        ],
        "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
    ),
    "machd_step_tokens": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}

OF_ONE_MODEL = [spec for spec in METRICS if not spec.is_of_several]
"""What a daemon of one model exports."""

each_metric = pytest.mark.parametrize("spec", METRICS, ids=[spec.name for spec in METRICS])


# The table


def test_every_promised_metric_is_there_with_its_labels() -> None:
    """Names and labels of the contract are kept."""
    table = {spec.name: spec.labels for spec in METRICS}
    assert {name: table.get(name) for name in CONTRACT} == CONTRACT


def test_names_are_unique() -> None:
    """A metric is one row."""
    assert len({spec.name for spec in METRICS}) == len(METRICS)


@each_metric
def test_a_metric_is_named_in_base_units(spec: MetricSpec) -> None:
    """Own prefix, counters end in ``_total`` and nothing else does, no scaled unit, a sentence."""
    assert re.fullmatch(r"machd_[a-z0-9]+(_[a-z0-9]+)*", spec.name)
    assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
    assert not re.search(
        r"_(ms|millis\w*|kb|mb|gb|mib|gib|percent|bucket|count|sum)(_|$)", spec.name
    )
    assert spec.help.endswith(".")
    assert "\n" not in spec.help
    assert (spec.kind is MetricKind.HISTOGRAM) == bool(spec.buckets)
    assert list(spec.buckets) == sorted(set(spec.buckets))


@pytest.mark.parametrize("name", VLLM_BUCKETS_S)
def test_histograms_use_vllms_buckets(name: str) -> None:
    """Dashboards and recording rules made for vLLM keep their meaning."""
    (spec,) = (spec for spec in METRICS if spec.name == name)
    assert list(spec.buckets) == [float(bound) for bound in VLLM_BUCKETS_S[name].split()]


@each_metric
def test_the_markdown_lists_the_metric(spec: MetricSpec) -> None:
    """The generated reference has one row for it with kind, labels and meaning."""
    (row,) = (line for line in metrics_markdown().splitlines() if f"`{spec.name}`" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    labels = ", ".join(f"`{label}`" for label in spec.labels) or "none"
    assert cells == [f"`{spec.name}`", spec.kind.value, labels, spec.help]


def test_the_markdown_is_one_table() -> None:
    """A heading, a rule, and a row a metric, with four cells each."""
    lines = metrics_markdown().splitlines()
    assert len(lines) == len(METRICS) + 2
    assert {line.count("|") for line in lines} == {5}


# The page


@pytest.fixture(name="metrics", params=["fresh", "busy"])
def _metrics(request: pytest.FixtureRequest) -> Metrics:
    return metrics_of_one_model()[0] if request.param == "fresh" else busy_metrics()


def test_the_page_parses_and_shows_the_whole_table(metrics: Metrics) -> None:
    """Each family is on the page with its type and help, before anything has happened as well."""
    families = Page(metrics).families
    for spec in OF_ONE_MODEL:
        # The parser drops a counter's suffix, as OpenMetrics has it.
        family = families[spec.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (spec.kind.value, spec.help)
    assert len([name for name in families if not name.startswith(NOT_OURS)]) == len(OF_ONE_MODEL)


def test_what_is_of_the_model_names_it_and_nothing_else_does() -> None:
    """Each series of the table's, but for those of the daemon alone, has the label ``model`` at a scrape."""
    metrics = busy_metrics()
    (model,) = metrics.models
    for spec in METRICS:
        if spec.counted_labels and (spec.is_read or spec.kind is MetricKind.GAUGE):
            owner = model if spec.is_of_model else metrics
            owner.watch(spec.name, lambda: 1.0, **dict.fromkeys(spec.counted_labels, "x"))
    model.name_model("some/model")
    named = {
        name: {sample.labels.get("model") for sample in family.samples}
        for name, family in families_of(metrics.render().decode()).items()
    }

    for spec in OF_ONE_MODEL:
        expected = None if spec.name in OF_DAEMON else "some/model"
        assert named.pop(spec.name.removesuffix("_total")) == {expected}, spec.name
    assert all(labels == {None} for labels in named.values()), "nor do those that are not ours"


def test_nothing_is_of_a_model_before_it_is_known() -> None:
    """A daemon that loads has no series of a model's; what it counts meanwhile is there once it has loaded."""
    metrics, model = metrics_of_one_model()
    metrics.export_vllm_names(on=True)
    model.count_rejection("not_ready")
    metrics.watch_state(lambda: State.LOADING)
    with_series = {
        name for name, family in families_of(metrics.render().decode()).items() if family.samples
    }
    assert {name for name in with_series if not name.startswith(NOT_OURS)} == OF_DAEMON - {
        "machd_build_info"  # nobody has set it here
    }
    assert metrics.count_of("machd_rejections_total", reason="not_ready") == 1

    assert Page(metrics).counted("machd_rejections_total") == {("not_ready",): 1}
    assert Page(metrics).value("machd_generation_tokens_total") == 0


@needs_programs("promtool")
def test_promtool_finds_nothing_to_say(metrics: Metrics) -> None:
    """Prometheus's own linter accepts the page."""
    done = subprocess.run(
        [path_of("promtool"), "check", "metrics"],
        input=metrics.render(),
        capture_output=True,
        check=False,
        timeout=CEILING_S,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_the_page_is_in_the_text_format() -> None:
    """The content type names the format that every Prometheus reads, and no birth series bloat it."""
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    assert "_created" not in Page(busy_metrics()).text
    assert "# EOF" not in Page(busy_metrics()).text


def test_registries_are_separate() -> None:
    """Two daemons in one process do not count for each other."""
    _, model = metrics_of_one_model()
    other, _ = metrics_of_one_model()
    model.on_request(RECORD)
    assert Page(other).value("machd_prompt_tokens_total") == 0


def test_nothing_a_client_sends_becomes_a_label() -> None:
    """Ids and key names of a request leave no trace, so a client cannot make series."""
    metrics, model = metrics_of_one_model()
    canary = "CANARY"
    model.on_request(replace(RECORD, request_id=canary, client=canary, coalesced_with=canary))
    model.on_events(
        [
            SequenceQueued(canary, 0),
            SequenceAdmitted(canary, 0, DecodeMode.SINGLE, 1, 1.0),
            token(canary, 2.0),
            end(canary, FinishReason.ERROR, RowFaultError(canary)),
        ]
    )
    page = Page(metrics)

    assert canary not in page.text
    assert len(page.series("machd_requests_total")) == 1


# What feeds it


def test_a_request_to_an_encoder_is_counted_without_a_slot() -> None:
    """Its inputs, its tokens and its whole time, and no time of a queue or of an answer."""
    metrics, model = metrics_of_one_model()
    model.on_request(replace(RECORD, endpoint="embeddings", decode_mode=None, inputs=3))
    page = Page(metrics)

    labels = {"endpoint": "embeddings", "finish_reason": "stop", "decode_mode": "none"}
    assert page.value("machd_requests_total", **labels) == 1
    assert page.value("machd_encoder_inputs_total") == 3
    assert page.value("machd_prompt_tokens_total") == 10
    assert page.value("machd_generation_tokens_total") == 0
    assert page.value("machd_request_duration_seconds_count") == 1
    assert page.value("machd_request_queue_time_seconds_count") == 0


def test_a_request_that_ended_is_counted() -> None:
    """Its kind of end, its tokens and its spans are there, each once."""
    metrics, model = metrics_of_one_model()
    model.on_request(RECORD)
    page = Page(metrics)

    labels = {"endpoint": "chat_completions", "finish_reason": "stop", "decode_mode": "single"}
    assert page.value("machd_requests_total", **labels) == 1
    assert page.value("machd_prompt_tokens_total") == 10
    assert page.value("machd_prompt_tokens_cached_total") == 4
    assert page.value("machd_generation_tokens_total") == 6
    assert page.value("machd_prompt_media_total", kind="image") == 2
    assert page.value("machd_prompt_media_total", kind="video") == 1
    sums = {
        "machd_time_to_first_token_seconds": 1.1,
        "machd_request_duration_seconds": 3.1,
        "machd_request_queue_time_seconds": 0.4,
        "machd_request_prefill_time_seconds": 0.7,
        "machd_request_decode_time_seconds": 2.0,
    }
    for name, seconds_s in sums.items():
        assert page.value(f"{name}_sum") == pytest.approx(seconds_s)
        assert page.value(f"{name}_count") == 1
    assert set(page.series("machd_aborts_total").values()) == {0}


def test_a_request_that_shared_a_decode_is_counted() -> None:
    """Who was answered from another's decode counts once, and has its tokens like everyone."""
    metrics, model = metrics_of_one_model()
    model.on_request(RECORD)
    model.on_request(replace(RECORD, coalesced_with="req-leader"))
    page = Page(metrics)

    assert page.value("machd_coalesced_requests_total") == 1
    assert page.value("machd_generation_tokens_total") == 12


def test_books_that_do_not_add_up_are_counted() -> None:
    """A bug of the scheduler's shows as a number that ought to stay zero, and is there from the start."""
    metrics, model = metrics_of_one_model()
    assert Page(metrics).value("machd_invariant_violations_total") == 0
    model.on_events([InvariantBroken("two slots for one sequence")])
    assert Page(metrics).value("machd_invariant_violations_total") == 1


def test_a_request_that_never_ran_has_no_spans() -> None:
    """Without a first token nothing is observed that would drag a quantile down."""
    metrics, model = metrics_of_one_model()
    model.on_request(
        replace(
            RECORD,
            decode_mode=None,
            ttft_s=None,
            prefill_s=None,
            decode_s=None,
            finish_reason="reject",
            error_code="queue_full",
        )
    )
    page = Page(metrics)

    labels = {"endpoint": "chat_completions", "finish_reason": "reject", "decode_mode": "none"}
    assert page.value("machd_requests_total", **labels) == 1
    assert page.value("machd_time_to_first_token_seconds_count") == 0
    assert page.value("machd_request_prefill_time_seconds_count") == 0
    assert page.value("machd_request_decode_time_seconds_count") == 0
    assert page.value("machd_request_queue_time_seconds_count") == 0
    assert page.value("machd_request_duration_seconds_count") == 0
    assert page.value("machd_prompt_tokens_total") == 0


def test_an_early_end_is_counted_with_its_code() -> None:
    """The reason is the error's stable code; a reject is no abort."""
    metrics, model = metrics_of_one_model()
    for code in ["client_disconnected", "client_disconnected", "request_timeout"]:
        model.on_request(replace(RECORD, finish_reason="abort", error_code=code))
    model.on_request(replace(RECORD, finish_reason="reject", error_code="queue_full"))

    assert Page(metrics).counted("machd_aborts_total") == {
        ("client_disconnected",): 2,
        ("request_timeout",): 1,
    }


def test_a_refusal_is_counted_with_its_code() -> None:
    """Who is turned away at the door is counted by why."""
    metrics, model = metrics_of_one_model()
    model.count_rejection("queue_full")
    model.count_rejection("draining")
    model.count_rejection("queue_full")
    assert Page(metrics).counted("machd_rejections_total") == {("queue_full",): 2, ("draining",): 1}


def test_reasons_are_there_with_the_model() -> None:
    """The first rejection and the first abort show as a rate: every code has its zero before it."""
    page = Page(metrics_of_one_model()[0])
    assert page.series("machd_rejections_total") == dict.fromkeys(
        [
            ("adapter_not_loaded",),
            ("draining",),
            ("key_limit",),
            ("kv_budget_spent",),
            ("not_ready",),
            ("overloaded",),
            ("queue_full",),
            ("queue_timeout",),
            ("too_many_in_flight",),
        ],
        0,
    )
    assert page.series("machd_aborts_total") == dict.fromkeys(
        [
            ("client_disconnected",),
            ("client_stalled",),
            ("drain_deadline",),
            ("operator_abort",),
            ("request_timeout",),
            ("unknown",),
        ],
        0,
    )


def test_changes_of_the_decode_mode_are_counted_by_the_mode_that_began() -> None:
    """Every mode has its zero before the first change, and each change counts once."""
    metrics, model = metrics_of_one_model()
    zeros = {(one.value,): 0.0 for one in DecodeMode}
    assert Page(metrics).series("machd_decode_mode_changes_total") == zeros
    model.on_events(
        [
            DecodeModeChanged(DecodeMode.SPECULATIVE, DecodeMode.BATCHED),
            DecodeModeChanged(DecodeMode.BATCHED, DecodeMode.SPECULATIVE),
            DecodeModeChanged(DecodeMode.SPECULATIVE, DecodeMode.BATCHED),
        ]
    )
    assert Page(metrics).counted("machd_decode_mode_changes_total") == {
        ("batched",): 2,
        ("speculative",): 1,
    }


def test_rejected_drafts_count_as_computed_tokens() -> None:
    """A step's tokens are all that went through the model, whatever came of them."""
    metrics, model = metrics_of_one_model()
    model.on_events([StepCompleted(2, 30, 0.1, forced_tokens=3, drafted_tokens=8)])
    assert Page(metrics).value("machd_step_tokens_sum") == 2 + 30 + 3 + 8


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux has /proc")
def test_the_process_is_on_the_page() -> None:
    """Memory, processor time and files of the whole process stand beside what MLX holds."""
    page = Page(metrics_of_one_model()[0])
    for name in ("resident_memory_bytes", "cpu_seconds_total", "start_time_seconds", "open_fds"):
        assert page.value(f"process_{name}")


def test_a_system_without_proc_has_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nothing is said of the process, and nothing breaks."""
    monkeypatch.setattr(ProcessCollector.__init__, "__defaults__", ("", None, "/nowhere", None))
    page = Page(metrics_of_one_model()[0])
    assert not [name for name in page.families if name.startswith("process_")]
    assert page.value("python_gc_collections_total", generation="0") is not None


def test_inter_token_latency_is_between_tokens_of_one_sequence() -> None:
    """First tokens and other sequences' tokens in between do not count."""
    metrics, model = metrics_of_one_model()
    model.on_events([token("a", 1.0), token("b", 1.1)])
    model.on_events([token("a", 1.3), token("b", 2.1)])
    page = Page(metrics)

    assert page.value("machd_inter_token_latency_seconds_count") == 2
    assert page.value("machd_inter_token_latency_seconds_sum") == pytest.approx(0.3 + 1.0)


def test_tokens_that_come_at_once_have_no_gap() -> None:
    """A sequence that joins a running decode is told what it missed in one go: no latency of zero."""
    metrics, model = metrics_of_one_model()
    model.on_events([token("a", 1.0), token("a", 1.0), token("a", 1.0), token("a", 1.5)])
    page = Page(metrics)

    assert page.value("machd_inter_token_latency_seconds_count") == 1
    assert page.value("machd_inter_token_latency_seconds_sum") == pytest.approx(0.5)


def test_a_finished_sequence_is_forgotten() -> None:
    """A daemon that runs for a year keeps nothing of the sequences that ended."""
    metrics, model = metrics_of_one_model()
    for number in range(100):
        model.on_events([token(f"s{number}", 1.0), end(f"s{number}")])
    assert model._last_token_s == {}

    model.on_events([token("s0", 50.0)])
    assert Page(metrics).value("machd_inter_token_latency_seconds_count") == 0


@pytest.mark.parametrize(
    ("width", "prefill_tokens", "phase"),
    [(3, 0, "decode"), (0, 64, "prefill"), (3, 64, "mixed")],
)
def test_a_step_is_observed_under_its_phase(width: int, prefill_tokens: int, phase: str) -> None:
    """Duration by phase, tokens of both kinds together, and the width where rows decoded."""
    metrics, model = metrics_of_one_model()
    model.on_events([StepCompleted(width, prefill_tokens, 0.25)])
    page = Page(metrics)

    assert page.value("machd_step_duration_seconds_sum", phase=phase) == 0.25
    assert page.value("machd_step_tokens_sum") == width + prefill_tokens
    assert page.value("machd_batch_width_sum") == width
    assert page.value("machd_batch_width_count") == (1 if width else 0)


def test_faults_are_there_with_the_model() -> None:
    """An alert on the rate of faults needs the zero before the first one."""
    assert Page(metrics_of_one_model()[0]).series("machd_faults_total") == {
        ("row",): 0,
        ("engine",): 0,
    }


@pytest.mark.parametrize(
    ("error", "row", "engine"),
    [
        (RowFaultError("x"), 1, 0),
        (EngineFaultError("x"), 0, 0),  # told by EngineFaulted, not by whom it ended
        (QueueFullError("x"), 0, 0),
        (RequestTimeoutError("x"), 0, 0),
    ],
    ids=["row", "engine", "queue", "timeout"],
)
def test_only_failures_of_our_own_are_faults(error: MachdError, row: int, engine: int) -> None:
    """Told by the engine and by the request, each failure counts once; a full queue is none."""
    metrics, model = metrics_of_one_model()
    model.on_events([end("a", FinishReason.ERROR, error)])
    model.on_request(replace(RECORD, finish_reason="error", error_code=error.code))
    assert Page(metrics).series("machd_faults_total") == {("row",): row, ("engine",): engine}


def test_one_engine_fault_is_one_fault() -> None:
    """However many sequences a failed step or a dead engine ends, the engine failed once."""
    metrics, model = metrics_of_one_model()
    fault = EngineFaultError("x")
    model.on_events([EngineFaulted(), *(end(one, FinishReason.ERROR, fault) for one in "abc")])
    for _ in "abc":
        model.on_request(replace(RECORD, finish_reason="error", error_code=fault.code))
    assert Page(metrics).series("machd_faults_total") == {("row",): 0, ("engine",): 1}


def test_gauges_are_read_at_every_scrape() -> None:
    """A watched gauge shows the value of the moment."""
    metrics, model = metrics_of_one_model()
    value = [1.0]
    model.watch("machd_requests_running", lambda: value[0])
    assert Page(metrics).value("machd_requests_running") == 1
    value[0] = 4.0
    assert Page(metrics).value("machd_requests_running") == 4


@pytest.mark.parametrize("state", State)
def test_one_state_is_active(state: State) -> None:
    """Every state has a series, and exactly the current one is 1."""
    metrics, _ = metrics_of_one_model()
    metrics.watch_state(lambda: state)
    assert Page(metrics).series("machd_state") == {
        (one.value,): float(one is state) for one in State
    }


@pytest.mark.parametrize("mode", DecodeMode)
def test_one_decode_mode_is_active(mode: DecodeMode) -> None:
    """Every mode has a series, and exactly the current one is 1."""
    metrics, model = metrics_of_one_model()
    model.watch_decode_mode(lambda: mode)
    assert Page(metrics).series("machd_decode_mode") == {
        (one.value,): float(one is mode) for one in DecodeMode
    }


def test_an_info_has_one_series() -> None:
    """A model that is replaced leaves no stale series."""
    metrics, _ = metrics_of_one_model()
    for mlx in ["1", "2"]:
        metrics.set_info("machd_build_info", version="v", mlx=mlx, mlx_lm="l", python="p")
    ((labels, value),) = Page(metrics).series("machd_build_info").items()
    assert (set(labels), value) == ({"v", "2", "l", "p"}, 1)
