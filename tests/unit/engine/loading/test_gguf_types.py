"""Each type of ggml's tensors, by the package ``gguf``'s own formulas: bit for bit, through a file and the reader."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from mlx.nn.layers.quantized import QuantizedLinear
from numpy.typing import NDArray

from machd.engine.kernels.packed_weights import unpacked
from machd.engine.loading.formats.gguf import tensors
from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.formats.gguf.packings import EXACT_FLOATS, PACKINGS, is_readable
from machd.engine.loading.formats.gguf.tensors import read_tensor, tensor_zeros

_EXPANDED = sorted(
    kind.name
    for kind in GGMLQuantizationType
    if kind.name.startswith(("IQ", "NV", "TQ")) and is_readable(kind.name)
)
_ROWS, _COLUMNS = 12, 512
_LARGEST = 2.0**15

Floats = NDArray[np.float32]


def _finite_blocks(kind: str, seed: int = 5) -> tuple[NDArray[np.uint8], Floats]:
    """Random bytes of whole blocks of weights that float16 holds, one row a row of the tensor, and their numbers by ``gguf``."""
    elements, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    wanted = _ROWS * _COLUMNS // elements
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (4 * wanted, size_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        numbers = dequantize(blocks, GGMLQuantizationType[kind])
        is_finite = (np.abs(numbers) < _LARGEST).all(axis=1)
    assert is_finite.sum() >= wanted
    raw = blocks[is_finite][:wanted].reshape(_ROWS, -1)
    return raw, numbers[is_finite][:wanted].reshape(_ROWS, _COLUMNS)


def _written(path: Path, kind: str, raw: NDArray[np.generic]) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("other", np.ones(3, np.float32))
    writer.add_tensor("x.weight", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _read(path: Path) -> dict[str, mx.array]:
    """Read the tensor, in the shapes and dtypes that its zeros have."""
    (tensor,) = (one for one in read_gguf_header(path).tensors if one.name == "x.weight")
    packing = PACKINGS.get(tensor.type_name)
    with path.open("rb") as file:
        found = read_tensor(file, tensor, packing)
    zeros = tensor_zeros(tensor, packing)
    assert {name: array.shape for name, array in found.items()} == {
        name: array.shape for name, array in zeros.items()
    }
    if packing is not None:
        assert {name: array.dtype for name, array in found.items()} == {
            name: array.dtype for name, array in zeros.items()
        }
    return found


def _numbers(kind: str, arrays: dict[str, mx.array]) -> Floats:
    """Unpack a layer's arrays as machd does where a setting names a dtype."""
    packing = PACKINGS[kind]
    layer = QuantizedLinear(
        _COLUMNS, _ROWS, bias=False, group_size=32, bits=packing.bits, mode=packing.mode
    )
    layer.group_size = packing.group_size
    layer.update(arrays)
    return np.array(unpacked(layer))


@pytest.mark.parametrize("kind", PACKINGS)
def test_packed_type_has_the_numbers_of_the_file(tmp_path: Path, kind: str) -> None:
    """Numbers times scale plus bias, rounded to float32 once, are ggml's numbers bit for bit."""
    raw, expected = _finite_blocks(kind)
    arrays = _read(_written(tmp_path / "x.gguf", kind, raw))
    assert set(arrays) == {"weight", "scales"} | (
        {"biases"} if PACKINGS[kind].mode == "affine" else set()
    )
    np.testing.assert_array_equal(_numbers(kind, arrays), expected)


@pytest.mark.parametrize("kind", PACKINGS)
def test_wrong_bit_of_a_packed_type_is_noticed(tmp_path: Path, kind: str) -> None:
    """The comparison above can fail: with one bit of the last byte but two of a block turned it does."""
    raw, expected = _finite_blocks(kind)
    changed = raw.copy()
    changed[3, -3] ^= 1
    arrays = _read(_written(tmp_path / "x.gguf", kind, changed))
    assert not np.array_equal(_numbers(kind, arrays), expected)


@pytest.mark.parametrize("kind", _EXPANDED)
def test_expanded_type_has_the_numbers_of_the_file(tmp_path: Path, kind: str) -> None:
    """A type without a packed form is expanded to float32 by ``gguf`` itself."""
    raw, expected = _finite_blocks(kind)
    np.testing.assert_array_equal(
        np.array(_read(_written(tmp_path / "x.gguf", kind, raw))["weight"]), expected
    )


@pytest.mark.parametrize("kind", [*EXACT_FLOATS, "F64"])
def test_floats_have_the_numbers_of_the_file(tmp_path: Path, kind: str) -> None:
    """Floats stay in the file's dtype; those of 64 bits, which mlx computes on no GPU, are rounded to 32."""
    values = np.random.default_rng(5).standard_normal((_ROWS, _COLUMNS))
    stored: dict[str, NDArray[np.generic]] = {
        "F64": values,
        "F32": values.astype(np.float32),
        "F16": values.astype(np.float16),
        "BF16": (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
    }
    found = _read(_written(tmp_path / "x.gguf", kind, stored[kind]))["weight"]
    expected = {
        **stored,
        "F64": values.astype(np.float32),
        "BF16": (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32),
    }[kind]
    dtypes = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "F64": mx.float32}
    assert found.dtype == dtypes[kind]
    np.testing.assert_array_equal(np.array(found.astype(mx.float32)), expected.astype(np.float32))


@pytest.mark.parametrize("kind", [*PACKINGS, "IQ4_XS", "TQ1_0"])
@pytest.mark.parametrize("step_weights", [256, 1024, 5 * 1024])
def test_steps_join_without_a_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, step_weights: int
) -> None:
    """However many weights are taken at once, fewer than a row or a part of the last, the arrays are the same."""
    path = _written(tmp_path / "x.gguf", kind, _finite_blocks(kind)[0])
    whole = _read(path)
    monkeypatch.setattr(tensors, "_WEIGHTS_AT_ONCE", step_weights)
    pieces = _read(path)
    assert pieces.keys() == whole.keys()
    assert all(mx.array_equal(pieces[name], whole[name]) for name in whole)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [*PACKINGS, *_EXPANDED])
def test_scales_that_are_no_numbers_are_read_in_silence(tmp_path: Path, kind: str) -> None:
    """A hostile file's infinite scales give infinite weights, as its floats may, and no warning in the log."""
    elements, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = np.full((2, size_bytes * 512 // elements), 0xFF, np.uint8)
    raw[1] = np.tile(np.array([0x00, 0x7C], np.uint8), raw.shape[1] // 2 + 1)[: raw.shape[1]]
    assert _read(_written(tmp_path / "x.gguf", kind, raw))["weight"].shape[0] == 2
