"""``machd serve`` as a real process, with clients for its requests and for its operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from support.clocks.polling import CEILING_S
from support.daemon.serve_process import ServeProcess


@dataclass(frozen=True, slots=True)
class OperatedProcess:
    """A daemon that is ready.

    Attributes:
        http: For requests.
        admin: For its operator, with the token.
    """

    server: ServeProcess
    http: httpx.Client
    admin: httpx.Client

    def command(self, path: str, **fields: object) -> None:
        """Have the operator do something; fails unless it is done."""
        answer = self.admin.post(path, json=fields or None)
        assert answer.is_success, answer.text


@contextmanager
def operated_process(config: Path) -> Iterator[OperatedProcess]:
    """Serve what a file of settings says; the token's directory is made beside it."""
    runtime = config.parent / "runtime"
    runtime.mkdir(mode=0o700)
    environ = {"XDG_RUNTIME_DIR": str(runtime)}
    with ServeProcess("--config", str(config), environ=environ) as server:
        (token,) = (runtime / "machd").glob("admin-*.token")
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        with (
            httpx.Client(base_url=server.url, timeout=CEILING_S) as http,
            httpx.Client(base_url=server.admin_url, headers=headers, timeout=CEILING_S) as admin,
        ):
            yield OperatedProcess(server, http, admin)
