"""Perplexity of a model on a text: the measure of what a weight format costs in quality."""

from __future__ import annotations

import math

import mlx.core as mx
from mlx.nn.layers.base import Module

from machd.engine.protocol.tokenizer import Tokenizer


def perplexity(model: Module, tokenizer: Tokenizer, text: str) -> float:
    """Return the exponential of the mean negative log-probability of a text's tokens after the first.

    The text has two tokens at least, and at most the model's context.
    """
    token_ids = mx.array(tokenizer.encode(text, add_special_tokens=True))  # [tokens]
    logits = model(token_ids[None, :-1]).astype(mx.float32)[0]  # [tokens - 1, vocabulary]
    targets = mx.take_along_axis(logits, token_ids[1:, None], axis=-1)[:, 0]
    loss = mx.mean(mx.logsumexp(logits, axis=-1) - targets).item()
    assert isinstance(loss, float), "a mean of float32 values"
    return math.exp(loss)
