"""Forward passes of encoders: token ids, padded at the right, to hidden states behind the last norm.

The layers are mlx-vlm's and mlx-lm's; the masks are machd's. A padded position sees itself, so that no row of a mask is
empty: softmax over nothing is NaN, which leaks through masked attention, because 0 times NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx

from machd.engine.backend.untyped import Layer
from machd.engine.encoding.encoder_files import EncoderFiles
from machd.engine.encoding.families import Layers

Body: TypeAlias = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Takes token ids and token types, both int32 [rows, tokens], and lengths, int32 [rows]; gives [rows, tokens, hidden]."""


def make_body(model: Layer, files: EncoderFiles) -> Body:
    """Make the forward pass of a family's module."""
    make = {
        Layers.BERT: _bert,
        Layers.MODERNBERT: _modernbert,
        Layers.DECODER: _decoder,
        Layers.GEMMA: _gemma,
    }[files.family.layers]
    return make(model, files)


def _bert(model: Layer, _files: EncoderFiles) -> Body:
    def forward(ids: mx.array, types: mx.array, lengths: mx.array) -> mx.array:
        hidden: mx.array = model.encoder(
            model.embeddings(ids, types), key_mask(lengths, ids.shape[1])
        )
        return hidden

    return forward


def _modernbert(model: Layer, _files: EncoderFiles) -> Body:
    reach = int(model.config.local_attention) // 2

    def forward(ids: mx.array, _types: mx.array, lengths: mx.array) -> mx.array:
        tokens = ids.shape[1]
        everywhere = key_mask(lengths, tokens)
        near = everywhere if tokens <= reach + 1 else window_mask(lengths, tokens, reach)
        hidden = model.embeddings(ids)
        for layer in model.layers:
            hidden = layer(hidden, everywhere, near)
        normed: mx.array = model.final_norm(hidden)
        return normed

    return forward


def _decoder(model: Layer, files: EncoderFiles) -> Body:
    body = model.model
    window = (
        files.checkpoint.config.get("sliding_window")
        if files.family.model_type == "mistral"
        else None
    )

    def forward(ids: mx.array, _types: mx.array, lengths: mx.array) -> mx.array:
        tokens = ids.shape[1]
        mask: mx.array | str | None
        if not files.description.is_causal:
            mask = key_mask(lengths, tokens)
        elif isinstance(window, int) and tokens > window:
            mask = causal_window_mask(tokens, window)
        else:
            # Padding at the right is behind every token that counts.
            mask = "causal"
        hidden = body.embed_tokens(ids)
        for layer in body.layers:
            hidden = layer(hidden, mask, None)
        normed: mx.array = body.norm(hidden)
        return normed

    return forward


def _gemma(model: Layer, files: EncoderFiles) -> Body:
    body = model.model
    width = math.sqrt(body.args.hidden_size)
    reach = body.args.sliding_window // 2

    def forward(ids: mx.array, _types: mx.array, lengths: mx.array) -> mx.array:
        tokens = ids.shape[1]
        far: mx.array | str | None
        near: mx.array | str | None
        if files.description.is_causal:
            far = near = "causal"
            if tokens > body.args.sliding_window:
                near = causal_window_mask(tokens, body.args.sliding_window)
        else:
            far = near = key_mask(lengths, tokens)
            if tokens > reach + 1:
                near = window_mask(lengths, tokens, reach)
        hidden = body.embed_tokens(ids)
        # In the dtype of the weights, as transformers has it; mlx-lm's own pass rounds it to bfloat16 first.
        hidden = hidden * mx.array(width, hidden.dtype)
        for layer in body.layers:
            hidden = layer(hidden, near if layer.self_attn.is_sliding else far, None)
        normed: mx.array = body.norm(hidden)
        return normed

    return forward


def key_mask(lengths: mx.array, tokens: int) -> mx.array:
    """Mask keys behind each row's length: bool, [rows, 1, 1, tokens]."""
    return (mx.arange(tokens)[None, :] < lengths[:, None])[:, None, None, :]


def window_mask(lengths: mx.array, tokens: int, reach: int) -> mx.array:
    """Mask keys behind each row's length or more than ``reach`` away: bool, [rows, 1, tokens, tokens]."""
    positions = mx.arange(tokens)
    distance = mx.abs(positions[:, None] - positions[None, :])
    return (key_mask(lengths, tokens) & (distance <= reach)) | (distance == 0)


def causal_window_mask(tokens: int, window: int) -> mx.array:
    """Mask keys behind a query or ``window`` and more before it: bool, [tokens, tokens]."""
    positions = mx.arange(tokens)
    behind = positions[:, None] - positions[None, :]
    return (behind >= 0) & (behind < window)
