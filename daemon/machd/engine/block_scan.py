"""What a directory of blocks has at the start, told from the beginnings of its files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from machd.engine.block_encoding import (
    FIRST_BYTES,
    MAX_BLOCK_BYTES,
    MAX_HEADER_BYTES,
    header_stop,
    read_head,
)
from machd.engine.block_protocol import SavedBlock
from machd.engine.key_directory import BlockFile, KeyDirectory

__all__ = ["MAX_FOUND_FILES", "MAX_FOUND_TOKENS", "FoundBlocks", "find_blocks"]

MAX_FOUND_FILES = 100_000
"""Files that are taken over, those last used first; the others are deleted."""

MAX_FOUND_TOKENS = 4_000_000
"""Of all of them together; they take some 150 MB of memory."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """What was found, and what was deleted.

    Attributes:
        blocks: With the sizes of their files; what a block follows comes before it.
        damaged: Files that said something that cannot be.
        useless: Files whose block follows one that is not there, or is beyond the limits.
    """

    blocks: tuple[tuple[SavedBlock, int], ...]
    damaged: int
    useless: int


def find_blocks(directory: KeyDirectory, key: bytes) -> FoundBlocks:
    """Read the heads of all files, and delete those that are of no use.

    The tensors are not looked at, nor the checksum: whoever loads a block does that.
    """
    files = sorted(directory.files(), key=lambda one: one.used_unix_s, reverse=True)
    found: list[tuple[SavedBlock, int]] = []
    damaged = tokens = read = 0
    for file in islice(files, MAX_FOUND_FILES):
        saved = _read(directory, file, key)
        if saved is None:
            directory.delete(file.digest)
            damaged += 1
        else:
            tokens += len(saved.token_ids)
            if tokens > MAX_FOUND_TOKENS:
                break
            found.append((saved, file.size_bytes))
        read += 1
    for file in files[read:]:
        directory.delete(file.digest)
    blocks, orphans = _rooted(found)
    for saved, _ in orphans:
        directory.delete(saved.digest)
    return FoundBlocks(blocks, damaged, len(files) - read + len(orphans))


def _read(directory: KeyDirectory, file: BlockFile, key: bytes) -> SavedBlock | None:
    if file.size_bytes > MAX_BLOCK_BYTES:
        return None
    try:
        first = directory.read(file.digest, FIRST_BYTES)
        if len(first) < header_stop(first) <= MAX_HEADER_BYTES:
            first = directory.read(file.digest, header_stop(first))
    except OSError:
        return None
    saved = read_head(first, file.size_bytes, key, file.used_unix_s)
    return saved if saved is not None and saved.digest == file.digest else None


def _rooted(
    found: Iterable[tuple[SavedBlock, int]],
) -> tuple[tuple[tuple[SavedBlock, int], ...], list[tuple[SavedBlock, int]]]:
    """Those that follow one another from position 0 on, in order, and those that do not."""
    stops: dict[bytes, int] = {}
    rooted: list[tuple[SavedBlock, int]] = []
    orphans: list[tuple[SavedBlock, int]] = []
    for one in sorted(found, key=lambda one: one[0].start):
        saved = one[0]
        if saved.start == 0 or stops.get(saved.parent) == saved.start:
            stops[saved.digest] = saved.start + len(saved.token_ids)
            rooted.append(one)
        else:
            orphans.append(one)
    return tuple(rooted), orphans
