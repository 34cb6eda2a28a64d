"""The port through which the block pool tells which blocks are in memory."""

from __future__ import annotations

from typing import Protocol

from machd.scheduler.block_tree import Block


class BlockObserver(Protocol):
    """Follows the blocks in memory. It is called on the engine thread and never waits."""

    def entered(self, block: Block) -> None:
        """Note that the engine has a block in memory, now or still."""
        ...

    def left(self, block: Block) -> None:
        """Note that a block has left memory, or never came to it."""
        ...

    def was_split(self, head: Block, tail: Block) -> None:
        """Note that a block became ``head`` and ``tail``; ``tail`` is the object that it was."""
        ...

    def cleared(self) -> None:
        """Note that no block is in memory any more, after all of them have left."""
        ...


class NoObserver:
    """An observer that ignores everything."""

    def entered(self, block: Block) -> None:
        """Do nothing."""

    def left(self, block: Block) -> None:
        """Do nothing."""

    def was_split(self, head: Block, tail: Block) -> None:
        """Do nothing."""

    def cleared(self) -> None:
        """Do nothing."""
