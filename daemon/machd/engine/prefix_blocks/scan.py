"""What a directory of blocks has at the start, told from the beginnings of its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace

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
    header_stop,
    read_head,
)
from machd.engine.protocol.blocks import SavedBlock
from machd.errors import SettingsError

MAX_FOUND_FILES = 100_000
"""Files that are taken over, those last used first; the others are deleted."""

MAX_FOUND_TOKENS = 4_000_000
"""Of all of them together; they take some 150 MB of memory."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """What was found, and what was deleted.

    Attributes:
        blocks: With the sizes of their files; what a block follows comes before it. Each counts as
            used when what follows it was, because nobody gets there but through it.
        damaged: Files that said something that cannot be.
        useless: Files whose block follows one that is not there, or is beyond the limits.
    """

    blocks: tuple[tuple[SavedBlock, int], ...]
    damaged: int
    useless: int


@dataclass(slots=True)
class _Seen:
    """A file with a head that can be.

    Attributes:
        tokens: How many it has.
        used_unix_s: When its block or one that follows it was last of use.
        saved: What the head says; None where that is not kept, for there is too much of it.
    """

    file: BlockFile
    parent: bytes
    start: int
    tokens: int
    used_unix_s: float
    saved: SavedBlock | None


def find_blocks(directory: KeyDirectory, key: bytes) -> FoundBlocks:
    """Read the heads of all files, and delete those that are of no use.

    The tensors are not looked at, nor the checksum: whoever loads a block does that. A file that
    cannot be read just now stays, and what seems to follow nothing then stays with it; neither
    counts until it is written again.
    """
    seen, damaged, is_complete = _look(directory, key, MAX_FOUND_TOKENS)
    for file in damaged:
        directory.delete(file.digest)
    rooted, orphans = _rooted(seen)
    _use_with_what_follows(rooted)
    kept = _within_limits(rooted)
    useless = rooted[len(kept) :] + (orphans if is_complete else [])
    for one in useless:
        directory.delete(one.file.digest)
    kept.sort(key=lambda one: one.start)
    blocks = tuple((saved, one.file.size_bytes) for one, saved in _with_heads(directory, key, kept))
    return FoundBlocks(blocks, len(damaged), len(useless))


def files_by_worth(
    directory: KeyDirectory, key: bytes
) -> list[tuple[tuple[float, int], BlockFile]]:
    """All files, each with what orders it: the smaller, the sooner it may go.

    Nothing is deleted. What a block follows is worth more than it, and what nobody could find or
    read is worth nothing.
    """
    seen, damaged, _ = _look(directory, key, 0)
    rooted, orphans = _rooted(seen)
    _use_with_what_follows(rooted)
    worthless = [*damaged, *(one.file for one in orphans)]
    return [
        *(((0.0, 0), file) for file in worthless),
        *(((one.used_unix_s, -one.start), one.file) for one in rooted),
    ]


def _look(
    directory: KeyDirectory, key: bytes, max_tokens: int
) -> tuple[list[_Seen], list[BlockFile], bool]:
    """Files with a head that can be, those without, and whether all could be read.

    No more heads are kept than have ``max_tokens`` tokens together.
    """
    seen: list[_Seen] = []
    damaged: list[BlockFile] = []
    is_complete = True
    tokens = 0
    for file in directory.files():
        try:
            saved = _read(directory, file, key)
        except OSError:
            is_complete = False
            continue
        if saved is None:
            damaged.append(file)
            continue
        tokens += len(saved.token_ids)
        is_kept = tokens <= max_tokens
        seen.append(
            _Seen(
                file=file,
                parent=saved.parent,
                start=saved.start,
                tokens=len(saved.token_ids),
                used_unix_s=file.used_unix_s,
                saved=saved if is_kept else None,
            )
        )
    return seen, damaged, is_complete


def _read(directory: KeyDirectory, file: BlockFile, key: bytes) -> SavedBlock | None:
    """What a head says; None where that cannot be.

    Raises:
        OSError: It cannot be read just now.
    """
    if file.size_bytes > MAX_BLOCK_BYTES:
        return None
    try:
        first = directory.read(file.digest, FIRST_BYTES)
        if len(first) < header_stop(first) <= MAX_HEADER_BYTES:
            first = directory.read(file.digest, header_stop(first))
    except NotAFileError:
        return None
    saved = read_head(first, file.size_bytes, key, file.used_unix_s)
    return saved if saved is not None and saved.digest == file.digest else None


def _rooted(seen: Iterable[_Seen]) -> tuple[list[_Seen], list[_Seen]]:
    """Those that follow one another from position 0 on, in order, and those that do not."""
    stops: dict[bytes, int] = {}
    rooted: list[_Seen] = []
    orphans: list[_Seen] = []
    for one in sorted(seen, key=lambda one: one.start):
        if one.start == 0 or stops.get(one.parent) == one.start:
            stops[one.file.digest] = one.start + one.tokens
            rooted.append(one)
        else:
            orphans.append(one)
    return rooted, orphans


def _use_with_what_follows(rooted: list[_Seen]) -> None:
    """Have a block count as used when what follows it was; parents come first, and stay so."""
    by_digest = {one.file.digest: one for one in rooted}
    for one in reversed(rooted):
        parent = by_digest.get(one.parent)
        if one.start > 0 and parent is not None:
            parent.used_unix_s = max(parent.used_unix_s, one.used_unix_s)


def _within_limits(rooted: list[_Seen]) -> list[_Seen]:
    """Those last used, as many as may be; with any of them all that it follows.

    ``rooted`` is put in that order.
    """
    rooted.sort(key=lambda one: (-one.used_unix_s, one.start))
    tokens = 0
    for number, one in enumerate(rooted):
        tokens += one.tokens
        if number == MAX_FOUND_FILES or tokens > MAX_FOUND_TOKENS:
            return rooted[:number]
    return rooted[:]


def _with_heads(
    directory: KeyDirectory, key: bytes, kept: Iterable[_Seen]
) -> Iterator[tuple[_Seen, SavedBlock]]:
    """What the heads say, read again where it was not kept."""
    for one in kept:
        saved = one.saved
        if saved is None:
            try:
                saved = _read(directory, one.file, key)
            except OSError:
                continue  # what follows is found to follow nothing
        if saved is not None:
            yield one, replace(saved, used_unix_s=one.used_unix_s)


class OtherKeys:
    """What a directory has of all keys but one. Used by one thread at a time."""

    def __init__(self, root: BlockDirectory, key: bytes, budget_bytes: int | None) -> None:
        """Count what is there; directories without files are removed.

        Args:
            root: Of all keys.
            key: Whose files are not counted, and never deleted.
            budget_bytes: What the files of all keys may take; None leaves the others alone.
        """
        self._root = root
        self._budget_bytes = budget_bytes
        self._counts: dict[bytes, int] = {}
        self._bytes = 0
        self._order: list[tuple[bytes, BlockFile]] | None = None
        for other in [] if budget_bytes is None else root.keys():
            if other != key:
                with suppress(OSError, SettingsError), closing(root.found(other)) as directory:
                    files = directory.files()
                    self._bytes += sum(one.size_bytes for one in files)
                    self._counts[other] = len(files)
                    if not files:
                        root.remove(other)

    def make_room(self, own_bytes: int) -> int:
        """Delete until ``own_bytes`` and what is left fit the budget; returns how many files."""
        deleted = 0
        while self._budget_bytes is not None and own_bytes + self._bytes > self._budget_bytes:
            if self._order is None:
                self._order = self._worst_last()
            if not self._order:
                self._bytes = 0  # nothing else can be deleted
                break
            self._delete(*self._order.pop())
            deleted += 1
        return deleted

    def _delete(self, key: bytes, file: BlockFile) -> None:
        with suppress(OSError, SettingsError), closing(self._root.found(key)) as directory:
            directory.delete(file.digest)
        self._bytes -= file.size_bytes
        self._counts[key] -= 1
        if not self._counts[key]:
            self._root.remove(key)

    def _worst_last(self) -> list[tuple[bytes, BlockFile]]:
        ranked = []
        for key in self._counts:
            with suppress(OSError, SettingsError), closing(self._root.found(key)) as directory:
                ranked += [(rank, key, file) for rank, file in files_by_worth(directory, key)]
        ranked.sort(key=lambda one: one[0], reverse=True)
        return [(key, file) for _, key, file in ranked]
