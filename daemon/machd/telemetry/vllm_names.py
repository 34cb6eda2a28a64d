"""The same numbers under vLLM's names, for dashboards and alerts that were made for it.

Nothing is counted twice: at a scrape the values are read from machd's own collectors and shown
under the name, the labels and the buckets that vLLM has for them. What vLLM exports and machd does
not measure is left out rather than made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from machd.telemetry.metric_table import MODEL_METRICS, MetricKind
from machd.telemetry.model_metrics import ModelMetrics

_ENGINE = "0"
"""vLLM numbers the engines of a model; there is one here."""

_OURS = {one.name: one for one in MODEL_METRICS}

_FINISHED = {
    "stop": "stop",
    "tool_calls": "stop",
    "length": "length",
    "abort": "abort",
    "error": "error",
}
"""Our finish reasons in vLLM's words; a request that was turned away is none of these."""


@dataclass(frozen=True, slots=True)
class VllmName:
    """One family of vLLM's.

    Attributes:
        name: As vLLM exports it, a counter's ``_total`` included.
        source: Our metric that it shows.
        label: The one label besides the model's and the engine's; empty for none.
        source_label: Ours that it comes from; series that differ in others are added up.
        values: Our label's values in vLLM's words, those without a word being left out; empty
            where they are the same.
        is_from_zero: Whether vLLM's label counts from 0 what ours counts from 1.
    """

    name: str
    source: str
    label: str = ""
    source_label: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    is_from_zero: bool = False

    def theirs(self, ours: str) -> str:
        """One of our label's values in vLLM's words; empty where there is no word for it."""
        if self.is_from_zero:
            return str(int(ours) - 1)
        return self.values.get(ours, "") if self.values else ours


VLLM_NAMES: tuple[VllmName, ...] = (
    VllmName("vllm:num_requests_running", "machd_requests_running"),
    VllmName("vllm:num_requests_waiting", "machd_requests_waiting"),
    VllmName("vllm:kv_cache_usage_perc", "machd_kv_cache_usage_ratio"),
    VllmName("vllm:prompt_tokens_total", "machd_prompt_tokens_total"),
    VllmName("vllm:prompt_tokens_cached_total", "machd_prompt_tokens_cached_total"),
    VllmName("vllm:generation_tokens_total", "machd_generation_tokens_total"),
    # vLLM counts both in tokens, which is what these two of ours are.
    VllmName("vllm:prefix_cache_queries_total", "machd_prompt_tokens_total"),
    VllmName("vllm:prefix_cache_hits_total", "machd_prompt_tokens_cached_total"),
    VllmName(
        "vllm:request_success_total",
        "machd_requests_total",
        "finished_reason",
        "finish_reason",
        _FINISHED,
    ),
    VllmName("vllm:admission_rejections_total", "machd_rejections_total", "reason", "reason"),
    VllmName("vllm:spec_decode_num_drafts_total", "machd_speculation_cycles_total"),
    VllmName("vllm:spec_decode_num_draft_tokens_total", "machd_speculation_draft_tokens_total"),
    VllmName(
        "vllm:spec_decode_num_accepted_tokens_total", "machd_speculation_accepted_tokens_total"
    ),
    VllmName(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "machd_speculation_accepted_by_position_tokens_total",
        "position",
        "position",
        is_from_zero=True,
    ),
    VllmName("vllm:time_to_first_token_seconds", "machd_time_to_first_token_seconds"),
    VllmName("vllm:inter_token_latency_seconds", "machd_inter_token_latency_seconds"),
    VllmName("vllm:e2e_request_latency_seconds", "machd_request_duration_seconds"),
    VllmName("vllm:request_queue_time_seconds", "machd_request_queue_time_seconds"),
    VllmName("vllm:request_prefill_time_seconds", "machd_request_prefill_time_seconds"),
    VllmName("vllm:request_decode_time_seconds", "machd_request_decode_time_seconds"),
    VllmName("vllm:iteration_tokens_total", "machd_step_tokens"),
)
"""What of vLLM's there is."""


class VllmNames(Collector):
    """Reads the metrics of the models at every scrape."""

    def __init__(self, models: Sequence[ModelMetrics]) -> None:
        """Show these models, as they are at a scrape; one without a name has no series yet."""
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Every family of the table, as it is now."""
        for spec in VLLM_NAMES:
            ours = _OURS[spec.source]
            # A histogram keeps a name that ends like a counter's: vLLM has one such.
            is_counter = ours.kind is MetricKind.COUNTER
            name = spec.name.removesuffix("_total") if is_counter else spec.name
            family = Metric(name, ours.help, ours.kind.value)
            for model in self._models:
                if model.model_id is None:
                    continue
                common = {"model_name": model.model_id, "engine": _ENGINE}
                for (suffix, labels), value in _samples(spec, model).items():
                    family.add_sample(name + suffix, common | dict(labels), value)
            yield family


_Series = tuple[str, tuple[tuple[str, str], ...]]
"""What stands behind the family's name, and the labels."""


def _samples(spec: VllmName, model: ModelMetrics) -> dict[_Series, float]:
    """Our samples of a model as vLLM has them."""
    family_name = _OURS[spec.source].family_name
    # vLLM too has every reason from the start.
    samples: dict[_Series, float] = {
        ("_total", ((spec.label, value),)): 0.0 for value in spec.values.values()
    }
    for sample in model.samples(spec.source):
        labels = {name: value for name, value in sample.labels.items() if name == "le"}
        if spec.label:
            theirs = spec.theirs(sample.labels[spec.source_label])
            if not theirs:
                continue
            labels[spec.label] = theirs
        series = (sample.name.removeprefix(family_name), tuple(labels.items()))
        samples[series] = samples.get(series, 0.0) + sample.value
    return samples
