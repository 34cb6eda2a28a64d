"""Writes blocks behind the steps' back: a queue bounded in bytes, and one thread.

The thread deletes before it writes, because who made room wants it first; so a block that is
forgotten and saved again is there in the end. Whatever fails costs that block alone, and whoever
asked for it can learn of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import structlog

from machd.clock import Clock
from machd.engine.prefix_blocks.directory import KeyDirectory
from machd.engine.prefix_blocks.encoding import BlockContent, encode_block
from machd.engine.protocol.blocks import SavedBlock
from machd.errors import SettingsError

MAX_QUEUED_BYTES = 256_000_000
"""Blocks that wait for a slow disk; those that come on top of them are not written. One that is larger
alone has to find the queue empty."""

_ENTRY_BYTES = 4096
"""About what a queued block takes beside its arrays, so that empty ones are bounded, too."""

_REPORT_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """A file, and which cut of the text up to its end it has.

    Attributes:
        size_bytes: Its length.
    """

    size_bytes: int
    start: int
    has_state: bool

    @classmethod
    def of(cls, saved: SavedBlock, size_bytes: int) -> WrittenBlock:
        """The file of a block."""
        return cls(size_bytes, saved.start, saved.has_state)

    def is_of(self, saved: SavedBlock) -> bool:
        """Whether the file has what is to be saved; all else follows from the digest."""
        return (self.start, self.has_state) == (saved.start, saved.has_state)


@dataclass(frozen=True, slots=True)
class _Waiting:
    saved: SavedBlock
    content: BlockContent

    @property
    def nbytes(self) -> int:
        return self.content.nbytes + _ENTRY_BYTES


class BlockWriter:
    """Owns a directory's files, and the one thread that writes and deletes there."""

    def __init__(
        self,
        directory: KeyDirectory,
        key: bytes,
        written: Mapping[bytes, WrittenBlock],
        clock: Clock,
        on_end: Callable[[], None],
        make_room: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Start the thread.

        Args:
            directory: Where to write.
            key: What the blocks are made under.
            written: The files that are there, by digest.
            clock: Reads time.
            on_end: Called when nothing is written any more, which may be after :meth:`close`.
            make_room: Called on the thread, before a file is written, with what all files take then.
        """
        self._directory = directory
        self._key = key
        self._clock = clock
        self._on_end = on_end
        self._make_room = make_room
        self._changed = threading.Condition()
        self._written = dict(written)
        self._file_bytes = sum(one.size_bytes for one in self._written.values())
        self._queue: dict[bytes, _Waiting] = {}
        self._present: _Waiting | None = None
        self._queued_bytes = 0
        self._used: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        self._unsaved: dict[bytes, None] = {}
        self._is_closing = False
        self._written_count = 0
        self._dropped_count = 0
        self._unreported_count = 0
        self._cause = ""
        self._reported_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="machd-blocks", daemon=True)
        self._thread.start()

    @property
    def file_bytes(self) -> int:
        """What the files take, without those that are about to be deleted."""
        return self._file_bytes

    @property
    def written(self) -> int:
        """Blocks that were written since the start."""
        return self._written_count

    @property
    def dropped(self) -> int:
        """Blocks that were not written since the start."""
        return self._dropped_count

    def put(self, saved: SavedBlock, content: BlockContent) -> None:
        """Have a block written, unless it is there or there is no room for it; never waits."""
        waiting = _Waiting(saved, content)
        with self._changed:
            if self._is_closing:
                return
            self._unsaved.pop(saved.digest, None)
            if self._has(saved):
                self._used.add(saved.digest)
            else:
                self._leave_queue(saved.digest)
                if self._queued_bytes and self._queued_bytes + waiting.nbytes > MAX_QUEUED_BYTES:
                    self._drop(1, "the disk could not keep up")
                    self._lose(saved.digest)
                    return
                self._queue[saved.digest] = waiting
                self._queued_bytes += waiting.nbytes
            self._changed.notify()

    def find(self, digest: bytes) -> WrittenBlock | tuple[SavedBlock, BlockContent] | None:
        """A block's file, or itself where it is not written yet; None where there is neither."""
        with self._changed:
            waiting = self._queue.get(digest)
            if waiting is None and digest not in self._forgotten:
                waiting = self._writing(digest)
            return (
                self._written.get(digest) if waiting is None else (waiting.saved, waiting.content)
            )

    def has(self, saved: SavedBlock) -> bool:
        """Whether a block is written, or will be."""
        with self._changed:
            return self._has(saved)

    def use(self, digest: bytes) -> None:
        """Note that a block was of use now."""
        with self._changed:
            self._used.add(digest)
            self._changed.notify()

    def forget(self, digests: Iterable[bytes]) -> None:
        """Have blocks deleted, or not written after all."""
        with self._changed:
            for digest in digests:
                self._forget(digest)
            self._changed.notify()

    def lose(self, digest: bytes) -> None:
        """Have a block deleted that is not what it should be, and let it be known."""
        with self._changed:
            self._lose(digest)

    def take_unsaved(self) -> tuple[bytes, ...]:
        """Digests of what was to be kept and is not, each once."""
        if not self._unsaved:  # the usual case, without waiting for a lock
            return ()
        with self._changed:
            unsaved, self._unsaved = self._unsaved, {}
        return tuple(unsaved)

    def close(self, within_s: float) -> None:
        """Write what waits, for ``within_s`` seconds at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(within_s)
        with self._changed:
            if self._queue:
                self._drop(len(self._queue), "the stop could not wait for them")
                self._queue.clear()
            self._report()

    def _has(self, saved: SavedBlock) -> bool:
        digest = saved.digest
        waiting = self._queue.get(digest)
        if waiting is None and digest not in self._forgotten:
            waiting = self._writing(digest)
        if waiting is not None:
            return WrittenBlock.of(waiting.saved, 0).is_of(saved)
        written = self._written.get(digest)
        return written is not None and written.is_of(saved)

    def _writing(self, digest: bytes) -> _Waiting | None:
        """What is being written now, if it is that."""
        present = self._present
        return present if present is not None and present.saved.digest == digest else None

    def _forget(self, digest: bytes) -> None:
        self._unsaved.pop(digest, None)
        self._leave_queue(digest)
        written = self._written.pop(digest, None)
        if written is not None:
            self._file_bytes -= written.size_bytes
        if written is not None or self._writing(digest) is not None:
            self._forgotten.add(digest)

    def _lose(self, digest: bytes) -> None:
        """Nothing stays by this name, not even another cut of the text, which nobody asks for."""
        self._forget(digest)
        self._unsaved[digest] = None
        self._changed.notify()

    def _lose_all(self) -> None:
        with self._changed:
            for digest in tuple(self._written):
                self._lose(digest)

    def _leave_queue(self, digest: bytes) -> None:
        waiting = self._queue.pop(digest, None)
        if waiting is not None:
            self._queued_bytes -= waiting.nbytes

    def _drop(self, count: int, cause: str) -> None:
        self._dropped_count += count
        self._unreported_count += count
        self._cause = cause

    def _run(self) -> None:
        try:
            while self._work():
                pass
        finally:
            self._on_end()

    def _work(self) -> bool:
        """Do what there is to be done, one block at a time; returns whether there can be more."""
        with self._changed:
            while not (self._queue or self._forgotten or self._used or self._is_closing):
                self._changed.wait()
            forgotten, used = self._forgotten, self._used - self._forgotten
            self._forgotten, self._used = set(), set()
            waiting = self._present = self._pop()
        for digest in forgotten:
            self._directory.delete(digest)
        for digest in used:
            self._directory.touch(digest)
        if waiting is not None:
            self._write(waiting)
        with self._changed:
            self._report_at_times()
            return not self._is_closing or bool(self._queue or self._forgotten or self._used)

    def _pop(self) -> _Waiting | None:
        """The block that has waited longest. Its bytes count until it is written."""
        digest = next(iter(self._queue), None)
        return None if digest is None else self._queue.pop(digest)

    def _write(self, waiting: _Waiting) -> None:
        saved = waiting.saved
        size_bytes, cause = 0, ""
        try:
            pieces = encode_block(saved, waiting.content, self._key)
            self._make_room(self._file_bytes + sum(len(piece) for piece in pieces))
            try:
                size_bytes = self._directory.write(saved.digest, pieces, saved.used_unix_s)
            except FileNotFoundError:  # somebody has removed the directory, and all files with it
                self._directory.restore()
                self._lose_all()
                size_bytes = self._directory.write(saved.digest, pieces, saved.used_unix_s)
        except OSError as error:
            cause = error.strerror or type(error).__name__
        except SettingsError as error:
            cause = error.message
        except Exception as error:  # noqa: BLE001 - a library's, and only a copy is lost
            cause = type(error).__name__
        with self._changed:
            self._present = None
            self._queued_bytes -= waiting.nbytes
            if cause:
                self._drop(1, cause)
                # Unless it was forgotten meanwhile, or is to be written once more.
                if saved.digest not in self._forgotten and saved.digest not in self._queue:
                    self._lose(saved.digest)
                return
            self._written_count += 1
            if saved.digest not in self._forgotten:
                before = self._written.get(saved.digest)
                self._written[saved.digest] = WrittenBlock.of(saved, size_bytes)
                self._file_bytes += size_bytes - (before.size_bytes if before else 0)

    def _report_at_times(self) -> None:
        """Report unless that was done lately, or is about to be: whoever closes has the sum."""
        now_s = self._clock.monotonic_s()
        is_due = self._reported_s is None or now_s - self._reported_s >= _REPORT_INTERVAL_S
        if is_due and not self._is_closing and self._unreported_count:
            self._reported_s = now_s
            self._report()

    def _report(self) -> None:
        if self._unreported_count:
            structlog.get_logger("machd.engine").warning(
                "blocks.not_written",
                count=self._unreported_count,
                cause=self._cause,
                advice="see that cache.disk_dir has room and answers; requests are not affected",
            )
        self._unreported_count = 0
