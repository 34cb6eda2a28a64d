"""A real Prometheus on loopback, which scrapes one daemon and takes the alerts of this repository."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from support.clocks.polling import CEILING_S, wait_until
from support.programs.installed_programs import path_of

ALERTS = Path(__file__).resolve().parents[3] / "config" / "prometheus" / "alerts.yml"


class PrometheusServer:
    """A context manager: inside it Prometheus answers at ``url``, and has scraped once."""

    def __init__(self, target_url: str, *, interval: str) -> None:
        """Prepare to scrape a daemon every ``interval``."""
        self._target = httpx.URL(target_url).netloc.decode()
        self._interval = interval
        self._folder = tempfile.TemporaryDirectory(prefix="machd-prometheus-")
        self.url = ""

    def __enter__(self) -> Self:
        """Start, and wait for the first scrape."""
        folder = Path(self._folder.name)
        (folder / "prometheus.yml").write_text(
            json.dumps(self._config()), "utf-8"
        )  # YAML holds JSON
        address = f"127.0.0.1:{_free_port()}"
        self.url = f"http://{address}"
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                path_of("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            wait_until(self._has_scraped, "Prometheus scrapes the daemon")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and remove what it has stored."""
        self._process.terminate()
        try:
            self._process.wait(CEILING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def query(self, expr: str) -> list[float]:
        """Return the values of an expression now, NaN included."""
        result = self.get("query", query=expr)["result"]
        return [float(one["value"][1]) for one in result]

    def get(self, path: str, **parameters: str | float) -> Any:
        """The data of an answer of the API; a refused query is a failure with its text."""
        return _data(self.url, path, parameters)

    def _config(self) -> dict[str, object]:
        scrape = {"job_name": "machd", "static_configs": [{"targets": [self._target]}]}
        return {
            "global": {
                "scrape_interval": self._interval,
                "scrape_timeout": self._interval,
                "evaluation_interval": "1s",
            },
            "rule_files": [str(ALERTS)],
            "scrape_configs": [scrape],
        }

    def _has_scraped(self) -> bool:
        if self._process.poll() is not None:
            self._log.seek(0)
            raise RuntimeError(f"Prometheus has ended: {self._log.read()}")
        try:
            return self.query('up{job="machd"}') == [1.0]
        except (httpx.HTTPError, json.JSONDecodeError):
            return False


def query_range(
    url: str, expr: str, *, start_unix_s: float, end_unix_s: float, step_s: float
) -> list[dict[str, Any]]:
    """The lines of an expression at any Prometheus: labels as ``metric``, pairs as ``values``."""
    parameters: dict[str, str | float] = {
        "query": expr,
        "start": start_unix_s,
        "end": end_unix_s,
        "step": step_s,
    }
    lines: list[dict[str, Any]] = _data(url, "query_range", parameters)["result"]
    return lines


def _data(url: str, path: str, parameters: Mapping[str, str | float]) -> Any:
    answer = httpx.get(f"{url}/api/v1/{path}", params=dict(parameters), timeout=CEILING_S).json()
    assert answer["status"] == "success", (parameters, answer)
    return answer["data"]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
