"""A pool of worker threads that are started at once and never joined."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class Workers(ThreadPoolExecutor):
    """A pool whose threads are started at once.

    Under load the system may have no memory for another thread. And a thread may be stuck in a call, on a
    hung file system or in a library's endless loop.
    """

    def __init__(self, threads: int, *, name: str) -> None:
        """Start the threads.

        Raises:
            RuntimeError: The system has no room for them.
        """
        super().__init__(threads, thread_name_prefix=name)
        # Each of these calls waits for all others, so that each thread runs one.
        all_started = threading.Barrier(threads)
        for _ in range(threads):
            self.submit(all_started.wait)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the base class's
        """Take no more work; threads end after their current call."""
        super().shutdown(wait=False, cancel_futures=True)
