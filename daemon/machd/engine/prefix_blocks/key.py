"""The key of a model's blocks: two daemons with the same key can use each other's.

A block's content follows from its tokens, the weights, the code that computes and the KV format.
Weights are told apart by their files: names, sizes, times, and both ends, because copies and archives
can have any time. To read all of them would take minutes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from machd.engine.backend.model_files import open_regular
from machd.engine.loading.loader import LoadedModel
from machd.engine.prefix_blocks.encoding import BLOCK_VERSION
from machd.errors import ModelNotFoundError
from machd.installed import installed_version

_KEY_BYTES = 16
_SAMPLE_BYTES = 64 << 10
"""Bytes that are read of a file's beginning, where its header is, and of its end."""

_COMPUTING = ("mlx", "mlx-lm")
_COMPUTING_IMAGES = ("mlx-vlm", "transformers", "pillow", "opencv-python")


def block_key(loaded: LoadedModel) -> bytes:
    """Compute the key from the weights, their dtype, the caches, and the versions that compute.

    A model that was made in memory is known by its description and name alone.

    Raises:
        ModelNotFoundError: A file of the model's cannot be read any more.
    """
    key = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in _parts(loaded):
        key.update(len(part).to_bytes(8, "little"))
        key.update(part)
    return key.digest()


def _parts(loaded: LoadedModel) -> Iterator[bytes]:
    description = loaded.description
    texts = [
        str(BLOCK_VERSION),
        *(f"{name} {installed_version(name)}" for name in _COMPUTING),
        loaded.kv_format.name,
        # All that decides on keys and values, but not what a request may use of the model.
        description.architecture,
        description.dtype,
        str(description.quantization),
        description.backend,
        f"{description.parameters} {description.weights_bytes} {description.vocabulary_tokens}",
        repr(description.cache),
    ]
    if description.vision is not None:
        texts += [f"{name} {installed_version(name)}" for name in _COMPUTING_IMAGES]
    for text in texts:
        yield text.encode()
    for file in (*sorted(loaded.weight_files), *_beside(loaded.weight_files)):
        yield from _file(file)
    if not loaded.weight_files:
        yield description.model_id.encode()


def _beside(weight_files: tuple[Path, ...]) -> list[Path]:
    """List the configuration and code beside weights in mlx-lm's layout, which decide, too."""
    directories = {file.parent for file in weight_files if file.suffix == ".safetensors"}
    return [
        file
        for directory in sorted(directories)
        for file in (directory / "config.json", *sorted(directory.glob("*.py")))
        if file.is_file()
    ]


def _file(path: Path) -> Iterator[bytes]:
    """Read a file's name, size, time, and both ends."""
    try:
        with open_regular(path) as file:
            facts = os.fstat(file.fileno())
            yield f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode()
            yield file.read(_SAMPLE_BYTES)
            file.seek(max(facts.st_size - _SAMPLE_BYTES, 0))
            yield file.read(_SAMPLE_BYTES)
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path.name}: {error.strerror}") from error
