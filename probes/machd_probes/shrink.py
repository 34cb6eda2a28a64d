"""Shrinks a model's configuration so that it can be measured in a second.

Options that select code stay: kinds of layers, rotations, the head dimension, grouped queries. Sizes
shrink: layers, heads, widths, experts, the vocabulary, windows. Keys are those of checkpoints on the
Hugging Face hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_DEPTHS = (2, 3, 4, 6, 8, 12, 16)
"""Layers that are tried: as few as have every kind of layer."""

_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers|num_transformer_layers")
_HEADS = re.compile(r"(\w+_)?(num|n)_(\w+_)?(heads?|kv_heads?|n_heads?)|kv_n_heads|n_head")
_QUERY_HEADS = ("num_attention_heads", "n_heads", "n_head", "num_heads")
_KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads")
_WIDTHS = re.compile(
    r"(\w+_)?(hidden_size|intermediate_size|intermediate_size_mlp|ffn_hidden_size|ffn_dim|hidden_dim)"
    r"|d_model|model_dim|n_embd|n_inner|embedding_size|mamba_d_ssm|lru_width|share_expert_dim"
)
_MOST = (
    (re.compile(r"(vocab_size|num_vocab)(_per_layer_input)?"), 512),
    (re.compile(r"(\w+_)?(num_experts|num_local_experts|n_routed_experts)"), 8),
    (re.compile(r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|n_group"), 2),
    (re.compile("topk_group"), 1),
    (re.compile(r"(\w+_)?(sliding_window|window_size|attention_chunk_size)(_size)?"), 32),
    (re.compile(r"(q|kv|o)_lora_rank|index_topk"), 64),
    (re.compile(r"(n_positions|n_ctx|model_max_length|max_position_embeddings)"), 2048),
)
"""Numbers that are free of the others, and the most that each may be."""

_LEFT_OUT = frozenset({"quantization", "quantization_config", "model_file", "auto_map"})


@dataclass(frozen=True, slots=True)
class _Scale:
    """By how much heads and widths shrink: heads by the same factor as what they add up to."""

    numerator: int = 1
    denominator: int = 1

    @classmethod
    def of(cls, config: Mapping[str, object], default: _Scale) -> _Scale:
        """Two keys at most, and two queries to each."""
        queries = _first(config, _QUERY_HEADS)
        if queries is None:
            return default
        keys = _first(config, _KEY_HEADS) or queries
        few = min(keys, 2) * min(max(queries // keys, 1), 2)
        return cls(few, queries)

    def __call__(self, number: int) -> int:
        """Return the scaled number, or the number itself if that is not an integer."""
        scaled, rest = divmod(number * self.numerator, self.denominator)
        return scaled if scaled and not rest else number


def shrunk_configurations(config: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield shrunk configurations, with two layers first, then with more.

    Some may not build, or may lack a kind of layer; the caller tries them in order.
    """
    for depth in _DEPTHS:
        yield _shrunk(config, depth, _Scale())


def _shrunk(config: Mapping[str, object], depth: int, default: _Scale) -> dict[str, object]:
    scale = _Scale.of(config, default)
    layers = next((key for key in config if _LAYERS.fullmatch(key)), "")
    small: dict[str, object] = {}
    for key, value in config.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            small[key] = _shrunk(value, depth, scale)
        elif isinstance(value, list):
            small[key] = _shrunk_list(value, _first(config, (layers,)) or 0, depth)
        elif isinstance(value, int) and not isinstance(value, bool):
            small[key] = _shrunk_number(key, value, depth, scale)
        else:
            small[key] = value
    return small


def _shrunk_number(key: str, value: int, depth: int, scale: _Scale) -> int:
    if _LAYERS.fullmatch(key):
        return min(value, depth)
    if key in _KEY_HEADS:
        return min(value, 2)
    if _HEADS.fullmatch(key) or _WIDTHS.fullmatch(key):
        return scale(value)
    most = next((most for name, most in _MOST if name.fullmatch(key)), value)
    return min(value, most)


def _shrunk_list(value: list[object], layers: int, depth: int) -> list[object]:
    """One entry a layer, or numbers of layers; other lists stay."""
    if layers <= depth:
        return value
    if len(value) == layers:
        return value[:depth]
    numbers = [one for one in value if isinstance(one, int) and 0 <= one < layers]
    is_numbers = len(value) > 1 and len(numbers) == len(value)
    return [one for one in numbers if one < depth] if is_numbers else value


def _first(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return None
