"""vLLM's names: the same numbers, as a dashboard that was made for vLLM asks for them."""

from __future__ import annotations

import cProfile
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from reference_tables import vllm_names_markdown
from support.clocks.polling import CEILING_S
from support.daemon.scraping import metrics_of_one_model
from support.programs.installed_programs import needs_programs, path_of

from machd.engine.protocol.step import SampledToken
from machd.generations.record import RequestRecord
from machd.scheduler.events import DecodeMode, OutputGenerated, StepCompleted
from machd.telemetry.metric_table import METRICS
from machd.telemetry.metrics import Metrics
from machd.telemetry.vllm_names import VLLM_NAMES, VllmName

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operating" / "metrics.md"

RECORD = RequestRecord(
    request_id="r",
    endpoint="chat_completions",
    decode_mode=DecodeMode.BATCHED,
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
)

VLLM = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:spec_decode_num_drafts_total": "counter",
    "vllm:spec_decode_num_draft_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "counter",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:iteration_tokens_total": "histogram",
}
"""What vLLM's own dashboard asks for, and what kind of metric it is there."""

_REQUEST_BOUNDS = (
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 "
    "240.0 480.0 960.0 1920.0 7680.0"
)
BOUNDS = {
    "vllm:time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 "
        "10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
    ),
    "vllm:inter_token_latency_seconds": (
        "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
    ),
    "vllm:e2e_request_latency_seconds": _REQUEST_BOUNDS,
    "vllm:request_queue_time_seconds": _REQUEST_BOUNDS,
    "vllm:request_prefill_time_seconds": _REQUEST_BOUNDS,
    "vllm:request_decode_time_seconds": _REQUEST_BOUNDS,
    "vllm:iteration_tokens_total": (
        "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0"
    ),
}
"""vLLM's buckets."""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

each_name = pytest.mark.parametrize("spec", VLLM_NAMES, ids=[spec.name for spec in VLLM_NAMES])


def _at_work() -> Metrics:
    """Metrics of a daemon that has answered, with vLLM's names."""
    metrics, model = metrics_of_one_model()
    model.name_model("m")
    model.set_info(
        "machd_model_info",
        architecture="llama",
        kv_cache_kind="standard",
        dtype="float32",
        backend="cpu",
    )
    model.watch("machd_requests_running", lambda: 2.0)
    model.watch("machd_requests_waiting", lambda: 3.0)
    model.watch("machd_kv_cache_usage_ratio", lambda: 0.25)
    model.watch("machd_speculation_cycles_total", lambda: 7.0)
    model.watch("machd_speculation_draft_tokens_total", lambda: 14.0)
    model.watch("machd_speculation_accepted_tokens_total", lambda: 9.0)
    by_position = {"1": 6.0, "2": 3.0}
    model.watch_all("machd_speculation_accepted_by_position_tokens_total", lambda: by_position)
    model.on_events([OutputGenerated("a", SampledToken(0, 97), at_s) for at_s in (1.0, 1.5)])
    model.on_events([StepCompleted(2, 30, 0.1)])
    model.on_request(RECORD)
    model.on_request(replace(RECORD, endpoint="completions", decode_mode=DecodeMode.SINGLE))
    model.on_request(replace(RECORD, finish_reason="tool_calls"))
    model.on_request(replace(RECORD, finish_reason="length"))
    model.on_request(replace(RECORD, finish_reason="abort", error_code="client_disconnected"))
    model.on_request(replace(RECORD, finish_reason="reject", decode_mode=None))
    model.count_rejection("queue_full")
    metrics.export_vllm_names(on=True)
    return metrics


def _samples(metrics: Metrics) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def _value(samples: Samples, name: str, **labels: str) -> float:
    common = {"model_name": "m", "engine": "0"}
    return samples[name, frozenset((common | labels).items())]


def test_nothing_is_under_vllms_names_unless_asked_for() -> None:
    """Off at first, on and off again while it runs, and asking twice changes nothing."""
    metrics = Metrics()
    for is_on in (None, True, True, False, False, True):
        if is_on is not None:
            metrics.export_vllm_names(on=is_on)
        assert (b"vllm:" in metrics.render()) is bool(is_on)


def test_what_vllms_dashboard_asks_for_is_there() -> None:
    """Names, kinds and both of vLLM's labels, on every series."""
    page = _at_work().render().decode()
    kinds = dict(
        line.removeprefix("# TYPE ").split(" ") for line in page.splitlines() if "# TYPE" in line
    )
    assert {name: kinds.get(name) for name in VLLM} == VLLM
    series = [name for name, labels in _samples(_at_work()) if name.startswith("vllm:")]
    labelled = [
        name
        for name, labels in _samples(_at_work())
        if {("model_name", "m"), ("engine", "0")} <= labels
    ]
    assert series == labelled


def test_the_numbers_are_our_own() -> None:
    """What is read under either name at one scrape is the same."""
    samples = _samples(_at_work())
    assert _value(samples, "vllm:num_requests_running") == 2
    assert _value(samples, "vllm:num_requests_waiting") == 3
    assert _value(samples, "vllm:kv_cache_usage_perc") == 0.25
    assert _value(samples, "vllm:prompt_tokens_total") == 50
    assert _value(samples, "vllm:generation_tokens_total") == 30
    assert _value(samples, "vllm:prefix_cache_queries_total") == 50
    assert _value(samples, "vllm:prefix_cache_hits_total") == 20
    assert _value(samples, "vllm:time_to_first_token_seconds_count") == 5
    assert _value(samples, "vllm:time_to_first_token_seconds_sum") == pytest.approx(5.5)
    assert _value(samples, "vllm:iteration_tokens_total_sum") == 32
    assert _value(samples, "vllm:iteration_tokens_total_bucket", le="16.0") == 0
    assert _value(samples, "vllm:iteration_tokens_total_bucket", le="32.0") == 1
    assert _value(samples, "vllm:inter_token_latency_seconds_bucket", le="+Inf") == 1
    assert _value(samples, "vllm:admission_rejections_total", reason="queue_full") == 1


def test_successes_are_counted_by_vllms_reasons() -> None:
    """Endpoints and modes are added up, a call of a tool is a stop, and a rejection is none."""
    samples = _samples(_at_work())
    counts = {
        dict(labels)["finished_reason"]: value
        for (name, labels), value in samples.items()
        if name == "vllm:request_success_total"
    }
    assert counts == {"stop": 3, "length": 1, "abort": 1, "error": 0}


def test_drafts_are_counted_from_vllms_position() -> None:
    """The next token is 0 there and 1 here."""
    samples = _samples(_at_work())
    assert _value(samples, "vllm:spec_decode_num_drafts_total") == 7
    assert _value(samples, "vllm:spec_decode_num_draft_tokens_total") == 14
    assert _value(samples, "vllm:spec_decode_num_accepted_tokens_total") == 9
    positions = {
        dict(labels)["position"]: value
        for (name, labels), value in samples.items()
        if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    }
    assert positions == {"0": 6, "1": 3}


def test_reasons_are_there_with_the_model() -> None:
    """As with vLLM, a rate is a number before the first request has ended."""
    metrics, model = metrics_of_one_model()
    model.name_model("m")
    metrics.export_vllm_names(on=True)
    reasons = {
        dict(labels)["finished_reason"]
        for name, labels in _samples(metrics)
        if name == "vllm:request_success_total"
    }
    assert reasons == {"stop", "length", "abort", "error"}


@pytest.mark.parametrize("name", BOUNDS)
def test_histograms_have_vllms_buckets(name: str) -> None:
    """Quantiles of a recording rule that was made for vLLM mean the same."""
    bounds = [
        dict(labels)["le"]
        for sample, labels in _samples(_at_work())
        if sample == f"{name}_bucket"
    ]  # fmt: skip
    assert bounds == [*BOUNDS[name].split(), "+Inf"]


@each_name
def test_a_name_shows_a_metric_of_ours(spec: VllmName) -> None:
    """What it is read from exists, with the label that it needs."""
    (ours,) = (one for one in METRICS if one.name == spec.source)
    assert not spec.source_label or spec.source_label in ours.labels


def test_the_page_lists_them() -> None:
    """The page for users of vLLM lists the names."""
    assert vllm_names_markdown() in PAGE.read_text("utf-8")


@needs_programs("promtool")
def test_promtool_reads_them() -> None:
    """All that Prometheus's linter has to say is about how vLLM spells."""
    done = subprocess.run(
        [path_of("promtool"), "check", "metrics"],
        input=_at_work().render().decode(),
        capture_output=True,
        text=True,
        check=False,
        timeout=CEILING_S,
    )
    said = [line.partition(" ")[::2] for line in (done.stdout + done.stderr).splitlines()]
    spelling = [one for one in said if one[1] != "metric names should not contain ':'"]
    assert {name for name, _ in said} == {spec.name for spec in VLLM_NAMES}
    assert spelling == [
        ("vllm:iteration_tokens_total", 'non-counter metrics should not have "_total" suffix')
    ]


def test_a_scrape_is_cheap() -> None:
    """The whole page takes the event loop few calls, both spellings: about forty a line."""
    metrics = _at_work()
    with cProfile.Profile() as profile:
        page = metrics.render()
    calls = sum(one.callcount for one in profile.getstats())
    assert calls < 80 * page.count(b"\n")
