"""The MODEL argument: every spelling finds its files or says how to get them."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from machd.engine.backend.own_code import OwnCode
from machd.engine.loading import embedded
from machd.engine.loading.formats.checkpoint import read_directory
from machd.engine.loading.source import ModelSource, SourceKind, resolve_model
from machd.errors import ModelDownloadError, ModelNotFoundError


def _resolve(model: str | None, cache_directory: Path, *, offline: bool = True) -> ModelSource:
    return resolve_model(model, offline=offline, cache_directory=cache_directory)


def test_no_model_argument_means_the_embedded_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without MODEL the embedded file is taken from the cache, under its own name."""
    monkeypatch.setattr(embedded, "locate", lambda _: tmp_path / "x.gguf")
    assert _resolve(None, tmp_path) == ModelSource(
        SourceKind.GGUF, tmp_path / "x.gguf", "smollm2-135m-instruct"
    )


def test_an_absent_default_is_fetched_only_when_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline is an error that names the command; online it is pulled."""
    monkeypatch.setattr(embedded, "locate", lambda _: None)
    monkeypatch.setattr(embedded, "pull", lambda _, progress: tmp_path / "x.gguf")  # noqa: ARG005
    with pytest.raises(ModelNotFoundError, match="machd model pull"):
        _resolve(None, tmp_path)
    assert _resolve(None, tmp_path, offline=False).path == tmp_path / "x.gguf"


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is the model's, also when it is given as ``.`` or through a link."""
    directory = tmp_path / "My-Model"
    directory.mkdir()
    link = tmp_path / "alias"
    link.symlink_to(directory)
    assert _resolve(str(directory), tmp_path).model_id == "My-Model"
    assert _resolve(str(link), tmp_path).model_id == "alias"
    monkeypatch.chdir(directory)
    assert _resolve(".", tmp_path).model_id == "My-Model"


def test_a_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    """The suffix says the format, in either case."""
    path = tmp_path / "small.Q4_0.GGUF"
    path.write_bytes(b"GGUF")
    assert _resolve(str(path), tmp_path) == ModelSource(SourceKind.GGUF, path, "small.Q4_0")


@pytest.mark.parametrize("name", ["weights.safetensors", "model.bin"])
def test_another_file_is_refused(tmp_path: Path, name: str) -> None:
    """A single weight file is no model."""
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="give the directory"):
        _resolve(str(tmp_path / name), tmp_path)


@pytest.mark.parametrize("model", ["./no/such", "/no/such/dir", "nowhere", "org/x.gguf", "a/b/c"])
def test_missing_model_is_an_error(tmp_path: Path, model: str) -> None:
    """Nothing that looks like a path is ever looked up on the hub."""
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        _resolve(model, tmp_path, offline=False)


def test_a_missing_relative_path_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with one slash may be a path or a hub id: offline it is said to be neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFoundError) as refused:
        _resolve("models/mine", tmp_path)
    assert f"models/mine is no path below {tmp_path}" in refused.value.message
    assert "--no-model-offline" in refused.value.message


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"]
)
def test_a_directory_of_an_adapter_is_said_to_be_one(tmp_path: Path, name: str) -> None:
    """The error for an adapter's directory says how to use the adapter."""
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelNotFoundError, match=r"holds an adapter.*\[adapters\.NAME\]"):
        read_directory(tmp_path, OwnCode.REFUSED)


def test_a_hub_id_offline_reads_the_local_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline asks for local files only, and a miss names the switch that would fetch."""
    asked: list[dict[str, object]] = []

    def snapshot(_model_id: str, **options: object) -> str:
        asked.append(options)
        if len(asked) > 1:
            raise LocalEntryNotFoundError("not here")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = _resolve("org/name-4bit", tmp_path)
    assert found == ModelSource(SourceKind.DIRECTORY, tmp_path, "org/name-4bit")
    assert asked[0]["local_files_only"] is True
    with pytest.raises(ModelNotFoundError, match="--no-model-offline"):
        _resolve("org/name-4bit", tmp_path)


def test_fetching_takes_data_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pattern lets ``.bin``, ``.pt``, ``.pkl`` or ``.py`` files come."""
    patterns: list[str] = []

    def snapshot(_model_id: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    _resolve("org/name", tmp_path, offline=False)
    names = ["pytorch_model.bin", "a.pt", "b.pkl", "modeling.py", "model.pth", "x.ckpt"]
    assert not [name for name in names for pattern in patterns if Path(name).match(pattern)]
    assert Path("model-00001-of-00002.safetensors").match(patterns[0])


def test_an_unreachable_hub_is_a_download_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online, a connection that fails is not "no such model"."""

    def snapshot(_model_id: str, **_options: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelDownloadError, match="no route"):
        _resolve("org/name", tmp_path, offline=False)


@pytest.mark.parametrize("model", ["/" + "a" * 300, "~no-such-user-of-this-machine/model"])
def test_unreadable_path_is_an_error(model: str, tmp_path: Path) -> None:
    """A name too long for the system and an unknown home are told with their reason."""
    with pytest.raises(ModelNotFoundError, match="cannot look at"):
        _resolve(model, tmp_path)


def test_pipe_is_refused_as_no_model(tmp_path: Path) -> None:
    """It exists, and is no model."""
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(ModelNotFoundError, match="is neither a directory"):
        _resolve(str(pipe), tmp_path)
