"""Gemma, the first."""

from __future__ import annotations

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.transformer import (
    TIED_NAMES,
    less_one,
    plain_rope_config,
)

GEMMA = Family(
    "gemma", "gemma", TIED_NAMES, plain_rope_config, {"norm": less_one}, leaves_out=frozenset()
)
