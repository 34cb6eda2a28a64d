"""The errors of those who waited or ran too long."""

from __future__ import annotations

from machd.errors import MachdError, QueueTimeoutError, RequestTimeoutError
from machd.scheduler.waiting import QueueLimits

__all__ = ["queue_timeout", "request_timeout"]


def queue_timeout(limits: QueueLimits, *, retry_after_s: int) -> MachdError:
    """For a sequence that found no slot in time."""
    return QueueTimeoutError(
        f"no slot became free within limits.queue_timeout_s ({limits.queue_timeout_s:g} s)",
        retry_after_s=retry_after_s,
    )


def request_timeout(limits: QueueLimits) -> MachdError:
    """For a sequence of a request that took too long altogether."""
    return RequestTimeoutError(
        f"the request ran longer than limits.request_timeout_s ({limits.request_timeout_s:g} s)"
    )
