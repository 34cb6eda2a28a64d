"""The disk tier of blocks: one file each, which outlives the daemon.

A file is used only if it is exactly what was written: its checksum is verified before anything of it
is parsed, and then it has to be of this very block, under this very key. All else is deleted. At the
start only the files' heads are read, so that thousands of them cost a moment; a head that lies is
found out when its block is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import structlog

from machd.clock import Clock, SystemClock
from machd.engine.prefix_blocks.directory import BlockDirectory, KeyDirectory, NotAFileError
from machd.engine.prefix_blocks.encoding import BlockContent, decode_block, is_of
from machd.engine.prefix_blocks.scan import FoundBlocks, OtherKeys, find_blocks
from machd.engine.prefix_blocks.writer import BlockWriter, WrittenBlock
from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.engine import DiskReading

_REPORT_INTERVAL_S = 60.0


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
        """Lock the directory, see what is there, and delete what is of no use.

        Args:
            directory: Of all keys; made if it is not there.
            key: What blocks have to be made under to be of use.
            budget_bytes: What the files of all keys may take: other keys' go for it, now and
                while this one's become more; this one's do not. None leaves the others alone.
            clock: Reads time; the machine's unless given.

        Raises:
            SettingsError: The directory cannot be used, or another daemon uses it.
        """
        self._key = key
        self._clock = clock or SystemClock()
        self._is_closed = False
        self._loaded_count = 0
        self._reported_s: float | None = None
        with ExitStack() as opened:
            root = opened.enter_context(closing(BlockDirectory(directory)))
            self._directory = opened.enter_context(closing(root.of_key(key)))
            others = OtherKeys(root, key, budget_bytes)
            found = _found(self._directory, key, others)
            # As long as anything is written; whatever failed until here has let go of the lock.
            on_end = opened.pop_all().close
        self._found = tuple(saved for saved, _ in found.blocks)
        self._damaged_count = found.damaged
        self._writer = BlockWriter(
            self._directory,
            key,
            {one.digest: WrittenBlock.of(one, size_bytes) for one, size_bytes in found.blocks},
            self._clock,
            on_end,
            others.make_room,
        )

    def saved(self) -> tuple[SavedBlock, ...]:
        """What was found at the start and is still there, parents first."""
        return tuple(one for one in self._found if self._writer.has(one))

    def save(self, saved: SavedBlock, content: BlockContent) -> None:
        """Have a block written soon, or note its use where that was done; never waits or raises."""
        self._writer.put(saved, content)

    def load(self, saved: SavedBlock) -> BlockContent | None:
        """A block's content; None where it is not there, or not as it was written."""
        found = None if self._is_closed else self._writer.find(saved.digest)
        content = None
        if isinstance(found, WrittenBlock):
            content = self._read(saved, found.size_bytes)
        elif found is not None and is_of(found[0], saved):
            content = found[1]
        elif not self._is_closed:
            self._writer.lose(saved.digest)
        if content is not None:
            self._loaded_count += 1
            self._writer.use(saved.digest)
        return content

    def forget(self, digests: Iterable[bytes]) -> None:
        """Have blocks deleted soon; those that are not there are no fault."""
        self._writer.forget(digests)

    def take_unsaved(self) -> tuple[bytes, ...]:
        """Digests of blocks that were to be kept and are not, since this was last asked.

        Those that could not be written, and those that were found to be gone or damaged; not those
        that were forgotten, or saved once more since.
        """
        return self._writer.take_unsaved()

    def reading(self) -> DiskReading:
        """What there is, without what is about to be deleted."""
        return DiskReading(
            bytes=self._writer.file_bytes,
            written=self._writer.written,
            loaded=self._loaded_count,
            damaged=self._damaged_count,
            dropped=self._writer.dropped,
        )

    def close(self, within_s: float) -> None:
        """Write what waits, for ``within_s`` seconds at most; then nothing is there any more."""
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
            self._report_damage()
        return content

    def _report_damage(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._reported_s is None or now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            structlog.get_logger("machd.engine").warning(
                "blocks.damaged",
                count=self._damaged_count,
                advice="see that nothing else writes to cache.disk_dir, and that its disk is well",
            )


def _found(directory: KeyDirectory, key: bytes, others: OtherKeys) -> FoundBlocks:
    """Look through the directory, and say what is there."""
    found = find_blocks(directory, key)
    own_bytes = sum(size_bytes for _, size_bytes in found.blocks)
    stale = others.make_room(own_bytes)
    log = structlog.get_logger("machd.engine")
    log.info(
        "blocks.found",
        count=len(found.blocks),
        bytes=own_bytes,
        damaged=found.damaged,
        useless=found.useless,
        stale=stale,
    )
    return found
