"""Log-probabilities of given tokens, and the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from machd.engine.protocol.step import PromptLogprob, TokenLogprob


def likeliest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Ids and logits [rows, count] of the largest logits of each row, best first."""
    if count == 1:
        top = mx.argmax(logits, axis=-1, keepdims=True)
    else:
        top = mx.argpartition(-logits, kth=count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logits, top, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids = mx.take_along_axis(top, order, axis=-1).astype(mx.int32)
    return ids, mx.take_along_axis(values, order, axis=-1)


def named_logprobs(logits: mx.array, token_ids: mx.array) -> mx.array:
    """Log-probabilities float32 [rows, m] of the tokens int32 [rows, m] under logits float32 [rows, vocabulary]."""
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.take_along_axis(logits, token_ids, axis=-1) - normaliser


def score_tokens(
    logits: mx.array, token_ids: Sequence[int], position: int, top_logprobs: int
) -> list[PromptLogprob]:
    """Score one token for each row of logits, float32 [tokens, vocabulary], and wait for it.

    Args:
        logits: Those that each token follows.
        token_ids: The tokens, at least one.
        position: Of the first one in its prompt.
        top_logprobs: How many of the likeliest tokens to tell beside each.

    Raises:
        FloatingPointError: The logits are not numbers.
    """
    ids = mx.array(list(token_ids), dtype=mx.int32)[:, None]
    normaliser = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, ids, axis=-1)
    columns = [
        (chosen - normaliser)[:, 0],
        1 + mx.sum(logits > chosen, axis=-1),
        mx.isnan(chosen - normaliser)[:, 0],
    ]
    if top_logprobs:
        top_ids, top_logits = likeliest(logits, top_logprobs)
        columns += [top_ids, top_logits - normaliser]
    mx.eval(columns)
    values: list[Any] = [column.tolist() for column in columns]
    logprobs, ranks, poisoned, *top = values
    if any(poisoned):
        raise FloatingPointError("the logits of the row's prompt are not numbers")
    return [
        PromptLogprob(
            position + index,
            token_id,
            logprobs[index],
            ranks[index],
            tuple(map(TokenLogprob, top[0][index], top[1][index])) if top else (),
        )
        for index, token_id in enumerate(token_ids)
    ]
