"""Worker threads that are there from the start and that nothing waits for at the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class Workers(ThreadPoolExecutor):
    """A pool whose threads are started at once.

    Under load the system may have no memory for another thread. And a thread may be inside a call
    that never returns, on a file system that does not answer or in a library's loop.
    """

    def __init__(self, threads: int, *, name: str) -> None:
        """Start the threads.

        Raises:
            RuntimeError: The system has no room for them.
        """
        super().__init__(threads, thread_name_prefix=name)
        # Each of these calls waits for all others, so that no thread can run two of them.
        all_started = threading.Barrier(threads)
        for _ in range(threads):
            self.submit(all_started.wait)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the base class's
        """Take no more work; the threads end when they can."""
        super().shutdown(wait=False, cancel_futures=True)
