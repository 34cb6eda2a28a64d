"""The files of an adapter: which format they have, what their headers say, their hash, and their weights.

An adapter is a directory of mlx-lm's or PEFT's, or a GGUF file. Pickles are never opened. What is read is what was hashed: the
content is read once, compared with the hash that a request names, and parsed from memory.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from machd import regular_files
from machd.engine.adapters.adapter_config import CONFIG_FILE, MAX_CONFIG_BYTES, AdapterConfig
from machd.engine.adapters.gguf_format import read_gguf_adapter
from machd.engine.adapters.landing import landed
from machd.engine.adapters.low_rank import AdapterWeights, BaseLayers
from machd.engine.adapters.mlx_lm_format import WEIGHTS_FILE as MLX_LM_FILE
from machd.engine.adapters.mlx_lm_format import read_mlx_lm
from machd.engine.adapters.peft_format import WEIGHTS_FILE as PEFT_FILE
from machd.engine.adapters.peft_format import read_peft
from machd.engine.adapters.stored_adapter import (
    DTYPES,
    MAX_TENSORS,
    AdapterFormat,
    StoredAdapter,
    StoredArray,
)
from machd.engine.adapters.stored_weights import low_rank
from machd.engine.backend.model_files import shortened
from machd.engine.backend.safetensors_header import header_of
from machd.engine.loading.formats.gguf.header import gguf_header_of, read_gguf_header
from machd.errors import AdapterError, ModelError

_DIGEST_BYTES = 16
_READ_BYTES = 1 << 20

MAX_ADAPTER_BYTES = 16 << 30
"""Limit of a file of weights; a rank of 256 on all layers of a model of 70 billion weights takes 7 GB."""

_MAX_ENTRIES = 10_000
"""Files of a directory that are looked at for a reason why there is no adapter."""

_PICKLED = (".bin", ".npz", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an adapter's headers say.

    Attributes:
        format: Who wrote it.
        max_rank: The largest of its layers' ranks.
        layers: How many it changes.
        dtype: Its weights', such as ``bfloat16``; several with commas.
        base_model: What it says of the model that it was trained on; None if nothing.
        size_bytes: Of its files.
    """

    format: AdapterFormat
    max_rank: int
    layers: int
    dtype: str
    base_model: str | None
    size_bytes: int


def describe_adapter(path: Path) -> AdapterFacts:
    """Read and check an adapter's headers, without a weight; takes milliseconds.

    Raises:
        AdapterError: It is damaged, of a format that is not read, or holds what is not served as an adapter.
    """
    with _as_adapter_error():
        files = _files(path)
        adapter = _headers(files)
        dtypes = {DTYPES[array.dtype] for layer in adapter.layers for array in layer.arrays}
        return AdapterFacts(
            format=files.format,
            max_rank=max(layer.rank for layer in adapter.layers),
            layers=len(adapter.layers),
            dtype=", ".join(sorted(dtypes)),
            base_model=adapter.base_model or None,
            size_bytes=sum(file.stat().st_size for file in files.all),
        )


def adapter_digest(path: Path) -> bytes:
    """Hash the content of the files that :func:`read_adapter` reads, and nothing else: neither their names nor their dates.

    Raises:
        AdapterError: There is no adapter, or a file cannot be read.
    """
    with _as_adapter_error():
        files = _files(path)
        hashes = []
        for file in files.all:
            of_file = hashlib.blake2b(digest_size=_DIGEST_BYTES)
            with _opened(file) as opened:
                while piece := opened.read(_READ_BYTES):
                    of_file.update(piece)
            hashes.append(of_file.digest())
        return _joined(files.format, hashes)


def read_adapter(path: Path, digest: bytes, base: BaseLayers) -> AdapterWeights:
    """Read an adapter for a model.

    Args:
        path: Its directory, or its GGUF file.
        digest: Of :func:`adapter_digest`.
        base: The model's linear layers.

    Returns:
        Its weights in float32, which holds those of the files exactly.

    Raises:
        AdapterError: Its content is another than when it was hashed, it is damaged, or a tensor does not fit the model; the
            message lists those that do not.
    """
    with _as_adapter_error():
        files = _files(path)
        # Before the weights are read: a layer of the model bounds what is.
        landed(_headers(files), base)
        contents = [_content(file) for file in files.all]
        hashes = [hashlib.blake2b(one, digest_size=_DIGEST_BYTES).digest() for one in contents]
        if _joined(files.format, hashes) != digest:
            raise AdapterError("its files have changed while it was loaded; send the request again")
        weights = memoryview(contents[-1])
        layers = landed(_parsed(files, contents), base)
        return {
            base_path: low_rank(layer, base[base_path], weights)
            for base_path, layer in layers.items()
        }


@dataclass(frozen=True, slots=True)
class _Files:
    """The files that count.

    Attributes:
        weights: Of the tensors; that of GGUF has everything.
        config: ``adapter_config.json``; None for GGUF.
    """

    format: AdapterFormat
    weights: Path
    config: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        return (self.weights,) if self.config is None else (self.config, self.weights)


def _files(path: Path) -> _Files:
    """Tell an adapter's format by its files."""
    if not path.is_dir():
        if not path.exists():
            raise AdapterError("there is no such file or directory")
        if path.suffix != ".gguf":
            raise AdapterError("it is neither a directory nor a .gguf file")
        return _Files(AdapterFormat.GGUF, path)
    found = [
        (kind, name)
        for kind, name in ((AdapterFormat.MLX_LM, MLX_LM_FILE), (AdapterFormat.PEFT, PEFT_FILE))
        if os.path.lexists(path / name)
    ]
    if len(found) > 1:
        raise AdapterError(f"its directory holds both {MLX_LM_FILE} and {PEFT_FILE}; keep one")
    if not found:
        raise AdapterError(_why_nothing(path))
    [(kind, name)] = found
    return _Files(kind, _inside(path, name), _inside(path, CONFIG_FILE))


def _why_nothing(path: Path) -> str:
    names = sorted(entry.name for entry in itertools.islice(os.scandir(path), _MAX_ENTRIES))
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        return f"its weights are pickled or packed ({pickled[0][:80]}), which is never opened: save them as safetensors"
    if any(name.endswith(".gguf") for name in names):
        return "its directory holds a GGUF file: name the file itself"
    return f"its directory holds neither {MLX_LM_FILE} nor {PEFT_FILE}"


def _inside(path: Path, name: str) -> Path:
    """Find a file of an adapter's directory; a link may point to another place in it, or in the hub's cache that it is part of."""
    file = path / name
    try:
        folder, real = path.resolve(), file.resolve()
    except RuntimeError as error:  # links in a circle
        raise AdapterError(f"{name} is a link to itself") from error
    # A snapshot of the hub's cache has links to the blobs beside the snapshots.
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not real.is_relative_to(folder) and not real.is_relative_to(blobs):
        raise AdapterError(f"{name} is a link to a place outside the adapter's directory")
    if not real.exists():
        raise AdapterError(f"its directory holds no {name}")
    return real


def _headers(files: _Files) -> StoredAdapter:
    """Read the headers alone."""
    if files.config is None:
        return read_gguf_adapter(read_gguf_header(files.weights))
    with _opened(files.weights) as opened:
        return _described(files, _config(files.config), opened, files.weights.stat().st_size)


def _parsed(files: _Files, contents: list[bytes]) -> StoredAdapter:
    """Read the headers in files' contents."""
    if files.config is None:
        return read_gguf_adapter(gguf_header_of(contents[0], files.weights))
    config, weights = contents
    return _described(files, AdapterConfig(config), io.BytesIO(weights), len(weights))


def _described(
    files: _Files, config: AdapterConfig, weights: BinaryIO, size_bytes: int
) -> StoredAdapter:
    header = header_of(weights, files.weights, size_bytes, MAX_TENSORS)
    arrays = [
        StoredArray(name, tensor.dtype, tensor.shape, tensor.offset, tensor.size_bytes)
        for name, tensor in header.tensors.items()
    ]
    _check_covered(arrays, weights.tell(), size_bytes)
    read = read_mlx_lm if files.format is AdapterFormat.MLX_LM else read_peft
    return read(config, arrays)


def _check_covered(arrays: list[StoredArray], begin: int, end: int) -> None:
    """Refuse tensors that overlap, and bytes of no tensor: the shapes then bound what is read."""
    for array in sorted(arrays, key=lambda one: (one.offset, one.size_bytes)):
        if array.offset != begin:
            raise AdapterError(
                f"{shortened(array.name)} does not begin where the tensor before it ends; save or copy the file again"
            )
        begin += array.size_bytes
    if begin != end:
        raise AdapterError("the file goes on behind its tensors; save or copy it again")


def _config(path: Path) -> AdapterConfig:
    with _opened(path) as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES >> 20} MiB")
    return AdapterConfig(content)


def _content(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with regular_files.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_ADAPTER_BYTES:
            raise AdapterError(f"{path.name} is larger than {MAX_ADAPTER_BYTES >> 30} GiB")
        yield file


def _joined(kind: AdapterFormat, hashes: list[bytes]) -> bytes:
    """Hash the hashes of the files with the format, so that no file counts for another."""
    return hashlib.blake2b(
        kind.value.encode() + b":" + b"".join(hashes), digest_size=_DIGEST_BYTES
    ).digest()


@contextmanager
def _as_adapter_error() -> Iterator[None]:
    """Turn what the readers of models' files raise into an adapter's error."""
    try:
        yield
    except ModelError as error:
        raise AdapterError(error.message) from error
    except regular_files.IrregularFileError as error:
        raise AdapterError(f"a file cannot be read: {error.strerror}") from error
    except OSError as error:
        raise AdapterError(f"a file cannot be read: {error.strerror}") from error
