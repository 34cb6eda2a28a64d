"""The engine of rank 0: every verb is ordered of the other ranks before it is done here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from machd.engine.protocol.forwarding import ForwardingEngine
from machd.engine.protocol.memory import MemoryReading, RankReading, StepMemoryError
from machd.engine.protocol.step import StepPlan, StepResult
from machd.engine.ranks.orders import Close, Order, Report, Reset, Run, encoded
from machd.engine.ranks.rank_group import RankGroup
from machd.engine.ranks.rank_memory import gathered_memory
from machd.engine.step.mlx_engine import MlxEngine


class RanksLostError(BaseException):
    """The ranks cannot go on together.

    No Exception: nothing that only reads the engine's memory, or tries a step again, may take it for its own.
    """


class LeadingEngine(ForwardingEngine):
    """An engine whose steps all ranks run. Lives on the engine thread."""

    def __init__(self, engine: MlxEngine, group: RankGroup, unix_s: Callable[[], float]) -> None:
        """Lead the ranks of ``group``."""
        super().__init__(engine)
        self._shard = engine
        self._group = group
        self._unix_s = unix_s
        self._orders = 0
        self._is_lost = False

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step on every rank.

        Raises:
            StepMemoryError: A rank has too little memory for it; no rank has done anything of it.
            RanksLostError: It failed here. The others may be anywhere in it, so there is no other step.
        """
        with self._together():
            self._order(Run.of(plan, self._orders, self._shard.row_checksum()))
            return super().run(plan)

    def memory(self) -> MemoryReading:
        """Read the memory of every rank; what is left is what the tightest one has.

        Raises:
            OSError: The system cannot tell on this rank.
        """
        reading = super().memory()
        with self._together():
            self._order(Report(self._orders))
            ranks = gathered_memory(self._group, reading)
        now_s = self._unix_s()
        return replace(
            reading,
            available_bytes=min(one.available_bytes for one in ranks),
            step_bytes=min(one.step_bytes for one in ranks),
            ranks=tuple(
                RankReading(rank, one.active_bytes, one.available_bytes, now_s)
                for rank, one in enumerate(ranks)
            ),
        )

    def reset(self, *, max_rows: int | None = None) -> None:
        """Remove every row on every rank."""
        with self._together():
            self._order(Reset(self._orders, max_rows))
            super().reset(max_rows=max_rows)

    def close(self) -> None:
        """End every rank."""
        if not self._is_lost:
            with contextlib.suppress(RuntimeError):  # a rank that is gone has ended already
                self._order(Close(self._orders))
        super().close()

    def _order(self, order: Order) -> None:
        self._group.tell(encoded(order))
        self._orders += 1

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        if self._is_lost:
            raise RanksLostError
        try:
            yield
        except StepMemoryError:
            raise
        except BaseException as error:
            self._is_lost = True
            raise RanksLostError from error
