"""Tensors of a GGUF file as arrays that mlx computes with.

mlx reads GGUF files too, but rounds Q6_K to float16, and its reader divides by numbers of the header, which can kill
the process. Block formats are those of ggml-common.h; ggml-quants.c has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import BinaryIO, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.loading.formats.gguf.header import EXPANDED, KEPT_BITS, GgufTensor

_Bytes: TypeAlias = NDArray[np.uint8]
_Floats: TypeAlias = NDArray[np.float32]

_SUPER_BLOCK = 256
"""Weights of a block of Q6_K."""

_BLOCKS_AT_ONCE = 1 << 14
"""Blocks of Q6_K that are expanded at once: 4 million weights, whose steps take some 100 MB."""


def read_tensor(file: BinaryIO, tensor: GgufTensor) -> dict[str, mx.array]:
    """Read a tensor of one of the types above.

    Returns:
        ``weight`` alone: float16 of F16, float32 of F32 and of Q6_K, whose product is exact but for the rounding of the result.
        Or mlx's affine format in groups of 32: ``weight`` (uint32 of packed weights), ``scales`` and ``biases`` (float16).

    Raises:
        EOFError: The file has become shorter.
    """
    file.seek(tensor.offset)
    content = file.read(tensor.size_bytes)
    if len(content) < tensor.size_bytes:
        raise EOFError
    raw = np.frombuffer(content, np.uint8)
    if tensor.type_name == "Q6_K":
        return {"weight": mx.array(_q6_k(raw).reshape(tensor.shape))}
    if tensor.type_name in EXPANDED:
        dtype = "<f4" if tensor.type_name == "F32" else "<f2"
        return {"weight": mx.array(raw.view(dtype).reshape(tensor.shape))}
    packed, scales, biases = _AFFINE[tensor.type_name](raw)
    *rows, columns = tensor.shape
    bits = KEPT_BITS[tensor.type_name]
    return {
        "weight": mx.array(packed.reshape(-1).view("<u4").reshape(*rows, columns * bits // 32)),
        "scales": mx.array(scales.reshape(*rows, columns // 32)),
        "biases": mx.array(biases.reshape(*rows, columns // 32)),
    }


def _q4_0(raw: _Bytes) -> tuple[_Bytes, NDArray[np.float16], NDArray[np.float16]]:
    blocks = raw.reshape(-1, 18)
    scales = _halves(blocks[:, :2])
    return _neighbours_packed(blocks.view("<u2")[:, 1:]), scales, scales * np.float16(-8)


def _q4_1(raw: _Bytes) -> tuple[_Bytes, NDArray[np.float16], NDArray[np.float16]]:
    blocks = raw.reshape(-1, 20)
    return (
        _neighbours_packed(blocks.view("<u2")[:, 2:]),
        _halves(blocks[:, :2]),
        _halves(blocks[:, 2:4]),
    )


def _q8_0(raw: _Bytes) -> tuple[_Bytes, NDArray[np.float16], NDArray[np.float16]]:
    blocks = raw.reshape(-1, 34)
    scales = _halves(blocks[:, :2])
    # int8 to uint8 with a bias of -128 scales: the sign bit flips.
    return blocks[:, 2:] ^ np.uint8(0x80), scales, scales * np.float16(-128)


_AFFINE: Mapping[
    str, Callable[[_Bytes], tuple[_Bytes, NDArray[np.float16], NDArray[np.float16]]]
] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _halves(columns: _Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(columns).view("<f2")[:, 0]


def _neighbours_packed(quants: NDArray[np.uint16]) -> _Bytes:
    """Pack neighbours of [blocks, 8] into [blocks, 2, 8], as mlx does; ggml packs weight i with weight i + 16."""
    packed = np.empty((len(quants), 2, 8), np.uint8)
    for half in range(2):
        pairs = (quants >> np.uint16(4 * half)) & np.uint16(0x0F0F)  # two weights, in a byte each
        packed[:, half] = pairs | (pairs >> np.uint16(4))  # the low byte has both
    return packed


def _q6_k(raw: _Bytes) -> _Floats:
    blocks = raw.reshape(-1, 210)
    values = np.empty((len(blocks), _SUPER_BLOCK), np.float32)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        part = slice(start, start + _BLOCKS_AT_ONCE)
        values[part] = _q6_k_blocks(blocks[part])
    return values


def _q6_k_blocks(blocks: _Bytes) -> _Floats:
    """Expand blocks: 128 bytes of low bits, 64 of high bits, 16 scales (int8), and a scale of those (float16)."""
    low = blocks[:, :128].reshape(-1, 2, 1, 2, 32)
    low = np.concatenate([low & 0xF, low >> 4], axis=2)  # [blocks, half, nibble, 2, 32]
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(2, 2, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 1, 32) >> shifts) & 3
    quants = (low | (high << np.uint8(4))).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _halves(blocks[:, 208:]).astype(np.float32)[:, None]  # exact: 8 and 11 bits
    return (scales[..., None] * quants).reshape(-1, _SUPER_BLOCK)
