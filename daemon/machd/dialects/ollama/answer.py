"""Answers of Ollama's endpoints. Durations are in nanoseconds, as in Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from machd.dialects.logprobs import ChatTokenLogprob
from machd.dialects.usage import CacheDiagnosisDetails
from machd.dialects.wire.raw_json import JsonObject
from machd.errors import MachdError, NotFoundError

DoneReason: TypeAlias = Literal["stop", "length", "load", "unload"]
"""Why an answer ended; ``load`` and ``unload`` answer a request that asked for no text."""

OllamaCapability: TypeAlias = Literal["completion", "embedding", "tools", "thinking"]
"""What a model can do."""


class OllamaFunctionCall(Struct, frozen=True, kw_only=True):
    """The function of a call; ``index`` counts the calls of one answer from 0."""

    index: int
    name: str
    arguments: JsonObject


class OllamaAnswerToolCall(Struct, frozen=True, kw_only=True):
    """A call that the model makes."""

    id: str
    function: OllamaFunctionCall


class OllamaAnswerMessage(Struct, frozen=True, kw_only=True):
    """The assistant's message, or the next part of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnswerToolCall] | UnsetType = UNSET


class OllamaLine(Struct, frozen=True, kw_only=True):
    """Fields of a line of either endpoint; from ``done_reason`` on with the last line alone.

    Attributes:
        created_at: When the request was read, in RFC 3339; the same in every line.
        logprobs: Of the tokens that came since the line before, where asked for.
        total_duration: From the request's arrival to its last token.
        load_duration: 0, as the model is loaded before requests are taken.
        prompt_eval_count: Tokens of the prompt, those found in the prefix cache included.
        prompt_eval_duration: From a slot to the first token.
        eval_duration: From the first token to the last.
        cache_diagnosis: An extension: why the prefix cache had no more of the prompt, where asked for.
    """

    model: str
    created_at: str
    done: bool = False
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    cache_diagnosis: CacheDiagnosisDetails | UnsetType = UNSET


class OllamaChatLine(OllamaLine, frozen=True, kw_only=True):
    """A chat's answer, or a line of one."""

    message: OllamaAnswerMessage


class OllamaGenerateLine(OllamaLine, frozen=True, kw_only=True):
    """A prompt's answer, or a line of one."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaModelDetails(Struct, frozen=True, kw_only=True):
    """The kind of a model; texts are empty while it was never loaded.

    Attributes:
        quantization_level: How the weights are quantised, or the dtype of plain ones.
    """

    parent_model: str = ""
    format: str = "mlx"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelEntry(Struct, frozen=True, kw_only=True):
    """Which model is meant, and how large it is.

    Attributes:
        size: Bytes of its weights in memory; before it was loaded, those of its files, or 0.
        digest: Hexadecimal hash of the model's id and of what decides its caches' content; of one of several models, of
            its name and of what its files were at the start.
    """

    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails


class OllamaModel(OllamaModelEntry, frozen=True, kw_only=True):
    """A model that is served; ``modified_at`` is when its weights were written."""

    modified_at: str


class OllamaModelList(Struct, frozen=True, kw_only=True):
    """Every model that is served."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModelEntry, frozen=True, kw_only=True):
    """A model in memory.

    Attributes:
        expires_at: When it is unloaded unless a request comes; centuries ahead where it stays loaded.
        size_vram: Bytes of the weights that are on a GPU.
    """

    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModelList(Struct, frozen=True, kw_only=True):
    """Every model in memory."""

    models: list[OllamaRunningModel]


class OllamaModelFacts(Struct, frozen=True, kw_only=True):
    """Facts about the served model.

    Attributes:
        template: Empty, as Ollama's template language is not the model's.
        model_info: Facts by the names that GGUF gives them.
    """

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: OllamaModelDetails
    model_info: dict[str, int | str]
    capabilities: list[OllamaCapability]
    modified_at: str


class OllamaVersion(Struct, frozen=True, kw_only=True):
    """The version of Ollama whose API is spoken, and machd's own."""

    version: str
    machd: str


_OTHER_MODELS = (
    "this server serves the one model that it was started with; to serve another, restart it with "
    "--model-path, and see /api/tags for the one that is served"
)
_FILES = (
    "of the files of models this API only fetches new ones, with /api/pull; replace or remove them in "
    "models.directory or in the tables [models.NAME], where aliases stand too, and reload or restart it"
)
_FILE_PATHS = ("/api/push", "/api/create", "/api/copy", "/api/delete")

_NOT_SERVED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("/api/pull", *_FILE_PATHS), _OTHER_MODELS)
)


class OllamaErrorBody(Struct, frozen=True, kw_only=True):
    """The body of every failure below ``/api/``, and the line that ends a stream that failed."""

    error: str


def ollama_error_json(error: MachdError) -> bytes:
    """Encode an error in Ollama's envelope."""
    return msgspec.json.encode(OllamaErrorBody(error=error.message))


def ollama_not_found(path: str, *, is_one: bool = True) -> NotFoundError:
    """The error for a path below ``/api/`` at which nothing is served; ``is_one`` where there is one model alone."""
    pull = "" if is_one else "/api/pull, "
    return NotFoundError(
        (_FILES if not is_one and path in _FILE_PATHS else _NOT_SERVED.get(path))
        or "nothing is served at this path; of Ollama's API, /api/chat, /api/generate, /api/embed, "
        f"/api/tags, /api/show, {pull}/api/ps and /api/version are"
    )
