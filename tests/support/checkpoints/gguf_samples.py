"""A tiny GGUF file of each family whose metadata are damaged on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from unit.engine.gguf_writer import Blocks, llama_metadata, quantised, tiny_gguf, write_gguf
from unit.engine.tiny_llama import TOKENS

Metadata = Mapping[str, object]

_GEMMA3_LAYERS = 6
"""One whole pattern of windows."""


def _llama_metadata() -> dict[str, object]:
    return llama_metadata(
        **{
            "llama.attention.key_length": 16,
            "llama.expert_count": 0,
            "llama.rope.dimension_count": 16,
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.original_context_length": 256,
            "split.no": 0,
            "split.count": 1,
            "split.tensors.count": 20,
            "general.type": "model",
        }
    )


def _gemma3_metadata() -> dict[str, object]:
    tokenizer = {
        key: value for key, value in llama_metadata().items() if key.startswith("tokenizer.")
    }
    return {
        "general.architecture": "gemma3",
        "gemma3.embedding_length": 64,
        "gemma3.block_count": _GEMMA3_LAYERS,
        "gemma3.feed_forward_length": 96,
        "gemma3.attention.head_count": 4,
        "gemma3.attention.head_count_kv": 2,
        "gemma3.attention.key_length": 16,
        "gemma3.attention.value_length": 16,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 16,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.context_length": 512,
        **tokenizer,
    }


def _gemma3(path: Path, metadata: Metadata) -> Path:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), 64), "output_norm": (64,)}
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    layer: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(norms, (64,)),
        **dict.fromkeys(("attn_q", "attn_output"), (64, 64)),
        **dict.fromkeys(("attn_k", "attn_v"), (32, 64)),
        **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (16,)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (96, 64)),
        "ffn_down": (64, 96),
    }
    for number in range(_GEMMA3_LAYERS):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(9)
    tensors: dict[str, Blocks] = {
        f"{name}.weight": quantised(
            "F32" if len(shape) == 1 else "Q8_0",
            (0.1 * random.standard_normal(shape)).astype(np.float32),
        )
        for name, shape in shapes.items()
    }
    return write_gguf(path, metadata, tensors)


def _llama(path: Path, metadata: Metadata) -> Path:
    return tiny_gguf(path, "Q8_0", metadata)


SAMPLES: Mapping[str, tuple[Metadata, Callable[[Path, Metadata], Path]]] = {
    "llama": (_llama_metadata(), _llama),
    "gemma3": (_gemma3_metadata(), _gemma3),
}
"""By architecture: the metadata, and what writes a file with them or others."""
