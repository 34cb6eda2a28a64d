"""Weights of encoders: those that do not fit are named, packed ones are read, and dtypes are as asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.engines.loaded_encoder import least_cosine, loaded_encoder, vectors

from machd.capabilities.fit import MemoryNeeds
from machd.engine.encoding import encoder_model, mlx_encoder
from machd.engine.protocol.encoder import EncoderInput
from machd.errors import ModelArchitectureError, ModelFormatError, ModelMemoryError
from machd_probes.encoder_matrix.tiny_checkpoint import token_ids, write_encoder
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS

_TENSOR = "encoder.layer.1.attention.self.query.weight"

Tensors = dict[str, Any]


def _changed(directory: Path, change: Callable[[Tensors], object]) -> Path:
    tensors: Tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _put(value: float) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[_TENSOR][3, 5] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put(float("nan")), (_TENSOR, "NaN")),
        (_put(float("inf")), (_TENSOR, "infinity")),
        (lambda one: one.pop(_TENSOR), ("lacks", _TENSOR)),
        (lambda one: one.update({"encoder.extra": one[_TENSOR]}), ("too much", "encoder.extra")),
        (
            lambda one: one.update({_TENSOR: one[_TENSOR][:16]}),
            (_TENSOR, "[16, 32]", "[32, 32]"),
        ),
        (
            lambda one: one.update({_TENSOR.replace("weight", "scales"): one[_TENSOR]}),
            ("packed", "quantization"),
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: Callable[[Tensors], object], words: tuple[str, ...], tmp_path: Path
) -> None:
    """NaN, a tensor that is missing, one that nothing needs and one of another shape are refused by their names."""
    directory = _changed(write_encoder(tmp_path, TINY_ENCODERS["bert"]), change)
    with pytest.raises(ModelFormatError) as refused:
        loaded_encoder(directory)
    for word in words:
        assert word in refused.value.message


def test_nan_in_a_dense_layer_is_named(tmp_path: Path) -> None:
    """Weights behind pooling are checked, too."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["xlm-roberta"])

    def change(tensors: Tensors) -> None:
        tensors["linear.weight"][0, 0] = np.nan

    _changed(directory / "2_Dense", change)
    with pytest.raises(ModelFormatError, match=r"linear\.weight"):
        loaded_encoder(directory)


def test_missing_weights_of_a_dense_layer_are_named(tmp_path: Path) -> None:
    """A dense layer without weights is refused by its folder."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["xlm-roberta"])
    (directory / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match="2_Dense"):
        loaded_encoder(directory)


@pytest.mark.parametrize("is_packed", [False, True])
def test_dense_layers_may_lie_among_the_weights(is_packed: object, tmp_path: Path) -> None:
    """A converted checkpoint that has its dense layers in one file with all others has the same vectors."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["gemma3_text"])
    text = [EncoderInput(token_ids(9))]
    before = vectors(loaded_encoder(directory), text)
    tensors: dict[str, mx.array] = mx.load(str(directory / "model.safetensors"))  # type: ignore[assignment]
    for place in range(2):
        path = directory / f"{place + 2}_Dense" / "model.safetensors"
        dense: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        moved = {name.replace("linear", f"dense.{place}"): one for name, one in dense.items()}
        if is_packed:
            name = f"dense.{place}."
            packed = mx.quantize(moved[name + "weight"], 32, 8)
            parts = ("weight", "scales", "biases")
            moved |= {name + part: one for part, one in zip(parts, packed, strict=True)}
        tensors |= moved
        mx.eval(list(moved.values()))
        path.unlink()
    mx.eval(list(tensors.values()))
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    if is_packed:
        quantization = {"group_size": 32, "bits": 8}
        config = {**TINY_ENCODERS["gemma3_text"].config, "quantization": quantization}
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = vectors(loaded_encoder(directory), text)
    assert least_cosine(before, found) > (0.999 if is_packed else 1 - 1e-9)


def test_tensors_that_embedding_needs_none_of_are_left_out(tmp_path: Path) -> None:
    """A pooler, a head for masked words and saved positions change nothing."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    text = [EncoderInput(token_ids(9))]
    before = vectors(loaded_encoder(directory), text)

    def change(tensors: Tensors) -> None:
        tensors["pooler.dense.weight"] = tensors[_TENSOR]
        tensors["cls.predictions.bias"] = tensors[_TENSOR][0]
        tensors["embeddings.position_ids"] = np.arange(64)[None]

    found = vectors(loaded_encoder(_changed(directory, change)), text)
    assert np.array_equal(before, found)


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3", "gemma3_text"])
def test_packed_weights_are_those_that_mlx_unpacks(name: str, tmp_path: Path) -> None:
    """A checkpoint that mlx has quantised has the vectors of one with its unpacked weights."""
    encoder = TINY_ENCODERS[name]
    plain, packed = (write_encoder(tmp_path / one, encoder) for one in ("plain", "packed"))
    tensors: dict[str, mx.array] = mx.load(str(plain / "model.safetensors"))  # type: ignore[assignment]
    kept, unpacked = dict(tensors), dict(tensors)
    for tensor, array in tensors.items():
        if array.ndim == 2 and "embed" not in tensor and array.shape[-1] % 32 == 0:
            stem = tensor.removesuffix("weight")
            kept[tensor], kept[stem + "scales"], kept[stem + "biases"] = mx.quantize(array, 32, 8)
            unpacked[tensor] = mx.dequantize(
                kept[tensor], kept[stem + "scales"], kept[stem + "biases"], 32, 8
            )
    mx.save_safetensors(str(plain / "model.safetensors"), unpacked)
    mx.save_safetensors(str(packed / "model.safetensors"), kept)
    config = {**encoder.config, "quantization": {"group_size": 32, "bits": 8}}
    (packed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    texts = [EncoderInput(token_ids(one)) for one in (5, 23)]
    one, other = loaded_encoder(plain), loaded_encoder(packed)
    assert least_cosine(vectors(one, texts), vectors(other, texts)) > 1 - 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_is_the_setting(dtype: str, tmp_path: Path) -> None:
    """``model.dtype`` is what the layers compute in; vectors are float32 in any case."""
    directory = write_encoder(tmp_path, TINY_ENCODERS["xlm-roberta"])
    text = [EncoderInput(token_ids(20))]
    encoder, plain = loaded_encoder(directory, dtype=dtype), loaded_encoder(directory)
    assert encoder.model.dtype == dtype
    assert least_cosine(vectors(encoder, text), vectors(plain, text)) > 0.999


def test_rotary_positions_have_one_meaning_in_both_spellings(tmp_path: Path) -> None:
    """What transformers 5 writes below ``rope_parameters`` and older versions beside is the same model."""
    old: dict[str, dict[str, object]] = {
        "modernbert": {"global_rope_theta": 500.0, "local_rope_theta": 90.0},
        "gemma3_text": {
            "rope_theta": 500.0,
            "rope_local_base_freq": 90.0,
            "sliding_window_pattern": 2,
            "layer_types": None,
        },
        "qwen3": {"rope_theta": 700.0},
        "llama": {"rope_theta": 700.0},
    }
    text = [EncoderInput(token_ids(30))]
    for name, values in old.items():
        encoder = TINY_ENCODERS[name]
        new = vectors(loaded_encoder(write_encoder(tmp_path / name, encoder)), text)
        write_encoder(tmp_path / name, encoder, rope_parameters=None, **values)
        assert np.array_equal(new, vectors(loaded_encoder(tmp_path / name), text))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
        ("modernbert", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
        ("llama", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    ],
)
def test_layers_that_no_module_computes_are_refused(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """Rotary positions and kinds of layers that would be taken for the usual ones are refused."""
    directory = write_encoder(tmp_path, TINY_ENCODERS[name], **changes)
    with pytest.raises(ModelFormatError, match=r"rope_type|layer_types"):
        loaded_encoder(directory)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bert", {"num_attention_heads": 0}),
        ("bert", {"num_attention_heads": -4}),
        ("bert", {"num_attention_heads": 5}),
        ("bert", {"num_attention_heads": "many"}),
        ("bert", {"num_hidden_layers": 2}),
        ("bert", {"layer_norm_eps": "small"}),
        ("bert", {"vocab_size": 1 << 40}),
        ("bert", {"type_vocab_size": None}),
        ("modernbert", {"local_attention": "near"}),
        ("modernbert", {"norm_eps": []}),
        ("gemma3_text", {"sliding_window": None}),
        ("gemma3_text", {"query_pre_attn_scalar": 0}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}),
        ("qwen3", {"head_dim": 7}),
        ("llama", {"rope_parameters": {"rope_type": "unheard", "rope_theta": 1.0}}),
    ],
)
def test_absurd_configurations_are_refused_before_a_text_is_asked_for(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """What no layer can compute ends in an error of the files at loading."""
    with pytest.raises(ModelFormatError):
        loaded_encoder(write_encoder(tmp_path, TINY_ENCODERS[name], **changes))


def test_without_the_extra_the_line_to_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family of mlx-vlm's says what to install; a decoder needs nothing."""
    monkeypatch.setattr(encoder_model, "is_installed", lambda: False)
    with pytest.raises(ModelArchitectureError, match=r"install|--vision"):
        loaded_encoder(write_encoder(tmp_path / "bert", TINY_ENCODERS["bert"]))
    loaded_encoder(write_encoder(tmp_path / "qwen3", TINY_ENCODERS["qwen3"]))


def test_a_model_among_others_asks_for_memory_before_weights_are_read(tmp_path: Path) -> None:
    """What it needs is told once, has no keys and values, and a limit below the weights refuses it."""
    from machd.engine.loading.loader import MemoryShare  # noqa: PLC0415 - imports mlx

    directory = write_encoder(tmp_path, TINY_ENCODERS["bert"])
    told: list[MemoryNeeds] = []
    encoder = loaded_encoder(directory, share=MemoryShare(1 << 30, told.append))
    assert [one.weights_bytes for one in told] == [encoder.model.weights_bytes]
    assert told[0].working_bytes > 0
    assert told[0].bytes_per_token == told[0].bytes_per_sequence == 0
    with pytest.raises(ModelMemoryError):
        loaded_encoder(directory, share=MemoryShare(1_000, told.append))


def test_a_pass_beyond_the_memory_is_refused_before_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that takes more than is left raises MemoryError, and the next one is computed."""
    encoder = loaded_encoder(write_encoder(tmp_path, TINY_ENCODERS["bert"]))
    text = EncoderInput(token_ids(40))
    monkeypatch.setattr(mlx_encoder, "available_memory_bytes", lambda: 1_000)
    with pytest.raises(MemoryError):
        encoder.encode([text] * 2_000)
    assert vectors(encoder, [text]).shape == (1, 32)


def test_memory_is_given_back_when_an_encoder_is_closed(tmp_path: Path) -> None:
    """Weights are gone from mlx's memory after ``close``."""
    before_bytes = mx.get_active_memory()
    encoder = loaded_encoder(write_encoder(tmp_path, TINY_ENCODERS["bert"]))
    assert mx.get_active_memory() > before_bytes
    encoder.close()
    assert mx.get_active_memory() - before_bytes < encoder.model.weights_bytes / 10
