"""A watch over an engine leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from unittest.mock import Mock

from machd.errors import EngineFaultError
from machd.served.engine_watch import EngineWatch


def test_failure_after_the_watch_is_no_error_of_the_event_loop() -> None:
    """The daemon's log has no traceback of asyncio's when a killed engine process ends after a stop has ended the watch."""
    told = list[dict[str, object]]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, one: told.append(one))
        engine = Mock(finished=Future[None](), heartbeat_age_s=0.0)
        watching = asyncio.create_task(EngineWatch(engine, lambda: 1.0, Mock()).failed())
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait({watching})
        engine.finished.set_exception(EngineFaultError("killed"))
        await asyncio.sleep(0.01)
        gc.collect()

    asyncio.run(main())
    assert told == []
