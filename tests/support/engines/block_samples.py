"""Blocks whose content follows from their digest, so that a test can check it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from machd.engine.prefix_blocks.encoding import BlockContent, PlainArray
from machd.engine.protocol.blocks import SavedBlock

ROOT = hashlib.blake2b(b"a namespace", digest_size=16).digest()
"""Of no tokens at all."""


def saved_block(
    number: int, *, parent: SavedBlock | None = None, tokens: int = 8, has_state: bool = False
) -> SavedBlock:
    """Make a block of a text by its number; its digest depends on its parent, too."""
    before = ROOT if parent is None else parent.digest
    start = 0 if parent is None else parent.start + len(parent.token_ids)
    token_ids = tuple((number * 7919 + i) % 100_000 for i in range(tokens))
    text = before + np.array(token_ids, dtype="<u4").tobytes()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return SavedBlock(digest, before, start, token_ids, has_state, nbytes=1000 + number % 1000)


def chain(number: int, length: int) -> Iterator[SavedBlock]:
    """Make the blocks of a text, from the first on."""
    block = None
    for i in range(length):
        block = saved_block(number * 1000 + i, parent=block)
        yield block


def content_of(saved: SavedBlock, size_bytes: int = 4096) -> BlockContent:
    """Make the content of a block."""
    random = np.random.default_rng(list(saved.digest))
    arrays: dict[str, PlainArray] = {
        "0.keys": random.standard_normal((1, 2, 8, size_bytes // 128), dtype=np.float32),
        "0.values": random.integers(0, 1 << 16, (1, 2, 8, size_bytes // 64), dtype=np.uint16),
        "state": random.integers(0, 2, (3, 5)).astype(bool),
        "scalar": np.asarray(random.standard_normal(), dtype=np.float16),
        "empty": np.zeros((0, 4), dtype=np.int32),
    }
    return BlockContent(
        arrays, {"kind": "sample", "of": saved.digest.hex(), "quote": '"checksum":"'}
    )


def is_same_content(found: BlockContent | None, wanted: BlockContent) -> bool:
    """Compare all names, types, shapes, bytes and notes."""
    return (
        found is not None
        and dict(found.notes) == dict(wanted.notes)
        and found.arrays.keys() == wanted.arrays.keys()
        and all(
            array.dtype == wanted.arrays[name].dtype
            and array.shape == wanted.arrays[name].shape
            and array.tobytes() == wanted.arrays[name].tobytes()
            for name, array in found.arrays.items()
        )
    )


def file_of(directory: Path, key: bytes, saved: SavedBlock) -> Path:
    """Return the path of a block's file."""
    return directory / key.hex() / f"{saved.digest.hex()}.safetensors"


def files_in(directory: Path, key: bytes) -> dict[str, int]:
    """List names and sizes of all files of a key; files that are deleted meanwhile are left out."""
    sizes: dict[str, int] = {}
    for one in (directory / key.hex()).iterdir():
        with suppress(FileNotFoundError):
            sizes[one.name] = one.lstat().st_size
    return sizes
