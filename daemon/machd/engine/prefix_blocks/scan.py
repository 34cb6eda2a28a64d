"""The blocks that a directory has at the start, and the files of other keys, which make room.

Only the heads of files are read. A block counts as used when any block that follows it was, because
it is found through those before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass

from machd.engine.prefix_blocks.directory import (
    BlockDirectory,
    BlockFile,
    KeyDirectory,
    NotAFileError,
)
from machd.engine.prefix_blocks.encoding import (
    FIRST_BYTES,
    MAX_BLOCK_BYTES,
    MAX_HEADER_BYTES,
    BlockHead,
    header_stop,
    read_head,
)
from machd.engine.protocol.blocks import SavedBlock
from machd.errors import SettingsError

MAX_FOUND_FILES = 100_000
"""Files that are taken over, those last used first; the others are deleted."""

MAX_FOUND_TOKENS = 4_000_000
"""Tokens of all blocks that are taken over; they take some 150 MB of memory."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """The blocks that were taken over, and how many files were deleted.

    Attributes:
        blocks: Each with the bytes of its file, and after the block that it follows.
        damaged: Files whose head cannot be right.
        useless: Files whose block follows one that is not there, or that are beyond the limits.
    """

    blocks: tuple[tuple[SavedBlock, int], ...]
    damaged: int
    useless: int


@dataclass(slots=True)
class _Seen:
    """A file whose head can be right, and when its block, or one that follows it, was last of use."""

    file: BlockFile
    head: BlockHead
    used_unix_s: float


@dataclass(frozen=True, slots=True)
class _Scan:
    """The files of a key.

    Attributes:
        rooted: Files whose blocks follow one another from position 0, parents first.
        orphans: Files whose block follows one that was not seen.
        is_complete: Whether all heads could be read.
    """

    rooted: list[_Seen]
    orphans: list[BlockFile]
    damaged: list[BlockFile]
    is_complete: bool


def find_blocks(directory: KeyDirectory, key: bytes) -> FoundBlocks:
    """Read the heads of all files, and delete the files that are of no use.

    A head that is wrong is found out when its block is loaded. A file that cannot be read just now
    stays, and so do the blocks that seem to follow nothing then; none of them is taken over.
    """
    scan = _scanned(directory, key)
    kept = _within_limits(scan.rooted)
    useless = [one.file for one in scan.rooted[len(kept) :]]
    useless += scan.orphans if scan.is_complete else []
    for file in (*scan.damaged, *useless):
        directory.delete(file.digest)
    kept.sort(key=lambda one: one.head.start)
    blocks = tuple((one.head.saved(one.used_unix_s), one.file.size_bytes) for one in kept)
    return FoundBlocks(blocks, len(scan.damaged), len(useless))


class OtherKeys:
    """The files of all keys but one: of models and versions that are not served now.

    They stay while the budget has room, so that a daemon that goes back to another model finds its
    blocks, and go one by one as the files of the served key need it: the longest unused first, and
    none before the blocks that follow it. Used by one thread at a time.
    """

    def __init__(self, root: BlockDirectory, key: bytes, budget_bytes: int | None) -> None:
        """Count the bytes of files of keys but this one; directories without files are removed. No budget leaves all alone."""
        self._root = root
        self._budget_bytes = budget_bytes
        self._keys = [] if budget_bytes is None else root.other_keys(key)
        self._bytes = 0
        self._worst_last: list[tuple[bytes, BlockFile]] | None = None
        for other in self._keys:
            with suppress(OSError, SettingsError), closing(root.found(other)) as directory:
                self._bytes += sum(file.size_bytes for file in directory.files())
                root.remove(other)

    def make_room(self, own_bytes: int) -> int:
        """Delete files until ``own_bytes`` and the rest fit the budget; returns how many."""
        deleted = 0
        while self._budget_bytes is not None and own_bytes + self._bytes > self._budget_bytes:
            if self._worst_last is None:
                self._worst_last = self._ranked()
            if not self._worst_last:
                self._bytes = 0  # nothing else can be deleted
                break
            self._delete(*self._worst_last.pop())
            deleted += 1
        return deleted

    def _delete(self, key: bytes, file: BlockFile) -> None:
        with suppress(OSError, SettingsError), closing(self._root.found(key)) as directory:
            directory.delete(file.digest)
        self._bytes -= file.size_bytes
        self._root.remove(key)

    def _ranked(self) -> list[tuple[bytes, BlockFile]]:
        """Order all files; the last one is worth least. A file of no use is worth nothing."""
        ranked: list[tuple[float, int, bytes, BlockFile]] = []
        for key in self._keys:
            with suppress(OSError, SettingsError), closing(self._root.found(key)) as directory:
                scan = _scanned(directory, key)
                useless = (*scan.damaged, *scan.orphans)
                ranked += [(0.0, 0, key, file) for file in useless]
                ranked += [(one.used_unix_s, -one.head.start, key, one.file) for one in scan.rooted]
        ranked.sort(key=lambda one: one[:2], reverse=True)
        return [(key, file) for _, _, key, file in ranked]


def _scanned(directory: KeyDirectory, key: bytes) -> _Scan:
    seen: list[_Seen] = []
    damaged: list[BlockFile] = []
    is_complete = True
    for file in directory.files():
        try:
            head = _read(directory, file, key)
        except OSError:
            is_complete = False
            continue
        if head is None:
            damaged.append(file)
        else:
            seen.append(_Seen(file, head, file.used_unix_s))
    rooted, orphans = _rooted(seen)
    return _Scan(rooted, orphans, damaged, is_complete)


def _read(directory: KeyDirectory, file: BlockFile, key: bytes) -> BlockHead | None:
    """Read a file's head; None if it cannot be right, and an OSError if it cannot be read just now."""
    if file.size_bytes > MAX_BLOCK_BYTES:
        return None
    try:
        first = directory.read(file.digest, FIRST_BYTES)
        if len(first) < header_stop(first) <= MAX_HEADER_BYTES:
            first = directory.read(file.digest, header_stop(first))
    except NotAFileError:
        return None
    head = read_head(first, file.size_bytes, key)
    return head if head is not None and head.digest == file.digest else None


def _rooted(seen: Iterable[_Seen]) -> tuple[list[_Seen], list[BlockFile]]:
    """Split blocks into those that follow one another from position 0, in order, and the rest."""
    by_digest: dict[bytes, _Seen] = {}
    orphans: list[BlockFile] = []
    for one in sorted(seen, key=lambda one: one.head.start):
        parent = by_digest.get(one.head.parent)
        if one.head.start == 0 or (parent is not None and _stop(parent) == one.head.start):
            by_digest[one.head.digest] = one
        else:
            orphans.append(one.file)
    rooted = list(by_digest.values())
    # A block counts as used when one that follows it was, however old its own file is.
    for one in reversed(rooted):
        parent = by_digest.get(one.head.parent)
        if one.head.start > 0 and parent is not None:
            parent.used_unix_s = max(parent.used_unix_s, one.used_unix_s)
    return rooted, orphans


def _stop(one: _Seen) -> int:
    return one.head.start + one.head.tokens


def _within_limits(rooted: list[_Seen]) -> list[_Seen]:
    """Take the blocks that were last used, each with all that it follows.

    ``rooted`` is put in that order, so that the others are its end.
    """
    rooted.sort(key=lambda one: (-one.used_unix_s, one.head.start))
    tokens = 0
    for number, one in enumerate(rooted):
        tokens += one.head.tokens
        if number == MAX_FOUND_FILES or tokens > MAX_FOUND_TOKENS:
            return rooted[:number]
    return rooted[:]
