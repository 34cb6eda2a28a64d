"""Loading of all shards as one: rank 0 shows how far every rank is, and each learns of one that fails.

While ranks read weights they meet at fixed shares of their bytes, however many tensors each of them has. A rank
that fails comes to the next meeting with its reason, so that no rank waits for one that has gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx
import numpy as np
import structlog

from machd.engine.protocol.progress import LoadProgress
from machd.engine.ranks.rank_group import RankGroup
from machd.errors import EngineFaultError, MachdError, StartupError

T = TypeVar("T")

_MEETINGS = 10
"""How often ranks meet while they read weights: at every tenth of a rank's bytes."""

_REASON_BYTES = 1024


class SharedLoading:
    """Receives the stages of one rank's loading on its engine thread; see :class:`LoadProgress`."""

    def __init__(self, group: RankGroup, progress: LoadProgress) -> None:
        """Begin; every rank has one of these."""
        self._group = group
        self._progress = progress
        self._total_bytes: int | None = None
        self._done_bytes = 0
        self._meetings = 0
        self._is_over = False

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Begin a stage; ranks meet in the first one that is counted in bytes.

        Raises:
            StartupError: Another rank has failed.
        """
        if self._total_bytes is not None and not self._is_over:
            self._meet(until=_MEETINGS)
            self._is_over = True
        elif self._total_bytes is None:
            self._total_bytes = total_bytes
        self._progress.stage(name, total_bytes)

    def advance(self, done_bytes: int) -> None:
        """Count bytes as done, and meet the other ranks when another share of all of them is.

        Raises:
            StartupError: Another rank has failed.
        """
        if self._total_bytes and not self._is_over:
            self._done_bytes += done_bytes
            # The last meeting is that at the end of the stage.
            self._meet(until=min(_MEETINGS * self._done_bytes // self._total_bytes, _MEETINGS - 1))

    def load(self, load: Callable[[], T]) -> T:
        """Load this rank's shard; the function tells its stages to this object.

        Raises:
            MachdError: It failed on this rank, or on another one: then the message says on which, and why.
        """
        try:
            return load()
        except MachdError as error:
            if self._total_bytes is not None and not self._is_over:
                self._gather(has_failed=True)
                self._raise_reasons(error.message)
            raise
        except RuntimeError as error:
            raise EngineFaultError(
                "another rank was lost while the model loaded, or it failed here; the log of that rank "
                f"says why: {error}"
            ) from error

    def _meet(self, *, until: int) -> None:
        """Meet the others as often as is due: each rank gets to the same number of meetings."""
        while self._meetings < until:
            self._meetings += 1
            ranks = self._gather(has_failed=False)
            if any(has_failed for _, _, has_failed in ranks):
                self._raise_reasons("")
            if self._group.leads:
                self._show([done for done, _, _ in ranks], [total for _, total, _ in ranks])

    def _gather(self, *, has_failed: bool) -> list[list[int]]:
        return self._group.gather([self._done_bytes, self._total_bytes or 0, int(has_failed)])

    def _show(self, loaded_bytes: list[int], total_bytes: list[int]) -> None:
        shares = [
            f"{rank} {done / max(total, 1):.0%}"
            for rank, (done, total) in enumerate(zip(loaded_bytes, total_bytes, strict=True))
        ]
        self._progress.stage(f"loading the weights: rank {', '.join(shares)}", sum(total_bytes))
        self._progress.advance(sum(loaded_bytes))
        structlog.get_logger("machd.engine").info(
            "ranks.loading", loaded_bytes=loaded_bytes, total_bytes=total_bytes
        )

    def _raise_reasons(self, reason: str) -> None:
        """Tell why this rank has failed, empty if it has not, and raise where another one has. A collective.

        Raises:
            StartupError: Another rank has failed, and this one has not.
        """
        self._is_over = True
        own = np.zeros((1, _REASON_BYTES), dtype=np.uint8)
        text = reason.encode()[:_REASON_BYTES]
        own[0, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        every = mx.distributed.all_gather(mx.array(own), group=self._group.group, stream=mx.cpu)
        texts = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in np.array(every)]
        if not reason:
            failed = "; ".join(
                f"rank {rank} could not load its shard: {text}"
                for rank, text in enumerate(texts)
                if text
            )
            raise StartupError(failed)
