"""Attention on the CPU by machd's own kernels: a token's bits depend on its row's positions alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import mlx.core as mx

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kernels import cpu_attention
from machd.engine.kernels.native_layers import is_left_to_mlx
from machd.engine.kv.layers.slab import SlabKv

HEAD_NUMBERS = 16
"""A head has a multiple of so many."""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Compute what :func:`machd.engine.kernels.cpu_attention.attend` does; masks that are arrays are left to it."""
    if not (_is_causal(queries, mask) and _takes(queries, keys, values)):
        return cpu_attention.attend(queries, keys, values, scale=scale, mask=mask)
    starts = _ends(queries, keys)
    mixed: mx.array = native_kernels().attend(queries, keys, values, starts, scale=scale)
    return mixed.swapaxes(1, 2)


def attend_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: SlabKv,
    *,
    scale: float,
    mask: mx.array | str | None = None,
) -> mx.array:
    """Compute what :func:`machd.engine.kernels.cpu_attention.attend_rows` does; windows and packed formats are left to it."""
    if not (cache.is_plain and cache.sees_all(mask) and _takes(queries, keys, values)):
        return cpu_attention.attend_rows(queries, keys, values, cache, scale=scale, mask=mask)
    cache.write(keys, values)
    parts = []
    for rows, arrays in cache.by_slab():
        prefix = cache.prefix(rows) or ()
        seeing = rows.of(queries)
        parts.append(native_kernels().attend(seeing, *arrays, rows.start, *prefix, scale=scale))
    return cache.in_row_order(parts).swapaxes(1, 2)


def take_native_attention(model: LanguageModel) -> None:
    """Have machd's kernels compute the attention that a model's code asks mlx-lm for, where they can.

    The code has mlx-lm's function under a name of its own module, which gets another one for good. It does the same.
    """
    from mlx_lm.models import base  # noqa: PLC0415 - after import_mlx_lm()

    if native_kernels() is None:
        return
    own = _own_attention(base.scaled_dot_product_attention)
    for name in {type(module).__module__ for module in model.modules()}:
        code = sys.modules[name]
        if getattr(code, _ATTENTION, None) is base.scaled_dot_product_attention:
            setattr(code, _ATTENTION, own)


def is_native_model(model: LanguageModel, head_dims: Iterable[int]) -> bool:
    """Return True if machd's kernels compute every layer of a language model, not fused yet, that they have a kernel for."""
    if native_kernels() is None or any(width % HEAD_NUMBERS for width in head_dims):
        return False
    language: LanguageModel = getattr(model, "language_model", model)
    return not any(is_left_to_mlx(layer) for layer in language.modules())


_ATTENTION = "scaled_dot_product_attention"


def _own_attention(mlx_lms: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(  # noqa: PLR0913, PLR0917 - mlx-lm's
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Cache,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        arrays, native = (queries, keys, values), native_kernels()
        is_plain = native is not None and sinks is None and not hasattr(cache, "bits")
        if not (is_plain and all(isinstance(one, mx.array) for one in arrays) and _takes(*arrays)):
            return mlx_lms(queries, keys, values, cache, scale, mask, sinks)
        if isinstance(cache, SlabKv):
            starts, window = cache.starts, cache.window_of(mask)
        else:
            starts, window = _ends(queries, keys), 0 if _is_causal(queries, mask) else None
        if window is None:
            return mlx_lms(queries, keys, values, cache, scale, mask, sinks)
        mixed: mx.array = native.attend(queries, keys, values, starts, scale=scale, window=window)
        return mixed.swapaxes(1, 2)

    return attention


def _takes(*arrays: mx.array) -> bool:
    return all(one.dtype == mx.float32 and one.shape[-1] % HEAD_NUMBERS == 0 for one in arrays)


def _is_causal(queries: mx.array, mask: mx.array | str | None) -> bool:
    """Return True if tokens are the last ones of all columns, and each sees those up to its own."""
    return mask == "causal" if isinstance(mask, str) else mask is None and queries.shape[2] == 1


def _ends(queries: mx.array, keys: mx.array) -> mx.array:
    """Return the columns before tokens that are the last ones, int32 [rows]."""
    return mx.array([keys.shape[2] - queries.shape[2]] * queries.shape[0], dtype=mx.int32)
