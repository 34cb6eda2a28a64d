"""What a request's ``model`` means where models and adapters have names, and which models take adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from machd.capabilities.verdict import Support, Verdict
from machd.errors import AdapterError, MachdError, ModelNotServedError, UnsupportedParameterError
from machd.http.asked_models import AskedModel, check_takes_adapters, find_asked
from machd.http.model_names import ModelNames
from machd.request.adapter import Adapter, adapter_namespace
from machd.served.adapter_places import AdapterToServe
from machd.served.adapter_readings import NO_ADAPTER_FILES
from machd.served.adapter_set import AdapterSet, combined
from machd.served.served_model import ServedModel
from machd.settings.adapters import AdaptersSettings

_STYLE = AdapterToServe("style", Path("/a/style"))
_HOUSE = AdapterToServe("org/house", Path("/a/house"), "qwen3:8b")
_ALIKE = AdapterToServe("Twin", Path("/a/Twin"))
_OTHER = AdapterToServe("twin", Path("/a/twin"))
_SHADOWED = AdapterToServe("coder", Path("/a/coder"))
_NAMES = ModelNames(["gpt-4o"], others={"qwen3:8b": "qwen3:8b", "coder": "coder"})
_TOLERANT = ModelNames(["gpt-4o"], others=_NAMES.others, accepts_any=True)


def _adapters() -> AdapterSet:
    adapters = AdapterSet(NO_ADAPTER_FILES)
    adapters.take_on(AdaptersSettings(), [_STYLE, _HOUSE, _ALIKE, _OTHER, _SHADOWED])
    return adapters


@pytest.mark.parametrize(
    ("asked", "model_name", "adapter"),
    [
        ("base", "default", None),
        ("gpt-4o:latest", "default", None),
        ("qwen3:8b", "qwen3:8b", None),
        ("style", "default", _STYLE),
        ("STYLE:latest", "default", _STYLE),
        ("gpt-4o:style", "default", _STYLE),
        ("base:Style:latest", "default", _STYLE),
        ("house", "qwen3:8b", _HOUSE),
        ("org/house", "qwen3:8b", _HOUSE),
        ("qwen3:8b:house", "qwen3:8b", _HOUSE),
        ("Twin", "default", _ALIKE),
        ("twin", "default", _OTHER),
        # A model of the name comes first; behind the base's name it is the adapter.
        ("coder", "coder", None),
        ("base:coder", "default", _SHADOWED),
    ],
)
@pytest.mark.parametrize("names", [_NAMES, _TOLERANT], ids=["strict", "tolerant"])
def test_name_means_one_model_or_one_adapter(
    names: ModelNames, asked: str, model_name: str, adapter: AdapterToServe | None
) -> None:
    """Whatever else is accepted, a name that is known means what it names."""
    assert find_asked(names, _adapters(), asked, "base") == AskedModel(model_name, adapter)


@pytest.mark.parametrize(
    "asked", ["base:unknown", "qwen3:8b:style", "coder:house", "base:", "base:TWIN", "gpt-4o:org/x"]
)
@pytest.mark.parametrize("names", [_NAMES, _TOLERANT], ids=["strict", "tolerant"])
def test_name_behind_a_models_is_an_adapter_of_it_or_nothing(names: ModelNames, asked: str) -> None:
    """No model answers for an adapter that it has not, nor for one of two that are written alike."""
    with pytest.raises(ModelNotServedError):
        find_asked(names, _adapters(), asked, "base")


def test_unloaded_adapter_is_not_answered_by_the_model() -> None:
    """Its name is known, so that it is none of those that mean the default model."""
    adapters = _adapters()
    adapters.unload("style")

    for asked in ("style", "base:style"):
        with pytest.raises(ModelNotServedError, match="unloaded"):
            find_asked(_TOLERANT, adapters, asked, "base")


def test_without_adapters_names_are_read_as_before() -> None:
    """A colon says nothing then."""
    none = AdapterSet(NO_ADAPTER_FILES)

    assert find_asked(_TOLERANT, none, "base:unknown", "base") == AskedModel("default")


def test_listed_adapters_come_in_one_order_each_content_once() -> None:
    """Equal sets have equal keys, in whatever order they are listed; scale 0 leaves one out."""
    one, two, copy = Adapter(b"1", 0.5, "a"), Adapter(b"2", 2.0, "b"), Adapter(b"1", 0.25, "c")

    assert combined([two, one]) == combined([one, two]) == (one, two)
    assert combined([one, copy]) == (Adapter(b"1", 0.75),)
    assert combined([one, Adapter(b"1", -0.5), Adapter(b"2", 0.0)]) == ()
    namespaces = {adapter_namespace(chosen) for chosen in [(), (one,), (two,), (one, two), (copy,)]}
    assert len(namespaces) == 5


@pytest.mark.parametrize(
    ("encoder", "support", "error"),
    [
        (None, Support.SUPPORTED, None),
        (None, Support.UNKNOWN, None),
        (None, Support.BLOCKED, AdapterError),
        (object(), Support.BLOCKED, UnsupportedParameterError),
    ],
)
def test_model_that_is_computed_without_adapters_refuses_them(
    encoder: object, support: Support, error: type[MachdError] | None
) -> None:
    """An encoder and a model whose verdict is blocked are each told in words, the latter with the verdict's reason."""
    served = SimpleNamespace(
        model=SimpleNamespace(encoder=encoder),
        verdicts=SimpleNamespace(batched_adapters=Verdict(support, "its experts lie on disk")),
    )

    def check() -> MachdError | None:
        try:
            check_takes_adapters(cast("ServedModel", served))
        except MachdError as refusal:
            return refusal
        return None

    refusal = check()
    assert refusal is None if error is None else type(refusal) is error
    assert not isinstance(refusal, AdapterError) or "its experts lie on disk" in refusal.message
