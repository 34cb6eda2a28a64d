"""The disk tier of the prefix cache: one file for each block, which outlives the daemon.

A file is used only if it is exactly what was written, and of this very block under this very key;
any other is deleted. At the start only the heads of files are read, so that thousands of them cost
a moment; a head that is wrong is found out when its block is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import structlog

from machd.clock import Clock, SystemClock, Throttle
from machd.engine.prefix_blocks.directory import BlockDirectory, KeyDirectory, NotAFileError
from machd.engine.prefix_blocks.encoding import BlockContent, decode_block, is_of
from machd.engine.prefix_blocks.scan import FoundBlocks, OtherKeys, find_blocks
from machd.engine.prefix_blocks.writer import BlockWriter, WrittenBlock
from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.memory import DiskReading


class DiskTier:
    """The files of one key. Made, used and closed on one thread; it writes on another."""

    def __init__(
        self,
        directory: Path,
        key: bytes,
        *,
        budget_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Lock the directory of all keys, find the blocks of this one in it, and delete files that are of no use.

        Other keys' files are deleted for ``budget_bytes``, now and while this key's become more; this key's are
        not. None leaves the others alone.

        Raises:
            SettingsError: The directory cannot be used, or another daemon uses it.
        """
        clock = clock or SystemClock()
        self._key = key
        self._is_closed = False
        self._loaded_count = 0
        self._damage_reports = Throttle(clock)
        with ExitStack() as opened:
            root = opened.enter_context(closing(BlockDirectory(directory)))
            self._directory = opened.enter_context(closing(root.of_key(key)))
            others = OtherKeys(root, key, budget_bytes)
            found = _found(self._directory, key, others)
            # Open until the last block is written; a failure before this line releases the lock.
            on_end = opened.pop_all().close
        self._found = tuple(saved for saved, _ in found.blocks)
        self._damaged_count = found.damaged
        files = {
            saved.digest: WrittenBlock(size_bytes, saved.start, saved.has_state)
            for saved, size_bytes in found.blocks
        }
        self._writer = BlockWriter(self._directory, key, files, clock, on_end, others.make_room)

    def saved(self) -> tuple[SavedBlock, ...]:
        """List the blocks that were found at the start and are still there, parents first."""
        return tuple(one for one in self._found if self._writer.has(one))

    def save(self, saved: SavedBlock, content: BlockContent) -> None:
        """Write a block soon, or note its use if it is written; never waits or raises."""
        self._writer.put(saved, content)

    def load(self, saved: SavedBlock) -> BlockContent | None:
        """Read a block's content; None if it is not there, or not as it was written."""
        if self._is_closed:
            return None
        found = self._writer.find(saved.digest)
        content = None
        if isinstance(found, WrittenBlock):
            content = self._read(saved, found.size_bytes)
        elif found is not None and is_of(found.saved, saved):
            content = found.content
        else:
            self._writer.lose(saved.digest)
        if content is not None:
            self._loaded_count += 1
            self._writer.use(saved.digest)
        return content

    def forget(self, digests: Iterable[bytes]) -> None:
        """Delete blocks soon; digests that are not there are ignored."""
        self._writer.forget(digests)

    def take_unsaved(self) -> tuple[bytes, ...]:
        """Take the digests of blocks that were to be kept and are not, since the last call.

        These could not be written, or were found to be gone or damaged, and were neither forgotten
        nor saved once more since.
        """
        return self._writer.take_unsaved()

    def reading(self) -> DiskReading:
        """Read the counts; bytes are without those that are about to be deleted."""
        return DiskReading(
            bytes=self._writer.file_bytes,
            written=self._writer.written,
            loaded=self._loaded_count,
            damaged=self._damaged_count,
            dropped=self._writer.dropped,
        )

    def close(self, within_s: float) -> None:
        """Write queued blocks, for ``within_s`` seconds at most; later loads find none."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.close(within_s)

    def _read(self, saved: SavedBlock, size_bytes: int) -> BlockContent | None:
        content = None
        try:
            # One more than there should be: a file that grew is not what was written, either.
            whole = self._directory.read(saved.digest, size_bytes + 1)
            content = decode_block(whole, saved, self._key)
        except FileNotFoundError:
            self._writer.lose(saved.digest)
            return None
        except NotAFileError:
            pass
        except OSError:
            return None  # no memory, no descriptor, a cable: the file may well be right
        if content is None:
            self._damaged_count += 1
            self._writer.lose(saved.digest)
            if self._damage_reports.is_due():
                _report_damage(self._damaged_count)
        return content


def _found(directory: KeyDirectory, key: bytes, others: OtherKeys) -> FoundBlocks:
    """Find the blocks in the directory, and log how many."""
    found = find_blocks(directory, key)
    own_bytes = sum(size_bytes for _, size_bytes in found.blocks)
    structlog.get_logger("machd.engine").info(
        "blocks.found",
        count=len(found.blocks),
        bytes=own_bytes,
        damaged=found.damaged,
        useless=found.useless,
        stale=others.make_room(own_bytes),
    )
    if found.damaged:
        _report_damage(found.damaged)
    return found


def _report_damage(count: int) -> None:
    structlog.get_logger("machd.engine").warning(
        "blocks.damaged",
        count=count,
        advice="see that nothing else writes to cache.disk_dir, and that its disk is well",
    )
