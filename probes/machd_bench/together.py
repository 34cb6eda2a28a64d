"""Work that is done at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

_Result = TypeVar("_Result")


async def together(work: Iterable[Coroutine[object, object, _Result]]) -> list[_Result]:
    """Run all of it at once, and give the results in its order.

    The first failure cancels the rest, and is raised as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
