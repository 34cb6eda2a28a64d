"""Models in the shapes of LM Studio's protocol, made of what ``GET /api/v1/models`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET

from machd.dialects.lm_studio import (
    LmStudioModel,
    LmStudioModelFacts,
    LmStudioModelFactsList,
)
from machd.dialects.lm_studio_socket.errors import UnknownModelError
from machd.errors import NotFoundError
from machd.http.inner_request import AnsweredError, InnerClient


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The models that a namespace is about.

    Attributes:
        type: As lists of models have it; a model that was never loaded counts as ``llm``.
        load_route: A request that loads a model as any request for it does, with the rest of its body.
    """

    type: Literal["llm", "embedding"]
    load_route: str
    load_body: Mapping[str, object]


LLM = ModelKind("llm", "POST /api/generate", {"stream": False})
EMBEDDING = ModelKind("embedding", "POST /api/embed", {})


async def listed(client: InnerClient) -> list[LmStudioModelFacts]:
    """Every model that is served, the default one first."""
    body = await client.ask("GET /api/v1/models")
    return msgspec.json.decode(body, type=LmStudioModelFactsList).models


async def find(client: InnerClient, name: str | None, kind: ModelKind) -> LmStudioModelFacts:
    """Return the model that a client names, or any of a kind, best a loaded one.

    Raises:
        UnknownModelError: It is not served.
    """
    models = await listed(client)
    if name is None:
        fitting = [one for one in models if one.type == kind.type] or models
        return next((one for one in fitting if one.loaded_instances), fitting[0])
    for one in models:
        if one.key == name:
            return one
    try:
        body = await client.ask(f"GET /api/v0/models/{name}")
    except AnsweredError as error:
        loaded = [one.key for one in models if one.loaded_instances]
        raise UnknownModelError(error, name, loaded) from None
    key = msgspec.json.decode(body, type=LmStudioModel).id
    for one in models:
        if one.key == key:
            return one
    raise NotFoundError("this model has just been added or removed; ask again")


def model_info(model: LmStudioModelFacts) -> dict[str, object]:
    """A model, as lists of those on disk have it."""
    info: dict[str, object] = {
        "type": model.type,
        "modelKey": model.key,
        "format": "gguf" if model.format == "gguf" else "safetensors",
        "displayName": model.display_name,
        "publisher": model.publisher,
        "path": model.key,
        "indexedModelIdentifier": model.key,
        "deviceIdentifier": None,
        "sizeBytes": model.size_bytes,
        "vision": model.capabilities is not UNSET and model.capabilities.vision,
        "trainedForToolUse": (
            model.capabilities is not UNSET and model.capabilities.trained_for_tool_use
        ),
        "maxContextLength": 0 if model.max_context_length is UNSET else model.max_context_length,
    }
    if model.params_string is not None:
        info["paramsString"] = model.params_string
    if model.architecture is not None:
        info["architecture"] = model.architecture
    if model.quantization is not None:
        bits = model.quantization.bits_per_weight
        info["quantization"] = {"name": model.quantization.name, "bits": round(bits or 0)}
    return info


def instance_info(model: LmStudioModelFacts) -> dict[str, object]:
    """A model that is loaded, or was: its one instance has its name."""
    info = model_info(model)
    return {
        **info,
        "identifier": model.key,
        "instanceReference": model.key,
        "ttlMs": None,
        "lastUsedTime": None,
        "contextLength": info["maxContextLength"],
    }
