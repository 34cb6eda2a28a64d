"""From the settings to published KV events."""

from __future__ import annotations

import ipaddress

import structlog

from machd.clock import Clock
from machd.errors import SettingsError
from machd.kv_events.listener import MAX_OPEN_FILES
from machd.kv_events.publisher import KvEventPublisher
from machd.settings.cache import CacheSettings
from machd.settings.kv_events import KvEventsSettings


def open_kv_events(
    section: KvEventsSettings, cache: CacheSettings, clock: Clock
) -> KvEventPublisher | None:
    """Bind the endpoints; None where the settings name none.

    Raises:
        SettingsError: There is nothing to publish or to replay.
        ListenError: An endpoint is taken.
    """
    if section.endpoint is None:
        if section.replay_endpoint is not None:
            problem = "needs events to send again; name an endpoint for them in kv_events.endpoint"
            raise SettingsError([f"kv_events.replay_endpoint: {problem}"])
        return None
    if not cache.prefix:
        problem = (
            "events are about the prefix cache; set cache.prefix to true, or leave the endpoint out"
        )
        raise SettingsError([f"kv_events.endpoint: {problem}"])
    publisher = KvEventPublisher(
        section.endpoint,
        clock,
        replay_endpoint=section.replay_endpoint,
        topic=section.topic or "",
        encoding=section.encoding,
    )
    endpoints = [one for one in (publisher.endpoint, publisher.replay_endpoint) if one]
    is_exposed = any(is_reachable_from_outside(one) for one in endpoints)
    log = structlog.get_logger("machd.kv_events")
    (log.warning if is_exposed else log.info)(
        "kv_events.listening",
        endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        is_exposed=is_exposed,
    )
    return publisher


def open_files(section: KvEventsSettings) -> int:
    """The most files that the endpoints have open."""
    endpoints = (section.endpoint, section.replay_endpoint)
    return sum(MAX_OPEN_FILES for one in endpoints if one is not None)


def is_reachable_from_outside(endpoint: str) -> bool:
    """Return True if other machines may connect to an endpoint."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
