"""Fields of vLLM, llama.cpp, mlx-lm and Ollama that machd knows and does not act on.

Each either asks for nothing that machd does not do anyway, and is ignored, or would change the answer,
and is refused by name unless its value asks for nothing. The fields that machd does act on stand in
:mod:`machd.dialects.wire.sampling` and in the dialects.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from machd.dialects.wire.generation_request import SamplingFields
from machd.dialects.wire.idle_time import read_ttl
from machd.dialects.wire.refusal import Ignored, Refused, only
from machd.request.adapter import NumberedAdapter
from machd.settings.adapters import MAX_SCALE

_MAX_ADAPTERS = 16
"""Of one request."""

_MAX_ID = 2**31 - 1

FalseOnly: TypeAlias = Annotated[Raw | UnsetType, only(False)]  # noqa: FBT003 - a JSON value
TrueOnly: TypeAlias = Annotated[Raw | UnsetType, only(True)]  # noqa: FBT003 - a JSON value
ZeroOnly: TypeAlias = Annotated[Raw | UnsetType, only(0, 0.0)]
OneOnly: TypeAlias = Annotated[Raw | UnsetType, only(1, 1.0)]
_OffOnly: TypeAlias = Annotated[Raw | UnsetType, only(-1, -1.0, 0, 0.0)]
_LeftOnly: TypeAlias = Annotated[Raw | UnsetType, only("left")]
_SeparateOnly: TypeAlias = Annotated[Raw | UnsetType, only("auto", "deepseek")]


class VllmFields(SamplingFields, frozen=True, kw_only=True):
    """vLLM's."""

    use_beam_search: FalseOnly = UNSET
    skip_special_tokens: TrueOnly = UNSET
    return_prompt_text: FalseOnly = UNSET
    return_token_ids: FalseOnly = UNSET
    return_tokens_as_token_ids: FalseOnly = UNSET
    include_reasoning: TrueOnly = UNSET
    truncation_side: _LeftOnly = UNSET
    watermarking: FalseOnly = UNSET
    documents: Refused = UNSET
    ec_transfer_params: Refused = UNSET
    kv_transfer_params: Refused = UNSET
    logits_processors: Refused = UNSET
    logprob_token_ids: Refused = UNSET
    prompt_embeds: Refused = UNSET
    repetition_detection: Refused = UNSET
    structural_tag: Refused = UNSET
    vllm_xargs: Refused = UNSET

    early_stopping: Ignored = UNSET
    length_penalty: Ignored = UNSET
    media_io_kwargs: Ignored = UNSET
    mm_processor_kwargs: Ignored = UNSET
    request_id: Ignored = UNSET
    return_mm_kwargs: Ignored = UNSET
    return_token_offsets: Ignored = UNSET
    routed_experts_prompt_start: Ignored = UNSET
    session_id: Ignored = UNSET
    spaces_between_special_tokens: Ignored = UNSET


class ListedAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that computes the answer, beside the model.

    Attributes:
        id: As ``GET /lora-adapters`` tells it.
        scale: What it counts for; 0 leaves it out, 1 is as it was trained.
    """

    id: Annotated[int, Meta(ge=0, le=_MAX_ID)]
    scale: Annotated[float, Meta(ge=-MAX_SCALE, le=MAX_SCALE)]


class LlamaCppFields(VllmFields, frozen=True, kw_only=True):
    """llama.cpp's. What only shapes a sampler that has to be off is ignored.

    Attributes:
        lora: Adapters of the model that compute the answer, all that are listed together.
        return_progress: Tell in a stream how far the prompt is computed.
    """

    adaptive_target: _OffOnly = UNSET
    dry_multiplier: ZeroOnly = UNSET
    dynatemp_range: ZeroOnly = UNSET
    grammar_lazy: FalseOnly = UNSET
    grammar_triggers: Refused = UNSET
    image_data: Refused = UNSET
    lora: Annotated[list[ListedAdapter], Meta(max_length=_MAX_ADAPTERS)] | None = None
    min_keep: ZeroOnly = UNSET
    mirostat: ZeroOnly = UNSET
    n_cmpl: OneOnly = UNSET
    n_indent: ZeroOnly = UNSET
    n_probs: ZeroOnly = UNSET
    parse_tool_calls: TrueOnly = UNSET
    post_sampling_probs: FalseOnly = UNSET
    reasoning_format: _SeparateOnly = UNSET
    reasoning_in_content: FalseOnly = UNSET
    response_fields: Refused = UNSET
    return_progress: bool | None = None
    return_tokens: FalseOnly = UNSET
    samplers: Refused = UNSET
    t_max_predict_ms: _OffOnly = UNSET
    tfs_z: OneOnly = UNSET
    top_n_sigma: _OffOnly = UNSET
    typical_p: OneOnly = UNSET
    xtc_probability: ZeroOnly = UNSET

    adaptive_decay: Ignored = UNSET
    backend_sampling: Ignored = UNSET
    cache_prompt: Ignored = UNSET
    dry_allowed_length: Ignored = UNSET
    dry_base: Ignored = UNSET
    dry_penalty_last_n: Ignored = UNSET
    dry_sequence_breakers: Ignored = UNSET
    dynatemp_exponent: Ignored = UNSET
    id_slot: Ignored = UNSET
    mirostat_eta: Ignored = UNSET
    mirostat_tau: Ignored = UNSET
    n_cache_reuse: Ignored = UNSET
    n_discard: Ignored = UNSET
    n_keep: Ignored = UNSET
    penalize_nl: Ignored = UNSET
    preserved_tokens: Ignored = UNSET
    reasoning_control: Ignored = UNSET
    speculative_n_max: Ignored = field(default=UNSET, name="speculative.n_max")
    speculative_n_min: Ignored = field(default=UNSET, name="speculative.n_min")
    speculative_p_min: Ignored = field(default=UNSET, name="speculative.p_min")
    speculative_type: Ignored = field(default=UNSET, name="speculative.type")
    sse_ping_interval: Ignored = UNSET
    timings_per_token: Ignored = UNSET
    xtc_threshold: Ignored = UNSET

    def listed_adapters(self) -> list[NumberedAdapter] | None:
        """Those of ``lora``."""
        return (
            None if self.lora is None else [NumberedAdapter(one.id, one.scale) for one in self.lora]
        )


class OtherServersFields(LlamaCppFields, frozen=True, kw_only=True):
    """The fields of mlx-lm's server, of Ollama's OpenAI endpoints and of LM Studio's.

    Attributes:
        ttl: Seconds without a request after which the model is unloaded, from now on; heeded for an operator, where there
            are several models.
    """

    adapters: Refused = UNSET
    role_mapping: Refused = UNSET

    draft_model: Ignored = UNSET
    keep_alive: Ignored = UNSET
    num_draft_tokens: Ignored = UNSET
    ttl: Ignored = UNSET

    @property
    def idle_s(self) -> float | None:
        """Idle seconds after which the model is to be unloaded, as of :class:`machd.dialects.wire.generation_request.GenerationRequest`."""
        return read_ttl(self.ttl)
