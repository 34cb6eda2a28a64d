"""A hub on loopback that speaks what ``huggingface_hub`` asks for: model info, trees, resolving with redirects, ranges.

Large files are served by a second origin, as the hub's are by its CDN. Faults are planted by the attributes of :class:`LoopbackHub`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"

_INFO = re.compile(r"/api/models/(?P<model>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)")
_TREE = re.compile(r"/api/models/(?P<model>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<model>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_LARGE = (".safetensors", ".gguf", ".bin")
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request for a file's content.

    Attributes:
        start: Of the range that was asked for.
        token: What came as Authorization; None without.
    """

    file: str
    start: int
    token: str | None


@dataclass
class LoopbackHub:
    """A context manager: inside it the hub answers at ``url``.

    Attributes:
        models: Contents of files by name, by model.
        token: That a request has to bring; None for a public hub.
        is_gated: Refuses every token.
        sizes: Sizes that are told instead of the true ones.
        cuts: After how many bytes the next transfers of a file are cut, in order.
        wrong: Files that are served with another content of the same length.
        bytes_per_s: Speed of every transfer.
        ignores_ranges: Answers 200 with the whole file.
        unavailable: How many of the next transfers are answered with 503.
        info: What is answered instead of facts about a model.
        stalled: Requests that are never answered: of "info" or of "tree".
        transfers: Requests for contents, in order.
        authorizations: What came as Authorization with requests for facts, in order.
    """

    models: Mapping[str, Mapping[str, bytes]]
    token: str | None = None
    is_gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    bytes_per_s: float | None = None
    ignores_ranges: bool = False
    unavailable: int = 0
    info: bytes | None = None
    stalled: set[str] = field(default_factory=set)
    transfers: list[Transfer] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)

    def __enter__(self) -> Self:
        """Start both origins."""
        self._has_ended = threading.Event()
        self._servers = [_Server(self, is_cdn=False), _Server(self, is_cdn=True)]
        self.url, self.cdn_url = (
            f"http://127.0.0.1:{one.server_address[1]}" for one in self._servers
        )
        for one in self._servers:
            threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Stop them."""
        self._has_ended.set()
        for one in self._servers:
            one.shutdown()
            one.server_close()

    def stall(self, what: str) -> None:
        """Keep a request waiting until the hub ends, if it is to be."""
        if what in self.stalled:
            self._has_ended.wait()

    def environ(self, home: os.PathLike[str]) -> dict[str, str]:
        """Return the environment of a program that asks this hub, and has its cache below ``home``."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        root = os.fspath(home)
        return kept | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": f"{root}/hf",
            "HOME": root,
            "XDG_CACHE_HOME": f"{root}/cache",
            "XDG_CONFIG_HOME": f"{root}/config",
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LoopbackHub, *, is_cdn: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.is_cdn = is_cdn

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that leave."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        if self.server.is_cdn:
            model, _, name = path.removeprefix("/cdn/").partition("//")
            self._give(name, hub.models[model][name])
            return
        for pattern, answer in ((_INFO, self._info), (_TREE, self._tree), (_FILE, self._file)):
            found = pattern.fullmatch(path)
            if found is not None:
                if self._is_let_in(found["model"], found["revision"]):
                    answer(found["model"], *([found["file"]] if pattern is _FILE else []))
                return
        self._refuse(404, "EntryNotFound")

    def _is_let_in(self, model: str, revision: str) -> bool:
        hub, given = self.server.hub, self.headers.get("Authorization")
        if hub.is_gated:
            self._refuse(403, "GatedRepo")
        elif hub.token is not None and given not in {None, f"Bearer {hub.token}"}:
            self._refuse(401, None, "Invalid credentials in Authorization header")
        elif model not in hub.models or (hub.token is not None and given is None):
            self._refuse(401 if given is None else 404, "RepoNotFound")
        elif revision not in {"main", "v1", COMMIT}:
            self._refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def _info(self, model: str) -> None:
        hub = self.server.hub
        hub.authorizations.append(self.headers.get("Authorization"))
        hub.stall("info")
        if hub.info is not None:
            self._content(hub.info)
            return
        siblings = [
            {"rfilename": one["path"], "size": one["size"], "blobId": one["oid"]}
            | (
                {"lfs": {"sha256": one["lfs"]["oid"], "size": one["size"], "pointerSize": 130}}
                if "lfs" in one
                else {}
            )
            for one in self._entries(model)
        ]
        self._json({"id": model, "sha": COMMIT, "private": False, "siblings": siblings})

    def _tree(self, model: str) -> None:
        self.server.hub.stall("tree")
        self._json(self._entries(model))

    def _entries(self, model: str) -> list[dict[str, Any]]:
        hub = self.server.hub
        entries: list[dict[str, Any]] = []
        for name, content in hub.models[model].items():
            size = hub.sizes.get(name, len(content))
            entry: dict[str, Any] = {
                "type": "file",
                "path": name,
                "size": size,
                "oid": _git_id(content),
            }
            if name.endswith(_LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 130}
            entries.append(entry)
        return entries

    def _file(self, model: str, file: str) -> None:
        hub = self.server.hub
        content = hub.models[model].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": COMMIT}
        if not file.endswith(_LARGE):
            self._give(file, content, headers | {"ETag": f'"{_git_id(content)}"'})
            return
        self._send(
            302,
            headers
            | {
                "Location": f"{hub.cdn_url}/cdn/{model}//{file}",
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
            },
        )

    def _give(self, name: str, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a file, or the rest of it, with the faults that are planted."""
        hub = self.server.hub
        if name in hub.wrong:
            content = content[::-1]
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and not hub.ignores_ranges else 0
        if self.command == "GET":
            token = self.headers.get("Authorization")
            hub.transfers.append(Transfer(name, int(asked[1]) if asked else 0, token))
            if hub.unavailable:
                hub.unavailable -= 1
                self._refuse(503, None)
                return
        rest = content[start:]
        own = {"Content-Length": str(len(rest)), "Accept-Ranges": "bytes"} | dict(headers or {})
        if start:
            own["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if start else 200, own, is_whole=False)
        if self.command == "HEAD":
            return
        self._write(rest, hub.cuts.get(name))

    def _write(self, rest: bytes, cuts: list[int] | None) -> None:
        kept = rest[: cuts.pop(0)] if cuts else rest
        for at in range(0, len(kept), _CHUNK_BYTES):
            chunk = kept[at : at + _CHUNK_BYTES]
            self.wfile.write(chunk)
            if (bytes_per_s := self.server.hub.bytes_per_s) is not None:
                time.sleep(len(chunk) / bytes_per_s)
        if len(kept) < len(rest):
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(1)

    def _json(self, value: object) -> None:
        self._content(json.dumps(value).encode())

    def _content(self, body: bytes) -> None:
        self._send(
            200,
            {"Content-Type": "application/json", "Content-Length": str(len(body))},
            is_whole=False,
        )
        self.wfile.write(body)

    def _refuse(self, status: int, code: str | None, message: str = "no") -> None:
        self._send(status, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}))

    def _send(self, status: int, headers: Mapping[str, str], *, is_whole: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if is_whole:
            self.send_header("Content-Length", "0")
        self.end_headers()


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
