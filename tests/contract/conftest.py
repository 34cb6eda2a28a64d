"""Engines with the embedded model's tokenizer and vocabulary and a fraction of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from machd.engine.protocol.engine import Engine

if TYPE_CHECKING:
    from machd.engine.loading.loader import LoadedModel  # imports mlx, which comes after the BLAS

_LAYERS = 2


@pytest.fixture(autouse=True, scope="module")
def _without_compilation() -> Iterator[None]:
    """Compute as the daemon does."""
    from support.engines.cpu_layers import computing_as_the_daemon  # noqa: PLC0415 - imports mlx

    with computing_as_the_daemon():
        yield


@pytest.fixture(name="tiny_engine", scope="session")
def _tiny_engine() -> Iterator[Engine]:
    """An engine with a tiny model of 256 tokens, whose rows have the same bits in every company."""
    yield from _tiny(looks_ahead=False)


@pytest.fixture(name="tiny_ahead_engine", scope="session")
def _tiny_ahead_engine() -> Iterator[Engine]:
    """One that looks ahead, as on a GPU."""
    yield from _tiny(looks_ahead=True)


def _tiny(*, looks_ahead: bool) -> Iterator[Engine]:
    from support.engines.tiny_engines import native_llama  # noqa: PLC0415 - imports mlx

    from machd.engine.assembly import make_engine  # noqa: PLC0415 - imports mlx

    engine = make_engine(native_llama(), looks_ahead=looks_ahead)
    yield engine
    engine.close()


@pytest.fixture(name="short_model", scope="session")
def _short_model(embedded_model: LoadedModel) -> LoadedModel:
    """The embedded model's first layers and its head.

    It costs a fifth of the whole model. Its answers mean nothing, and serve where a test needs a real
    tokenizer and no sense.
    """
    from machd.engine.loading.description import describe_model  # noqa: PLC0415 - imports mlx

    whole = embedded_model.description
    model = copy(embedded_model.model)
    model.model = copy(model.model)
    model.model.layers = model.model.layers[:_LAYERS]
    description = describe_model(
        model,
        model_id=whole.model_id,
        architecture=whole.architecture,
        context_tokens=whole.context_tokens,
        eos_token_ids=whole.eos_token_ids,
    )
    return replace(embedded_model, model=model, description=description)


@pytest.fixture(name="short_engine", scope="session")
def _short_engine(short_model: LoadedModel) -> Iterator[Engine]:
    """An engine with the short model."""
    from machd.engine.assembly import make_engine  # noqa: PLC0415 - imports mlx

    engine = make_engine(short_model)
    yield engine
    engine.close()


@pytest.fixture(name="short_ahead_engine", scope="session")
def _short_ahead_engine(short_model: LoadedModel) -> Iterator[Engine]:
    """One that looks ahead, as on a GPU."""
    from machd.engine.assembly import make_engine  # noqa: PLC0415 - imports mlx

    engine = make_engine(short_model, looks_ahead=True)
    yield engine
    engine.close()
