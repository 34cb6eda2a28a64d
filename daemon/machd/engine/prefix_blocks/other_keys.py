"""Files of other keys: of models that are not served now, of versions that are not installed now.

Nobody else would ever delete them. They stay while the budget has room, so that going back to another
model finds what it left, and go one by one as this key's files need it: the longest unused first, and
none before those that follow it, which nobody could find any more.
"""

from __future__ import annotations

from contextlib import closing, suppress

from machd.engine.prefix_blocks.directory import BlockDirectory
from machd.engine.prefix_blocks.key_directory import BlockFile
from machd.engine.prefix_blocks.scan import files_by_worth
from machd.errors import SettingsError


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
