"""A package index on loopback whose links have hashes: a folder of empty wheels behind the simple API."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from packaging.utils import canonicalize_name, parse_wheel_filename


class HashedIndex:
    """A context manager: inside it the wheels of a folder are served below ``url``."""

    def __init__(self, folder: Path) -> None:
        """Serve the wheels of a folder, which :meth:`add` fills."""
        self._folder = folder
        handler = type("Handler", (_Handler,), {"folder": folder})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Where the simple API begins; files are beside it, at ``../files/NAME``."""
        return f"http://127.0.0.1:{self._server.server_port}/simple"

    def add(self, file_name: str) -> str:
        """Make an empty wheel with this file name; return its SHA-256 in hexadecimal digits."""
        distribution, version, _, _ = parse_wheel_filename(file_name)
        stem = "-".join(file_name.split("-")[:2])
        tag = file_name.removesuffix(".whl").split("-", 2)[2]
        with zipfile.ZipFile(self._folder / file_name, "w") as wheel:
            wheel.writestr(
                f"{stem}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
            )
            wheel.writestr(f"{stem}.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
        return hashlib.sha256((self._folder / file_name).read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        """Answer with a project's list of files, or with a file."""
        first, _, name = self.path.strip("/").partition("/")
        if first == "files" and (self.folder / name).is_file():
            self._answer((self.folder / name).read_bytes(), "application/octet-stream")
            return
        names = [
            one.name
            for one in sorted(self.folder.glob("*.whl"))
            if canonicalize_name(one.name.partition("-")[0]) == name
        ]
        if first != "simple" or not names:
            self.send_error(404)
            return
        links = [
            f'<a href="/files/{one}#sha256={hashlib.sha256((self.folder / one).read_bytes()).hexdigest()}">{one}</a>'
            for one in names
        ]
        self._answer(
            f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode(), "text/html"
        )

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Say nothing."""

    def _answer(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
