"""Tensors of a GGUF file as arrays that mlx computes with.

mlx reads GGUF files too, but rounds Q6_K to float16, expands Q4_K wrongly, and its reader divides by numbers of the header,
which can kill the process.
"""

from __future__ import annotations

from typing import BinaryIO

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from machd.engine.loading.formats.gguf.header import GgufTensor
from machd.engine.loading.formats.gguf.packings import EXACT_FLOATS, Packing, repacked

_WEIGHTS_AT_ONCE = 1 << 22
"""Weights that are repacked or expanded at once: the steps take some 100 MB."""


def tensor_zeros(tensor: GgufTensor, packing: Packing | None) -> dict[str, mx.array]:
    """Make lazy zeros in the shapes and dtypes of what :func:`read_tensor` reads."""
    if packing is None:
        exact = {"F32": mx.float32, "BF16": mx.bfloat16}
        return {"weight": mx.zeros(tensor.shape, exact.get(tensor.type_name, mx.float16))}
    *rows, columns = tensor.shape
    scale_type = getattr(mx, packing.scale_type)
    groups = (*rows, columns // packing.group_size)
    arrays = {
        "weight": mx.zeros((*rows, columns * packing.bits // 32), mx.uint32),
        "scales": mx.zeros(groups, scale_type),
    }
    return arrays | ({"biases": mx.zeros(groups, scale_type)} if packing.mode == "affine" else {})


def read_tensor(file: BinaryIO, tensor: GgufTensor, packing: Packing | None) -> dict[str, mx.array]:
    """Read a tensor.

    Args:
        file: The file that has it.
        tensor: Its description.
        packing: The form that it gets; None for floats.

    Returns:
        The arrays of a module: ``weight`` alone, in the dtype of the file, or float32 where it is expanded from blocks;
        or ``weight``, ``scales`` and perhaps ``biases`` in mlx's packed format.

    Raises:
        EOFError: The file has become shorter.
    """
    file.seek(tensor.offset)
    content = file.read(tensor.size_bytes)
    if len(content) < tensor.size_bytes:
        raise EOFError
    raw = np.frombuffer(content, np.uint8)
    # A damaged file has infinite scales: its weights are infinite, as those of a file of floats may be, and no warning helps.
    with np.errstate(over="ignore", invalid="ignore"):
        return _read(raw, tensor, packing)


def _read(
    raw: NDArray[np.uint8], tensor: GgufTensor, packing: Packing | None
) -> dict[str, mx.array]:
    if packing is not None:
        return _packed(raw, tensor, packing)
    dtype = EXACT_FLOATS.get(tensor.type_name)
    if dtype is None:
        return {"weight": mx.array(_expanded(raw, tensor))}
    values = mx.array(raw.view(dtype).reshape(tensor.shape))
    return {"weight": values.view(mx.bfloat16) if tensor.type_name == "BF16" else values}


def _packed(raw: NDArray[np.uint8], tensor: GgufTensor, packing: Packing) -> dict[str, mx.array]:
    pieces = [
        repacked(tensor.type_name, one)
        for one in np.split(raw, range(_step_bytes(tensor), len(raw), _step_bytes(tensor)))
    ]
    *rows, columns = tensor.shape
    widths = {"weight": columns * packing.bits // 32}
    return {
        part: mx.array(
            np.concatenate([one[part] for one in pieces]).reshape(
                *rows, widths.get(part, columns // packing.group_size)
            )
        )
        for part in pieces[0]
    }


def _expanded(raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
    if tensor.type_name == "F64":
        return raw.view("<f8").astype(np.float32).reshape(tensor.shape)
    from gguf import GGMLQuantizationType  # noqa: PLC0415 - most files need it not, and it takes 0.1 s
    from gguf.quants import dequantize  # noqa: PLC0415 - the same

    kind = GGMLQuantizationType[tensor.type_name]
    values = np.empty(tensor.elements, np.float32)
    begin = 0
    for one in np.split(raw, range(_step_bytes(tensor), len(raw), _step_bytes(tensor))):
        piece = dequantize(one, kind).reshape(-1)
        values[begin : begin + len(piece)] = piece
        begin += len(piece)
    return values.reshape(tensor.shape)


def _step_bytes(tensor: GgufTensor) -> int:
    """Bytes of whole blocks that are taken at once."""
    blocks = tensor.elements // tensor.block_elements
    block_bytes = tensor.size_bytes // blocks
    return _WEIGHTS_AT_ONCE // tensor.block_elements * block_bytes
