"""What a model's cache is, read from live cache objects after a short prompt.

A configuration can change the kind of cache an architecture makes, so nothing is told from names
in files: the objects that ``make_prompt_cache`` gives are asked, down into cache lists.

The prompt can be traced instead of computed: shapes are known of arrays that nobody computed, and
they are all that a cost is made of. So a model larger than the machine can be asked, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.row_caches import innermost, kv_arrays, make_row_caches
from machd.errors import ModelArchitectureError

_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """What a short prompt shows.

    Attributes:
        logits_tokens: Width of the logits.
    """

    cache: CacheFacts
    logits_tokens: int


def cache_facts(model: Module) -> CacheFacts:
    """Facts of the model's cache; see :func:`measure_model`."""
    return measure_model(model).cache


def measure_model(model: Module, kv_format: KvFormat = PLAIN) -> MeasuredModel:
    """Run twice eight tokens through the model and look at what its caches hold.

    A cache of keys and values tells its cost by their shapes. A cache of another class costs a
    position what the second eight tokens added; what then is left of the first eight is what a
    sequence costs whatever its length. A rotating cache is counted as if it never rotated: an
    upper bound for sequences longer than its window.

    The run also compiles what mlx compiles at run time, which the first request would wait for.

    Args:
        model: Of any class of mlx-lm's.
        kv_format: How keys and values are kept: costs are of this, classes are the model's own.
    """
    layers = layer_facts(model)
    caches = make_row_caches(model, kv_format)
    prompt = _prompt(model)
    logits = _run(model, prompt, caches)
    first_bytes = [_held_bytes(cache) for cache in innermost(caches)]
    _run(model, prompt, caches)
    costs = [
        _cost(cache, before) for cache, before in zip(innermost(caches), first_bytes, strict=True)
    ]
    return MeasuredModel(_cache_facts(layers, costs), int(logits.shape[-1]))


@dataclass(frozen=True, slots=True)
class TracedModel:
    """What a short prompt shows when nothing is computed.

    Attributes:
        note: What could not be seen and was worked out instead; empty where all was seen.
    """

    cache: CacheFacts
    note: str = ""


def trace_model(model: LanguageModel) -> TracedModel:
    """What :func:`measure_model` says of the cache, without computing a single weight.

    The forward pass runs as mlx traces a function to compile it: every array stays a shape, and a
    model that wants to read one gets an exception from mlx instead of 100 GB of weights. Where
    that happens, the layers that came before show what the others of their class cost.

    Compilation must not be switched off in this process (``mx.disable_compile``), because mlx then
    does not trace.

    Raises:
        ModelArchitectureError: The forward pass fails here, before a layer shows its cost.
    """
    layers = layer_facts(model)
    caches = make_row_caches(model)
    opened = innermost(caches)
    prompt = _prompt(model)
    first_bytes: list[int] = []
    failures: list[Exception] = []

    def forward(tokens: mx.array) -> tuple[mx.array, ...]:
        assert _is_traced(tokens), "compilation is switched off"
        try:
            model(tokens, cache=caches)
            first_bytes.extend(_held_bytes(cache) for cache in opened)
            model(tokens, cache=caches)
        except Exception as error:  # noqa: BLE001 - whatever a model of mlx-lm's raises
            failures.append(error)
        return ()

    mx.compile(forward)(prompt)
    if not failures:
        costs = [_cost(cache, before) for cache, before in zip(opened, first_bytes, strict=True)]
        return TracedModel(_cache_facts(layers, costs))
    costs, seen = _costs_of_their_class(opened, failures[0])
    note = (
        f"the model computes while it runs, so {seen} of its {len(opened)} caches were looked at "
        "and the others counted like them"
    )
    return TracedModel(_cache_facts(layers, costs), note)


def _is_traced(tokens: mx.array) -> bool:
    """Whether mlx refuses to compute, as it does while it traces."""
    try:
        mx.eval(tokens)
    except ValueError:
        return True
    return False


def _costs_of_their_class(caches: Sequence[Cache], failure: Exception) -> tuple[list[_Cost], int]:
    """The costs of caches of which only the first were filled, and how many those are.

    Raises:
        ModelArchitectureError: A class of which none was filled with keys and values.
    """
    filled = [cache for cache in caches if isinstance(getattr(cache, "keys", None), mx.array)]
    by_class = {type(cache): _cost(cache, 0) for cache in filled}
    if any(type(cache) not in by_class for cache in caches):
        raise ModelArchitectureError(
            f"the model's forward pass does not work here: {type(failure).__name__}: {failure}"
        ) from failure
    return [by_class[type(cache)] for cache in caches], len(filled)


def layer_facts(model: Module) -> tuple[LayerCacheFacts, ...]:
    """Facts of empty caches: trimmable is said of those, because a short window fills at once.

    No weight is read for them.
    """
    caches = make_row_caches(model)
    owners = _owners(model, caches)
    return tuple(_facts(cache, owner) for cache, owner in zip(caches, owners, strict=True))


def _prompt(model: Module) -> mx.array:
    """Token ids (1, 8), inside the vocabulary."""
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


def _cost(cache: Cache, first_bytes: int) -> _Cost:
    """What one cache costs, seen after 16 tokens; ``first_bytes`` is what it held after 8."""
    arrays = kv_arrays(cache) or (getattr(cache, "keys", None), getattr(cache, "values", None))
    planes = [array for array in arrays if isinstance(array, mx.array)]
    if len(planes) == len(arrays):
        # (1, heads, positions, n); positions may be allocated ahead.
        return _Cost(sum(plane.nbytes // plane.shape[-2] for plane in planes), 0)
    per_token_bytes = max(_held_bytes(cache) - first_bytes, 0) // _PROMPT_TOKENS
    return _Cost(per_token_bytes, max(first_bytes - per_token_bytes * _PROMPT_TOKENS, 0))


def _run(model: LanguageModel, tokens: mx.array, caches: list[Cache]) -> mx.array:
    """Logits (1, tokens, vocabulary) of one more chunk; the caches grow by it."""
    output = model(tokens, cache=caches)
    logits: mx.array = getattr(output, "logits", output)
    mx.eval(logits, [array for cache in innermost(caches) for array in _arrays(cache)])
    return logits


def _vocabulary_tokens(model: Module) -> int:
    """Rows of the first embedding, so that the probe's token ids stay inside."""
    for _, module in model.named_modules():
        if isinstance(module, Embedding | QuantizedEmbedding):
            return int(module.weight.shape[0])
    return _PROMPT_TOKENS + 1


def _arrays(cache: Cache) -> Iterator[mx.array]:
    """The arrays that a cache holds; none where it is of no use to this model."""
    try:
        state = cache.state
    except AttributeError:
        return
    flat = tree_flatten(state)
    assert isinstance(flat, list)
    yield from (value for _, value in flat if isinstance(value, mx.array))


def _held_bytes(cache: Cache) -> int:
    return sum(array.nbytes for array in _arrays(cache))


def _is_list(cache: Cache) -> bool:
    return type(cache).__name__ == "CacheList"


def _facts(cache: Cache, owner: str) -> LayerCacheFacts:
    window = getattr(cache, "max_size", None)
    nested = cache.caches if _is_list(cache) else ()
    inner = tuple(_facts(each, owner) for each in nested)
    return LayerCacheFacts(
        class_name=type(cache).__name__,
        owner=owner,
        trimmable=bool(cache.is_trimmable()),
        # A list always has the method; what counts is what it would call.
        mergeable=all(each.mergeable for each in inner) if inner else hasattr(cache, "merge"),
        keep=int(getattr(cache, "keep", 0) or 0),
        window_tokens=int(window) if window is not None else None,
        nested=inner,
    )


def _owners(model: Module, caches: Sequence[Cache]) -> list[str]:
    """Class of the module that keeps state in each cache; empty where the two do not pair up."""
    layers = getattr(model, "layers", None)
    if layers is None or len(layers) != len(caches):
        return [""] * len(caches)
    return [_owner(layer) for layer in layers]


def _owner(layer: Module) -> str:
    """The child that takes a ``cache``: attention, or a recurrent mixer."""
    for child in layer.children().values():
        if isinstance(child, Module) and _takes_cache(child):
            return type(child).__name__
    return type(layer).__name__


def _takes_cache(module: Module) -> bool:
    return callable(module) and "cache" in inspect.signature(module).parameters
