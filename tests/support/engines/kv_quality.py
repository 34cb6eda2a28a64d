"""Effect of KV formats on a model's log-probabilities, on a fixed text.

``tests/support/engines/print_kv_quality.py`` prints the table of the embedded model for the docs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.row_caches import innermost, kv_arrays, make_row_caches
from machd.engine.loading.loader import LoadedModel

FORMATS = ("none", "affine8", "affine4", "turboquant")

_TEXT = Path(__file__).parents[2] / "golden" / "kv_quality_text.txt"
_CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Quality:
    """One format against none.

    Attributes:
        perplexity: Of the text, each token after all those before it.
        max_difference: Of the log-probabilities of all tokens at all positions, in nats.
        mean_difference: The same.
        same_best: Share of the positions whose most likely token is the same.
        bytes_per_token: Of keys and values.
    """

    tokens: int
    perplexity: float
    max_difference: float
    mean_difference: float
    same_best: float
    bytes_per_token: int


def measured_quality(
    loaded: LoadedModel, formats: tuple[str, ...] = FORMATS, max_tokens: int | None = None
) -> dict[str, Quality]:
    """By format; ``none`` is what the others are compared with."""
    text = _TEXT.read_text("utf-8")
    token_ids = loaded.tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    reference, plain_bytes = _logprobs(loaded, token_ids, "none")
    found = {"none": _quality(token_ids, reference, reference, plain_bytes)}
    for name in formats:
        if name not in found:
            heard, bytes_per_token = _logprobs(loaded, token_ids, name)
            found[name] = _quality(token_ids, reference, heard, bytes_per_token)
    return {name: found[name] for name in formats}


def _quality(
    token_ids: list[int],
    reference: list[mx.array],
    heard: list[mx.array],
    bytes_per_token: int,
) -> Quality:
    told: list[float] = []
    largest, total, same = 0.0, 0.0, 0
    following = [*token_ids[1:], None]
    for begin, (expected, actual) in enumerate(zip(reference, heard, strict=True)):
        difference = mx.abs(actual - expected)
        largest = max(largest, float(difference.max()))
        total += float(difference.mean(axis=-1).sum())
        same += int((expected.argmax(axis=-1) == actual.argmax(axis=-1)).sum())
        at = begin * _CHUNK_TOKENS
        told += [
            float(actual[place, following[at + place]])
            for place in range(actual.shape[0])
            if following[at + place] is not None
        ]
    count = len(token_ids)
    return Quality(
        tokens=count,
        perplexity=float(np.exp(-np.mean(told))),
        max_difference=largest,
        mean_difference=total / count,
        same_best=same / count,
        bytes_per_token=bytes_per_token,
    )


def _logprobs(loaded: LoadedModel, token_ids: list[int], name: str) -> tuple[list[mx.array], int]:
    """[tokens of a chunk, vocabulary] each, and what a position costs."""
    model = loaded.model
    caches = make_row_caches(model, kv_format_named(name))
    chunks = []
    for begin in range(0, len(token_ids), _CHUNK_TOKENS):
        chunk = mx.array([token_ids[begin : begin + _CHUNK_TOKENS]], dtype=mx.int32)
        logits = model(chunk, cache=caches)[0].astype(mx.float32)
        chunks.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(chunks[-1], [cache.state for cache in caches])
    arrays = [array for cache in innermost(caches) for array in kv_arrays(cache) or ()]
    return chunks, sum(array.nbytes // array.shape[2] for array in arrays)


def main() -> None:
    """Print the table of the embedded model."""
    from machd.engine.loading.loader import load_model  # noqa: PLC0415
    from machd.engine.loading.source import resolve_model  # noqa: PLC0415
    from machd.user_directories import user_cache_directory  # noqa: PLC0415 - of the script alone

    source = resolve_model(None, offline=True, cache_directory=user_cache_directory(os.environ))
    found = measured_quality(load_model(source))
    plain = found["none"]
    lines = [
        "| `kv_quantization` | bytes a token | fewer | perplexity | change | max | mean | same |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found.items():
        lines.append(
            f"| {name} | {one.bytes_per_token} | {plain.bytes_per_token / one.bytes_per_token:.2f} "
            f"| {one.perplexity:.4f} | {one.perplexity / plain.perplexity - 1:+.3%} "
            f"| {one.max_difference:.3f} | {one.mean_difference:.4f} | {one.same_best:.1%} |"
        )
    sys.stdout.write("\n".join([*lines, f"{plain.tokens} tokens", ""]))
