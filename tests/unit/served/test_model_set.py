"""Which models a daemon serves, and what each of them has of its own."""

from __future__ import annotations

from pathlib import Path

from machd.served.model_set import find_models, models_to_serve
from machd.settings.sources import SettingsSources


def _served(path: Path, text: str, **flags: object) -> dict[str, str | None]:
    """Directories of blocks by the models that settings name."""
    path.write_text(text)
    settings = SettingsSources(path, {}, flags).load().settings
    models = models_to_serve(settings, find_models(settings))
    return {one.name: one.settings.cache.disk_dir for one in models}


def test_models_with_one_disk_dir_have_directories_of_their_own_in_it(tmp_path: Path) -> None:
    """Whatever their names, and whether a table says so or all of them: no model finds another's files."""
    blocks = tmp_path / "blocks"
    tables = f"""
        cache.disk_dir = "{blocks}"
        [models."org/name"]
        path = "/m/one"
        [models."other%2Fname"]
        path = "/m/two"
        [models.third]
        path = "/m/three"
        cache.disk_dir = "{blocks}"
    """
    found = _served(tmp_path / "machd.toml", tables, **{"model.path": "/m/zero"})
    assert set(found) == {"default", "org/name", "other%2Fname", "third"}
    directories = [Path(one) for one in found.values() if one is not None]
    assert len(set(directories)) == len(found)
    assert {one.parent for one in directories} == {blocks}


def test_the_only_model_has_the_directory_itself(tmp_path: Path) -> None:
    """With one model its blocks lie where the setting says."""
    blocks = tmp_path / "blocks"
    found = _served(tmp_path / "machd.toml", f'cache.disk_dir = "{blocks}"')
    assert found == {"default": str(blocks)}


def test_models_of_a_directory_are_found_anew(tmp_path: Path) -> None:
    """A file that has come is served under its name, one that has gone is not."""
    models = tmp_path / "models"
    models.mkdir()
    (models / "one.gguf").write_bytes(b"GGUF")
    text = f'[models]\ndirectory = "{models}"'
    assert set(_served(tmp_path / "machd.toml", text)) == {"one"}
    (models / "two.gguf").write_bytes(b"GGUF")
    (models / "one.gguf").unlink()
    assert set(_served(tmp_path / "machd.toml", text)) == {"two"}
