"""Writes small GGUF files, block formats included, and says what their numbers are.

Written from ggml's format alone, so that reader and writer share no mistake.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from unit.engine.tiny_llama import CHAT_TEMPLATE, MERGES, TOKENS, llama_weights

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Blocks = tuple[str, tuple[int, ...], bytes]
"""Type name, row-major shape, and data as they lie in the file."""

_TYPE_IDS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 8,
    "Q6_K": 14,
    "I32": 26,
    "F64": 28,
    "BF16": 30,
}
_ALIGNMENT = 32


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Blocks]) -> Path:
    """Write a version 3 file."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _text(key) + _typed(value)
    data = bytearray()
    for name, (kind, shape, raw) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", length) for length in reversed(shape))
        head += struct.pack("<IQ", _TYPE_IDS[kind], len(data))
        data += raw + bytes(-len(raw) % _ALIGNMENT)
    head += bytes(-len(head) % _ALIGNMENT)
    path.write_bytes(bytes(head + data))
    return path


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


@dataclass(frozen=True)
class Number:
    """A number of a type that Python does not tell: its kind in the file, and its struct format."""

    kind: int
    code: str
    value: float


def _typed(value: object) -> bytes:
    if isinstance(value, Number):
        return struct.pack(f"<I{value.code}", value.kind, value.value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    assert isinstance(value, list)
    inner = [_typed(item) for item in value]
    return (
        struct.pack("<I", 9)
        + inner[0][:4]
        + struct.pack("<Q", len(value))
        + b"".join(item[4:] for item in inner)
    )


def quantised(kind: str, values: Floats) -> Blocks:
    """Store an array. Q6_K takes its shape alone from it, and random blocks."""
    if kind in ("F32", "F16"):
        return kind, values.shape, values.astype("<f4" if kind == "F32" else "<f2").tobytes()
    if kind == "Q6_K":
        return kind, values.shape, _random_q6_k_blocks(values.size // 256)
    encode: dict[str, Callable[[Floats], list[Bytes]]] = {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q8_0": _q8_0,
    }
    parts = encode[kind](values.reshape(-1, 32))
    return kind, values.shape, np.concatenate(parts, axis=1).tobytes()


def dequantised(blocks: Blocks) -> Floats:
    """The numbers that blocks stand for, by ggml's reference formulas, in float32."""
    kind, shape, raw = blocks
    decode: dict[str, Callable[[Bytes], Floats]] = {
        "Q4_0": lambda b: (_nibbles(b[:, 2:]) - 8.0) * _half(b, 0),
        "Q4_1": lambda b: _nibbles(b[:, 4:]) * _half(b, 0) + _half(b, 2),
        "Q8_0": lambda b: b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0),
        "Q6_K": _q6_k_values,
    }
    if kind in ("F32", "F16"):
        return (
            np.frombuffer(raw, "<f4" if kind == "F32" else "<f2").astype(np.float32).reshape(shape)
        )
    sizes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q6_K": 210}
    block_bytes = np.frombuffer(raw, np.uint8).reshape(-1, sizes[kind])
    return decode[kind](block_bytes).astype(np.float32).reshape(shape)


def _half(blocks: Bytes, offset: int) -> Floats:
    return blocks[:, offset : offset + 2].copy().view("<f2").astype(np.float32)


def _half_bytes(values: Floats) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _nibbles(packed: Bytes) -> Floats:
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _packed(quants: Floats) -> Bytes:
    whole = quants.astype(np.uint8)
    return (whole[:, :16] | (whole[:, 16:] << 4)).astype(np.uint8)


def _q4_0(values: Floats) -> list[Bytes]:
    scale = np.abs(values).max(axis=1, keepdims=True) / 8 + 1e-8
    return [_half_bytes(scale), _packed(np.clip(np.round(values / scale) + 8, 0, 15))]


def _q4_1(values: Floats) -> list[Bytes]:
    low = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - low) / 15 + 1e-8
    quants = np.clip(np.round((values - low) / scale), 0, 15)
    return [_half_bytes(scale), _half_bytes(low), _packed(quants)]


def _q8_0(values: Floats) -> list[Bytes]:
    scale = np.abs(values).max(axis=1, keepdims=True) / 127 + 1e-8
    return [_half_bytes(scale), np.round(values / scale).astype(np.int8).view(np.uint8)]


def _random_q6_k_blocks(count: int) -> bytes:
    random = np.random.default_rng(7)
    blocks = random.integers(0, 256, (count, 210), dtype=np.uint8)
    scales = random.uniform(1e-4, 1e-3, (count, 1)).astype(np.float32)
    blocks[:, 208:210] = _half_bytes(scales)
    return blocks.tobytes()


def _q6_k_values(blocks: Bytes) -> Floats:
    scale = _half(blocks, 208)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    parts: list[Floats] = []
    for half in range(2):
        low, high = blocks[:, 64 * half :][:, :64], blocks[:, 128 + 32 * half :][:, :32]
        for quarter in range(4):
            packed = low[:, 32 * (quarter % 2) :][:, :32].astype(np.int32)
            nibble = (packed & 15) if quarter < 2 else (packed >> 4)
            q = (nibble | (((high >> (2 * quarter)) & 3) << 4)).astype(np.float32) - 32
            s = np.repeat(scales[:, 8 * half + 2 * quarter :][:, :2], 16, axis=1)
            parts.append(scale * s * q)
    return np.concatenate(parts, axis=1)


def llama_metadata(**changes: object) -> dict[str, object]:
    """Metadata of the tiny llama; a key is changed by its name with dots as underscores twice."""
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for name, value in changes.items():
        key = name.replace("__", ".")
        metadata.pop(key, None)
        if value is not None:
            metadata[key] = value
    return metadata


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_gguf(path: Path, kind: str, metadata: Mapping[str, object] | None = None) -> Path:
    """The tiny llama as llama.cpp's converter would write it: names, order of rows, vectors F32."""
    tensors: dict[str, Blocks] = {}
    for name, values in llama_weights().items():
        module = name.removesuffix(".weight")
        prefix = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        rows = values
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(module)
        if heads is not None:
            # As in llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute.
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
            rows = halves.swapaxes(1, 2).reshape(values.shape)
        stored = quantised(kind if values.ndim == 2 else "F32", rows)
        tensors[f"{prefix}{_NAMES[module]}.weight"] = stored
    return write_gguf(path, metadata or llama_metadata(), tensors)
