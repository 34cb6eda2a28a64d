"""Every architecture has a tiny model, and each is one that a comparison can fail on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.engines.architectures import (
    MENDED,
    NEED_METAL,
    ONE_OF_EACH_KIND,
    buildable_variants,
    each_architecture,
)
from support.engines.probing import without_compilation

from machd.capabilities.facts import CacheFacts, KvCacheKind
from machd.engine.kernels.batchable import make_batchable
from machd.engine.loading.loader import LoadedModel
from machd.errors import ModelArchitectureError
from machd_probes.catalogue import architecture_names
from machd_probes.passes import Logprobs, Passes
from machd_probes.prober import tiny_loaded
from machd_probes.scripts import LENGTHS, random_prompt
from machd_probes.tiny import tiny_configuration, tiny_model, tiny_variants

_ARCHITECTURES = 126
"""Of mlx-lm 0.32.2, which is pinned."""

_PROMPT_LENGTHS = (5, 18, 44)
_PROMPT_VOCABULARY = 256
_TOKENS = 8
_DISTINCT_TOKENS = 6
_FELT_NATS = 0.003
"""Ten times what float32 rounding was measured at, and more."""

_EACH = each_architecture({*ONE_OF_EACH_KIND, *MENDED})


@pytest.fixture(autouse=True, scope="module")
def _shared_models() -> Iterator[None]:
    """Models built once for all tests of this module, and dropped behind them."""
    with without_compilation():
        yield
    for known in (_loaded, _first_tokens):
        known.cache_clear()
    mx.clear_cache()


@cache
def _loaded(variant: str) -> LoadedModel:
    """The model as it is served: mended where machd does so."""
    return tiny_loaded(variant)


def _passes(variant: str) -> Passes:
    return Passes(_loaded(variant).model)


def _facts(variant: str) -> CacheFacts:
    return _loaded(variant).description.cache


@cache
def _first_tokens(variant: str, length: int) -> tuple[int, ...]:
    """The greedy completion of a prompt."""
    passes = _passes(variant)
    caches = passes.new_caches()
    logprobs = passes.feed(_prompt(length), caches)
    said = [int(np.argmax(logprobs[-1]))]
    while len(said) < _TOKENS:
        said.append(int(np.argmax(passes.feed(said[-1:], caches)[-1])))
    return tuple(said)


def _prompt(length: int) -> tuple[int, ...]:
    """The one that the probe itself has of this length."""
    return random_prompt(length, LENGTHS.index(length), _PROMPT_VOCABULARY)


def test_no_architecture_is_without_a_configuration() -> None:
    """The target of none is met: each of the installed mlx-lm's architectures has one or more."""
    names = architecture_names()

    without = [name for name in names if not tiny_variants(name)]

    assert len(names) == _ARCHITECTURES
    assert (len(without), without) == (0, [])


def test_every_configuration_belongs_to_an_installed_architecture() -> None:
    """No file is left over, and each builds the architecture that it is named after."""
    folder = files("machd_probes") / "architectures"
    names = {one.name.removesuffix(".toml") for one in folder.iterdir() if ".toml" in one.name}

    assert names == {*buildable_variants(), *NEED_METAL}
    assert {name: tiny_configuration(name).config["model_type"] for name in names} == {
        name: name.partition("+")[0] for name in names
    }


def test_every_run_has_each_kind_of_cache() -> None:
    """The architectures that `make test` keeps have every kind of cache that facts can name."""
    assert {_facts(variant).kind for variant in ONE_OF_EACH_KIND} == set(KvCacheKind)


@_EACH
def test_every_run_has_each_mended_architecture(variant: str) -> None:
    """An architecture is listed as mended exactly when machd replaces a layer of it."""
    model = tiny_model(tiny_configuration(variant))

    assert (make_batchable(model) > 0) is (variant in MENDED)


@_EACH
def test_prompts_exceed_windows(variant: str) -> None:
    """A window is full with all but the shortest prompts, and turned over several times."""
    windows = _facts(variant).window_tokens

    assert windows or _facts(variant).kind is not KvCacheKind.ROTATING
    assert all(4 * window < max(LENGTHS) for window in windows)
    assert all(sum(length > window + 1 for length in LENGTHS) >= 4 for window in windows)


@_EACH
def test_a_tiny_model_is_the_same_every_time(variant: str) -> None:
    """Nothing is left to the chance of mlx-lm's initialisation, and all parameters are numbers."""
    first, second = (_parameters(variant) for _ in range(2))

    assert first.keys() == second.keys()
    assert all(bool(mx.array_equal(first[name], second[name])) for name in first)
    floats = [one for one in first.values() if mx.issubdtype(one.dtype, mx.floating)]
    assert bool(mx.all(mx.stack([mx.all(mx.isfinite(one)) for one in floats])))


def _parameters(variant: str) -> dict[str, mx.array]:
    flat = tree_flatten(tiny_model(tiny_configuration(variant)).parameters())
    assert isinstance(flat, list)
    return dict(flat)


@_EACH
def test_a_tiny_model_has_something_to_say(variant: str) -> None:
    """Three prompts get six different tokens or more: what repeats one token hides every fault."""
    said = {token for length in _PROMPT_LENGTHS for token in _first_tokens(variant, length)}

    assert len(said) >= _DISTINCT_TOKENS


@_EACH
def test_a_tiny_model_heeds_the_first_token(variant: str) -> None:
    """Another first token changes what is likely behind the last of eighteen; all are numbers."""
    prompt = _prompt(18)
    changed = (prompt[0] % 100 + 1, *prompt[1:])

    one, other = (_behind(variant, tokens) for tokens in (prompt, changed))

    possible = np.isfinite(one)
    assert np.array_equal(possible, np.isfinite(other))
    assert not np.any(np.isnan(one) | np.isnan(other))
    assert float(np.max(np.abs(one[possible] - other[possible]))) > _FELT_NATS


def _behind(variant: str, prompt: tuple[int, ...]) -> Logprobs:
    passes = _passes(variant)
    behind: Logprobs = passes.feed(prompt, passes.new_caches())[-1]
    return behind


@pytest.mark.skipif(mx.metal.is_available(), reason="they can be built here")
@pytest.mark.parametrize("variant", NEED_METAL)
def test_the_exceptions_need_metal(variant: str) -> None:
    """An architecture without a tiny model has one reason for that, which its error names."""
    with pytest.raises(ModelArchitectureError, match="No Metal back-end"):
        tiny_loaded(variant)
