"""Experts are read as they were when the model was loaded, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from machd.engine.experts.conversion import convert
from machd.engine.experts.expert_files import ExpertFiles, ExpertReadError
from machd.engine.experts.stored_layer import ParameterForm, Place

_NUMBERS = 3000
_OFFSET = 5003
"""No multiple of anything."""

_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def _file(directory: Path, seed: int = 0) -> tuple[Path, bytes]:
    content = np.random.default_rng(seed).bytes(_OFFSET + _NUMBERS * 4)
    path = directory / "weights"
    path.write_bytes(content)
    return path, content


def _form() -> ParameterForm:
    return ParameterForm("up_proj", "weight", (_NUMBERS,), mx.uint32, mx.uint32)


def _read(files: ExpertFiles, path: Path) -> bytes:
    into = np.zeros(_NUMBERS * 4, dtype=np.uint8)
    assert files.read(Place(path, _OFFSET), _form(), into) == into.nbytes
    return into.tobytes()


def test_bytes_are_those_of_the_file_wherever_they_lie(tmp_path: Path) -> None:
    """Reads begin and end at any byte, up to the last of the file."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    assert _read(files, path) == content[_OFFSET:]
    assert _read(files, path) == content[_OFFSET:]
    files.close()


def test_a_deleted_file_is_still_read(tmp_path: Path) -> None:
    """An open file outlives its name."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    path.unlink()
    assert _read(files, path) == content[_OFFSET:]
    files.close()


def test_a_replaced_file_is_read_as_it_was(tmp_path: Path) -> None:
    """A download that replaces the file changes nothing for who has it open."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    other = tmp_path / "other"
    other.write_bytes(bytes(len(content)))
    other.replace(path)
    assert _read(files, path) == content[_OFFSET:]
    files.close()


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """What is missing at the end is not zeros."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    os.truncate(path, len(content) - 1)
    with pytest.raises(ExpertReadError, match="shorter"):
        _read(files, path)
    files.close()


def test_a_file_that_is_written_to_is_refused(tmp_path: Path) -> None:
    """The first read already: what was there at load is not known."""
    path, content = _file(tmp_path)
    files = ExpertFiles([path])
    os.utime(path, ns=(0, 0))
    path.write_bytes(content)
    with pytest.raises(ExpertReadError, match="changed"):
        _read(files, path)
    files.close()


def test_other_content_is_refused_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    """A checksum of the first read tells."""
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


def test_a_read_that_fails_is_told_with_the_files_name(tmp_path: Path) -> None:
    """The system's error says what, the message says where."""
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
def test_numbers_are_converted_as_mlx_converts_them(
    stored_dtype: mx.Dtype, dtype: mx.Dtype
) -> None:
    """Every pair of dtypes, bit by bit, with ties, zeros and the largest numbers."""
    if stored_dtype == dtype:
        return
    random = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 65504.0, 2.0**-24, 1e-30], dtype=np.float32)
    stored = mx.array(np.concatenate([random, ties])).astype(stored_dtype)
    expected = np.array(stored.astype(dtype).view(mx.uint8))
    into = np.zeros(expected.nbytes, dtype=np.uint8)
    convert(np.array(stored.view(mx.uint8)), stored_dtype, into, dtype)
    assert into.tobytes() == expected.tobytes()
