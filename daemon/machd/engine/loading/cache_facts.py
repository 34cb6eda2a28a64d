"""Facts of a model's caches, read from the live cache objects after a short prompt.

A configuration can change the kind of cache that an architecture makes, so the facts are read from the
objects that ``make_prompt_cache`` returns, cache lists included. For a model larger than the machine the
prompt is traced instead of computed: costs need shapes only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.engine.backend.inspection_bounds import printable
from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.layers.kinds import kind_of
from machd.engine.kv.row_caches import innermost, is_cache_list, kv_arrays, make_row_caches
from machd.errors import ModelArchitectureError, ModelFormatError

_PROMPT_TOKENS = 8

_LARGEST_WINDOW_TOKENS = 1 << 53
"""Largest integer that every JSON parser reads exactly."""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """The caches of a model that has run or was traced.

    Attributes:
        logits_tokens: Width of its logits; 0 where a trace ended before them.
        head_dims: Widths of its keys and values.
        note: What a trace inferred; empty for nothing.
    """

    cache: CacheFacts
    logits_tokens: int
    head_dims: frozenset[int]
    note: str = ""


def measure_model(model: Module, kv_format: KvFormat = PLAIN) -> MeasuredModel:
    """Run eight tokens through a model, and eight more, and read the sizes of its caches.

    For a cache of keys and values the cost follows from their shapes. For a cache of another class the bytes
    added by the second eight tokens are the cost of positions; the rest of the first eight tokens' bytes is
    the cost of a sequence of any length. A rotating cache is counted as if it never rotated: an upper
    bound for sequences longer than its window.

    The run also compiles mlx's kernels, for which the first request would wait.

    Raises:
        ModelArchitectureError: The forward pass fails here.
        ModelFormatError: All logits are NaN.
    """
    layers = layer_facts(model)
    caches = make_row_caches(model, kv_format)
    prompt = _prompt(model)
    try:
        logits = _run(model, prompt, caches)
        first_bytes = [_held_bytes(cache) for cache in innermost(caches)]
        _run(model, prompt, caches)
    except Exception as error:
        # A model of mlx-lm's raises any error.
        raise _not_working(error) from error
    if mx.all(mx.any(mx.isnan(logits), axis=-1)).item():
        raise ModelFormatError(
            "the model computes NaN for every token: a number of its configuration or a weight is damaged, or too "
            "large for model.dtype; fetch or copy it again, or try `--model-dtype float32`"
        )
    costs = [
        _cost(cache, before) for cache, before in zip(innermost(caches), first_bytes, strict=True)
    ]
    return MeasuredModel(_cache_facts(layers, costs), int(logits.shape[-1]), _head_dims(caches))


def trace_model(model: LanguageModel) -> MeasuredModel:
    """Find the facts of :func:`measure_model` without computing a weight.

    The forward pass runs under mlx's tracing for compilation: every array stays a shape, and a model that
    reads an array's values gets an exception from mlx instead of 100 GB of weights. The layers before that
    one then give the costs of the other layers of their class.

    Raises:
        ModelArchitectureError: The forward pass fails here, before a layer shows its cost.
    """
    layers = layer_facts(model)
    caches = make_row_caches(model)
    opened = innermost(caches)
    prompt = _prompt(model)
    first_bytes: list[int] = []
    failures: list[Exception] = []
    logits_tokens = 0

    def forward(tokens: mx.array) -> tuple[mx.array, ...]:
        nonlocal logits_tokens
        try:
            logits_tokens = int(_logits(model(tokens, cache=caches)).shape[-1])
            first_bytes.extend(_held_bytes(cache) for cache in opened)
            model(tokens, cache=caches)
        except Exception as error:  # noqa: BLE001 - a model of mlx-lm's raises any error
            failures.append(error)
        return ()

    with _compilation():
        mx.compile(forward)(prompt)
    if not failures:
        costs = [_cost(cache, before) for cache, before in zip(opened, first_bytes, strict=True)]
        return MeasuredModel(_cache_facts(layers, costs), logits_tokens, _head_dims(caches))
    costs, seen = _costs_of_their_class(opened, failures[0])
    note = (
        f"the model computes while it runs, so {seen} of its {len(opened)} caches were looked at "
        "and the others counted like them"
    )
    return MeasuredModel(_cache_facts(layers, costs), logits_tokens, _head_dims(caches), note)


@contextmanager
def _compilation() -> Iterator[None]:
    """Switch compilation on, without which mlx does not trace; an engine on the CPU has switched it off."""
    if _is_compilation_on():
        yield
        return
    mx.enable_compile()
    try:
        yield
    finally:
        mx.disable_compile()


def _is_compilation_on() -> bool:
    """Tell whether mlx traces what it compiles: it refuses to compute meanwhile."""
    is_traced = False

    def forward(tokens: mx.array) -> mx.array:
        nonlocal is_traced
        try:
            mx.eval(tokens)
        except ValueError:
            is_traced = True
        return tokens

    mx.compile(forward)(mx.zeros(1))
    return is_traced


def _costs_of_their_class(caches: Sequence[Cache], failure: Exception) -> tuple[list[_Cost], int]:
    """Infer the costs of caches of which only the first were filled; returns their number, too."""
    filled = [cache for cache in caches if isinstance(getattr(cache, "keys", None), mx.array)]
    by_class = {type(cache): _cost(cache, 0) for cache in filled}
    if any(type(cache) not in by_class for cache in caches):
        raise _not_working(failure) from failure
    return [by_class[type(cache)] for cache in caches], len(filled)


def _not_working(failure: Exception) -> ModelArchitectureError:
    return ModelArchitectureError(
        f"the model's forward pass does not work here: {printable(failure)}"
    )


def layer_facts(model: Module) -> tuple[LayerCacheFacts, ...]:
    """Read the facts of empty caches, and no weight; a filled window would not be trimmable.

    Raises:
        ModelFormatError: A window's size is out of bounds.
    """
    caches = make_row_caches(model)
    owners = _owners(model, caches)
    found = tuple(_facts(cache, owner) for cache, owner in zip(caches, owners, strict=True))
    if max((one.window_tokens or 0 for one in found), default=0) > _LARGEST_WINDOW_TOKENS:
        raise ModelFormatError(
            "the configuration says a window of more than 2^53 tokens, which is absurd; fetch or copy it again"
        )
    return found


def _prompt(model: Module) -> mx.array:
    """Make token ids inside the vocabulary, [1, 8]."""
    return mx.array([list(range(1, _PROMPT_TOKENS + 1))]) % _vocabulary_tokens(model)


def _cache_facts(layers: tuple[LayerCacheFacts, ...], costs: Sequence[_Cost]) -> CacheFacts:
    return CacheFacts(
        layers,
        sum(cost.per_token_bytes for cost in costs),
        sum(cost.per_sequence_bytes for cost in costs),
    )


@dataclass(frozen=True, slots=True)
class _Cost:
    per_token_bytes: int
    per_sequence_bytes: int


def _head_dims(caches: Sequence[Cache]) -> frozenset[int]:
    return frozenset(
        int(array.shape[-1])
        for cache in innermost(caches)
        for array in _keys_and_values(cache)
        if isinstance(array, mx.array)
    )


def _keys_and_values(cache: Cache) -> Sequence[object]:
    """Return the arrays of keys and values, None for each that the cache lacks."""
    return kv_arrays(cache) or (getattr(cache, "keys", None), getattr(cache, "values", None))


def _cost(cache: Cache, first_bytes: int) -> _Cost:
    """Find the cost of a cache of 16 tokens; ``first_bytes`` is its size after 8."""
    held = _keys_and_values(cache)
    arrays = [array for array in held if isinstance(array, mx.array)]
    if len(arrays) == len(held):
        # [1, heads, positions, n]; positions may be allocated ahead.
        return _Cost(sum(array.nbytes // array.shape[-2] for array in arrays), 0)
    per_token_bytes = max(_held_bytes(cache) - first_bytes, 0) // _PROMPT_TOKENS
    return _Cost(per_token_bytes, max(first_bytes - per_token_bytes * _PROMPT_TOKENS, 0))


def _run(model: LanguageModel, tokens: mx.array, caches: list[Cache]) -> mx.array:
    """Compute the logits of one more chunk, [1, tokens, vocabulary]; the caches grow by it."""
    logits = _logits(model(tokens, cache=caches))
    mx.eval(logits, [array for cache in innermost(caches) for array in _arrays(cache)])
    return logits


def _logits(output: Any) -> mx.array:  # noqa: ANN401 - what a model of mlx-lm's or mlx-vlm's gives
    logits: mx.array = getattr(output, "logits", output)
    return logits


def _vocabulary_tokens(model: Module) -> int:
    """Count the rows of the first embedding."""
    for _, module in model.named_modules():
        if isinstance(module, Embedding | QuantizedEmbedding):
            return int(module.weight.shape[0])
    return _PROMPT_TOKENS + 1


def _arrays(cache: Cache) -> Iterator[mx.array]:
    """List the arrays of a cache; none for a cache that the model does not use."""
    try:
        state = cache.state
    except AttributeError:
        return
    flat = tree_flatten(state)
    assert isinstance(flat, list)
    yield from (value for _, value in flat if isinstance(value, mx.array))


def _held_bytes(cache: Cache) -> int:
    return sum(array.nbytes for array in _arrays(cache))


def _facts(cache: Cache, owner: str) -> LayerCacheFacts:
    window = getattr(cache, "max_size", None)
    inner = tuple(_facts(each, owner) for each in cache.caches) if is_cache_list(cache) else ()
    return LayerCacheFacts(
        class_name=type(cache).__name__,
        owner=owner,
        trimmable=bool(cache.is_trimmable()),
        mergeable=all(one.mergeable for one in inner) if inner else kind_of(cache).can_batch(cache),
        keep=int(getattr(cache, "keep", 0) or 0),
        window_tokens=int(window) if window is not None else None,
        nested=inner,
    )


def _owners(model: Module, caches: Sequence[Cache]) -> list[str]:
    """Name the class of the module that fills each cache; empty where layers and caches differ."""
    layers = getattr(model, "layers", None)
    if layers is None or len(layers) != len(caches):
        return [""] * len(caches)
    return [_owner(layer) for layer in layers]


def _owner(layer: Module) -> str:
    """Name the child that takes a ``cache``: attention, or a recurrent mixer."""
    children = (child for child in layer.children().values() if isinstance(child, Module))
    owners = (
        child
        for child in children
        if callable(child) and "cache" in inspect.signature(child).parameters
    )
    return type(next(owners, layer)).__name__
