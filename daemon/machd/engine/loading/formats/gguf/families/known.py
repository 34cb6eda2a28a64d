"""The families that machd reads, by the name that a file says."""

from __future__ import annotations

from collections.abc import Mapping

from machd.engine.loading.formats.gguf.families.cohere2 import COHERE2
from machd.engine.loading.formats.gguf.families.command_r import COMMAND_R
from machd.engine.loading.formats.gguf.families.deepseek2 import DEEPSEEK2
from machd.engine.loading.formats.gguf.families.family import Family
from machd.engine.loading.formats.gguf.families.gemma import GEMMA
from machd.engine.loading.formats.gguf.families.gemma2 import GEMMA2
from machd.engine.loading.formats.gguf.families.gemma3 import GEMMA3
from machd.engine.loading.formats.gguf.families.glm4 import GLM4
from machd.engine.loading.formats.gguf.families.gpt_oss import GPT_OSS
from machd.engine.loading.formats.gguf.families.granite import GRANITE, GRANITEMOE
from machd.engine.loading.formats.gguf.families.lfm2 import LFM2
from machd.engine.loading.formats.gguf.families.llama import LLAMA
from machd.engine.loading.formats.gguf.families.mistral3 import MISTRAL3
from machd.engine.loading.formats.gguf.families.olmo2 import OLMO2
from machd.engine.loading.formats.gguf.families.phi3 import PHI3
from machd.engine.loading.formats.gguf.families.qwen2 import QWEN2, QWEN2MOE
from machd.engine.loading.formats.gguf.families.qwen3 import QWEN3, QWEN3MOE
from machd.engine.loading.formats.gguf.families.qwen35 import QWEN3NEXT, QWEN35, QWEN35MOE
from machd.engine.loading.formats.gguf.families.smollm3 import SMOLLM3
from machd.engine.loading.formats.gguf.families.stablelm import STABLELM
from machd.engine.loading.formats.gguf.families.starcoder2 import STARCODER2

_READ = (
    COHERE2,
    COMMAND_R,
    DEEPSEEK2,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM4,
    GPT_OSS,
    GRANITE,
    GRANITEMOE,
    LFM2,
    LLAMA,
    MISTRAL3,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN2MOE,
    QWEN3,
    QWEN3MOE,
    QWEN3NEXT,
    QWEN35,
    QWEN35MOE,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)

FAMILIES: Mapping[str, Family] = {one.architecture: one for one in _READ}
"""Every family by its ``general.architecture``."""
