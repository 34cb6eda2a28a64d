"""The request fields of OpenAI, Anthropic, vLLM and llama.cpp, and what machd makes of each.

A field has a sample that asks for something. The page shows the field's fate as the wire types have it;
a test sends every sample and sees that fate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import get_type_hints

from msgspec import Meta, Struct

from machd.dialects.anthropic.request import MessagesRequest
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.completions.request import CompletionRequest
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.wire.refusal import neutral_values

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTION = {"name": "weather", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}
_ITEM_TOOL = {"type": "function", **_FUNCTION}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}


class Fate(StrEnum):
    """What machd makes of a field."""

    DONE = "done"
    IGNORED = "ignored"
    """It would not change the answer."""

    REFUSED = "refused"
    """It would change the answer: 400 that names the field, unless its value asks for nothing."""


@dataclass(frozen=True, slots=True)
class Door:
    """An endpoint with the fields that its callers know.

    Attributes:
        body: A request that is answered; samples are added to it.
        fields: Server or API to its fields, each with a sample.
    """

    path: str
    type: type[Struct]
    body: Mapping[str, object]
    fields: Mapping[str, Mapping[str, object]]

    def rows(self) -> Iterator[tuple[str, list[str], object, Fate]]:
        """Each field with the servers that know it, its sample and its fate, by name."""
        names = sorted({name for fields in self.fields.values() for name in fields})
        fates = _fates(self.type)
        for name in names:
            known = [server for server, fields in self.fields.items() if name in fields]
            yield name, known, self.fields[known[0]][name], fates[name]


_MACHD = {"return_cache_diagnosis": True}

_OPENAI_SAMPLING: dict[str, object] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"65": 1},
    "max_tokens": 4,
    "n": 2,
    "presence_penalty": 0.5,
    "seed": 1,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.5,
    "user": "u",
}
_VLLM: dict[str, object] = {
    "allowed_token_ids": [65, 66],
    "bad_words": ["xyz"],
    "cache_salt": "salt",
    "ec_transfer_params": {"a": 1},
    "guided_choice": ["a", "b"],
    "guided_decoding_backend": "xgrammar",
    "guided_grammar": 'start: "a"',
    "guided_json": _SCHEMA,
    "guided_regex": "a+",
    "guided_whitespace_pattern": " ",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {"a": 1},
    "length_penalty": 0.5,
    "logprob_token_ids": [1],
    "min_p": 0.1,
    "min_tokens": 2,
    "priority": 1,
    "prompt_logprobs": 1,
    "repetition_detection": {"a": 1},
    "repetition_penalty": 1.1,
    "request_id": "r",
    "response_format": _FORMAT,
    "return_mm_kwargs": False,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "session_id": "s",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop_token_ids": [65],
    "stream_interval": 2,
    "structured_outputs": {"regex": "a+"},
    "top_k": 5,
    "truncate_prompt_tokens": 100,
    "truncation_side": "right",
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
_LLAMA_CPP: dict[str, object] = {
    "adaptive_decay": 0.5,
    "adaptive_target": 0.5,
    "backend_sampling": True,
    "cache_prompt": False,
    "dry_allowed_length": 3,
    "dry_base": 2.0,
    "dry_multiplier": 0.8,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["."],
    "dynatemp_exponent": 2.0,
    "dynatemp_range": 0.5,
    "grammar": 'root ::= "a"',
    "grammar_lazy": True,
    "grammar_triggers": [{"type": 0}],
    "id_slot": 1,
    "image_data": [{"id": 1}],
    "json_schema": _SCHEMA,
    "lora": [{"id": 0, "scale": 1.0}],
    "min_keep": 2,
    "mirostat": 2,
    "mirostat_eta": 0.2,
    "mirostat_tau": 4.0,
    "n_cache_reuse": 4,
    "n_cmpl": 2,
    "n_discard": 4,
    "n_indent": 2,
    "n_keep": 4,
    "n_predict": 4,
    "n_probs": 3,
    "parse_tool_calls": False,
    "penalize_nl": True,
    "post_sampling_probs": True,
    "preserved_tokens": ["x"],
    "reasoning_control": True,
    "reasoning_format": "none",
    "reasoning_in_content": True,
    "repeat_last_n": -1,
    "repeat_penalty": 1.1,
    "response_fields": ["content"],
    "return_progress": True,
    "return_tokens": True,
    "samplers": ["top_k"],
    "speculative.n_max": 4,
    "speculative.n_min": 1,
    "speculative.p_min": 0.5,
    "speculative.type": "draft",
    "sse_ping_interval": 1,
    "t_max_predict_ms": 1000,
    "tfs_z": 0.9,
    "timings_per_token": True,
    "top_n_sigma": 1.0,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
}
_OTHERS: dict[str, object] = {
    "adapters": "x",
    "best_of": 2,
    "documents": [{"title": "a"}],
    "draft_model": "x",
    "early_stopping": True,
    "format": "json",
    "include_reasoning": False,
    "keep_alive": "5m",
    "logits_processors": ["x"],
    "media_io_kwargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "num_draft_tokens": 3,
    "prompt_embeds": "x",
    "return_prompt_text": True,
    "role_mapping": {"a": "b"},
    "structural_tag": "x",
    "ttl": 600,
}
_CHAT_OPENAI: dict[str, object] = {
    **_OPENAI_SAMPLING,
    "audio": {"voice": "x"},
    "function_call": "none",
    "functions": [_FUNCTION],
    "logprobs": True,
    "max_completion_tokens": 4,
    "messages": [{"role": "user", "content": "hi"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "model": "fake",
    "moderation": {"a": 1},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "hi"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": _FORMAT,
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": True,
    "tool_choice": "none",
    "tools": [_TOOL],
    "top_logprobs": 2,
    "verbosity": "low",
    "web_search_options": {"a": 1},
}
_CHAT_VLLM: dict[str, object] = {
    **_VLLM,
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": False,
    "documents": [{"title": "a"}],
    "echo": True,
    "include_reasoning": False,
    "media_io_kwargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "return_prompt_text": True,
    "thinking_budget": 5,
    "thinking_token_budget": 5,
}
_CHAT_LLAMA_CPP = _LLAMA_CPP | {"thinking_budget_tokens": 5}
_RESPONSES_OPENAI: dict[str, object] = {
    "background": True,
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "include": ["reasoning.encrypted_content"],
    "input": "hi",
    "instructions": "Be brief.",
    "max_output_tokens": 4,
    "max_tool_calls": 2,
    "metadata": {"a": "b"},
    "model": "fake",
    "moderation": {"a": 1},
    "parallel_tool_calls": False,
    "previous_response_id": None,
    "prompt": {"id": "p"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": False,
    "stream": False,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
    "tool_choice": "none",
    "tools": [_ITEM_TOOL],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "u",
}
_RESPONSES_OTHERS: dict[str, object] = {
    "cache_salt": "salt",
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "logit_bias": {"65": 1},
    "max_completion_tokens": 4,
    "max_tokens": 4,
    "min_p": 0.1,
    "n": 2,
    "presence_penalty": 0.5,
    "priority": 1,
    "reasoning_effort": "low",
    "repetition_penalty": 1.1,
    "response_format": _FORMAT,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [65],
    "stream_interval": 2,
    "structured_outputs": {"regex": "a+"},
    "top_k": 5,
}
_MESSAGES_ANTHROPIC: dict[str, object] = {
    "cache_control": {"type": "ephemeral"},
    "container": "c",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "diagnostics": {"previous_message_id": None},
    "inference_geo": "eu",
    "max_tokens": 4,
    "mcp_servers": [{"type": "url"}],
    "messages": [{"role": "user", "content": "hi"}],
    "metadata": {"user_id": "u"},
    "model": "fake",
    "output_config": {"effort": "low"},
    "output_format": {"type": "json_schema", "schema": _SCHEMA},
    "service_tier": "auto",
    "speed": "fast",
    "stop_sequences": ["x"],
    "stream": False,
    "system": "Be brief.",
    "temperature": 0.5,
    "thinking": {"type": "disabled"},
    "tool_choice": {"type": "none"},
    "tools": [{"name": "weather", "input_schema": _SCHEMA}],
    "top_k": 5,
    "top_p": 0.5,
    "user_profile_id": "u",
    "workspace_id": "w",
}

DOORS = (
    Door(
        "/v1/chat/completions",
        ChatCompletionRequest,
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4,
            "logprobs": True,
        },
        {
            "OpenAI": _CHAT_OPENAI,
            "vLLM": _CHAT_VLLM,
            "llama.cpp": _CHAT_LLAMA_CPP,
            "others": _OTHERS,
            "machd": _MACHD,
        },
    ),
    Door(
        "/v1/completions",
        CompletionRequest,
        {"model": "fake", "prompt": "hi", "max_tokens": 4},
        {
            "OpenAI": {
                **_OPENAI_SAMPLING,
                "best_of": 1,
                "echo": True,
                "logprobs": 1,
                "model": "fake",
                "prompt": "hi",
                "suffix": "x",
            },
            "vLLM": {**_VLLM, "add_special_tokens": False, "prompt_embeds": "x"},
            "llama.cpp": _LLAMA_CPP,
            "others": _OTHERS,
            "machd": _MACHD,
        },
    ),
    Door(
        "/v1/responses",
        ResponsesRequest,
        {"model": "fake", "input": "hi", "max_output_tokens": 4},
        {"OpenAI": _RESPONSES_OPENAI, "other endpoints": _RESPONSES_OTHERS, "machd": _MACHD},
    ),
    Door(
        "/v1/messages",
        MessagesRequest,
        {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        {"Anthropic": _MESSAGES_ANTHROPIC, "vLLM": {"cache_salt": "salt"}, "machd": _MACHD},
    ),
)


def request_fields_markdown() -> str:
    """The page: one table an endpoint."""
    return f"{_INTRODUCTION}\n" + "\n".join(_table(door) for door in DOORS)


_INTRODUCTION = """\
Every request field that clients of these servers send. **done**: machd acts on it. **ignored**: it would not change
the answer. **refused**: it would change the answer in a way that machd does not support, so a value that asks for
something gets 400 `unsupported_parameter`, and `param` names the field. Fields that are not listed are ignored, and
their names are in the debug log.
"""


def _table(door: Door) -> str:
    lines = [f"## `POST {door.path}`\n", "| Field | Known from | machd |", "|---|---|---|"]
    lines += [f"| `{name}` | {', '.join(known)} | {fate} |" for name, known, _, fate in door.rows()]
    return "\n".join(lines) + "\n"


def _fates(type_: type[Struct]) -> dict[str, Fate]:
    """Field, as clients spell it, to what its type says of it."""
    hints = get_type_hints(type_, include_extras=True)
    refused = neutral_values(type_)
    spelled = zip(type_.__struct_fields__, type_.__struct_encode_fields__, strict=True)
    return {
        spelling: Fate.REFUSED
        if name in refused
        else Fate.IGNORED
        if _is_ignored(hints[name])
        else Fate.DONE
        for name, spelling in spelled
    }


def _is_ignored(hint: object) -> bool:
    marks = [*getattr(hint, "__metadata__", ())]
    for member in getattr(hint, "__args__", ()):
        marks += getattr(member, "__metadata__", ())
    return any(
        isinstance(mark, Meta) and (mark.description or "").startswith("Accepted") for mark in marks
    )
