"""A directory becomes a model, or a message that names the file and the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from support.engines.native import without_kernels
from unit.engine.tiny_llama import CONFIG, TinyLlama, largest

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.kv.formats import kv_format_named
from machd.engine.loading.formats import checkpoint
from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import LoadedModel, load_model
from machd.errors import (
    ChatTemplateMissingError,
    MachdError,
    ModelArchitectureError,
    ModelCodeError,
    ModelFormatError,
    ModelMemoryError,
    ModelNotFoundError,
    SettingsError,
)

import_mlx_lm()

from mlx_lm.models.cache import RotatingKVCache  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_template_process")

GIB = 1024**3


class Recorder:
    """A record of progress."""

    def __init__(self) -> None:
        self.totals: dict[str, int | None] = {}
        self.steps: list[int] = []

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Record a stage."""
        self.totals[name] = total_bytes

    def advance(self, done_bytes: int) -> None:
        """Record bytes."""
        self.steps.append(done_bytes)


def _quantised(path: Path) -> TinyLlama:
    """The tiny model with 4-bit weights, as ``mlx_lm.convert`` would write it."""
    tiny = TinyLlama.save(path, dtype=mx.bfloat16)
    model = Model(ModelArgs.from_dict(CONFIG))
    model.load_weights(str(path / "model.safetensors"))
    quantize(model, group_size=32, bits=4)
    arrays = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
    tiny.change_config(quantization={"group_size": 32, "bits": 4})
    return tiny


def _memory(monkeypatch: pytest.MonkeyPatch, available_bytes: int) -> None:
    monkeypatch.setattr(
        "machd.engine.loading.placing.whole.available_memory_bytes", lambda: available_bytes
    )


def _logits(loaded: LoadedModel) -> mx.array:
    logits: mx.array = loaded.model(mx.array([[5, 80, 200, 33]]))
    return logits.astype(mx.float32)


def test_description_agrees_with_the_files(tiny: TinyLlama) -> None:
    """Every field comes from the files or from the live model."""
    description = load_model(tiny.source, blas="OpenBLAS 0.3.21").description
    assert description.model_id == "tiny-llama"
    assert description.architecture == "llama"
    assert description.context_tokens == 512
    assert description.vocabulary_tokens == CONFIG["vocab_size"]
    assert description.dtype == "float32"
    assert description.quantization is None
    assert description.weights_bytes == 4 * description.parameters
    assert description.eos_token_ids == {2}
    assert description.cache.class_counts == {"KVCache": 2}
    # Two layers, keys and values, two heads of sixteen float32.
    assert description.cache.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert description.cache.bytes_per_sequence == 0
    modified_s = (tiny.path / "model.safetensors").stat().st_mtime
    assert description.created_unix_s == int(modified_s)


def test_progress_counts_every_stored_byte(tiny: TinyLlama) -> None:
    """The bar ends where it said it would, and moves more than once."""
    progress = Recorder()
    load_model(tiny.source, progress=progress)
    assert sum(progress.steps) == progress.totals["loading the weights"]
    assert len(progress.steps) > 10


@pytest.mark.parametrize("stored", [mx.float16, mx.bfloat16])
def test_the_cpu_computes_in_float32_when_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: mx.Dtype
) -> None:
    """Auto widens where 60 % of the memory suffices, and keeps what is stored elsewhere."""
    tiny = TinyLlama.save(tmp_path / "half", dtype=stored)
    monkeypatch.setattr("machd.engine.loading.placing.precision.backend_name", lambda: "cpu")
    assert load_model(tiny.source).description.dtype == "float32"
    needed_bytes = load_model(tiny.source).description.weights_bytes
    _memory(monkeypatch, int(needed_bytes / 0.6) - 100)
    name = str(stored).removeprefix("mlx.core.")
    assert load_model(tiny.source).description.dtype == name
    _memory(monkeypatch, GIB)
    monkeypatch.setattr("machd.engine.loading.placing.precision.backend_name", lambda: "metal")
    assert load_model(tiny.source).description.dtype == name


def test_quantised_weights_are_widened_without_changing_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float32 model answers as the packed one, up to the packed one's rounding."""
    tiny = _quantised(tmp_path / "q4")
    plain = load_model(tiny.source, dtype="float32")
    a = _logits(plain)
    without_kernels(monkeypatch)
    _memory(monkeypatch, 400_000)
    packed = load_model(tiny.source)
    assert plain.description.quantization is None
    assert plain.description.dtype == "float32"
    assert packed.description.quantization == "affine 4-bit, group 32"
    assert plain.description.parameters == packed.description.parameters
    assert largest(a - _logits(packed)) < 0.05 * largest(a)


def test_named_dtype_is_used(tiny: TinyLlama) -> None:
    """Every floating-point weight gets it."""
    loaded = load_model(tiny.source, dtype="bfloat16")
    assert loaded.description.dtype == "bfloat16"
    assert loaded.description.weights_bytes == 2 * loaded.description.parameters


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sizes are in the message, in GiB, and no weight was touched."""
    _memory(monkeypatch, 1000)
    monkeypatch.setattr("mlx_lm.utils.load_model", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(ModelMemoryError, match=r"0\.00 GiB and 0\.00 GiB"):
        load_model(tiny.source)


def test_a_dtype_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dtype that the settings name is not replaced in silence."""
    tiny = TinyLlama.save(tmp_path / "half", dtype=mx.float16)
    _memory(monkeypatch, (tiny.path / "model.safetensors").stat().st_size + 10_000)
    with pytest.raises(ModelMemoryError, match="in float32"):
        load_model(tiny.source, dtype="float32")


def _truncate(tiny: TinyLlama) -> None:
    path = tiny.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _break_header(tiny: TinyLlama) -> None:
    path = tiny.path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"{{{{" + data[12:])


def _foreign_header(tiny: TinyLlama) -> None:
    path = tiny.path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"model.norm.weight"', b'"model.norm.weigh\xff"'))


def _huge_header(tiny: TinyLlama) -> None:
    (tiny.path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")


def _lying_shape(tiny: TinyLlama) -> None:
    entry = {"dtype": "F32", "shape": [1 << 40, 4], "data_offsets": [0, 16]}
    text = json.dumps({"model.norm.weight": entry}).encode()
    path = tiny.path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def _infinite_shape(tiny: TinyLlama) -> None:
    text = b'{"model.norm.weight":{"dtype":"F32","shape":[1e400],"data_offsets":[0,16]}}'
    path = tiny.path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def _other_shape(tiny: TinyLlama) -> None:
    tiny.change_config(intermediate_size=100)


def _missing_weight(tiny: TinyLlama) -> None:
    tiny.change_config(num_hidden_layers=3)


def _no_weights(tiny: TinyLlama) -> None:
    (tiny.path / "model.safetensors").unlink()


def _dangling_link(tiny: TinyLlama) -> None:
    (tiny.path / "model.safetensors").unlink()
    (tiny.path / "model.safetensors").symlink_to(tiny.path / "gone")


def _pickled(tiny: TinyLlama) -> None:
    (tiny.path / "model.safetensors").rename(tiny.path / "pytorch_model.bin")


def _missing_shard(tiny: TinyLlama) -> None:
    tiny.write_json(
        "model.safetensors.index.json",
        {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}},
    )


def _broken_config(tiny: TinyLlama) -> None:
    (tiny.path / "config.json").write_text('{"model_type": "llama",')


def _incomplete_config(tiny: TinyLlama) -> None:
    tiny.write_json("config.json", {"model_type": "llama"})


def _no_model_type(tiny: TinyLlama) -> None:
    tiny.write_json("config.json", {"hidden_size": 64})


def _unknown_type(tiny: TinyLlama) -> None:
    tiny.change_config(model_type="flux_capacitor")


def _own_code(tiny: TinyLlama) -> None:
    (tiny.path / "arch.py").write_text("raise SystemExit('code of the checkpoint ran')")
    tiny.change_config(model_file="arch.py")


def _own_tokenizer(tiny: TinyLlama) -> None:
    (tiny.path / "tokenizer.json").unlink()
    tiny.write_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "MyTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_my.MyTokenizer", None]},
        },
    )
    (tiny.path / "tokenization_my.py").write_text("raise SystemExit('tokenizer code ran')")


def _no_tokenizer(tiny: TinyLlama) -> None:
    (tiny.path / "tokenizer.json").unlink()
    (tiny.path / "tokenizer_config.json").unlink()


def _no_template(tiny: TinyLlama) -> None:
    (tiny.path / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("damage", "expected", "words"),
    [
        (_truncate, ModelFormatError, r"model\.safetensors.*truncated"),
        (_break_header, ModelFormatError, r"model\.safetensors.*not JSON"),
        (_foreign_header, ModelFormatError, r"model\.safetensors.*not JSON"),
        (_huge_header, ModelFormatError, r"model\.safetensors.*longer than the file"),
        (_lying_shape, ModelFormatError, r"model\.norm\.weight do not agree"),
        (_infinite_shape, ModelFormatError, r"entry for model\.norm\.weight makes no sense"),
        (_other_shape, ModelFormatError, "do not fit together"),
        (_missing_weight, ModelFormatError, "do not fit together"),
        (_no_weights, ModelNotFoundError, r"model\*\.safetensors"),
        (_dangling_link, ModelNotFoundError, r"cannot read model\.safetensors"),
        (_pickled, ModelFormatError, r"pytorch_model\.bin"),
        (_missing_shard, ModelNotFoundError, "model-00002-of-00002.safetensors is missing"),
        (lambda one: (one.path / "config.json").unlink(), ModelNotFoundError, r"config\.json"),
        (_broken_config, ModelFormatError, r"config\.json is not valid JSON"),
        (_incomplete_config, ModelFormatError, r"config\.json"),
        (_no_model_type, ModelFormatError, "model_type"),
        (_unknown_type, ModelArchitectureError, "flux_capacitor"),
        (lambda one: one.change_config(model_type="..evil"), ModelArchitectureError, "evil"),
        (lambda one: one.change_config(model_type="cache"), ModelArchitectureError, "cache"),
        (_own_code, ModelCodeError, r"arch\.py.*--model-trust-remote-code"),
        (_own_tokenizer, ModelCodeError, r"tokenizer_config\.json.*--model-trust-remote-code"),
        (_no_tokenizer, ModelNotFoundError, r"tokenizer\.json"),
        (lambda one: (one.path / "tokenizer.json").write_text("{"), ModelFormatError, "tokenizer"),
        (_no_template, ChatTemplateMissingError, "--model-chat-template none"),
    ],
)
def test_damaged_checkpoint_is_named_in_the_error(
    tiny: TinyLlama,
    damage: Callable[[TinyLlama], object],
    expected: type[MachdError],
    words: str,
) -> None:
    """Each way a checkpoint can be wrong has its class, and its message names the culprit."""
    damage(tiny)
    with pytest.raises(expected, match=words) as caught:
        load_model(tiny.source)
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1e\\+09, and the weights are"),
        ({"num_hidden_layers": 1e400}, "infinitely many"),
        ({"text_config": {"n_layers": 10**9}}, "n_layers"),
        ({"num_local_experts": 10**9}, "num_local_experts = 1e\\+09, and no layer has"),
        ({"num_attention_heads": 10**9}, "num_attention_heads"),
        ({"hidden_size": 10**12}, "do not fit"),
        ({"intermediate_size": 2**31 - 1}, "do not fit"),
        ({"vocab_size": 10**9}, "do not fit"),
    ],
)
def test_absurd_configuration_is_refused_before_a_model_is_built(
    tiny: TinyLlama, changes: dict[str, object], words: str
) -> None:
    """Loops of mlx-lm over a number of the configuration's never begin: a load cannot be stopped."""
    tiny.change_config(**changes)

    with pytest.raises(ModelFormatError, match=words):
        load_model(tiny.source)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": float("nan")}, "NaN is no number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = infinitely many"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05"),
        ({"rope_theta": 0.0}, "rope_theta = 0,"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor = 0,"),
        ({"max_position_embeddings": 2**60}, "2\\^53 tokens"),
        ({"text_config": {"rope_theta": 0}}, "rope_theta = 0,"),
    ],
)
def test_number_that_makes_every_token_nan_is_refused_by_check_and_loader(
    tiny: TinyLlama, changes: dict[str, object], words: str
) -> None:
    """Such a model used to start, and then to fail each request."""
    tiny.change_config(**changes)
    for read in (inspect_model, load_model):
        with pytest.raises(ModelFormatError, match=words):
            read(tiny.source)


def test_model_that_computes_no_number_is_refused(tiny: TinyLlama) -> None:
    """A damaged weight that reaches every token is noticed by the first short run."""
    file = str(tiny.path / "model.safetensors")
    arrays = mx.load(file)
    assert isinstance(arrays, dict)
    arrays["model.norm.weight"] = mx.full(arrays["model.norm.weight"].shape, mx.nan)
    mx.save_safetensors(file, arrays, {"format": "mlx"})
    with pytest.raises(ModelFormatError, match="computes NaN for every token"):
        load_model(tiny.source)


def test_checkpoint_of_too_many_tensors_is_refused(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of all files together, and is reached before a name is looked at."""
    shutil.copy(tiny.path / "model.safetensors", tiny.path / "model-2.safetensors")
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 21)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors.*more than"):
        load_model(tiny.source)


def test_trusted_code_runs(tiny: TinyLlama) -> None:
    """With the switch, and only with it, the checkpoint's own architecture is used."""
    (tiny.path / "arch.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    tiny.change_config(model_file="arch.py", model_type="mine")
    loaded = load_model(tiny.source, trust_remote_code=True)
    assert loaded.description.architecture == "llama"


def test_an_auto_map_that_mlx_lm_does_not_need_is_no_obstacle(tiny: TinyLlama) -> None:
    """Many converted models still name PyTorch classes that are never loaded."""
    tiny.change_config(auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    assert load_model(tiny.source).description.architecture == "llama"


def test_a_template_of_the_users_replaces_the_models(tiny: TinyLlama, tmp_path: Path) -> None:
    """``--model-chat-template FILE`` wins over the checkpoint's."""
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_model(tiny.source, chat_template=str(path)).tokenizer
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(SettingsError, match=r"model\.chat_template"):
        load_model(tiny.source, chat_template=str(tmp_path / "absent.jinja"))


def test_the_context_is_never_stretched_in_silence(tiny: TinyLlama) -> None:
    """Fewer positions are taken as asked; more than the model has are an error."""
    loaded = load_model(tiny.source, max_context_tokens=100)
    assert loaded.description.context_tokens == 100
    with pytest.raises(SettingsError, match=r"model\.max_context_tokens: the model has 512"):
        load_model(tiny.source, max_context_tokens=513)


def test_bytes_per_token_are_those_of_the_kv_format(tiny: TinyLlama) -> None:
    """The budget reckons with the size of keys and values in the KV format."""
    plain = load_model(tiny.source).description.cache
    small = load_model(tiny.source, kv_format=kv_format_named("affine8")).description.cache

    assert small.layers == plain.layers
    assert small.bytes_per_token * 1.8 < plain.bytes_per_token


def test_a_model_without_a_cache_for_the_format_is_refused_before_it_is_read(
    tiny: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both settings are named, and what to do; nothing is silently kept in full size."""
    monkeypatch.setattr(Model, "make_cache", lambda _: [RotatingKVCache(8), RotatingKVCache(8)])
    progress = Recorder()

    with pytest.raises(SettingsError) as refused:
        load_model(tiny.source, kv_format=kv_format_named("affine8"), progress=progress)

    for words in ("cache.kv_quantization", "model.path", "sliding window", "to none"):
        assert words in refused.value.message
    assert "loading the weights" not in progress.totals
    assert refused.value.exit_code == 2


def test_kv_format_is_accepted_with_windows_beside_standard_caches(tiny: TinyLlama) -> None:
    """Standard caches are in the KV format, windows stay as they are."""
    tiny.change_config(layer_types=["sliding_attention", "full_attention"], sliding_window=8)

    loaded = load_model(tiny.source, kv_format=kv_format_named("turboquant"))

    assert loaded.kv_format.name == "turboquant"
