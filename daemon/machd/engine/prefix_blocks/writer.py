"""The writer of blocks: a queue bounded in bytes, and one thread that writes and deletes files.

The thread deletes before it writes, because room is made by deleting; so a block that is forgotten
and saved again is there in the end. A failure costs its block alone, and is told by
:meth:`BlockWriter.take_unsaved`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from machd.clock import Clock, Throttle
from machd.engine.prefix_blocks.directory import KeyDirectory
from machd.engine.prefix_blocks.encoding import BlockContent, encode_block
from machd.engine.protocol.blocks import SavedBlock
from machd.errors import SettingsError

MAX_QUEUED_BYTES = 256_000_000
"""Bytes of the blocks that wait for a slow disk; blocks beyond them are not written. A block that is
larger alone has to find the queue empty."""

_ENTRY_BYTES = 4096
"""About what a queued block takes beside its arrays, so that empty ones are bounded, too."""


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """A block's file: its bytes, and the positions and state that it has of the text up to its end."""

    size_bytes: int
    start: int
    has_state: bool


@dataclass(frozen=True, slots=True)
class QueuedBlock:
    """A block that is not written yet."""

    saved: SavedBlock
    content: BlockContent

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the queue."""
        return self.content.nbytes + _ENTRY_BYTES


class BlockWriter:
    """The owner of a directory's files, and of the one thread that writes and deletes there.

    Attributes:
        file_bytes: Bytes of the files, without those that are about to be deleted.
    """

    def __init__(
        self,
        directory: KeyDirectory,
        key: bytes,
        files: Mapping[bytes, WrittenBlock],
        clock: Clock,
        on_end: Callable[[], None],
        make_room: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Start the thread.

        ``on_end`` is called when the last block is written, which may be after :meth:`close`; ``make_room`` on the
        thread before a file is written, with the bytes that all files will take.
        """
        self._directory = directory
        self._key = key
        self._on_end = on_end
        self._make_room = make_room
        self._changed = threading.Condition()  # re-entrant
        self._files = dict(files)
        self.file_bytes = sum(one.size_bytes for one in self._files.values())
        self.written = 0
        self.dropped = 0
        self._queue: dict[bytes, QueuedBlock] = {}
        self._queued_bytes = 0
        self._in_hand: QueuedBlock | None = None
        self._used: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        self._unsaved: dict[bytes, None] = {}
        self._is_closing = False
        self._unreported_count = 0
        self._cause = ""
        self._reports = Throttle(clock)
        self._thread = threading.Thread(target=self._run, name="machd-blocks", daemon=True)
        self._thread.start()

    def put(self, saved: SavedBlock, content: BlockContent) -> None:
        """Queue a block if there is room; one that is written is noted as used. Never waits."""
        queued = QueuedBlock(saved, content)
        with self._changed:
            if self._is_closing:
                return
            self._unsaved.pop(saved.digest, None)
            if self.has(saved):
                self.use(saved.digest)
                return
            self._unqueue(saved.digest)
            if self._queued_bytes and self._queued_bytes + queued.nbytes > MAX_QUEUED_BYTES:
                self._drop(1, "the disk could not keep up")
                self.lose(saved.digest)
                return
            self._queue[saved.digest] = queued
            self._queued_bytes += queued.nbytes
            self._changed.notify()

    def find(self, digest: bytes) -> WrittenBlock | QueuedBlock | None:
        """Find a block's file, or the block itself if it is not written yet."""
        with self._changed:
            queued = self._queue.get(digest)
            if queued is None and digest not in self._forgotten and self._is_in_hand(digest):
                queued = self._in_hand
            return self._files.get(digest) if queued is None else queued

    def has(self, saved: SavedBlock) -> bool:
        """Find out whether a block is written or will be."""
        found = self.find(saved.digest)
        known = found.saved if isinstance(found, QueuedBlock) else found
        # The digest decides all else.
        return known is not None and (known.start, known.has_state) == (
            saved.start,
            saved.has_state,
        )

    def use(self, digest: bytes) -> None:
        """Note that a block was of use now."""
        with self._changed:
            self._used.add(digest)
            self._changed.notify()

    def forget(self, digests: Iterable[bytes]) -> None:
        """Delete blocks soon, or do not write them after all."""
        with self._changed:
            for digest in digests:
                self._unsaved.pop(digest, None)
                self._unqueue(digest)
                file = self._files.pop(digest, None)
                if file is not None:
                    self.file_bytes -= file.size_bytes
                if file is not None or self._is_in_hand(digest):
                    self._forgotten.add(digest)
            self._changed.notify()

    def lose(self, digest: bytes) -> None:
        """Delete a block that is not what it should be, and report it as unsaved.

        A file with the same digest goes, too, even if it starts elsewhere: no load asks for it.
        """
        with self._changed:
            self.forget([digest])
            self._unsaved[digest] = None

    def take_unsaved(self) -> tuple[bytes, ...]:
        """Take the digests of blocks that were to be kept and are not, each once."""
        if not self._unsaved:  # the usual case, without waiting for a lock
            return ()
        with self._changed:
            unsaved, self._unsaved = self._unsaved, {}
        return tuple(unsaved)

    def close(self, within_s: float) -> None:
        """Write queued blocks, for ``within_s`` seconds at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(within_s)
        with self._changed:
            if self._queue:
                self._drop(len(self._queue), "the stop could not wait for them")
                self._queue.clear()
            self._report()

    def _is_in_hand(self, digest: bytes) -> bool:
        return self._in_hand is not None and self._in_hand.saved.digest == digest

    def _unqueue(self, digest: bytes) -> None:
        queued = self._queue.pop(digest, None)
        if queued is not None:
            self._queued_bytes -= queued.nbytes

    def _drop(self, count: int, cause: str) -> None:
        self.dropped += count
        self._unreported_count += count
        self._cause = cause

    def _run(self) -> None:
        try:
            while self._work():
                pass
        finally:
            self._on_end()

    def _work(self) -> bool:
        """Delete, touch, and write one block; returns whether there can be more to do."""
        with self._changed:
            while not (self._queue or self._forgotten or self._used or self._is_closing):
                self._changed.wait()
            forgotten, used = self._forgotten, self._used - self._forgotten
            self._forgotten, self._used = set(), set()
            oldest = next(iter(self._queue), None)
            # Its bytes count until it is written.
            block = self._in_hand = None if oldest is None else self._queue.pop(oldest)
        for digest in forgotten:
            self._directory.delete(digest)
        for digest in used:
            self._directory.touch(digest)
        if block is not None:
            self._write(block)
        with self._changed:
            # Not while closing: close reports the sum.
            if self._unreported_count and not self._is_closing and self._reports.is_due():
                self._report()
            return not self._is_closing or bool(self._queue or self._forgotten or self._used)

    def _write(self, block: QueuedBlock) -> None:
        digest = block.saved.digest
        size_bytes, cause = 0, ""
        try:
            size_bytes = self._write_file(block)
        except OSError as error:
            cause = error.strerror or type(error).__name__
        except SettingsError as error:
            cause = error.message
        except Exception as error:  # noqa: BLE001 - a library's, and only a copy is lost
            cause = type(error).__name__
        with self._changed:
            self._in_hand = None
            self._queued_bytes -= block.nbytes
            if cause:
                self._drop(1, cause)
                # Unless it was forgotten meanwhile, or is to be written once more.
                if digest not in self._forgotten and digest not in self._queue:
                    self.lose(digest)
                return
            self.written += 1
            if digest not in self._forgotten:
                before = self._files.get(digest)
                saved = block.saved
                self._files[digest] = WrittenBlock(size_bytes, saved.start, saved.has_state)
                self.file_bytes += size_bytes - (before.size_bytes if before else 0)

    def _write_file(self, block: QueuedBlock) -> int:
        """Write a block's file, and make its directory again if it was removed; returns the bytes."""
        saved = block.saved
        pieces = encode_block(saved, block.content, self._key)
        self._make_room(self.file_bytes + sum(len(piece) for piece in pieces))
        try:
            return self._directory.write(saved.digest, pieces, saved.used_unix_s)
        except FileNotFoundError:  # the directory was removed, and all files with it
            self._directory.restore()
        with self._changed:
            for digest in tuple(self._files):
                self.lose(digest)
        return self._directory.write(saved.digest, pieces, saved.used_unix_s)

    def _report(self) -> None:
        if self._unreported_count:
            structlog.get_logger("machd.engine").warning(
                "blocks.not_written",
                count=self._unreported_count,
                cause=self._cause,
                advice="see that cache.disk_dir has room and answers; requests are not affected",
            )
        self._unreported_count = 0
