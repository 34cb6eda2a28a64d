"""A GGUF file's packed types in every dtype of the weights, with machd's kernels and without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx.utils import tree_flatten
from support.engines.native import without_kernels
from unit.engine.gguf_writer import llama_metadata
from unit.engine.tiny_llama import TOKENS, largest

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.kernels.native_layers import is_native, take_native
from machd.engine.kernels.packed_weights import is_left_to_kernels, unpacked
from machd.engine.loading.formats.gguf.packings import PACKINGS
from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import load_model
from machd.engine.loading.placing.precision import Conversion, model_dtype, native_layers
from machd.engine.loading.placing.whole import materialise
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.progress import SilentProgress

import_mlx_lm()

from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_template_process")

for_kernels = pytest.mark.skipif(
    native_kernels() is None, reason="make setup has found no compiler"
)

_WIDTH = 256
_DEVIATION = 0.05
"""Of the weights: activations stay in float16's range."""

_SMALL_GROUPS = [kind for kind, packing in PACKINGS.items() if packing.group_size < 32]
_MIX = ("Q6_K", "Q3_K", "Q2_K", "Q4_K", "Q5_K", "Q5_1", "MXFP4", "IQ4_XS", "Q8_0")
"""Types of the matrices of a file as published, which mixes them: the embeddings', the head's and those of a layer."""

_IDS = mx.array([[5, 80, 200, 33]])


def _blocks(kind: str, rows: int, seed: int) -> tuple[Any, Any]:
    """Random blocks of weights of a model's size, and their numbers."""
    quant = GGMLQuantizationType[kind]
    elements, size_bytes = GGML_QUANT_SIZES[quant]
    raw = np.random.default_rng(seed).integers(
        0, 256, (rows * _WIDTH // elements, size_bytes), dtype=np.uint8
    )
    if kind == "MXFP4":
        raw[:, 0] = 119 + raw[:, 0] % 3
        return raw.reshape(rows, -1), dequantize(raw, quant).reshape(rows, _WIDTH)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2)}
    halves |= {"Q5_K": (0, 2), "Q5_1": (0, 2)}
    scale = np.float16(0.01)

    def scaled() -> Any:
        for at in halves.get(kind, (0,)):
            raw[:, at : at + 2] = np.array([scale]).view(np.uint8)
        return dequantize(raw, quant)

    scale = np.float16(scale * _DEVIATION / scaled().std())
    numbers = scaled()
    return raw.reshape(rows, -1), numbers.reshape(rows, _WIDTH)


def _written(path: Path, *kinds: str, as_floats: bool = False) -> ModelSource:
    """A llama of one layer whose matrices are of these types, in turn, or the same numbers as float32."""
    writer = GGUFWriter(path, "llama")
    for key, value in llama_metadata(
        llama__embedding_length=_WIDTH,
        llama__feed_forward_length=_WIDTH,
        llama__block_count=1,
        llama__attention__head_count_kv=4,
    ).items():
        if key == "general.architecture":
            continue
        add: Any = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    rows = {"token_embd": len(TOKENS), "output": len(TOKENS)}
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for seed, name in enumerate((*rows, *(f"blk.0.{one}" for one in layer))):
        kind = kinds[seed % len(kinds)]
        raw, numbers = _blocks(kind, rows.get(name, _WIDTH), seed)
        if as_floats:
            writer.add_tensor(f"{name}.weight", numbers)
        else:
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType[kind])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(SourceKind.GGUF, path, path.stem)


def _logits(model: Any) -> mx.array:
    return model(_IDS).astype(mx.float32)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> mx.array:
    """Logits of the mixed file's numbers as float32."""
    path = tmp_path_factory.mktemp("exact") / "exact.gguf"
    logits = _logits(load_model(_written(path, *_MIX, as_floats=True), dtype="float32").model)
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=for_kernels), False])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
def test_mixed_types_answer_in_every_dtype(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: mx.array,
    dtype: str,
    kernels: bool,  # noqa: FBT001 - a parameter
) -> None:
    """The answer is that of the same numbers as floats, within the dtype's rounding, and check says what is held."""
    if not kernels:
        without_kernels(monkeypatch)
    source = _written(tmp_path / "x.gguf", *_MIX)
    loaded, checked = load_model(source, dtype=dtype), inspect_model(source, dtype=dtype)
    tolerance = {"float16": 0.01, "bfloat16": 0.08}.get(dtype, 0.002)
    assert largest(_logits(loaded.model) - expected) < tolerance * largest(expected)
    held_bytes = sum(
        array.nbytes for array in dict(tree_flatten(loaded.model.parameters())).values()
    )
    assert checked.description.weights_bytes == loaded.description.weights_bytes == held_bytes
    assert checked.description.dtype == loaded.description.dtype
    assert checked.description.quantization == loaded.description.quantization
    types = {one.name: one for one in checked.tensor_types}
    assert set(types) == {*_MIX, "F32"}
    assert sum(one.held_bytes for one in types.values()) == held_bytes
    assert sum(one.stored_bytes for one in types.values()) == checked.stored_bytes
    stays = kernels and dtype == "auto"
    form = "affine 6-bit, group 16" if stays else "float32" if dtype == "auto" else dtype
    assert types["Q6_K"].held_as == (form,)
    assert types["Q6_K"].is_exact is (dtype in ("auto", "float32"))
    assert not types["IQ4_XS"].is_exact


@pytest.mark.parametrize("kind", ["Q4_K", "Q2_K", "Q6_K"])
def test_type_stays_packed_or_is_expanded_where_floats_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without kernels mlx computes groups of 32 packed; it has none of 16, which are expanded to float16, as check says."""
    without_kernels(monkeypatch)
    for module in ("placing.whole", "inspection"):
        monkeypatch.setattr(
            f"machd.engine.loading.{module}.available_memory_bytes", lambda: 2_000_000
        )
    source = _written(tmp_path / "x.gguf", kind)
    loaded, checked = load_model(source), inspect_model(source)
    is_expanded = kind in _SMALL_GROUPS
    assert (loaded.description.quantization is None) is is_expanded
    assert checked.description.quantization == loaded.description.quantization
    assert checked.description.weights_bytes == loaded.description.weights_bytes
    assert loaded.model["lm_head"]["weight"].dtype == (mx.float16 if is_expanded else mx.uint32)
    assert checked.tensor_types[0].is_exact is not is_expanded


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=for_kernels), False])
def test_mixed_types_are_quantised_anew_from_their_floats(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: mx.array,
    kernels: bool,  # noqa: FBT001 - a parameter
) -> None:
    """model.quantize packs what model.dtype has unpacked, in mlx's own groups."""
    if not kernels:
        without_kernels(monkeypatch)
    source = _written(tmp_path / "x.gguf", *_MIX)
    loaded = load_model(source, dtype="float32", quantize="affine8")
    checked = inspect_model(source, dtype="float32", quantize="affine8")
    assert loaded.description.quantization == "affine 8-bit, group 64"
    assert checked.description.weights_bytes == loaded.description.weights_bytes
    assert largest(_logits(loaded.model) - expected) < 0.03 * largest(expected)


def _in_groups_of_16(layer: Any, bits: int) -> Any:
    """Give a quantised layer random numbers, and a scale and a bias to each 16 of them."""
    random = np.random.default_rng(bits)
    *rows, columns = layer.scales.shape
    groups = (*rows, columns * layer.group_size // 16)
    layer.weight = mx.array(random.integers(0, 1 << 32, layer.weight.shape, dtype=np.uint32))
    layer.scales = mx.array(random.normal(size=groups).astype(np.float32))
    layer.biases = mx.array(random.normal(size=groups).astype(np.float32))
    layer.group_size = 16
    return layer


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_unpacked_weights_have_their_own_groups_scale_and_bias(bits: int) -> None:
    """Bit i of the numbers lies at bit i of the words, read from the lowest, and 16 numbers share a scale and a bias."""
    layer = _in_groups_of_16(QuantizedEmbedding(7, 96, 32, bits), bits)
    raw = np.array(layer.weight).view(np.uint8)
    flags = np.unpackbits(raw, axis=1, bitorder="little").reshape(7, 96, bits)
    numbers = (flags.astype(np.float32) * (1 << np.arange(bits))).sum(axis=2, dtype=np.float32)
    scales, biases = (np.repeat(np.array(layer[one]), 16, axis=1) for one in ("scales", "biases"))
    expected = (numbers * scales + biases).astype(np.float32)
    np.testing.assert_allclose(np.array(unpacked(layer)), expected, rtol=1e-6, atol=1e-6)
    assert mx.array_equal(unpacked(layer, mx.array([[3, 0]])), unpacked(layer)[mx.array([[3, 0]])])


@for_kernels
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_native_embedding_of_small_groups_looks_up_and_multiplies(bits: int) -> None:
    """Rows are those of the unpacked weights, and as a linear layer it multiplies with all of them."""
    layer = _in_groups_of_16(QuantizedEmbedding(40, 96, 32, bits), bits)
    plain, ids = unpacked(layer), mx.array([[3, 39], [0, 7]])
    assert take_native(layer)
    assert mx.array_equal(layer(ids), plain[ids])
    x = mx.random.normal((3, 96))
    assert largest(layer.as_linear(x) - x @ plain.T) < 1e-5 * largest(x @ plain.T)


_SWITCH: Any = QuantizedSwitchLinear


class _Experts(Module):
    def __init__(self, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.experts = _in_groups_of_16(
            _SWITCH(96, 24, 5, bias=False, group_size=32, bits=bits), bits
        )


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=for_kernels), False])
@pytest.mark.parametrize("available_bytes", [1 << 40, 1])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_experts_of_small_groups_compute_packed_or_in_float32(
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    available_bytes: int,
    kernels: bool,  # noqa: FBT001 - a parameter
) -> None:
    """Machd's kernels compute them as they are stored; mlx, which multiplies experts in float32 only, where there are none."""
    if not kernels:
        without_kernels(monkeypatch)
    model = _Experts(bits)
    assert is_left_to_kernels(model.experts)
    plain, native = unpacked(model.experts), native_layers("auto")
    dtype = model_dtype(
        model, "auto", None, backend="cpu", available_bytes=available_bytes, native=native
    )
    assert dtype is mx.float32
    materialise(model, Conversion(dtype, native=native), SilentProgress())
    assert is_native(model.experts) is kernels
    assert isinstance(model.experts, QuantizedSwitchLinear if kernels else SwitchLinear)
    chosen = [[0, 4], [2, 2], [1, 3], [4, 0]]
    x, indices = mx.random.normal((4, 1, 1, 96)), mx.array(chosen)
    expected = mx.stack(
        [mx.stack([x[row, 0] @ plain[one].T for one in ids]) for row, ids in enumerate(chosen)]
    )
    assert largest(model.experts(x, indices) - expected) < 1e-5 * largest(expected)
