"""The families that machd reads, by the name that a file says."""

from __future__ import annotations

from collections.abc import Mapping

from machd.engine.loading.formats.gguf.families.deepseek2 import DEEPSEEK2
from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.gemma3 import GEMMA3
from machd.engine.loading.formats.gguf.families.gpt_oss import GPT_OSS
from machd.engine.loading.formats.gguf.families.llama import LLAMA
from machd.engine.loading.formats.gguf.families.qwen35 import QWEN3NEXT, QWEN35, QWEN35MOE

FAMILIES: Mapping[str, Family] = {
    one.architecture: one
    for one in (DEEPSEEK2, GEMMA3, GPT_OSS, LLAMA, QWEN3NEXT, QWEN35, QWEN35MOE)
}
"""Every family by its ``general.architecture``."""
