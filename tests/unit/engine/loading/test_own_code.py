"""Python code of a checkpoint runs nowhere unless the settings trust it."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from support.checkpoints.kept_family import write_kept_family
from support.checkpoints.planted_code import (
    NAMED_PLACES,
    OTHER_PLACES,
    TEMPLATE_ESCAPES,
    plant,
)
from unit.engine.tiny_llama import TinyLlama

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.backend.own_code import (
    OwnCode,
    auto_map_files,
    closed_to_own_code,
    is_runnable,
)
from machd.engine.loading.formats import directory
from machd.engine.loading.formats.checkpoint import read_directory
from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import load_model
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.loading.tokenizer_files import directory_tokenizer
from machd.engine.vision.families import COMPARED_FAMILIES
from machd.engine.vision.mlx_vlm_import import import_family
from machd.errors import InvalidRequestError, ModelCodeError, ModelError, TemplateLimitError

import_mlx_lm()


@pytest.fixture(name="vision_checkpoint", scope="module")
def _vision_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision") / "qwen2_vl"
    return write_kept_family("qwen2_vl", path)


@pytest.fixture(name="witness")
def _witness(tmp_path: Path) -> Path:
    """The file that planted code creates."""
    return tmp_path / "ran"


def _source(path: Path) -> ModelSource:
    return ModelSource(SourceKind.DIRECTORY, path, path.name)


@pytest.mark.parametrize("place", [*NAMED_PLACES, *OTHER_PLACES])
def test_text_models_tokenizer_runs_no_planted_code(
    tiny: TinyLlama, witness: Path, place: str
) -> None:
    """The tokenizer of a text model is made, and its template rendered, without code that a file names or holds."""
    plant(tiny.path, witness, {**NAMED_PLACES, **OTHER_PLACES}[place])
    checkpoint = read_directory(tiny.path, OwnCode.REFUSED)
    with contextlib.suppress(ModelError):
        tokenizer = directory_tokenizer(checkpoint, None, trust_remote_code=False)
        for number in range(TEMPLATE_ESCAPES if "template" in place else 0):
            with contextlib.suppress(InvalidRequestError, TemplateLimitError):
                tokenizer.render_chat([{"role": "user", "content": str(number)}])
        tokenizer.close()
    assert not witness.exists()


def test_text_model_is_served_beside_code_that_it_does_not_need(
    tiny: TinyLlama, witness: Path
) -> None:
    """Serve and check take a text model whose files name PyTorch classes and lie beside pickles, and run none of it."""
    unneeded = (NAMED_PLACES["config.json"], NAMED_PLACES["preprocessor_config.json"])
    plant(tiny.path, witness, *unneeded, OTHER_PLACES["pickled files"])
    assert any("auto_map" in one for one in inspect_model(tiny.source).notes)
    load_model(tiny.source).tokenizer.close()
    assert not witness.exists()


@pytest.mark.parametrize("place", NAMED_PLACES)
def test_vision_model_that_names_its_own_code_is_refused_unseen(
    vision_checkpoint: Path,
    tmp_path: Path,
    witness: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve and check refuse it by name, before mlx-vlm or transformers is asked for anything of it."""

    def seen(*_: object, **__: object) -> None:
        pytest.fail("a library has seen the checkpoint")

    monkeypatch.setattr(directory, "import_family", seen)
    monkeypatch.setattr(directory, "ProcessorFiles", seen)
    monkeypatch.setattr("mlx_lm.tokenizer_utils.load", seen)
    path = shutil.copytree(vision_checkpoint, tmp_path / "model")
    plant(path, witness, NAMED_PLACES[place])
    for read in (inspect_model, load_model):
        with pytest.raises(ModelCodeError, match="--model-trust-remote-code"):
            read(_source(path))
    assert not witness.exists()


def test_vision_model_runs_no_code_that_nothing_names(
    vision_checkpoint: Path, tmp_path: Path, witness: Path
) -> None:
    """Pickled weights, templates and stray modules beside a vision model are data, and it is served."""
    path = shutil.copytree(vision_checkpoint, tmp_path / "model")
    places = [one for name, one in OTHER_PLACES.items() if name != "mlx-lm's modules"]
    plant(path, witness, *places)
    loaded = load_model(_source(path))
    assert loaded.vision is not None
    loaded.vision.close()
    assert not witness.exists()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one in {"internvl_chat", "qwen2_vl"} else pytest.mark.long)
        for one in sorted(COMPARED_FAMILIES)
    ],
)
def test_processor_of_a_family_imports_no_code_of_the_checkpoint(
    family: str, tmp_path: Path, witness: Path
) -> None:
    """Behind the refusal, no family's processor runs planted code, whatever mlx-vlm passes to transformers."""
    path = write_kept_family(family, tmp_path / family)
    plant(path, witness, *NAMED_PLACES.values())
    with contextlib.suppress(Exception):
        import_family(path).load_processor()
    assert not witness.exists()


def test_processor_needs_no_python_files_that_were_not_fetched(tmp_path: Path) -> None:
    """A snapshot whose Python files were not fetched names code that cannot run, and needs none of it."""
    path = write_kept_family("internvl_chat", tmp_path / "internvl_chat")
    names = {
        "config.json": ("AutoConfig", "AutoModel"),
        "preprocessor_config.json": ("AutoProcessor",),
    }
    for file, classes in names.items():
        value = json.loads((path / file).read_text("utf-8"))
        value["auto_map"] = dict.fromkeys(classes, "modeling_internvl.InternVL")
        (path / file).write_text(json.dumps(value), encoding="utf-8")
    checkpoint = read_directory(path, OwnCode.REFUSED)
    assert len(checkpoint.code_files) == len(names)
    assert type(import_family(path).load_processor()).__name__ == "InternVLChatProcessor"


def test_trusted_code_of_a_processor_runs(
    vision_checkpoint: Path, tmp_path: Path, witness: Path
) -> None:
    """With the setting, the classes that the checkpoint names are imported."""
    path = shutil.copytree(vision_checkpoint, tmp_path / "model")
    plant(path, witness, NAMED_PLACES["tokenizer_config.json"])
    with contextlib.suppress(Exception):
        import_family(path).load_processor(trust_remote_code=True)
    assert witness.exists()


def test_door_of_transformers_is_closed_only_inside(tiny: TinyLlama, witness: Path) -> None:
    """A library that trusts a checkpoint by itself gets an error, and afterwards what it had before."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - after import_mlx_lm()

    plant(tiny.path, witness, NAMED_PLACES["tokenizer_config.json"])
    with closed_to_own_code(), pytest.raises(ModelCodeError):
        AutoTokenizer.from_pretrained(tiny.path, trust_remote_code=True)
    assert not witness.exists()
    AutoTokenizer.from_pretrained(tiny.path, trust_remote_code=True)
    assert witness.exists()


def test_files_that_name_no_class_are_not_parsed(tmp_path: Path) -> None:
    """Nested lists take fifty times their size as objects; only what spells the key is read as JSON, and not much of it."""
    (tmp_path / "large.json").write_bytes(b"[" + b"[],[]," * 2_000_000 + b"[]]")
    assert auto_map_files(tmp_path) == {}
    named = b'{"a\\u0075to_map": {"AutoConfig": "evil.P"}, "x": [%s0]}'
    (tmp_path / "small.json").write_bytes(named % b"")
    assert auto_map_files(tmp_path) == {"small.json": ["evil.P"]}
    (tmp_path / "small.json").write_bytes(named % (b"[]," * 3_000_000))
    (classes,) = auto_map_files(tmp_path).values()
    (tmp_path / "evil.py").touch()
    assert is_runnable(tmp_path, classes), "what nobody has read may name anything"
