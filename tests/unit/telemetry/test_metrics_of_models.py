"""The page that Prometheus reads, of one model and of several."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.clocks.polling import CEILING_S
from support.daemon.busy_metrics import RECORD, busy_metrics, make_busy, token
from support.daemon.scraping import families_of
from support.programs.installed_programs import needs_programs, path_of

from machd.telemetry.metric_table import METRICS, MetricKind
from machd.telemetry.metrics import Metrics
from machd.telemetry.model_metrics import ModelMetrics
from machd.telemetry.vllm_names import VLLM_NAMES

PAGE_OF_ONE_MODEL = Path(__file__).resolve().parents[2] / "golden" / "metrics_page.txt"


def _watch_everything(metrics: Metrics) -> None:
    """Give each gauge, and each counter that is read, one more series."""
    (model,) = metrics.models
    for number, spec in enumerate(METRICS):
        if spec.is_read or spec.kind is MetricKind.GAUGE:
            owner = model if spec.is_of_model else metrics
            owner.watch(
                spec.name, partial(float, number / 4), **dict.fromkeys(spec.counted_labels, "1")
            )


def _text(metrics: Metrics) -> str:
    """The page without what differs each time: the process and its garbage collector."""
    other = re.compile(r"(# (HELP|TYPE) )?(process_|python_gc_)")
    lines = metrics.render().decode().splitlines(keepends=True)
    return "".join(line for line in lines if not other.match(line))


def _two_models() -> tuple[Metrics, ModelMetrics, ModelMetrics]:
    """Metrics of a daemon that serves two models, of which one is at work."""
    metrics = busy_metrics()
    (first,) = metrics.models
    second = metrics.add_model()
    first.name_model("first")
    second.name_model("second")
    return metrics, first, second


def _values(metrics: Metrics, name: str, **labels: str) -> dict[str, float]:
    """Sums of a metric's series by model."""
    sums: dict[str, float] = {}
    for family in families_of(metrics.render().decode()).values():
        for one in family.samples:
            if one.name == name and labels.items() <= one.labels.items():
                model = one.labels["model"]
                sums[model] = sums.get(model, 0.0) + one.value
    return sums


# One model


def test_the_page_of_one_model_is_the_recorded_one() -> None:
    """Names, help, labels, values and their order are byte for byte what scrapers have always read."""
    metrics = busy_metrics()
    _watch_everything(metrics)
    metrics.models[0].name_model("some/model")
    metrics.export_vllm_names(on=True)
    assert _text(metrics) == PAGE_OF_ONE_MODEL.read_text("utf-8")


# Several models


def test_each_family_is_on_the_page_once() -> None:
    """Each family has one HELP line, one TYPE line and no series twice, whatever the number of models."""
    metrics, _, second = _two_models()
    make_busy(second)
    metrics.export_vllm_names(on=True)
    page = metrics.render().decode()

    lines = page.splitlines()
    heads = Counter(" ".join(line.split(" ")[:3]) for line in lines if line[0] == "#")
    assert set(heads.values()) == {1}
    names = [one.name for one in text_string_to_metric_families(page)]
    assert len(names) == len(set(names))
    series = Counter(line.rpartition(" ")[0] for line in lines if line[0] != "#")
    assert set(series.values()) == {1}


def test_the_series_of_a_family_stand_together() -> None:
    """Behind a family's head come the series of each model, in the order in which models were added."""
    metrics, _, _ = _two_models()
    family = families_of(metrics.render().decode())["machd_faults"]
    assert [(one.labels["model"], one.labels["scope"]) for one in family.samples] == [
        ("first", "row"),
        ("first", "engine"),
        ("second", "row"),
        ("second", "engine"),
    ]


def test_both_models_have_the_same_families() -> None:
    """What one model shows the other shows, with its own name alone."""
    metrics, _, second = _two_models()
    make_busy(second)
    series = [
        (one.name, one.labels.pop("model"), tuple(sorted(one.labels.items())))
        for family in families_of(metrics.render().decode()).values()
        for one in family.samples
        if one.labels.get("model")
    ]
    first, second_too = (
        [(name, labels) for name, one, labels in series if one == model]
        for model in ("first", "second")
    )
    assert first == second_too


@needs_programs("promtool")
def test_promtool_finds_nothing_to_say_of_two_models() -> None:
    """Prometheus's own linter accepts the page."""
    metrics, _, second = _two_models()
    make_busy(second)
    metrics.count_rejection("too_many_in_flight")
    done = subprocess.run(
        [path_of("promtool"), "check", "metrics"],
        input=metrics.render(),
        capture_output=True,
        check=False,
        timeout=CEILING_S,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_what_is_of_several_models_is_not_on_the_page_of_one() -> None:
    """States and loads of models are exported once there is more than one."""
    names = {spec.family_name for spec in METRICS if spec.is_of_several}
    assert names
    metrics = busy_metrics()
    metrics.models[0].name_model("first")
    assert not names & families_of(metrics.render().decode()).keys()
    metrics.add_model().name_model("second")
    assert names <= families_of(metrics.render().decode()).keys()


def test_a_models_events_count_for_it_alone() -> None:
    """Tokens of two models that have the same sequence ids are not taken for one sequence's."""
    metrics, first, second = _two_models()
    before = _values(metrics, "machd_inter_token_latency_seconds_count")
    first.on_events([token("s", 1.0)])
    second.on_events([token("s", 1.5), token("s", 2.0)])
    assert before == {"first": 1, "second": 0}
    assert _values(metrics, "machd_inter_token_latency_seconds_count") == {"first": 1, "second": 1}


def test_a_request_counts_for_the_model_of_its_record() -> None:
    """A daemon-wide observer finds the model by its name; a model that was forgotten has no series."""
    metrics, _, second = _two_models()
    metrics.on_request(replace(RECORD, model="second"))
    metrics.on_request(replace(RECORD, model="another"))
    assert _values(metrics, "machd_generation_tokens_total") == {"first": 18, "second": 6}

    metrics.forget_model(second)
    metrics.on_request(replace(RECORD, model="second"))
    assert _values(metrics, "machd_generation_tokens_total") == {"first": 18}


def test_gauges_of_two_models_are_read_apart() -> None:
    """Each shows its own value of the moment."""
    metrics, first, second = _two_models()
    first.watch("machd_requests_running", lambda: 1.0)
    second.watch("machd_requests_running", lambda: 2.0)
    second.set_info("machd_model_info", architecture="a", kv_cache_kind="k", dtype="d", backend="b")
    assert _values(metrics, "machd_requests_running") == {"first": 1, "second": 2}
    assert _values(metrics, "machd_model_info") == {"first": 1, "second": 1}


def test_a_model_without_a_name_has_no_series() -> None:
    """A model that loads beside one that serves is not on the page, and what it counts meanwhile is not lost."""
    metrics, _, _ = _two_models()
    third = metrics.add_model()
    third.count_restart("exit")
    assert set(_values(metrics, "machd_engine_restarts_total")) == {"first", "second"}
    third.name_model("third")
    assert _values(metrics, "machd_engine_restarts_total")["third"] == 1


@pytest.mark.parametrize(
    ("model_id", "label"), [("second", "second"), (None, ""), ("what a client sent", "")]
)
def test_a_rejection_counts_for_the_model_it_was_for(model_id: str | None, label: str) -> None:
    """Where the request had not come to any model the label is empty; a client's words are no label."""
    metrics, _, _ = _two_models()
    before = _values(metrics, "machd_rejections_total")
    metrics.count_rejection("too_many_in_flight", model_id)
    after = _values(metrics, "machd_rejections_total")
    assert before == {"first": 1, "second": 0, "": 0}
    assert after == {**before, label: 1}


def test_a_rejection_by_the_only_model_needs_no_name() -> None:
    """There is no series with an empty label as long as there is one model."""
    metrics = Metrics()
    model = metrics.add_model()
    metrics.count_rejection("not_ready")
    model.name_model("only")
    assert _values(metrics, "machd_rejections_total") == {"only": 1}


def test_counts_of_the_daemon_are_sums_over_its_models() -> None:
    """The status that operators read has the same numbers as the page."""
    metrics, first, second = _two_models()
    first.count_fault("row")
    second.count_fault("row")
    second.count_fault("engine")
    assert metrics.count_of("machd_faults_total", scope="row") == 2
    assert metrics.count_of("machd_faults_total") == 3
    assert second.count_of("machd_faults_total") == 2


def test_vllms_names_tell_models_apart() -> None:
    """Each series has its model's name, and each family of vLLM's has series of both."""
    metrics, _, second = _two_models()
    make_busy(second)
    metrics.export_vllm_names(on=True)
    families = families_of(metrics.render().decode())
    for spec in VLLM_NAMES:
        found = families.get(spec.name) or families[spec.name.removesuffix("_total")]
        models = {one.labels["model_name"] for one in found.samples}
        assert models in ({"first", "second"}, set()), spec.name
    values = {
        one.labels["model_name"]: one.value
        for one in families["vllm:generation_tokens"].samples
    }  # fmt: skip
    assert values == {"first": 18, "second": 18}
