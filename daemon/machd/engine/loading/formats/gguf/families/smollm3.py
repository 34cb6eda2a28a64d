"""SmolLM3: a llama in which every fourth layer has no rotary positions."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.llama import llama_config
from machd.engine.loading.formats.gguf.families.transformer import LLAMA_ORDER, NAMES
from machd.engine.loading.formats.gguf.header import GgufHeader

_LAYERS_TO_ONE_WITHOUT = 4
"""llama.cpp's own constant for this architecture, which no key has."""


def _config(header: GgufHeader) -> dict[str, object]:
    return llama_config(header) | {"no_rope_layer_interval": _LAYERS_TO_ONE_WITHOUT}


SMOLLM3 = Family("smollm3", "smollm3", NAMES, _config, LLAMA_ORDER)
