"""Damaged and hostile files of adapters are refused with the reason, and what must not be opened is not."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
from support.checkpoints.adapters import (
    BASE,
    gguf_metadata,
    gguf_tensors,
    mlx_lm_config,
    mlx_lm_tensors,
    peft_config,
    peft_tensors,
    random_adapter,
    write_gguf_adapter,
    write_mlx_lm,
    write_peft,
)
from support.checkpoints.hostile_adapters import A, B, bounds, refused

from machd.engine.adapters.adapter_files import adapter_digest, describe_adapter, read_adapter
from machd.errors import AdapterError


def _peft(directory: Path) -> Path:
    adapter = random_adapter()
    return write_peft(directory, peft_tensors(adapter), peft_config(adapter))


_TEXTS = {
    "text": ("not JSON", "not valid JSON"),
    "a list": ("[]", "not a JSON object"),
    "a number": ("4", "not a JSON object"),
    "nothing": ("", "not valid JSON"),
    "NaN": ('{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}', "NaN is no number"),
    "infinity": ('{"peft_type": "LORA", "r": 4, "lora_alpha": Infinity}', "Infinity is no number"),
    "a key twice": ('{"peft_type": "LORA", "r": 4, "r": 8}', "a key is there twice"),
    "depth": ('{"r":' + "[" * 100_000, "not valid JSON"),
    "5 MB": ('{"peft_type": "LORA", "x": "' + "x" * (5 << 20) + '"}', "larger than 4 MiB"),
    "a number of many digits": ('{"r": ' + "9" * 100_000 + "}", "not valid JSON"),
}


@pytest.mark.parametrize("case", _TEXTS)
def test_damaged_configuration_is_refused(tmp_path: Path, case: str) -> None:
    """A configuration that is no object in JSON is refused by name."""
    text, words = _TEXTS[case]
    path = _peft(tmp_path / "x")
    (path / "adapter_config.json").write_text(text, encoding="utf-8")
    refused(path, words)


def test_configuration_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    """Bytes that are no text are refused."""
    path = _peft(tmp_path / "x")
    (path / "adapter_config.json").write_bytes(b'{"r": "\xff\xfe"}')
    refused(path, "not valid JSON")


def _file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _entry(name: str, dtype: str, shape: list[int], begin: int, end: int) -> str:
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}})[1:-1]


_MANY_EMPTY = ",".join(map(_entry("%d", "F32", [0], 0, 0).__mod__, range(100_000)))

_HEADERS = {
    "an empty file": (b"", "longer than the file"),
    "a length of 2^63": (_file(b"{}", length=1 << 63), "longer than the file"),
    "a length beyond the file": (_file(b"{}", length=1000), "longer than the file"),
    "a header that is a list": (_file(b"[]"), "not a JSON object"),
    "a header that is text": (_file(b"nonsense"), "not JSON"),
    "a tensor outside the file": (
        _file(("{" + _entry(A, "F32", [4, 64], 0, 1024) + "}").encode(), b"\0" * 8),
        "ends behind the end",
    ),
    "a rank of 1e9 without its data": (
        _file(("{" + _entry(A, "F32", [10**9, 64], 0, 256 * 10**9) + "}").encode(), b"\0" * 8),
        "ends behind the end",
    ),
    "a shape without its size": (
        _file(("{" + _entry(A, "F32", [4, 64], 0, 8) + "}").encode(), b"\0" * 8),
        "shape and size",
    ),
    "a negative offset": (
        _file(("{" + _entry(A, "F32", [1], -4, 0) + "}").encode(), b"\0" * 8),
        "offsets",
    ),
    "a tensor twice": (
        _file(
            (
                "{" + _entry(A, "F32", [1, 1], 0, 4) + "," + _entry(A, "F32", [1, 1], 4, 8) + "}"
            ).encode(),
            b"\0" * 8,
        ),
        "twice",
    ),
    "tensors that overlap": (
        _file(
            (
                "{" + _entry(A, "F32", [2, 1], 0, 8) + "," + _entry(B, "F32", [1, 2], 0, 8) + "}"
            ).encode(),
            b"\0" * 8,
        ),
        "does not begin where",
    ),
    "bytes of no tensor": (
        _file(("{" + _entry(A, "F32", [1, 1], 0, 4) + "}").encode(), b"\0" * 8),
        "goes on behind",
    ),
    "an unknown type": (
        _file(("{" + _entry(A, "F6", [1, 1], 0, 4) + "}").encode(), b"\0" * 4),
        "makes no sense",
    ),
    "100,000 tensors": (
        _file(("{" + _MANY_EMPTY + "}").encode()),
        "tensors",
    ),
    "a pickle under the name": (pickle.dumps({"a": 1}), "longer than the file"),
}


@pytest.mark.parametrize("case", _HEADERS)
def test_damaged_weights_are_refused(tmp_path: Path, case: str) -> None:
    """A file of weights that is none is refused by name."""
    content, words = _HEADERS[case]
    path = _peft(tmp_path / "x")
    (path / "adapter_model.safetensors").write_bytes(content)
    refused(path, words)


def test_truncated_gguf_is_refused(tmp_path: Path) -> None:
    """A GGUF file that ends too early is refused wherever it ends."""
    adapter = dict(list(random_adapter().items())[:2])
    file = write_gguf_adapter(tmp_path / "x.gguf", gguf_tensors(adapter), gguf_metadata(adapter))
    content = file.read_bytes()
    for length in (0, 3, 4, 20, 100, 300, len(content) - 1000):
        file.write_bytes(content[:length])
        refused(file, "truncated|empty|not a GGUF|corrupt")


def test_sparse_file_of_a_huge_adapter_takes_no_memory(tmp_path: Path) -> None:
    """A small file that claims gigabytes of zeros is refused by its shapes, before they are read."""
    path = _peft(tmp_path / "x")
    rank = 1 << 24
    entries = [_entry(A, "F32", [rank, 64], 0, rank * 256)]
    entries.append(_entry(B, "F32", [64, rank], rank * 256, rank * 512))
    header = _file(("{" + ",".join(entries) + "}").encode())
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(header)
    os.truncate(weights, len(header) + rank * 512)
    config = peft_config(random_adapter()) | {"r": rank}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with bounds(), pytest.raises(AdapterError, match="rank 16,777,216 is larger"):
        read_adapter(path, b"", BASE)
    os.truncate(weights, 17 << 30)
    with bounds(), pytest.raises(AdapterError, match="larger than 16 GiB"):
        adapter_digest(path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("of_the_machine", ["/etc/passwd", "/dev/zero", "../outside", "nothing"])
def test_links_out_of_the_directory_are_refused(
    tmp_path: Path, name: str, of_the_machine: str
) -> None:
    """A link to a place outside an adapter's directory is not followed."""
    (tmp_path / "outside").write_text("{}", encoding="utf-8")
    path = _peft(tmp_path / "x")
    (path / name).unlink()
    (path / name).symlink_to(of_the_machine)
    with bounds(), pytest.raises(AdapterError, match=f"{name} is a link|holds no {name}"):
        adapter_digest(path)


def test_link_out_of_the_hub_cache_is_refused(tmp_path: Path) -> None:
    """A blob of the hub's cache that is itself a link to another place is not followed."""
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "0"
    outside = _peft(tmp_path / "outside")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in outside.iterdir():
        (blobs / file.name).symlink_to(file)
        (snapshot / file.name).symlink_to(blobs / file.name)
    with pytest.raises(AdapterError, match="is a link to a place outside"):
        describe_adapter(snapshot)


def test_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    """Links that lead to each other are refused."""
    path = _peft(tmp_path / "x")
    (path / "adapter_config.json").unlink()
    (path / "adapter_config.json").symlink_to("adapter_config.json")
    # Python 3.13 follows such a link to nothing.
    with pytest.raises(AdapterError, match=r"link to itself|holds no adapter_config"):
        describe_adapter(path)


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    """A named pipe, which would block its reader for ever, is refused."""
    path = _peft(tmp_path / "x")
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")
    with bounds(), pytest.raises(AdapterError, match="cannot be read"):
        adapter_digest(path)
    os.mkfifo(tmp_path / "x.gguf")
    with bounds(), pytest.raises(AdapterError, match=r"cannot be read|not a regular file"):
        describe_adapter(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapters.npz", "adapter.pt"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    """Pickled weights are refused by name, and not a byte of them is read."""
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    os.mkfifo(tmp_path / name)  # an open would block
    for entrance in (describe_adapter, adapter_digest):
        with bounds(), pytest.raises(AdapterError, match=rf"pickled or packed .{name}"):
            entrance(tmp_path)


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    """A path to nothing, an empty directory, another file and a directory of two formats are told apart."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x", encoding="utf-8")
    both = _peft(tmp_path / "both")
    adapter = random_adapter()
    write_mlx_lm(both, mlx_lm_tensors(adapter), mlx_lm_config(adapter))
    (tmp_path / "of_gguf").mkdir()
    (tmp_path / "of_gguf" / "a.gguf").write_bytes(b"GGUF")
    for name, words in {
        "nothing": "no such file",
        "empty": "neither adapters.safetensors nor adapter_model.safetensors",
        "file.txt": "neither a directory nor a .gguf file",
        "both": "both adapters.safetensors and",
        "of_gguf": "name the file itself",
    }.items():
        with pytest.raises(AdapterError, match=words):
            describe_adapter(tmp_path / name)
