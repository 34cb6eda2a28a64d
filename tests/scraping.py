"""Numbers from a daemon's metrics page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from raw_client import RawClient

__all__ = ["is_idle", "scrape"]


def scrape(url: str, name: str, **labels: str) -> float:
    """The sum of all series with these labels; 0 while there is none."""
    with RawClient(url) as client:
        client.request("GET", "/metrics", headers={"Connection": "close"})
        answer = client.read_answer()
    assert answer.status == 200, answer
    page = answer.body.decode()
    return sum(
        float(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def is_idle(url: str) -> bool:
    """Whether nothing runs and nothing waits."""
    return scrape(url, "machd_requests_running") == scrape(url, "machd_requests_waiting") == 0
