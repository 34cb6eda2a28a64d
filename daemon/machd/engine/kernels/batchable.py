"""Repairs of mlx-lm's layers that are wrong, or raise, with rows of different length.

A mended layer keeps its weights and gets a subclass of its own class. What is mended, of
mlx-lm 0.32.2:

- masks of four axes against scores of five (gemma2, phi3small);
- positions taken from the width of the cache, or as one number for all rows (afm7, gpt_bigcode,
  phi3small, rotations that grow with the length);
- a first token recognised by the lack of any state (recurrent_gemma);
- state that takes in a row's padding, in a pass of several tokens (olmo_hybrid).

Some are mended for single rows too, because their answers depend on how a prompt is cut, or are always
wrong: phi3small (adds a boolean mask to its scores, so its sparse layers see later tokens), plamo3
(caches shorter than its masks), olmo (raises on every prompt).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from machd.engine.backend.untyped import Cache, LanguageModel, Layer

Positions = int | mx.array
"""Position at which a pass begins: one for all rows, or int32 [rows]."""


def make_batchable(model: LanguageModel) -> int:
    """Mend a model's layers in place, which few models need; returns how many."""
    count = 0
    for module in model.modules():
        name = (type(module).__module__.rpartition(".")[2], type(module).__name__)
        if name in _MENDED:
            _MENDED[name](module)
            count += 1
    return count


def _take_class(layer: Layer, methods: dict[str, Callable[..., object]]) -> Layer:
    """Give a layer a subclass of its own class with other methods; returns its former class."""
    former = type(layer)
    layer.__class__ = type(f"Batchable{former.__name__}", (former,), methods)
    return former


def _gemma2_attention(attention: Layer) -> None:
    """Add an axis to the mask: scores are [rows, kv_heads, repeats, tokens, width]."""

    def call(
        self: Layer, x: mx.array, mask: mx.array | None = None, cache: Cache = None
    ) -> mx.array:
        if self.repeats > 1 and isinstance(mask, mx.array) and mask.ndim == 4:
            mask = mx.expand_dims(mask, 2)
        mixed: mx.array = former.__call__(self, x, mask, cache)
        return mixed

    former = _take_class(attention, {"__call__": call})


class _OwnRotation:
    """A rotation with its own begin of the pass, which ignores the caller's offset."""

    def __init__(self, rope: Layer) -> None:
        self._rope = rope
        self.begin: Positions = 0

    def __call__(self, heads: mx.array, offset: Positions = 0) -> mx.array:
        del offset
        rotated: mx.array = self._rope(heads, offset=self.begin)
        return rotated


def _afm7_model(model: Layer) -> None:
    """Give the last layers the position: they reuse keys, and place a query by the number of keys."""
    rotations = [_OwnRotation(layer.self_attn.rope) for layer in model.kv_reuse_layers]
    for layer, rotation in zip(model.kv_reuse_layers, rotations, strict=True):
        layer.self_attn.rope = rotation

    def call(self: Layer, inputs: mx.array, cache: list[Cache] | None = None) -> mx.array:
        for rotation in rotations:
            rotation.begin = 0 if cache is None else cache[0].offset
        hidden: mx.array = former.__call__(self, inputs, cache)
        return hidden

    former = _take_class(model, {"__call__": call})


def _gpt_bigcode_model(model: Layer) -> None:
    """Count each row's positions from its own; the original counts all rows from one number."""
    from mlx_lm.models.base import create_attention_mask  # noqa: PLC0415 - after import_mlx_lm()

    def call(self: Layer, inputs: mx.array, cache: list[Cache] | None = None) -> mx.array:
        caches = cache or [None] * len(self.h)
        begin = 0 if cache is None else cache[0].offset
        hidden = self.wte(inputs) + self.wpe(_positions(begin, inputs.shape[1]))
        mask = create_attention_mask(hidden, caches[0])
        for layer, one in zip(self.h, caches, strict=True):
            hidden = layer(hidden, mask, cache=one)
        normed: mx.array = self.ln_f(hidden)
        return normed

    _take_class(model, {"__call__": call})


def _phi3small_attention(attention: Layer) -> None:
    """Choose blocks and masks by each token's own position."""
    if not attention.block_sparse:
        return

    def call(
        self: Layer, x: mx.array, mask: mx.array | None = None, cache: Cache = None
    ) -> mx.array:
        self.mended.begin = 0 if cache is None else cache.offset
        mixed: mx.array = former.__call__(self, x, mask, cache)
        return mixed

    def sparse(
        self: Layer,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None,
    ) -> mx.array:
        rows, _, tokens, _ = queries.shape
        grouped = (scale * queries).reshape(rows, self.n_kv_heads, self.n_q_per_kv, tokens, -1)
        scores = grouped @ mx.expand_dims(keys, 2).swapaxes(-1, -2)
        sees = _block_sparse(self, self.mended.begin, tokens, keys.shape[2])
        if isinstance(mask, mx.array):
            sees = sees & (mask[:, :, None] if mask.ndim == 4 else mask)
        weights = mx.softmax(mx.where(sees, scores, -mx.inf), axis=-1, precise=True)
        mixed: mx.array = (weights @ mx.expand_dims(values, 2)).reshape(
            rows, self.n_heads, tokens, -1
        )
        return mixed

    attention.mended = _OwnRotation(attention.rope)
    former = _take_class(attention, {"__call__": call, "_block_sparse_attention": sparse})


def _phi3small_model(model: Layer) -> None:
    """Drop dummy token ids beyond the vocabulary.

    The original writes to fixed ids whatever the width of the logits, and mlx checks no bounds.
    """
    numbers = model._dummy_tokenizer_ids.tolist()  # noqa: SLF001 - the name is mlx-lm's
    known = [number for number in numbers if number < model.args.vocab_size]
    model._dummy_tokenizer_ids = mx.array(known, dtype=mx.int32)  # noqa: SLF001 - the same


def _block_sparse(attention: Layer, begin: Positions, tokens: int, width: int) -> mx.array:
    """Make the mask of what a head's token may see, later tokens aside: bool [rows or 1, kv_heads, repeats, tokens, width]."""
    block = attention.blocksparse_block_size
    own = _positions(begin, tokens).reshape(-1, 1, tokens, 1) // block  # [rows or 1, 1, tokens, 1]
    column = mx.arange(width) // block
    head = mx.arange(1, attention.n_heads + 1)[:, None, None]  # [heads, 1, 1]
    is_near = own - column < attention.blocksparse_num_local_blocks
    is_stride = (column + head) % attention.blocksparse_vert_stride == 0
    sees = (own >= column) & (is_near | is_stride)  # [rows or 1, heads, tokens, width]
    groups: mx.array = sees.reshape(-1, attention.n_kv_heads, attention.n_q_per_kv, tokens, width)
    return groups


def _plamo3_model(model: Layer) -> None:
    """Make caches one token longer: in a prompt a token sees a window and itself."""
    from mlx_lm.models.cache import RotatingKVCache  # noqa: PLC0415 - after import_mlx_lm()

    def make_cache(self: Layer) -> list[Cache]:
        caches: list[Cache] = own_caches(self)
        return [
            RotatingKVCache(max_size=cache.max_size + 1)
            if isinstance(cache, RotatingKVCache)
            else cache
            for cache in caches
        ]

    own_caches = type(model).make_cache
    _take_class(model, {"make_cache": make_cache})


def _minimax_m3_attention(attention: Layer) -> None:
    """Choose blocks of keys by each query's own position; mlx-lm goes by the width of the cache."""
    if not attention.is_sparse_attn:
        return

    def block_mask(
        self: Layer, x: mx.array, mask: mx.array | str | None, offset: Positions, cache: Cache
    ) -> mx.array | str | None:
        if not isinstance(offset, mx.array) or not offset.ndim:
            alone: mx.array | str | None = own_mask(self, x, mask, offset, cache)
            return alone
        return _minimax_m3_blocks(self, x, mask, offset, cache)

    own_mask = type(attention)._block_mask  # noqa: SLF001 - the name is mlx-lm's
    _take_class(attention, {"_block_mask": block_mask})


def _minimax_m3_blocks(
    attention: Layer, x: mx.array, mask: mx.array | str | None, begin: mx.array, cache: Cache
) -> mx.array:
    """Make the mask of the keys in the blocks that a query head's indexer scores highest: bool [rows, heads, tokens, width]."""
    rows, tokens, _ = x.shape
    heads, size = attention.index_n_heads, attention.index_block_size
    keys = attention.index_k_norm(attention.index_k_proj(x).reshape(rows, tokens, 1, -1))
    keys = attention.index_rope(keys.transpose(0, 2, 1, 3), offset=begin)
    keys, _ = cache.update_and_fetch(keys, mx.zeros((rows, 1, tokens, 0), keys.dtype))
    queries = attention.index_q_norm(attention.index_q_proj(x).reshape(rows, tokens, heads, -1))
    queries = attention.index_rope(queries.transpose(0, 2, 1, 3), offset=begin)
    width = keys.shape[2]
    own = _positions(begin, tokens)[:, None, :, None]  # [rows, 1, tokens, 1]
    sees = mx.arange(width) <= own  # [rows, 1, tokens, width]
    if isinstance(mask, mx.array):
        sees = sees & mask
    scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = mx.where(sees, scores, -mx.inf)
    blocks = -(-width // size)
    padding = [(0, 0), (0, 0), (0, 0), (0, blocks * size - width)]
    best = mx.pad(scores, padding, constant_values=-mx.inf)
    best = best.reshape(rows, heads, tokens, blocks, size).max(
        axis=-1
    )  # [rows, heads, tokens, blocks]
    behind = own // size - mx.arange(blocks)  # [rows, 1, tokens, blocks]
    best = mx.where((behind >= 0) & (behind < attention.index_local_blocks), mx.inf, best)
    # Ranked by two sorts, so that a row with fewer blocks than the maximum keeps all of its own.
    rank = mx.argsort(mx.argsort(-best, axis=-1), axis=-1)
    keep = mx.repeat(rank < attention.index_topk_blocks, size, axis=-1)[..., :width] & sees
    return mx.repeat(keep, attention.num_attention_heads // heads, axis=1)


def _olmo_block(block: Layer) -> None:
    """Turn the mask into numbers: the attention adds it to the scores, but gets a word or booleans."""

    def call(
        self: Layer, x: mx.array, mask: mx.array | str | None = None, cache: Cache = None
    ) -> mx.array:
        tokens = x.shape[1]
        if isinstance(mask, str):
            # The word is used where all rows begin at one place.
            begin = 0 if cache is None else int(mx.array(cache.offset).max())
            mask = mx.arange(begin + tokens) <= begin + mx.arange(tokens)[:, None]
        if isinstance(mask, mx.array) and mask.dtype == mx.bool_:
            mask = mx.where(mask, mx.array(0, x.dtype), mx.array(-mx.inf, x.dtype))
        output: mx.array = former.__call__(self, x, mask, cache)
        return output

    former = _take_class(block, {"__call__": call})


def _olmo_hybrid_net(net: Layer) -> None:
    """Take the convolution's state from each row's own last tokens, not from its padding."""

    def convolve(
        self: Layer,
        x: mx.array,
        conv: Layer,
        state: mx.array | None,
        cache: Cache,
        index: int,
    ) -> mx.array:
        convolved: mx.array = own_convolution(self, x, conv, state, cache, index)
        if cache is not None and cache.lengths is not None:
            rows, tokens, width = x.shape
            kept = self.conv_kernel_size - 1
            before = mx.zeros((rows, kept, width), x.dtype) if state is None else state
            ends = mx.clip(cache.lengths, 0, tokens)[:, None] + mx.arange(kept)  # [rows, kept]
            every = mx.concatenate([before, x], axis=1)  # [rows, kept + tokens, width]
            cache[index] = mx.take_along_axis(every, ends[..., None], axis=1)
        return convolved

    own_convolution = type(net)._apply_conv1d  # noqa: SLF001 - the name is mlx-lm's
    _take_class(net, {"_apply_conv1d": convolve})


def _recurrent_gemma_unit(unit: Layer) -> None:
    """Treat a row with a state of zeros as one without state, which a batch cannot express."""

    def call(self: Layer, x: mx.array, cache: mx.array | None = None) -> tuple[mx.array, mx.array]:
        output, state = former.__call__(self, x, cache)
        if cache is None or x.shape[1] > 1:
            return output, state
        first_output, first_state = former.__call__(self, x, None)
        is_first = mx.all(cache == 0, axis=-1)
        return (
            mx.where(is_first[:, None, None], first_output, output),
            mx.where(is_first[:, None], first_state, state),
        )

    former = _take_class(unit, {"__call__": call})


def _growing_rotation(rope: Layer) -> None:
    """Give rows of a batch the model's own base, not one that grows beyond the trained length.

    The model's own is right up to ``max_position_embeddings``, and no row of machd's becomes longer.
    """

    def call(self: Layer, x: mx.array, offset: Positions = 0) -> mx.array:
        if not isinstance(offset, mx.array):
            alone: mx.array = former.__call__(self, x, offset)
            return alone
        return mx.fast.rope(
            x, self.dims, traditional=self.traditional, base=self.base, scale=1.0, offset=offset
        )

    former = _take_class(rope, {"__call__": call})


def _positions(begin: Positions, tokens: int) -> mx.array:
    """Positions int32 [tokens], or [rows, tokens] where each row begins elsewhere."""
    steps = mx.arange(tokens, dtype=mx.int32)
    return begin[:, None] + steps if isinstance(begin, mx.array) and begin.ndim else begin + steps


_MENDED: dict[tuple[str, str], Callable[[Layer], None]] = {
    ("afm7", "AFMModel"): _afm7_model,
    ("gemma2", "Attention"): _gemma2_attention,
    ("gpt_bigcode", "GPTBigCodeModel"): _gpt_bigcode_model,
    ("minimax_m3_vl", "Attention"): _minimax_m3_attention,
    ("olmo", "TransformerBlock"): _olmo_block,
    ("phi3small", "Attention"): _phi3small_attention,
    ("phi3small", "Model"): _phi3small_model,
    ("olmo_hybrid", "GatedDeltaNet"): _olmo_hybrid_net,
    ("plamo3", "Model"): _plamo3_model,
    ("recurrent_gemma", "RGLRU"): _recurrent_gemma_unit,
    ("rope_utils", "DynamicNTKScalingRoPE"): _growing_rotation,
}
