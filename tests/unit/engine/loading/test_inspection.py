"""A model inspected without its weights is the model that loading makes of it."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.utils import tree_flatten
from support.checkpoints.header_checkpoint import write_header_checkpoint
from support.engines.native import without_kernels
from unit.engine.gguf_writer import llama_metadata, tiny_gguf
from unit.engine.tiny_llama import CONFIG, TinyLlama

from machd.capabilities.fit import MemoryNeeds
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.loading.architecture import import_architecture
from machd.engine.loading.cache_facts import measure_model, trace_model
from machd.engine.loading.inspection import ModelInspection, inspect_model, native_modes
from machd.engine.loading.loader import MemoryShare, load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.errors import (
    ModelArchitectureError,
    ModelCodeError,
    ModelFormatError,
    ModelNotFoundError,
)

pytestmark = pytest.mark.usefixtures("quick_inspections")

import_mlx_lm()

from mlx_lm.models.cache import ArraysCache, KVCache  # noqa: E402

CONFIGURATIONS = Path(__file__).parents[4] / "probes" / "machd_probes" / "architectures"


def inspected(path: Path, **settings: Any) -> ModelInspection:
    """Inspect a directory or a GGUF file."""
    kind = SourceKind.GGUF if path.suffix == ".gguf" else SourceKind.DIRECTORY
    return inspect_model(ModelSource(kind, path, path.name), **settings)


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_inspection_agrees_with_loading(tiny: TinyLlama, dtype: str) -> None:
    """The description without the weights is the loader's, but for what comes of the tokenizer and the files' age."""
    found = inspected(tiny.path, dtype=dtype)
    loaded = load_model(tiny.source, dtype=dtype).description
    assert found.description == replace(loaded, eos_token_ids=frozenset(), created_unix_s=0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
def test_inspection_of_a_gguf_file_agrees_with_loading(tmp_path: Path, kind: str) -> None:
    """The same of a GGUF file, packed or not, and its quantisation as loading would keep it."""
    path = tiny_gguf(tmp_path / "tiny.gguf", kind)
    source = ModelSource(SourceKind.GGUF, path, "tiny")
    found = inspected(path)
    loaded = load_model(source).description
    expected = replace(loaded, model_id=path.name, eos_token_ids=frozenset(), created_unix_s=0)
    assert found.description == expected
    assert (found.stored_as is not None) == kind.startswith("Q")


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "qwen3_next", "lfm2", "falcon_h1", "mamba", "deepseek_v41"]
)
def test_tracing_agrees_with_running(name: str) -> None:
    """Kinds and costs of every sort of cache are the same, and nothing was computed for them."""
    model = tiny_architecture(name)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    traced = trace_model(model)
    assert mx.get_peak_memory() - before < 1 << 20
    assert not traced.note
    assert traced.cache == measure_model(tiny_architecture(name)).cache


def test_tracing_works_with_compilation_switched_off_and_leaves_it_so() -> None:
    """An engine on the CPU switches it off in its process, and mlx traces with it alone."""
    ran: list[int] = []

    def counted(tokens: mx.array) -> mx.array:
        ran.append(1)
        return tokens

    mx.disable_compile()
    assert trace_model(tiny_architecture("llama")).cache.layers
    compiled = mx.compile(counted)
    compiled(mx.zeros(1))
    compiled(mx.zeros(1))
    assert len(ran) == 2  # a compiled function is called once


def test_a_model_that_computes_while_it_runs_is_counted_from_its_first_layer() -> None:
    """Dbrx reads its router's choice in every layer; the note says so, and the costs are right."""
    traced = trace_model(tiny_architecture("dbrx"))
    assert "computes while it runs" in traced.note
    assert traced.cache == measure_model(tiny_architecture("dbrx")).cache


def test_tracing_fails_when_no_layer_shows_a_cost() -> None:
    """A model that fails before it has filled a cache of each class is an error."""
    with pytest.raises(ModelArchitectureError, match="does not work here"):
        trace_model(Reader([KVCache(), ArraysCache(1)]))


def test_inspection_computes_no_weight(tmp_path: Path) -> None:
    """A model of 141 GB takes next to no memory and about a second."""
    path = write_header_checkpoint(tmp_path / "large")
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = inspected(path)
    assert mx.get_peak_memory() - before < 16 << 20
    assert found.stored_bytes == 141_107_412_992
    assert found.description.cache.bytes_per_token == 2 * 80 * 8 * 128 * 2


def test_quantisation_is_reported_as_stored(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode, bits and group come from the configuration; what memory would hold is told apart."""
    quantised = quantised_copy(tiny, mode="affine", bits=4, group_size=32)
    if native_kernels() is not None:
        kept = inspected(quantised)
        assert kept.description.quantization is not None
        assert kept.description.weights_bytes < 0.5 * inspected(tiny.path).description.weights_bytes
        assert kept.description.dtype == "float32"
    without_kernels(monkeypatch)
    found = inspected(quantised)
    assert str(found.stored_as) == "affine 4-bit, group 32"
    assert found.description.quantization is None
    assert found.description.weights_bytes == inspected(tiny.path).description.weights_bytes
    assert inspected(tiny.path).stored_as is None


@pytest.mark.skipif(native_kernels() is None, reason="make setup has found no compiler")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_native"),
    [("auto", 16, True), ("float32", 16, True), ("float16", 16, False), ("auto", 8, False)],
)
def test_model_is_native_when_machds_kernels_compute_all_of_it(
    tiny: TinyLlama, dtype: str, head_dim: int, *, is_native: bool
) -> None:
    """Inspecting and loading agree; a 16-bit dtype that is named and other heads leave products or attention to mlx."""
    tiny.change_config(
        head_dim=head_dim,
        num_attention_heads=64 // head_dim,
        num_key_value_heads=32 // head_dim,
    )
    assert inspected(tiny.path, dtype=dtype).description.is_native is is_native
    assert load_model(tiny.source, dtype=dtype).description.is_native is is_native


def test_model_is_not_native_without_machds_kernels(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then mlx computes everything."""
    without_kernels(monkeypatch)
    assert not inspected(tiny.path).description.is_native
    assert not load_model(tiny.source).description.is_native


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32)])
def test_quantisation_mode_is_reported(tiny: TinyLlama, mode: str, bits: int, group: int) -> None:
    """The microscaling formats are told from affine packing."""
    found = inspected(quantised_copy(tiny, mode=mode, bits=bits, group_size=group))
    assert found.stored_as is not None
    assert (found.stored_as.mode, found.stored_as.bits) == (mode, bits)


def test_native_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode counts if its product is right; one that raises or is wrong does not."""
    assert native_modes()["affine"]
    real = mx.quantized_matmul

    def faulty(*args: Any, **kwargs: Any) -> mx.array:
        mode = kwargs["mode"]
        if mode == "mxfp4":
            raise ValueError(mode)
        product = real(*args, **kwargs)
        return product + 1 if mode == "nvfp4" else product

    monkeypatch.setattr(mx, "quantized_matmul", faulty)
    assert native_modes() == {"affine": True, "mxfp4": False, "nvfp4": False, "mxfp8": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1e\\+09"),
        ({"num_hidden_layers": "two"}, "do not fit"),
        ({"num_hidden_layers": -1}, "do not fit"),
        ({"num_hidden_layers": 1}, "do not fit"),
        ({"num_hidden_layers": 1e400}, "infinitely many"),
        ({"num_hidden_layers": 10**4000}, "infinitely many"),
        ({"num_hidden_layers": None}, "do not fit"),
        ({"hidden_size": 0}, "do not fit"),
        ({"hidden_size": "64"}, "do not fit"),
        ({"hidden_size": -64}, "do not fit"),
        ({"hidden_size": 10**12}, "do not fit"),
        ({"num_attention_heads": 0}, "do not fit"),
        ({"num_key_value_heads": 10**9}, "no layer has more"),
        ({"intermediate_size": 2**31 - 1}, "do not fit"),
        ({"vocab_size": 10**9}, "do not fit"),
        ({"rope_scaling": "none"}, "do not fit"),
        ({"rms_norm_eps": None}, "do not fit"),
        ({"quantization": 7}, "do not fit"),
        ({"quantization_config": {"quant_method": "gptq"}}, "do not fit"),
        ({"model_type": "no_such_thing"}, "no such architecture"),
        ({"model_type": "../../etc"}, "no such architecture"),
        ({"model_type": 5}, "no model_type"),
        ({"model_type": "x" * 100_000}, "model_type of 100,000 characters"),
        ({"max_position_embeddings": 10**400}, "absurd"),
        ({"max_position_embeddings": 2**53 + 1}, "absurd"),
    ],
)
def test_absurd_configuration_is_named_in_the_error(
    tiny: TinyLlama, changes: dict[str, object], words: str
) -> None:
    """Whatever a field holds, a model error says what is wrong, and not that it took too long."""
    tiny.change_config(**changes)
    with pytest.raises((ModelFormatError, ModelArchitectureError), match=words):
        inspected(tiny.path)


def test_a_missing_field_is_an_error(tiny: TinyLlama) -> None:
    """A configuration without a field that the architecture needs names what is missing."""
    tiny.write_json("config.json", {k: v for k, v in CONFIG.items() if k != "hidden_size"})
    with pytest.raises(ModelFormatError, match="hidden_size"):
        inspected(tiny.path)


def test_missing_or_broken_file_is_an_error(tiny: TinyLlama) -> None:
    """A truncated header, tokenizer files that are no JSON, none, no model at all."""
    (tiny.path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        inspected(tiny.path)
    (tiny.path / "tokenizer.json").unlink()
    (tiny.path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="no tokenizer files"):
        inspected(tiny.path)
    weights = tiny.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelFormatError, match="header is longer"):
        inspected(tiny.path)
    (tiny.path / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        inspected(tiny.path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_without_end_is_not_read_to_its_end(tiny: TinyLlama, name: str) -> None:
    """JSON files are read up to a size that no real one has."""
    (tiny.path / name).write_bytes(b" " * (129 << 20))
    with pytest.raises(ModelFormatError, match="is larger than"):
        inspected(tiny.path)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ],
)
@pytest.mark.parametrize("read", [inspect_model, load_model])
def test_a_pipe_is_not_waited_for(tiny: TinyLlama, name: str, read: Callable[..., object]) -> None:
    """A file that is not regular is an error at once, in inspection and loading."""
    file = tiny.path / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(ModelFormatError, match=f"{name} is not a regular file"):
        read(tiny.source)


@pytest.mark.parametrize("name", ["plamo3", "phi3small"])
def test_inspection_repairs_a_model_as_loading_does(tmp_path: Path, name: str) -> None:
    """Its caches are those that it is served with: a mended model may make others."""
    path = tmp_path / name
    write_header_checkpoint(path, tensors={})
    config = tomllib.loads((CONFIGURATIONS / f"{name}.toml").read_text("utf-8"))["config"]
    (path / "config.json").write_text(json.dumps({"model_type": name, **config}))
    (path / "model.safetensors.index.json").unlink()
    flat = tree_flatten(tiny_architecture(name).parameters())
    mx.save_safetensors(str(path / "model.safetensors"), dict(flat), {"format": "mlx"})
    loaded = load_model(ModelSource(SourceKind.DIRECTORY, path, name)).description
    assert inspected(path).description.cache == loaded.cache


def test_a_tokenizer_that_serve_cannot_build_is_found(tiny: TinyLlama) -> None:
    """Merges of tokens that are not there: JSON, but no tokenizer."""
    content = json.loads((tiny.path / "tokenizer.json").read_text("utf-8"))
    content["model"]["merges"].append(["never", "seen"])
    tiny.write_json("tokenizer.json", content)
    for read in (inspect_model, load_model):
        with pytest.raises(ModelFormatError, match="tokenizer"):
            read(tiny.source)


def test_a_model_among_others_whose_classes_fail_is_named(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of mlx-lm's classes is an error of the files before memory is asked for, as it is when the model is checked."""

    def fail(_model: Module) -> None:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr("machd.engine.loading.inspection.trace_model", fail)
    asked = list[MemoryNeeds]()
    with pytest.raises(
        ModelFormatError, match="do not fit together: TypeError: unexpected keyword"
    ):
        load_model(tiny.source, share=MemoryShare(1 << 40, asked.append))
    assert not asked


def test_needs_among_others_are_those_of_a_check(tiny: TinyLlama) -> None:
    """What is reserved for a model that takes text only; its KV budget is set elsewhere."""
    asked = list[MemoryNeeds]()
    load_model(tiny.source, share=MemoryShare(1 << 40, asked.append))
    found = inspected(tiny.path)
    (needs,) = asked
    assert (needs.weights_bytes, needs.working_bytes, needs.kv_budget_bytes) == (
        found.description.weights_bytes, found.working_bytes, 0,
    )  # fmt: skip


def test_tokenizer_that_was_not_built_is_noted(tiny: TinyLlama) -> None:
    """A note says that a tokenizer of another kind was not checked."""
    assert not inspected(tiny.path).notes
    (tiny.path / "tokenizer.json").rename(tiny.path / "tokenizer.model")
    assert any("no tokenizer.json" in note for note in inspected(tiny.path).notes)


def test_a_gguf_tokenizer_that_serve_cannot_build_is_found(tmp_path: Path) -> None:
    """A kind that machd does not read is refused by both, with the same words."""
    metadata = llama_metadata(tokenizer__ggml__model="bert")
    path = tiny_gguf(tmp_path / "tiny.gguf", "F16", metadata)
    for read in (inspect_model, load_model):
        with pytest.raises(ModelFormatError, match="tokenizer bert is not supported"):
            read(ModelSource(SourceKind.GGUF, path, "tiny"))


def test_long_text_of_a_file_is_shortened(tiny: TinyLlama) -> None:
    """No message and no row is as long as a text in a file."""
    long = "x" * 100_000
    for changes in ({"model_type": long}, {"model_file": long}):
        tiny.change_config(**changes)
        for read in (inspect_model, load_model):
            with pytest.raises((ModelFormatError, ModelCodeError)) as caught:
                read(tiny.source)
            assert len(str(caught.value)) < 500
    tiny.change_config()
    tiny.write_json("tokenizer_config.json", {"tool_parser_type": long})
    assert inspected(tiny.path).template.tool_format is None
    tiny.write_json("model.safetensors.index.json", {"weight_map": {"a": long}})
    with pytest.raises(ModelNotFoundError) as missing:
        inspected(tiny.path)
    assert len(str(missing.value)) < 500


def test_no_code_of_the_checkpoint_runs(tiny: TinyLlama, tmp_path: Path) -> None:
    """A model of its own is refused unrun; a tokenizer of its own is named and left alone."""
    witness = tmp_path / "ran"
    code = f"open({str(witness)!r}, 'w')\nModel = ModelArgs = None\n"
    (tiny.path / "own.py").write_text(code, encoding="utf-8")
    tiny.change_config(auto_map={"AutoModel": "own.Model", "AutoTokenizer": "own.Model"})
    assert any("auto_map" in note for note in inspected(tiny.path).notes)
    tiny.change_config(model_file="own.py")
    with pytest.raises(ModelCodeError, match="never run"):
        inspected(tiny.path)
    assert not witness.exists()


def test_every_number_of_layers_is_compared(tiny: TinyLlama) -> None:
    """The guard looks into nested configurations, and lets a real one pass."""
    tiny.change_config(text_config={"n_layers": 10**9})
    with pytest.raises(ModelFormatError, match="n_layers"):
        inspected(tiny.path)
    tiny.change_config(text_config={"n_layers": 2})
    assert inspected(tiny.path).description.architecture == "llama"


class Reader(Module):
    """A model that looks at what it computes, before its first layer."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed = Embedding(11, 6)
        self._given = caches

    def make_cache(self) -> list[Any]:
        """The caches under test."""
        return self._given

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Read a number before any cache is filled."""
        assert len(cache) == len(self._given)
        x: mx.array = self.embed(tokens)
        x.sum().item()
        return x


def tiny_architecture(name: str) -> Module:
    """A tiny model of one of mlx-lm's architectures, as mlx-lm initialises it."""
    config = tomllib.loads((CONFIGURATIONS / f"{name}.toml").read_text("utf-8"))["config"]
    module = import_architecture(name)
    model: Module = module.Model(module.ModelArgs.from_dict({"model_type": name, **config}))
    model.eval()
    return model


def quantised_copy(tiny: TinyLlama, **how: Any) -> Path:
    """The tiny llama with its projections packed, as ``mlx_lm.convert`` saves it."""
    arrays = mx.load(str(tiny.path / "model.safetensors"))
    assert isinstance(arrays, dict)
    packed: dict[str, mx.array] = {}
    for name, array in arrays.items():
        stem = name.removesuffix(".weight")
        if "_proj" not in name:
            packed[name] = array
            continue
        parts = mx.quantize(array, **how)
        packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=False))
    path = tiny.path.with_name("packed")
    copied = replace(tiny, path=path)
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), packed, {"format": "mlx"})
    copied.write_json("config.json", {**CONFIG, "quantization": how})
    copied.write_tokenizer()
    return path
