"""A small model in place of a loaded one: the same code, with random weights, in its own engine.

Numbers of a large model that its code holds can point behind the arrays of a small one, and mlx checks
no bounds. So this runs in a worker process alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from msgspec.structs import replace

from machd.capabilities.evidence import MeasuredOn, ProbeResult
from machd.capabilities.model_code import ModelCode
from machd.clock import SystemClock
from machd.engine.assembly import make_engine
from machd.engine.backend.untyped import LanguageModel
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.architecture import import_architecture
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.placing.precision import Conversion, native_layers
from machd.engine.loading.placing.whole import materialise
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.progress import SilentProgress
from machd_probes.prober import run_check
from machd_probes.shrink import shrunk_configurations
from machd_probes.subject import Extent, Subject
from machd_probes.tiny import (
    TinyConfiguration,
    blank_model,
    build_tiny,
    tiny_configuration,
    tiny_variants,
)
from machd_probes.worker_messages import StandInOrder

_CONTEXT_TOKENS = 1024
_MAX_ROWS = 16
_TIED = " tie_word_embeddings"
"""The switch of a model, behind the name of its class: see :class:`ModelCode`."""

_FLOAT32 = "float32"

_LARGEST_PARAMETERS = 64_000_000
"""Of a stand-in: larger ones take longer than a start may."""


def probe_stand_in(order: StandInOrder) -> Iterator[ProbeResult]:
    """Run the checks on a stand-in; yield nothing if none can be built."""
    subject = make_stand_in(order)
    if subject is None:
        return
    clock = SystemClock()
    for name in order.checks:
        of_check: Subject | None = subject
        if name == "adapters" and order.dtype != _FLOAT32:
            # Merging an adapter rounds 16-bit weights by more than a pass does, so rows would differ from them.
            of_check = make_stand_in(order, is_exact=True)
        if of_check is not None:
            yield run_check(of_check, name, clock, measured_on=MeasuredOn.STAND_IN)


def make_stand_in(order: StandInOrder, *, is_exact: bool = False) -> Subject | None:
    """Build a small model that runs all the code of the loaded one; None if that fails.

    Tries its own configuration, shrunk, then the tiny configurations of the architecture. Takes at
    most a second.

    Args:
        order: The loaded model's code and dtype.
        is_exact: The same layers compute in float32, whatever the dtype of the loaded model.
    """
    if is_exact:
        order = replace(order, dtype=_FLOAT32)
    conversion = Conversion(
        getattr(mx, order.dtype), native=None if is_exact else native_layers("auto")
    )
    classes = _classes(order)
    for configuration in _configurations(order):
        built = _built(configuration, classes, order, conversion)
        if built is not None:
            loaded, plain = built
            engine = make_engine(loaded, max_rows=_MAX_ROWS)
            return Subject(engine, Extent(), model=loaded.model, plain=plain)
    return None


def _configurations(order: StandInOrder) -> Iterator[TinyConfiguration]:
    if order.config:
        yield from map(TinyConfiguration, shrunk_configurations(order.config))
    if order.model_file is None:
        yield from map(tiny_configuration, tiny_variants(order.architecture))


def _classes(order: StandInOrder) -> tuple[LanguageModel, LanguageModel]:
    """The classes that the loaded model was made from, which may be a checkpoint's own."""
    if order.model_file is None:
        module = import_architecture(order.architecture)
    else:
        path = Path(order.model_file)
        # The name that mlx-lm gives it, which is part of the names of its classes.
        spec = importlib.util.spec_from_file_location("custom_model", path)
        assert spec is not None, "a path of a Python file"
        assert spec.loader is not None, "a path of a Python file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.Model, module.ModelArgs


def _built(
    configuration: TinyConfiguration,
    classes: tuple[LanguageModel, LanguageModel],
    order: StandInOrder,
    conversion: Conversion,
) -> tuple[LoadedModel, Module] | None:
    """A model of this configuration, and the same as mlx-lm builds it; None where it does not build, is too large or has other code.

    Weights are drawn when the code is known to be that of the loaded model: of a large one they take seconds.
    """
    try:
        blank = blank_model(configuration, *classes)
        if _parameters(blank) > _LARGEST_PARAMETERS:
            return None
        _tie(blank, order.code)
        if not _is_like(_described(blank, order).code, order.code):
            return None
        small, plain = (build_tiny(configuration, *classes) for _ in range(2))
        for one in (small, plain):
            _tie(one, order.code)
        return _loaded(small, order, conversion), plain
    except (Exception, SystemExit):  # noqa: BLE001 - code of a model does anything
        return None


def _tie(small: LanguageModel, loaded: ModelCode) -> None:
    """Tie a model's output to its embeddings, if mlx-lm's ``sanitize`` tied that of the loaded one: no configuration says so."""
    if any(name.endswith(_TIED) for name in loaded.layers) and "lm_head" in small:
        flat = tree_flatten(small.parameters())
        assert isinstance(flat, list)
        small.sanitize({name: array for name, array in flat if not name.startswith("lm_head.")})


def _is_like(small: ModelCode | None, loaded: ModelCode) -> bool:
    """Return whether the small model has every layer and cache of the loaded one.

    Digests are not compared: both were built from the same files.
    """
    assert small is not None, "a model in memory has code"
    return loaded.layers <= small.layers and loaded.caches <= small.caches


def _loaded(small: Module, order: StandInOrder, conversion: Conversion) -> LoadedModel:
    # As the loader does it, so that the layers which serve are measured.
    materialise(small, conversion, SilentProgress())
    return LoadedModel(small, FakeTokenizer(), _described(small, order))


def _described(small: Module, order: StandInOrder) -> ModelDescription:
    return describe_model(
        small,
        model_id=f"small-{order.architecture}",
        architecture=order.architecture,
        context_tokens=_CONTEXT_TOKENS,
        eos_token_ids=frozenset(),
    )


def _parameters(model: Module) -> int:
    from mlx_lm.utils import get_total_parameters  # noqa: PLC0415 - after import_mlx_lm()

    return int(get_total_parameters(model))
