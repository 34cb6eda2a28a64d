"""The families that machd reads, by the name that a file says."""

from __future__ import annotations

from collections.abc import Mapping

from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.gemma3 import GEMMA3
from machd.engine.loading.formats.gguf.families.llama import LLAMA

FAMILIES: Mapping[str, Family] = {one.architecture: one for one in (GEMMA3, LLAMA)}
"""Every family by its ``general.architecture``."""
