"""Whatever changes what a block of given tokens holds gives it another key."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from tiny_models import TinyKind, tiny_model

from machd.engine import open as opening
from machd.engine.kv.format import kv_format_named
from machd.engine.loading.loader import LoadedModel
from machd.engine.prefix_blocks import key as block_key_module
from machd.engine.prefix_blocks.key import block_key
from machd.engine.protocol.blocks import SaveBlock, SavedBlock, StoreBlock
from machd.engine.protocol.sampling import SamplingParams
from machd.engine.protocol.step import PrefillChunk, StepPlan
from machd.errors import ModelNotFoundError, SettingsError
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings

SAMPLED_BYTES = 64 << 10


@pytest.fixture(name="loaded")
def _loaded(tmp_path: Path) -> LoadedModel:
    """A model in mlx-lm's layout; its files are none, which the key does not know."""
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
    """Change a file that keeps its times."""
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
    """Each has the other's content; the times are alike from the start."""
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
def test_the_files_decide(loaded: LoadedModel, change: Callable[[LoadedModel], None]) -> None:
    """Weights, configuration and the model's own code."""
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
def test_the_description_decides(loaded: LoadedModel, changes: dict[str, object]) -> None:
    """How the model computes, for one from files and for one made in memory."""
    for model in (loaded, replace(loaded, weight_files=())):
        changed = replace(model, description=replace(model.description, **changes))  # type: ignore[arg-type]
        assert block_key(changed) != block_key(model)


def test_how_caches_are_kept_decides(loaded: LoadedModel) -> None:
    """Their format, and what they are."""
    names = get_args(CacheSettings.model_fields["kv_quantization"].annotation)
    keys = {block_key(replace(loaded, kv_format=kv_format_named(name))) for name in names}
    assert len(keys) == len(names) == 4
    facts = replace(loaded.description.cache, bytes_per_token=7)
    changed = replace(loaded, description=replace(loaded.description, cache=facts))
    assert block_key(changed) != block_key(loaded)


@pytest.mark.parametrize("distribution", ["mlx", "mlx-lm"])
def test_versions_decide(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    """Of what computes, and of the files."""
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


def test_the_rest_does_not(loaded: LoadedModel, tmp_path: Path) -> None:
    """Where the model lies, what it is called, how much of it may be used, and what is beside it."""
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


def test_models_in_memory_are_told_apart_by_name(loaded: LoadedModel) -> None:
    """There is nothing else to tell them apart by."""
    model = replace(loaded, weight_files=())
    other = replace(model, description=replace(model.description, model_id="other"))
    assert len({block_key(loaded), block_key(model), block_key(other)}) == 3
    assert len(block_key(model)) == 16


def test_files_that_are_gone(loaded: LoadedModel) -> None:
    """An error of the tree, which names the file."""
    loaded.weight_files[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"cannot read model-2\.safetensors"):
        block_key(loaded)


def test_an_engine_keeps_blocks_for_the_next_one(loaded: LoadedModel, tmp_path: Path) -> None:
    """Wired as a daemon does it: what one saves, the next finds, unless the model has changed."""
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
def test_no_directory_no_tier(cache: CacheSettings) -> None:
    """Nor where there is no prefix cache whose disk tier it would be."""
    assert opening._block_directory(Settings(cache=cache)) is None
