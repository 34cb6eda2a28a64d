"""OLMo 2, and OLMo 3, which has layers with a sliding window besides."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    HEAD_NORMS,
    NAMES,
    biases,
    check_heads,
    transformer_config,
)
from machd.engine.loading.formats.gguf.header import GgufHeader
from machd.errors import ModelFormatError

_WINDOW = "olmo2.attention.sliding_window"
_LAYERS_IN_PATTERN = 4
"""Every fourth layer sees the whole context where no key says which; llama.cpp's constant."""


def _config(header: GgufHeader) -> dict[str, object]:
    config = transformer_config(header)
    check_heads(header, config)
    return config | biases(header)


def _olmo3_config(header: GgufHeader) -> dict[str, object]:
    config = _config(header)
    layers, base = config["num_hidden_layers"], config["rope_theta"]
    assert isinstance(layers, int)
    assert isinstance(base, float)
    if header.number("olmo2.rope.freq_base_swa", base) != base:
        raise ModelFormatError(
            f"{header.path.name}: olmo2.rope.freq_base_swa has to be olmo2.rope.freq_base"
        )
    slides = layer_pattern(header, "olmo2.attention.sliding_window_pattern", layers)
    return config | {
        "sliding_window": header.integer(_WINDOW),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
    }


def layer_pattern(header: GgufHeader, key: str, layers: int) -> list[bool]:
    """Tell which layers have a sliding window.

    Raises:
        ModelFormatError: The key has not as many entries as there are layers.
    """
    if not isinstance(header.metadata.get(key, 0), list):
        period = header.integer(key, _LAYERS_IN_PATTERN) or layers + 1
        return [layer % period < period - 1 for layer in range(layers)]
    pattern = [bool(one) for one in header.numbers(key)]
    if len(pattern) != layers:
        raise ModelFormatError(f"{header.path.name}: {key} has not an entry for each layer")
    return pattern


_NAMES = {
    **{
        name: path
        for name, path in NAMES.items()
        if name not in ("blk.*.attn_norm", "blk.*.ffn_norm")
    },
    **HEAD_NORMS,
    "blk.*.post_attention_norm": "model.layers.*.post_attention_layernorm",
    "blk.*.post_ffw_norm": "model.layers.*.post_feedforward_layernorm",
}


def _variant(header: GgufHeader) -> Family:
    return OLMO3 if header.integer(_WINDOW, 0) else OLMO2


OLMO3 = Family("olmo2", "olmo3", _NAMES, _olmo3_config)

OLMO2 = Family("olmo2", "olmo2", _NAMES, _config, variant=_variant)
