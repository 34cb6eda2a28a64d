"""The page of a running daemon: what its gauges follow, and what a change of the settings does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon, kept_logging
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import chat
from support.programs.installed_programs import needs_programs, path_of

_CONFIG = "/admin/config"


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[AdminDaemon]:
    config_path = tmp_path / "machd.toml"
    config_path.write_text("")
    with kept_logging(), AdminDaemon(tmp_path, config_path=config_path) as running:
        yield running


def _reload(daemon: AdminDaemon, text: str) -> httpx.Response:
    assert daemon.config_path is not None
    daemon.config_path.write_text(text)
    return daemon.admin.post("/admin/reload")


def _change(daemon: AdminDaemon, section: str, **values: object) -> httpx.Response:
    return daemon.admin.patch(_CONFIG, json={section: values})


def _value(daemon: AdminDaemon, name: str, **labels: str) -> float:
    return scrape(daemon.daemon.url, name, **labels)


@pytest.mark.parametrize("is_on", [True, False])
def test_vllms_names_are_there_from_the_start_if_asked_for(*, is_on: bool) -> None:
    """The settings that a daemon starts with count, not those of a change alone."""
    with RunningDaemon(flags={"metrics.vllm_names": is_on}) as daemon:
        assert (
            'vllm:num_requests_running{engine="0",model_name="fake"} 0' in _page(daemon)
        ) is is_on


def test_vllms_names_come_and_go(daemon: AdminDaemon) -> None:
    """A change of the settings shows at the next scrape, on both listeners."""
    for is_on in (True, None):
        assert _change(daemon, "metrics", vllm_names=is_on).status_code == 200
        for client in (daemon.http, daemon.admin):
            assert ("vllm:" in client.get("/metrics").text) is bool(is_on)


def test_a_change_that_is_refused_shows(daemon: AdminDaemon) -> None:
    """The last one went wrong, the time stays that of the settings in force; then all is well again."""
    started = _value(daemon, "machd_config_last_reload_timestamp_seconds")
    assert started == _value(daemon, "machd_start_time_seconds")
    assert _change(daemon, "limits", max_n=-1).status_code == 400
    assert _value(daemon, "machd_config_last_reload_successful") == 1, "that was no reload"
    assert _reload(daemon, "[limits]\nmax_n = -1\n").status_code == 400
    assert _value(daemon, "machd_config_last_reload_successful") == 0
    assert _value(daemon, "machd_config_last_reload_timestamp_seconds") == started

    assert _reload(daemon, "[limits]\nmax_n = 2\n").status_code == 200
    assert _value(daemon, "machd_config_last_reload_successful") == 1
    assert _value(daemon, "machd_config_last_reload_timestamp_seconds") > started
    assert _value(daemon, "machd_start_time_seconds") == started


def test_gauges_follow_the_settings(daemon: AdminDaemon) -> None:
    """The page shows the settings in force, also after they have changed."""
    assert _value(daemon, "machd_decode_mode_requested", mode="single") == 1
    assert _value(daemon, "machd_decode_mode_requested", mode="batched") == 0
    assert _change(daemon, "limits", max_queue=7).status_code == 200
    assert _change(daemon, "continuous_batching", enabled=True).status_code == 200
    assert _value(daemon, "machd_requests_waiting_limit") == 7
    assert _value(daemon, "machd_decode_mode_requested", mode="single") == 0
    assert _value(daemon, "machd_decode_mode_requested", mode="batched") == 1
    wait_until(
        lambda: _value(daemon, "machd_decode_mode_active", mode="batched") == 1, "it is done, too"
    )


def test_stored_responses_are_counted(daemon: AdminDaemon) -> None:
    """Count and bytes of what is kept, until it is deleted."""
    body = {"model": "fake", "input": "hi", "max_output_tokens": 16}
    response_id = daemon.http.post("/v1/responses", json=body).json()["id"]
    assert _value(daemon, "machd_stored_responses") == 1
    assert _value(daemon, "machd_stored_response_bytes") > 0

    assert daemon.http.delete(f"/v1/responses/{response_id}").status_code == 200
    assert _value(daemon, "machd_stored_responses") == 0
    assert _value(daemon, "machd_stored_response_bytes") == 0


def test_open_requests_are_counted(daemon: AdminDaemon) -> None:
    """A scrape over the public port counts itself, and a stream that is not read to its end."""
    assert _value(daemon, "machd_http_requests_in_flight") == 1
    body = chat("hi", stream=True, max_tokens=3000)
    with daemon.http.stream("POST", "/v1/chat/completions", json=body):
        assert _value(daemon, "machd_http_requests_in_flight") == 2


@needs_programs("promtool")
def test_promtool_finds_nothing_to_say(daemon: AdminDaemon) -> None:
    """Prometheus's own linter accepts the page of a daemon that has answered."""
    daemon.http.post("/v1/chat/completions", json=chat("hi", max_tokens=4)).raise_for_status()
    done = subprocess.run(
        [path_of("promtool"), "check", "metrics"],
        input=daemon.http.get("/metrics").content,
        capture_output=True,
        check=False,
        timeout=CEILING_S,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def _page(daemon: RunningDaemon) -> str:
    return httpx.get(f"{daemon.url}/metrics").text
