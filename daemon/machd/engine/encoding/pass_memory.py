"""The memory that a pass of an encoder takes, estimated from its configuration."""

from __future__ import annotations

from collections.abc import Mapping

_FLOAT_BYTES = 4
_HIDDEN_ARRAYS = 8
_INNER_ARRAYS = 3
_SCORE_ARRAYS = 2
"""Arrays of each kind that are alive at once; float32 is assumed, as on the CPU."""


def pass_bytes(config: Mapping[str, object], rows: int, tokens: int) -> int:
    """Estimate the bytes beside the weights that a pass of padded texts takes at its peak."""

    def width(key: str) -> int:
        value = config.get(key)
        return value if isinstance(value, int) else 0

    a_token = _HIDDEN_ARRAYS * width("hidden_size") + _INNER_ARRAYS * width("intermediate_size")
    scores = _SCORE_ARRAYS * width("num_attention_heads") * tokens
    return rows * tokens * (a_token + scores) * _FLOAT_BYTES
