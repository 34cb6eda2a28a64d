"""Gemma 2. Each layer sees the whole context, as in mlx-lm, which has no sliding windows for this architecture."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    FEEDFORWARD_NORMS,
    TIED_NAMES,
    less_one,
    plain_rope_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

_LAYERS_OF_27B = 46
"""Their number tells the one size whose queries are scaled by the hidden state's share of a head, as in llama.cpp."""


def _config(header: GgufHeader) -> dict[str, object]:
    config = plain_rope_config(header)
    of_hidden = header.integer("gemma2.embedding_length") // header.integer(
        "gemma2.attention.head_count"
    )
    is_27b = config["num_hidden_layers"] == _LAYERS_OF_27B
    return config | {
        "query_pre_attn_scalar": of_hidden if is_27b else config["head_dim"],
        "attn_logit_softcapping": _softcap(header, "gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _softcap(header, "gemma2.final_logit_softcapping", 30.0),
    }


def _softcap(header: GgufHeader, key: str, default: float) -> float:
    """Read a bound of logits, with llama.cpp's default; mlx-lm divides by it."""
    value = header.number(key, default)
    if value <= 0:
        raise ModelFormatError(f"{header.path.name}: {key} is {value:g}, and mlx-lm needs a bound")
    return value


GEMMA2 = Family(
    "gemma2",
    "gemma2",
    {**TIED_NAMES, **FEEDFORWARD_NORMS},
    _config,
    {"norm": less_one},
    leaves_out=frozenset(),
)
