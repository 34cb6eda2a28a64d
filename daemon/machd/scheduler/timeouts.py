"""Timeouts of waiting and running subscribers."""

from __future__ import annotations

from machd.errors import MachdError, QueueTimeoutError, RequestTimeoutError
from machd.scheduler.slots import Slots
from machd.scheduler.subscriber import Subscriber
from machd.scheduler.waiting import QueueLimits, WaitingQueue


def overdue(
    limits: QueueLimits, waiting: WaitingQueue, slots: Slots, now_s: float
) -> list[tuple[Subscriber, MachdError]]:
    """Return timed-out subscribers with their errors: waiting ones in queue order, then running."""
    late = [
        (one, _request_timeout(limits))
        if one.is_group_started
        else (one, _queue_timeout(limits, retry_after_s=waiting.retry_after_s()))
        for one in waiting.expired(now_s)
    ]
    oldest_s = now_s - limits.request_timeout_s
    late += [
        (subscriber, _request_timeout(limits))
        for sequence in slots
        for subscriber in sequence.subscribers
        if subscriber.request.arrived_s <= oldest_s
    ]
    return late


def _queue_timeout(limits: QueueLimits, *, retry_after_s: int) -> MachdError:
    return QueueTimeoutError(
        f"no slot became free within limits.queue_timeout_s ({limits.queue_timeout_s:g} s)",
        retry_after_s=retry_after_s,
    )


def _request_timeout(limits: QueueLimits) -> MachdError:
    return RequestTimeoutError(
        f"the request ran longer than limits.request_timeout_s ({limits.request_timeout_s:g} s)"
    )
