"""Models and adapters that a request names: in its ``model``, and as a list of adapters beside a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from machd.errors import (
    AdapterError,
    InvalidRequestError,
    ModelNotServedError,
    UnsupportedParameterError,
)
from machd.http.model_names import ModelNames, is_name
from machd.link.adapter_mode import adapter_policy
from machd.request.adapter import NumberedAdapter
from machd.served.adapter_places import AdapterToServe
from machd.served.adapter_set import AdapterSet
from machd.served.served_model import ServedModel
from machd.settings.models import OLLAMA_TAG


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model that is served, and its adapter where the request names one."""

    model_name: str
    adapter: AdapterToServe | None = None


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter that a request asks for; ``scale`` None for the one that its table says."""

    adapter: AdapterToServe
    scale: float | None = None


def find_asked(
    names: ModelNames, adapters: AdapterSet, asked: str | None, default: str
) -> AskedModel:
    """Return what a request's ``model`` names: ``MODEL``, ``ADAPTER`` or ``MODEL:ADAPTER``.

    A name that a model has means the model. A name with a model's before the colon means an adapter of that model, or
    nothing: a misspelt adapter is never answered by the model itself, even where every name is accepted.

    Args:
        names: Of the models.
        adapters: Of all models.
        asked: The name in the request; None or empty where it names none.
        default: Id of the default model.

    Raises:
        ModelNotServedError: It names nothing that is served.
        InvalidRequestError: It names nothing at all, and this server does not take any name.
    """
    if not asked or not adapters or not is_name(asked):
        return AskedModel(names.find(asked, default))
    if (model_name := names.named(asked, default)) is not None:
        return AskedModel(model_name)
    adapter = adapters.find(asked)
    if adapter is None:
        base, colon, own_name = asked.removesuffix(OLLAMA_TAG).rpartition(":")
        base_name = names.named(base, default) if colon else None
        if base_name is None:
            return AskedModel(names.find(asked, default))
        adapter = adapters.find(own_name)
        if adapter is None or adapter.model_name != base_name:
            raise ModelNotServedError(
                "the model has no adapter of this name; /v1/models lists those that are served",
                param="model",
            )
    if not adapters.is_loaded(adapter):
        raise ModelNotServedError(
            f"the adapter {adapter.name!r} is unloaded, until an operator loads it", param="model"
        )
    return AskedModel(adapter.model_name, adapter)


def asked_adapters(
    adapters: AdapterSet, found: AskedModel, numbered: Sequence[NumberedAdapter] | None
) -> list[WeightedAdapter]:
    """Return the adapters of a request: the one that its ``model`` names, or those that it lists.

    Raises:
        InvalidRequestError: It names one and lists others, or lists one that is not there or of another model, or twice.
    """
    if found.adapter is not None:
        if numbered:
            raise InvalidRequestError.at("lora", "model names an adapter already; send one of both")
        return [WeightedAdapter(found.adapter)]
    asked: dict[int, WeightedAdapter] = {}
    for one in numbered or ():
        adapter = adapters.numbered(one.number)
        if adapter is None or adapter.model_name != found.model_name:
            raise InvalidRequestError.at(
                "lora",
                f"the model has no adapter with id {one.number}; GET /lora-adapters lists them",
            )
        if one.number in asked:
            raise InvalidRequestError.at("lora", f"id {one.number} is listed twice")
        asked[one.number] = WeightedAdapter(adapter, one.scale)
    return list(asked.values())


def check_takes_adapters(served: ServedModel) -> None:
    """Refuse a loaded model that is computed without adapters.

    Raises:
        UnsupportedParameterError: It generates no text.
        AdapterError: Its verdict on adapters is blocked.
    """
    if served.model.encoder is not None:
        raise UnsupportedParameterError.at(
            "model", "adapters are served with models that generate text, and this one does not"
        )
    refusal = adapter_policy(served.verdicts.batched_adapters).refusal
    if refusal:
        raise AdapterError(refusal)
