"""A package index on loopback: the simple API over the files of a folder, as pip and uv ask it."""

from __future__ import annotations

import os
import re
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

_PAGE = re.compile(r"/simple/(?P<name>[^/]+)/")


class LoopbackIndex:
    """A context manager: inside it the index answers at ``url``.

    Attributes:
        asked: The paths that were asked for, in order.
    """

    def __init__(self, folder: Path) -> None:
        """Serve the wheels and source distributions of ``folder``."""
        self._folder = folder
        self.asked: list[str] = []

    def __enter__(self) -> Self:
        """Start it."""
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(_Handler, self.asked, directory=str(self._folder))
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/simple"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Stop it."""
        self._server.shutdown()
        self._server.server_close()


def environ_of_index(url: str, home: Path) -> dict[str, str]:
    """Return the variables of a user with an empty home, whose pip and uv ask one index alone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "XDG_", "LME_"))
        and name not in {"NOTIFY_SOCKET", "XPC_SERVICE_NAME"}
    }
    return kept | {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": url,
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CONFIG": "1",
        "UV_DEFAULT_INDEX": url,
        "UV_HTTP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }


def write_wheel(folder: Path, name: str, version: str, member: str, content: Path) -> Path:
    """Write a wheel that has one file, stored as it is; the metadata suffice for an installer."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    records = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(content, member)
        wheel.writestr(
            f"{records}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{records}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: machd\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(
            f"{records}/RECORD", f"{member},,\n{records}/METADATA,,\n{records}/WHEEL,,\n"
        )
    return path


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, asked: list[str], *args: object, directory: str) -> None:
        self._asked = asked
        super().__init__(*args, directory=directory)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer with a project's page, or with a file."""
        self._asked.append(self.path)
        page = _PAGE.fullmatch(self.path)
        if page is None:
            super().do_GET()
            return
        prefix = page["name"].replace("-", "_") + "-"
        names = [one.name for one in Path(self.directory).iterdir() if one.name.startswith(prefix)]
        body = "".join(f'<a href="/{name}">{name}</a>' for name in names).encode()
        self.send_response(200 if names else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""
