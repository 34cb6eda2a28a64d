"""The life of a rank that follows: it runs what rank 0 orders until that ends."""

from __future__ import annotations

from collections.abc import Callable

from machd.engine.protocol.memory import StepMemoryError
from machd.engine.ranks.orders import Close, Report, Reset, Run, decoded
from machd.engine.ranks.rank_group import RankGroup
from machd.engine.ranks.rank_memory import gathered_memory
from machd.engine.step.mlx_engine import MlxEngine
from machd.errors import EngineFaultError


def follow(engine: MlxEngine, group: RankGroup, on_order: Callable[[], None]) -> None:
    """Run orders until the group is closed; ``on_order`` is called at each, and so once a second when nothing runs.

    Raises:
        EngineFaultError: This rank does not have the rows that rank 0 has, or has missed an order.
    """
    orders = 0
    while True:
        order = decoded(group.tell(b""))
        on_order()
        if order.number != orders:
            raise EngineFaultError(f"order {order.number} came where {orders} was next")
        orders += 1
        match order:
            case Run():
                _run(engine, order)
            case Report():
                gathered_memory(group, engine.memory())
            case Reset(max_rows=max_rows):
                engine.reset(max_rows=max_rows)
            case Close():
                return


def _run(engine: MlxEngine, order: Run) -> None:
    if engine.row_checksum() != order.row_checksum:
        raise EngineFaultError("this rank's rows are not those of rank 0")
    try:
        engine.run(order.plan)
    except StepMemoryError:
        return  # rank 0 has raised it as well
