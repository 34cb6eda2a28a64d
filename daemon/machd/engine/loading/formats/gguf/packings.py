"""What becomes of each type of ggml's tensors in memory: mlx's packed weights with the file's own numbers, or floats.

Block formats are those of ggml-common.h; ggml-quants.c has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_Bytes: TypeAlias = NDArray[np.uint8]
_Floats: TypeAlias = NDArray[np.float16] | NDArray[np.float32]
_Affine: TypeAlias = tuple[_Bytes, _Floats, _Floats]
"""Weights as small numbers, [groups, group size]; scales and biases, [groups]: a weight is ``scale * number + bias``."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A form of mlx's quantised layers that holds a type without loss.

    Attributes:
        mode: ``affine`` or ``mxfp4``.
        bits: Of a weight.
        group_size: Weights that share a scale.
        scale_type: numpy's name of the dtype of scales and biases. float16 where the file has them so, which holds every weight
            below 65,504; float32 where they are products of two numbers of the file, which float16 would round.
    """

    mode: str
    bits: int
    group_size: int
    scale_type: str


_HALF, _PRODUCT = "float16", "float32"

PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "Q4_0": Packing("affine", 4, 32, _HALF),
        "Q4_1": Packing("affine", 4, 32, _HALF),
        "Q5_0": Packing("affine", 5, 32, _HALF),
        "Q5_1": Packing("affine", 5, 32, _HALF),
        "Q8_0": Packing("affine", 8, 32, _HALF),
        "Q2_K": Packing("affine", 2, 16, _PRODUCT),
        "Q3_K": Packing("affine", 3, 16, _PRODUCT),
        "Q4_K": Packing("affine", 4, 32, _PRODUCT),
        "Q5_K": Packing("affine", 5, 32, _PRODUCT),
        "Q6_K": Packing("affine", 6, 16, _PRODUCT),
        "MXFP4": Packing("mxfp4", 4, 32, "uint8"),
    }
)
"""Types of tensors that stay packed, in the form that they get."""

EXACT_FLOATS: Mapping[str, str] = MappingProxyType({"F32": "<f4", "F16": "<f2", "BF16": "<u2"})
"""Types that are floats in the file, with numpy's dtype of their bytes; numpy has no bfloat16."""


def repacked(type_name: str, raw: _Bytes) -> dict[str, NDArray[np.generic]]:
    """Repack blocks of a type of :data:`PACKINGS`, whole ones.

    Returns:
        ``weight`` (uint32 of packed weights, one after the other), ``scales``, and ``biases`` for affine ones; all flat.
    """
    if type_name == "MXFP4":
        blocks = raw.reshape(-1, 17)
        numbers = _halves_apart(blocks[:, 1:])
        return {"weight": _packed(numbers, 4), "scales": np.ascontiguousarray(blocks[:, 0])}
    numbers, scales, biases = _AFFINE[type_name](raw)
    packed = _packed(numbers, PACKINGS[type_name].bits)
    return {"weight": packed, "scales": scales.reshape(-1), "biases": biases.reshape(-1)}


def _packed(numbers: _Bytes, bits: int) -> NDArray[np.uint32]:
    """Pack numbers one after the other, the lowest bits first, as mlx does."""
    if 8 % bits == 0:  # bytes are whole, so that no wider words are needed
        parts = numbers.reshape(-1, 8 // bits)
        stored = parts[:, 0].copy()
        for place in range(1, 8 // bits):
            stored |= parts[:, place] << np.uint8(bits * place)
        return stored.view("<u4")
    eights = numbers.reshape(-1, 8)
    words = np.zeros(len(eights), np.uint64)
    for place in range(8):
        words |= eights[:, place].astype(np.uint64) << np.uint64(bits * place)
    stored = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits]
    return np.ascontiguousarray(stored).reshape(-1).view("<u4")


def _half(columns: _Bytes) -> NDArray[np.float16]:
    return np.ascontiguousarray(columns).view("<f2")[:, 0]


def _halves_apart(packed: _Bytes) -> _Bytes:
    """Unpack [blocks, 16] into [blocks, 32]: ggml packs weight i with weight i + 16."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _q4_0(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 18)
    scales = _half(blocks[:, :2])
    return _halves_apart(blocks[:, 2:]), scales, scales * np.float16(-8)


def _q4_1(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 20)
    return _halves_apart(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _fifth_bits(blocks: _Bytes) -> _Bytes:
    """Unpack the highest bits, [blocks, 4] into [blocks, 32], each of the value 16."""
    return np.unpackbits(blocks, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 22)
    scales = _half(blocks[:, :2])
    numbers = _halves_apart(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return numbers, scales, scales * np.float16(-16)


def _q5_1(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 24)
    numbers = _halves_apart(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 34)
    scales = _half(blocks[:, :2])
    # int8 to uint8 with a bias of -128 scales: the sign bit flips.
    return blocks[:, 2:] ^ np.uint8(0x80), scales, scales * np.float16(-128)


def _quarters_apart(packed: _Bytes) -> _Bytes:
    """Unpack two bits each, [blocks, 64] into [blocks, 256]: a byte of each half has weights 32 apart."""
    halves = packed.reshape(-1, 2, 1, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((halves >> shifts) & np.uint8(3)).reshape(-1, 256)


def _q2_k(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 84)
    scale, least = (_half(blocks[:, at : at + 2]).astype(np.float32) for at in (80, 82))
    scales = (blocks[:, :16] & 15) * scale[:, None]
    return _quarters_apart(blocks[:, 16:80]), scales, (blocks[:, :16] >> 4) * -least[:, None]


def _q3_k(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 110)
    bits = np.unpackbits(blocks[:, :32, None], axis=2, bitorder="little")
    high = bits.swapaxes(1, 2).reshape(-1, 256)  # bit b of byte l is weight 32 b + l
    numbers = _quarters_apart(blocks[:, 32:96]) | (high << np.uint8(2))
    low, two = blocks[:, 96:104], blocks[:, 104:108]
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 4, 1)
    highest = ((two[:, None, :] >> shifts) & np.uint8(3)).reshape(-1, 16) << np.uint8(4)
    six = np.concatenate([low & 15, low >> 4], axis=1) | highest
    scale = _half(blocks[:, 108:]).astype(np.float32)
    scales = (six.astype(np.float32) - 32) * scale[:, None]
    return numbers, scales, scales * np.float32(-4)


def _sixes(packed: _Bytes) -> tuple[_Bytes, _Bytes]:
    """Unpack 8 scales and 8 least values of 6 bits each from [blocks, 12]."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    least = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, least


def _scaled_sixes(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    scale, least = (_half(blocks[:, at : at + 2]).astype(np.float32) for at in (0, 2))
    scales, leasts = _sixes(blocks[:, 4:16])
    return scales * scale[:, None], leasts * -least[:, None]


def _q4_k(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 144)
    return (_nibbles_apart(blocks[:, 16:]), *_scaled_sixes(blocks))


def _nibbles_apart(packed: _Bytes) -> _Bytes:
    """Unpack [blocks, 128] into [blocks, 256]: 32 bytes have 32 weights in their low halves, then the next 32."""
    bytes_of = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([bytes_of & 15, bytes_of >> 4], axis=2).reshape(-1, 256)


def _q5_k(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 176)
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")
    fifth = bits.swapaxes(1, 2).reshape(-1, 256) << np.uint8(4)
    return (_nibbles_apart(blocks[:, 48:]) | fifth, *_scaled_sixes(blocks))


def _q6_k(raw: _Bytes) -> _Affine:
    blocks = raw.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 1, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2)  # [blocks, half, nibble, 2, 32]
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(2, 2, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 1, 32) >> shifts) & np.uint8(3)
    numbers = (low | (high.astype(np.uint8) << np.uint8(4))).reshape(-1, 256)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks[:, 208:]).astype(np.float32)[:, None]
    return numbers, scales, scales * np.float32(-32)


_AFFINE: Mapping[str, Callable[[_Bytes], _Affine]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


_NO_WEIGHTS = frozenset({"I8", "I16", "I32", "I64"})


def is_readable(type_name: str) -> bool:
    """Tell whether a type of ggml's is one of weights: packed, floats, or blocks that are expanded to floats."""
    return type_name not in _NO_WEIGHTS
