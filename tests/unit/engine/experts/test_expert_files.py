"""An expert is read as it was when the model was loaded, or the read fails."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from machd.engine.experts.dtype_conversion import convert
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.stored_layer import ExpertParameter, Location

_NUMBERS = 3000
_OFFSET = 5003
"""No multiple of anything."""

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def _file(directory: Path, seed: int = 0) -> tuple[Path, bytes]:
    content = np.random.default_rng(seed).bytes(_OFFSET + _NUMBERS * 4)
    path = directory / "weights"
    path.write_bytes(content)
    return path, content


def _parameter() -> ExpertParameter:
    return ExpertParameter("up_proj", "weight", (_NUMBERS,), mx.uint32, mx.uint32)


def _read(files: ExpertFiles, path: Path) -> bytes:
    into = np.zeros(_NUMBERS * 4, dtype=np.uint8)
    assert files.read(Location(path, _OFFSET), _parameter(), into) == into.nbytes
    return into.tobytes()


def test_read_returns_the_bytes_at_any_offset(tmp_path: Path) -> None:
    """A read may begin and end at any byte, up to the last of the file."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    assert _read(files, path) == content[_OFFSET:]
    assert _read(files, path) == content[_OFFSET:]
    files.close()


def test_read_works_after_the_file_is_deleted(tmp_path: Path) -> None:
    """A deleted file is read as it was, because it is open."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    path.unlink()
    assert _read(files, path) == content[_OFFSET:]
    files.close()


def test_read_ignores_a_file_that_replaces_the_open_one(tmp_path: Path) -> None:
    """A file renamed onto the path changes nothing: the open file is read."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    other = tmp_path / "other"
    other.write_bytes(bytes(len(content)))
    other.replace(path)
    assert _read(files, path) == content[_OFFSET:]
    files.close()


def test_read_fails_when_the_file_is_truncated(tmp_path: Path) -> None:
    """A missing end is an error and not zeros."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    os.truncate(path, len(content) - 1)
    with pytest.raises(ExpertReadError, match="shorter"):
        _read(files, path)
    files.close()


def test_read_fails_when_the_file_is_modified(tmp_path: Path) -> None:
    """A modified file fails the first read too, which has no checksum to compare with."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    os.utime(path, ns=(0, 0))
    path.write_bytes(content)
    with pytest.raises(ExpertReadError, match="modified"):
        _read(files, path)
    files.close()


def test_read_fails_when_only_the_content_differs(tmp_path: Path) -> None:
    """Other content is noticed by checksum where size and modification time are the same."""
    path, content = _file(tmp_path)
    facts = path.stat()
    files = ExpertFiles([path])
    _read(files, path)
    changed = bytearray(content)
    changed[-1] ^= 1
    path.write_bytes(changed)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(ExpertReadError, match="other content"):
        _read(files, path)
    files.close()


def test_failed_read_names_the_file_and_the_reason(tmp_path: Path) -> None:
    """The message has the file's name and the system's error."""
    path, _ = _file(tmp_path)
    files = ExpertFiles([path])
    files.close()
    files = ExpertFiles([path])
    descriptor = next(iter(files._files.values())).descriptor
    os.close(descriptor)
    with pytest.raises(ExpertReadError, match="weights: Bad file descriptor"):
        _read(files, path)
    files._files.clear()


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("stored_dtype", _DTYPES, ids=str)
def test_conversion_equals_astype_of_mlx(stored_dtype: mx.Dtype, dtype: mx.Dtype) -> None:
    """Every pair of dtypes converts bit for bit as in mlx, ties, zeros and the largest values included."""
    if stored_dtype == dtype:
        return
    random = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 65504.0, 2.0**-24, 1e-30], dtype=np.float32)
    stored = mx.array(np.concatenate([random, ties])).astype(stored_dtype)
    expected = np.array(stored.astype(dtype).view(mx.uint8))
    into = np.zeros(expected.nbytes, dtype=np.uint8)
    convert(np.array(stored.view(mx.uint8)), stored_dtype, into, dtype)
    assert into.tobytes() == expected.tobytes()
