"""A running daemon with an admin listener, and an HTTP client that has its token."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import structlog

from machd.engine.protocol.engine import Engine
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine


class AdminDaemon:
    """A context manager: inside it ``admin`` is a client of the admin API, and ``http`` of the other.

    Attributes:
        token: The admin token; None where the operator brought a file.
        token_file: Where the daemon has left it.
    """

    def __init__(
        self,
        directory: Path,
        make_engine: Callable[[], Engine] = FakeEngine,
        flags: Mapping[str, object] | None = None,
        *,
        config_path: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare one that leaves its token under ``directory``."""
        self.directory = directory
        self.config_path = config_path
        self.environ = {
            "XDG_RUNTIME_DIR": str(directory),
            "HOME": str(directory),
            **(environ or {}),
        }
        self.daemon = RunningDaemon(
            make_engine,
            {"admin.listen": "127.0.0.1:0", **(flags or {})},
            config_path=config_path,
            environ=self.environ,
        )

    def __enter__(self) -> Self:
        """Start."""
        self.daemon.__enter__()
        assert self.daemon.admin_url is not None
        self.admin_url = self.daemon.admin_url
        port = self.admin_url.rpartition(":")[2]
        self.token_file = self.directory / "machd" / f"admin-{port}.token"
        self.token = self.token_file.read_text().strip() if self.token_file.exists() else None
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        self.admin = httpx.Client(base_url=self.admin_url, headers=headers)
        self.http = httpx.Client(base_url=self.daemon.url)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Stop."""
        self.admin.close()
        self.http.close()
        self.daemon.__exit__(kind, error, traceback)

    @property
    def status(self) -> dict[str, Any]:
        """``GET /admin/status``."""
        answer = self.admin.get("/admin/status")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def sse_events(answer: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and data of a stream's events as they come."""
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@contextmanager
def kept_logging() -> Iterator[None]:
    """Put this process's logging back, which a daemon in it configures anew for another level."""
    root = logging.getLogger()
    handlers, level, config = root.handlers, root.level, structlog.get_config()
    try:
        yield
    finally:
        root.handlers, root.level = handlers, level
        structlog.configure(**config)
