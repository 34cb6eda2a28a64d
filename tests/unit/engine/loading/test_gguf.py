"""GGUF files of the llama family become the model that was written."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.engines.native import without_kernels
from unit.engine.gguf_writer import (
    Blocks,
    dequantised,
    llama_metadata,
    quantised,
    tiny_gguf,
    write_gguf,
)
from unit.engine.tiny_llama import TOKENS, TinyLlama, largest

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.formats.gguf.packings import PACKINGS
from machd.engine.loading.formats.gguf.reading import check_gguf, gguf_config
from machd.engine.loading.formats.gguf.tensors import read_tensor
from machd.engine.loading.formats.gguf.tokenizer import build_tokenizer
from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.errors import ModelArchitectureError, ModelFormatError

import_mlx_lm()

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.models.rope_utils import initialize_rope  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_template_process")

_WIDE = llama_metadata(
    llama__embedding_length=256,
    llama__feed_forward_length=256,
    llama__block_count=1,
    llama__attention__head_count_kv=4,
)
"""A llama of one layer whose rows are whole blocks of Q6_K."""

KINDS = ["F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q6_K"]


def _source(path: Path) -> ModelSource:
    return ModelSource(SourceKind.GGUF, path, path.stem)


def _logits(model: object, token_ids: list[int]) -> mx.array:
    assert callable(model)
    logits = model(mx.array([token_ids]))
    assert isinstance(logits, mx.array)
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_of_every_type_has_the_numbers_of_its_format(tmp_path: Path, kind: str) -> None:
    """Blocks dequantise to ggml's reference formulas; float32 scales leave no rounding."""
    values = np.random.default_rng(3).standard_normal((len(TOKENS), 256)).astype(np.float32)
    blocks = quantised(kind, values)
    path = write_gguf(tmp_path / "x.gguf", _WIDE, {**_q6_k_tensors(), "token_embd.weight": blocks})
    loaded = load_model(_source(path), dtype="float32")
    found = np.array(loaded.model["model"]["embed_tokens"]["weight"])
    np.testing.assert_array_equal(found, dequantised(blocks))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_tensor_has_the_bits_of_mlxs_own_reader(tmp_path: Path, kind: str) -> None:
    """Types that stay quantised are in mlx's layout, with its scales and biases."""
    values = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    path = write_gguf(tmp_path / "x.gguf", llama_metadata(), {"x.weight": quantised(kind, values)})
    (tensor,) = read_gguf_header(path).tensors
    with path.open("rb") as file:
        found = read_tensor(file, tensor, PACKINGS[kind])
    expected = mx.load(str(path))
    assert isinstance(expected, dict)
    for part, array in found.items():
        assert array.dtype == expected[f"x.{part}"].dtype
        assert mx.array_equal(array, expected[f"x.{part}"])


def _q6_k_blocks(shape: tuple[int, ...], seed: int) -> Blocks:
    """Random blocks whose weights have the size of a model's."""
    random = np.random.default_rng(seed)
    count = int(np.prod(shape)) // 256
    blocks = random.integers(0, 256, (count, 210), dtype=np.uint8)
    blocks[:, 192:208] = random.integers(-8, 9, (count, 16)).astype(np.int8).view(np.uint8)
    scales = random.uniform(1e-3, 2e-3, (count, 1)).astype("<f2")
    blocks[:, 208:] = scales.view(np.uint8).reshape(count, 2)
    return "Q6_K", shape, blocks.tobytes()


def _q6_k_tensors() -> dict[str, Blocks]:
    """A llama of one layer, 256 wide."""
    shapes = {
        "token_embd": (len(TOKENS), 256),
        "output": (len(TOKENS), 256),
        **{f"blk.0.attn_{one}": (256, 256) for one in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{one}": (256, 256) for one in ("gate", "up", "down")},
    }
    matrices = {
        f"{name}.weight": _q6_k_blocks(shape, seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    ones = quantised("F32", np.ones(256, np.float32))
    return {**matrices, **{f"{name}.weight": ones for name in norms}}


def _greedy(model: object, count: int) -> tuple[list[int], list[mx.array]]:
    """Generate tokens behind one, and the logits of each."""
    assert callable(model)
    cache = make_prompt_cache(model)
    token_ids, rows = [5], []
    for _ in range(count):
        row = model(mx.array([token_ids[-1:]]), cache=cache)[0, -1]
        rows.append(row)
        token_ids.append(int(np.argmax(np.array(row))))
    return token_ids[1:], rows


def test_q6_k_answers_as_its_exact_dequantisation(tmp_path: Path) -> None:
    """160 greedy tokens and all their logits are those of the same weights as float32."""
    stored = _q6_k_tensors()
    exact = {name: quantised("F32", dequantised(blocks)) for name, blocks in stored.items()}
    answers = [
        _greedy(
            load_model(_source(write_gguf(tmp_path / name, _WIDE, tensors)), dtype="float32").model,
            160,
        )
        for name, tensors in (("q6_k.gguf", stored), ("exact.gguf", exact))
    ]
    (found, found_rows), (expected, expected_rows) = answers
    assert len(set(expected)) > 20
    assert found == expected
    assert all(map(mx.array_equal, found_rows, expected_rows))


def test_gguf_model_equals_the_converted_one(tmp_path: Path, tiny: TinyLlama) -> None:
    """Names, order of rows and configuration: a float32 GGUF answers as its original does."""
    original = load_model(tiny.source).model
    converted = load_model(_source(tiny_gguf(tmp_path / "tiny.gguf", "F32")))
    token_ids = [5, 80, 200, 33, 7, 150, 260, 12]
    difference = _logits(original, token_ids) - _logits(converted.model, token_ids)
    assert largest(difference) < 1e-4
    assert converted.description.architecture == "llama"
    assert converted.description.context_tokens == 512


def test_rows_in_llama_cpp_order_are_noticed(tmp_path: Path, tiny: TinyLlama) -> None:
    """The comparison above can fail: with the wrong number of heads it does."""
    original = load_model(tiny.source).model
    path = tiny_gguf(
        tmp_path / "wrong.gguf",
        "F32",
        llama_metadata(
            llama__attention__head_count=2,
            llama__attention__head_count_kv=1,
        ),
    )
    wrong = load_model(_source(path)).model
    token_ids = [5, 80, 200, 33, 7, 150, 260, 12]
    difference = _logits(original, token_ids) - _logits(wrong, token_ids)
    assert largest(difference) > 1e-2


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_packed_and_dequantised_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bits: int
) -> None:
    """Kept quantised where memory is short, the model says so and answers nearly the same."""
    path = tiny_gguf(tmp_path / "tiny.gguf", kind)
    token_ids = [5, 80, 200, 33]
    plain = load_model(_source(path), dtype="float32")
    a = _logits(plain.model, token_ids)
    without_kernels(monkeypatch)
    monkeypatch.setattr(
        "machd.engine.loading.placing.whole.available_memory_bytes", lambda: 400_000
    )
    packed = load_model(_source(path))
    assert plain.description.quantization is None
    assert plain.description.dtype == "float32"
    assert packed.description.quantization == f"affine {bits}-bit, group 32"
    assert packed.description.dtype == "float16"
    b = _logits(packed.model, token_ids).astype(mx.float32)
    assert largest(a - b) < 0.02 * largest(a)


@pytest.mark.skipif(native_kernels() is None, reason="make setup has found no compiler")
@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_kernels_compute_in_float32_with_weights_as_stored(
    tmp_path: Path, kind: str, bits: int
) -> None:
    """The model says so, takes a fraction of the memory, and answers as the unpacked one within float32's rounding."""
    path = tiny_gguf(tmp_path / "tiny.gguf", kind)
    plain, packed = load_model(_source(path), dtype="float32"), load_model(_source(path))
    assert packed.description.quantization == f"affine {bits}-bit, group 32"
    assert packed.description.dtype == "float32"
    assert packed.description.weights_bytes < 0.5 * plain.description.weights_bytes
    token_ids = [5, 80, 200, 33]
    a, b = _logits(plain.model, token_ids), _logits(packed.model, token_ids)
    assert largest(a - b) < 1e-5 * largest(a)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95, 0.999])
def test_a_truncated_file_is_an_error_wherever_it_ends(tmp_path: Path, share: float) -> None:
    """In the metadata, the tensor list or the data: always a message, never a crash."""
    path = tiny_gguf(tmp_path / "tiny.gguf", "Q4_1")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFormatError, match="fetch the file again"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "corrupt"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "truncated or corrupt"),
    ],
)
def test_file_of_another_format_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """Lengths in the file are claims; none is believed beyond the file's end."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=message):
        read_gguf_header(path)


def _sparse_header(path: Path, *values: bytes) -> Path:
    """A header with these typed values, and then nothing but zeros, which take no disk space."""
    keys = (struct.pack("<Q", 1) + bytes([97 + index]) for index in range(len(values)))
    head = b"".join(key + value for key, value in zip(keys, values, strict=True))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + head)
    with path.open("r+b") as file:
        file.truncate(3 << 30)
    return path


_ARRAY_OF = {name: struct.pack("<II", 9, kind) for name, kind in (("array", 9), ("text", 8))}


@pytest.mark.parametrize(
    "values",
    [
        [_ARRAY_OF["array"] + struct.pack("<Q", 1 << 23)],
        [_ARRAY_OF["array"] + struct.pack("<Q", 1) + struct.pack("<IQ", 9, 1) * 1000],
        [_ARRAY_OF["text"] + struct.pack("<Q", 1 << 23)],
        [_ARRAY_OF["text"] + struct.pack("<Q4Q", 4, 0, 0, 0, 0)] * 2
        + [_ARRAY_OF["text"] + struct.pack("<Q", (1 << 22) - 9)],
        [struct.pack("<IQ", 8, 2 << 30)],
    ],
    ids=["arrays in an array", "deep arrays", "one list", "lists together", "a text"],
)
def test_a_small_file_does_not_become_a_large_header(tmp_path: Path, values: list[bytes]) -> None:
    """Holes in a file count as zeros, which stand for as many empty texts and lists as one asks."""
    path = _sparse_header(tmp_path / "sparse.gguf", *values)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFormatError, match="corrupt"):
            read_gguf_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__alignment": 0}, "general.alignment is 0"),
        ({"general__alignment": 12}, "general.alignment is 12"),
        ({"llama__attention__head_count_kv": 0}, "0 heads of keys"),
        ({"llama__attention__head_count": 0}, "0 heads do not divide"),
        ({"llama__attention__layer_norm_rms_epsilon": -1.0}, "eps = -1"),
        ({"llama__rope__freq_base": 0.0}, "rope_theta = 0"),
        ({"llama__rope__freq_base": float("nan")}, "not a finite number"),
        ({"llama__block_count": 2**31}, "num_hidden_layers"),
    ],
)
def test_number_that_no_model_can_have_is_refused_by_check_and_loader(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """It is a message about the key, where it was a division by zero in a library or NaN in each answer."""
    source = _source(tiny_gguf(tmp_path / "tiny.gguf", "Q8_0", llama_metadata(**changes)))
    for read in (inspect_model, load_model):
        with pytest.raises(ModelFormatError, match=message):
            read(source)


def test_a_pipe_is_no_gguf(tmp_path: Path) -> None:
    """It is refused unopened, because opening it would wait for a writer."""
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        read_gguf_header(tmp_path / "pipe.gguf")


def test_flipped_bytes_never_do_worse_than_an_error(tmp_path: Path) -> None:
    """Any byte of the header may be wrong: it is read as before, or refused by a model error."""
    path = tiny_gguf(tmp_path / "tiny.gguf", "Q8_0")
    data = path.read_bytes()
    random = np.random.default_rng(11)
    for position in random.integers(0, 9000, 300):
        changed = bytearray(data)
        changed[position] ^= int(random.integers(1, 256))
        path.write_bytes(bytes(changed))
        try:
            header = read_gguf_header(path)
            check_gguf(header)
            gguf_config(header)
            build_tokenizer(header)
        except (ModelFormatError, ModelArchitectureError):
            continue


def test_another_architecture_is_named(tmp_path: Path) -> None:
    """A person learns what the file holds and which layout to take instead."""
    path = tiny_gguf(tmp_path / "x.gguf", "F16", llama_metadata(general__architecture="rwkv7"))
    with pytest.raises(ModelArchitectureError, match=r"rwkv7.*mlx-lm layout"):
        load_model(_source(path))


def test_llama_with_a_number_of_experts_is_no_dense_llama(tmp_path: Path) -> None:
    """llama.cpp calls Mixtral llama too; dense layers are not taken for its experts."""
    metadata = llama_metadata(llama__expert_count=8, llama__expert_used_count=2)
    path = tiny_gguf(tmp_path / "x.gguf", "F16", metadata)
    with pytest.raises(
        ModelFormatError, match=r"lacks model\.layers\.0\.block_sparse_moe.*mixtral"
    ):
        load_model(_source(path))


def test_a_type_that_is_none_of_weights_is_named(tmp_path: Path) -> None:
    """The tensor and its type are in the message."""
    blocks = ("I32", (1, 256), bytes(4 * 256))
    path = write_gguf(tmp_path / "x.gguf", llama_metadata(), {"token_embd.weight": blocks})
    with pytest.raises(ModelFormatError, match=r"token_embd\.weight is stored as I32"):
        check_gguf(read_gguf_header(path))


def test_a_foreign_tensor_is_named(tmp_path: Path) -> None:
    """A tensor that a plain llama lacks means another model: it is not dropped in silence."""
    tensors = {
        "token_embd.weight": quantised("F32", np.zeros((8, 32), np.float32)),
        "blk.0.attn_q_norm.weight": quantised("F32", np.zeros(32, np.float32)),
    }
    path = write_gguf(tmp_path / "x.gguf", llama_metadata(), tensors)
    with pytest.raises(ModelFormatError, match=r"blk\.0\.attn_q_norm\.weight"):
        check_gguf(read_gguf_header(path))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0},
            {"type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 2.0,
                "llama__rope__scaling__original_context_length": 256,
            },
            {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        ),
    ],
)
def test_rotary_scaling_is_carried_over(
    tmp_path: Path, changes: dict[str, object], expected: object
) -> None:
    """Scaling in the metadata becomes mlx-lm's; none stays none."""
    header = read_gguf_header(tiny_gguf(tmp_path / "x.gguf", "F16", llama_metadata(**changes)))
    assert gguf_config(header)["rope_scaling"] == expected


def test_llama_3_factors_give_llama_3s_frequencies(tmp_path: Path) -> None:
    """The factors that llama.cpp computes from llama 3's parameters rotate as mlx-lm's own do."""
    parameters = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    own = initialize_rope(64, 10000.0, traditional=False, scaling_config=parameters)
    factors = np.array(own._freqs) / (10000.0 ** (np.arange(0, 64, 2) / 64))
    tensors = _q6_k_tensors() | {"rope_freqs.weight": quantised("F32", factors.astype(np.float32))}
    source = _source(write_gguf(tmp_path / "x.gguf", _WIDE, tensors))
    ours = load_model(source).model.model.layers[0].self_attn.rope
    x = mx.random.normal((1, 4, 40, 64))
    assert largest(own(x, offset=100) - ours(x, offset=100)) < 1e-5
    assert factors.max() > 7.9


def test_check_names_the_code_that_serves_llama_3_factors(tmp_path: Path) -> None:
    """Check builds the layers that serve does, so that evidence of one is found by the other."""
    factors = quantised("F32", np.linspace(1, 8, 32).astype(np.float32))
    tensors = {**_q6_k_tensors(), "rope_freqs.weight": factors}
    source = _source(write_gguf(tmp_path / "x.gguf", _WIDE, tensors))
    code = inspect_model(source).description.code
    assert code is not None
    assert any("SuScaledRoPE" in layer for layer in code.layers)
    assert code == load_model(source).description.code


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_unpacked_file_is_quantised_anew_by_serve_and_check(tmp_path: Path, dtype: str) -> None:
    """A named dtype unpacks the file's own format, and ``model.quantize`` names the next one; both tell the same size."""
    source = _source(tiny_gguf(tmp_path / "x.gguf", "Q8_0"))
    found = inspect_model(source, dtype=dtype, quantize="affine4")
    served = load_model(source, dtype=dtype, quantize="affine4").description
    assert served.quantization == str(found.quantised_to) == "affine 4-bit, group 64"
    assert served.weights_bytes == found.description.weights_bytes
    assert served.is_native == found.description.is_native


def test_the_embedded_model_knows_its_capital(embedded_model_path: Path) -> None:
    """Weights, tokenizer and template together: a wrong row order or merge gives no sense."""
    loaded = load_model(_source(embedded_model_path), dtype="float32")
    tokenizer = loaded.tokenizer
    prompt = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    text = ""
    for _ in range(12):
        token_id = int(np.argmax(np.array(_logits(loaded.model, token_ids)[0, -1])))
        if token_id in loaded.description.eos_token_ids:
            break
        token_ids.append(token_id)
        text += detokenizer.push(token_id)
    assert text + detokenizer.finish() == "The capital of France is Paris."
    assert loaded.description.parameters == 134_515_008
