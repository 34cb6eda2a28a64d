"""The tiny models are fit for comparisons: varied, attentive, and of the kinds they stand for."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import VOCABULARY_TOKENS, TinyKind, tiny_model, tiny_tokenizer

from machd.capabilities.facts import KvCacheKind
from machd_probes.play import Join
from machd_probes.scripts import random_prompt

_KINDS = pytest.mark.parametrize("kind", list(TinyKind))

_EXPECTED = {
    TinyKind.STANDARD: (KvCacheKind.STANDARD, {"KVCache": 2}, ()),
    TinyKind.ROTATING: (KvCacheKind.ROTATING, {"KVCache": 1, "RotatingKVCache": 1}, ()),
    TinyKind.HYBRID_GDN: (KvCacheKind.HYBRID_GDN, {"ArraysCache": 1, "KVCache": 1}, ()),
    TinyKind.HYBRID: (KvCacheKind.HYBRID, {"ArraysCache": 1, "KVCache": 1}, ()),
    TinyKind.NESTED: (KvCacheKind.NESTED, {"CacheList": 2}, ("ArraysCache", "KVCache")),
    TinyKind.NESTED_ROTATING: (
        KvCacheKind.NESTED,
        {"CacheList": 2},
        ("ArraysCache", "KVCache", "RotatingKVCache"),
    ),
}


@_KINDS
def test_a_tiny_model_has_the_caches_of_its_kind(kind: TinyKind) -> None:
    """Its live caches are of the classes that it stands for, in float32."""
    description = loaded(kind).description

    cache = description.cache
    assert (cache.kind, cache.class_counts, cache.nested_classes) == _EXPECTED[kind]
    assert description.dtype == "float32"
    assert description.vocabulary_tokens == VOCABULARY_TOKENS


@_KINDS
@pytest.mark.parametrize("length", [5, 17, 41])
def test_a_tiny_model_is_varied_and_attentive(kind: TinyKind, length: int) -> None:
    """Greedy answers have six different tokens at least, and another first token changes them."""
    prompt = random_prompt(length, 7)
    other = (prompt[0] % (VOCABULARY_TOKENS - 1) + 1, *prompt[1:])

    said = [token.token_id for token in alone(kind).tokens(Join(prompt, 24))]
    changed = [token.token_id for token in alone(kind).tokens(Join(other, 24))]

    assert len(set(said)) >= 6
    assert said != changed


@_KINDS
def test_a_tiny_model_is_the_same_every_time(kind: TinyKind) -> None:
    """No parameter is left to the chance of mlx-lm's initialisation, and none stays neutral."""
    first, second = (dict(_parameters(kind)) for _ in range(2))

    assert all(mx.array_equal(first[name], second[name]) for name in first)
    assert all(bool(mx.any(mx.std(array) > 0)) for array in first.values())


def _parameters(kind: TinyKind) -> list[tuple[str, mx.array]]:
    flat = tree_flatten(tiny_model(kind).model.parameters())
    assert isinstance(flat, list)
    return flat


def test_the_tiny_tokenizer_is_ascii() -> None:
    """Each ASCII character but NUL is the token of its code, there and back."""
    tokenizer = tiny_tokenizer()
    text = "".join(map(chr, range(1, VOCABULARY_TOKENS)))

    assert tokenizer.encode(text, add_special_tokens=False) == list(range(1, VOCABULARY_TOKENS))
    assert tokenizer.decode(range(1, VOCABULARY_TOKENS)) == text
    assert tokenizer.vocabulary_tokens == VOCABULARY_TOKENS
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.has_chat_template
