"""A change of anything that decides what a block of given tokens holds changes the key."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from support.engines.tiny_models import TinyKind, tiny_model

from machd.engine import open as opening
from machd.engine.kv.formats import kv_format_named
from machd.engine.loading.loader import LoadedModel
from machd.engine.prefix_blocks import key as block_key_module
from machd.engine.prefix_blocks.key import block_key
from machd.engine.protocol.blocks import SaveBlock, SavedBlock, StoreBlock
from machd.engine.protocol.step import PrefillChunk, StepPlan
from machd.errors import ModelNotFoundError, SettingsError
from machd.request.generation import SamplingParams
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings

SAMPLED_BYTES = 64 << 10


@pytest.fixture(name="loaded")
def _loaded(tmp_path: Path) -> LoadedModel:
    """A model in mlx-lm's layout; its files hold no weights, which the key does not notice."""
    directory = tmp_path / "model"
    directory.mkdir()
    files = tuple(directory / f"model-{n}.safetensors" for n in (1, 2))
    for n, file in enumerate(files):
        file.write_bytes(bytes([n]) * (3 * SAMPLED_BYTES))
    (directory / "config.json").write_text('{"rope_theta": 10000}')
    (directory / "modeling.py").write_text("scale = 1")
    (directory / "README.md").write_text("hello")
    return replace(tiny_model(TinyKind.STANDARD), weight_files=files)


def _rewritten(path: Path, content: bytes) -> None:
    """Change a file's content and keep its times."""
    facts = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _first_byte(loaded: LoadedModel) -> None:
    file = loaded.weight_files[1]
    _rewritten(file, b"x" + file.read_bytes()[1:])


def _last_byte(loaded: LoadedModel) -> None:
    file = loaded.weight_files[0]
    _rewritten(file, file.read_bytes()[:-1] + b"x")


def _size(loaded: LoadedModel) -> None:
    file = loaded.weight_files[0]
    _rewritten(file, file.read_bytes() + file.read_bytes()[-1:])


def _time(loaded: LoadedModel) -> None:
    facts = loaded.weight_files[0].stat()
    os.utime(loaded.weight_files[0], ns=(facts.st_atime_ns, facts.st_mtime_ns + 1000))


def _exchanged(loaded: LoadedModel) -> None:
    """Give each file the other's content; the times are alike from the start."""
    one, other = loaded.weight_files
    contents = one.read_bytes(), other.read_bytes()
    _rewritten(one, contents[1])
    _rewritten(other, contents[0])


def _configuration(loaded: LoadedModel) -> None:
    _rewritten(loaded.weight_files[0].with_name("config.json"), b'{"rope_theta": 20000}')


def _own_code(loaded: LoadedModel) -> None:
    _rewritten(loaded.weight_files[0].with_name("modeling.py"), b"scale = 2")


@pytest.mark.parametrize(
    "change",
    [_first_byte, _last_byte, _size, _time, _exchanged, _configuration, _own_code],
)
def test_key_depends_on_the_files(
    loaded: LoadedModel, change: Callable[[LoadedModel], None]
) -> None:
    """Weights, configuration and the model's own code decide."""
    before = block_key(loaded)
    assert block_key(loaded) == before
    change(loaded)
    assert block_key(loaded) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "another"},
        {"dtype": "bfloat16"},
        {"quantization": "affine 4-bit, group 64"},
        {"backend": "metal"},
        {"parameters": 1},
        {"weights_bytes": 1},
        {"vocabulary_tokens": 1},
    ],
)
def test_key_depends_on_the_description(loaded: LoadedModel, changes: dict[str, object]) -> None:
    """It decides for a model from files and for one made in memory."""
    for model in (loaded, replace(loaded, weight_files=())):
        changed = replace(model, description=replace(model.description, **changes))  # type: ignore[arg-type]
        assert block_key(changed) != block_key(model)


def test_key_depends_on_the_kv_format(loaded: LoadedModel) -> None:
    """The format and the facts about the caches decide."""
    names = get_args(CacheSettings.model_fields["kv_quantization"].annotation)
    keys = {block_key(replace(loaded, kv_format=kv_format_named(name))) for name in names}
    assert len(keys) == len(names) == 4
    facts = replace(loaded.description.cache, bytes_per_token=7)
    changed = replace(loaded, description=replace(loaded.description, cache=facts))
    assert block_key(changed) != block_key(loaded)


@pytest.mark.parametrize("distribution", ["mlx", "mlx-lm"])
def test_key_depends_on_versions(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    """The versions of mlx and mlx-lm and of the file format decide."""
    before = block_key(loaded)
    monkeypatch.setattr(
        block_key_module, "installed_version", lambda name: "9" if name == distribution else None
    )
    one = block_key(loaded)
    monkeypatch.setattr(
        block_key_module, "installed_version", lambda name: "8" if name == distribution else None
    )
    assert len({before, one, block_key(loaded)}) == 3
    monkeypatch.undo()
    monkeypatch.setattr(block_key_module, "BLOCK_VERSION", 99)
    assert block_key(loaded) != before


def test_key_does_not_depend_on_the_rest(loaded: LoadedModel, tmp_path: Path) -> None:
    """The model's place, name and limits, and other files beside it, do not decide."""
    before = block_key(loaded)
    description = replace(
        loaded.description,
        model_id="renamed",
        context_tokens=5,
        blas="another",
        created_unix_s=5,
        device_memory_bytes=5,
        block_key=b"set",
    )
    loaded.weight_files[0].with_name("README.md").write_text("more")
    shutil.move(loaded.weight_files[0].parent, tmp_path / "moved")
    files = tuple(tmp_path / "moved" / file.name for file in reversed(loaded.weight_files))
    assert block_key(replace(loaded, description=description, weight_files=files)) == before


def test_key_of_a_model_in_memory_depends_on_its_name(loaded: LoadedModel) -> None:
    """Such a model has nothing else to tell it apart by."""
    model = replace(loaded, weight_files=())
    other = replace(model, description=replace(model.description, model_id="other"))
    assert len({block_key(loaded), block_key(model), block_key(other)}) == 3
    assert len(block_key(model)) == 16


def test_missing_file_is_reported(loaded: LoadedModel) -> None:
    """The error names the file."""
    loaded.weight_files[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"cannot read model-2\.safetensors"):
        block_key(loaded)


def test_engine_keeps_blocks_for_the_next_one(loaded: LoadedModel, tmp_path: Path) -> None:
    """The next engine finds what one has saved, unless the model has changed."""
    directory = tmp_path / "blocks"
    settings = Settings(cache=CacheSettings(disk_dir=str(directory)))
    assert opening._block_directory(settings) == directory
    prompt = tuple(range(1, 9))
    saved = SavedBlock(b"d" * 16, b"p" * 16, 0, prompt, has_state=False, nbytes=1)
    engine = opening._engine(loaded, settings, directory)
    chunk = PrefillChunk(0, prompt, 0, False, SamplingParams(), 32)  # noqa: FBT003
    engine.run(StepPlan(prefill=(chunk,)))
    engine.run(StepPlan(blocks=(StoreBlock(1, 0, 0, 7), SaveBlock(1, saved))))
    with pytest.raises(SettingsError, match="another daemon"):
        opening._engine(loaded, settings, directory)
    engine.close()
    again = opening._engine(loaded, settings, directory)
    assert [one.digest for one in again.saved_blocks()] == [saved.digest]
    again.close()
    _configuration(loaded)
    other = opening._engine(loaded, settings, directory)
    assert other.saved_blocks() == ()
    other.close()


@pytest.mark.parametrize(
    "cache", [CacheSettings(), CacheSettings(disk_dir="/nowhere", prefix=False)]
)
def test_there_is_no_disk_tier_without_a_directory_or_a_prefix_cache(cache: CacheSettings) -> None:
    """A directory alone is not used."""
    assert opening._block_directory(Settings(cache=cache)) is None
