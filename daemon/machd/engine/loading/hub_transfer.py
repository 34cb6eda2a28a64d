"""One large file from the hub: streamed, hashed on the way, and resumed where a transfer was cut."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from machd.engine.loading.hub_cache import without_passwords
from machd.errors import ModelDownloadError

if TYPE_CHECKING:
    from httpx2 import Request, Response

_MAX_TRIES = 5
"""Tries in a row that bring nothing."""

_READ_BYTES = 4 * 1024 * 1024
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})

Advance: TypeAlias = Callable[[int, int], None]
"""Takes how many bytes have come, fewer than none where they have to come again, and how many there are."""


class _CutError(Exception):
    """A transfer has ended early, and may be tried again."""


def bound_waiting() -> None:
    """Have no request of the library wait for ever: its listings come without a timeout."""
    from huggingface_hub.utils import get_session  # noqa: PLC0415

    hooks = get_session().event_hooks["request"]
    if _give_timeout not in hooks:
        hooks.append(_give_timeout)


def _give_timeout(request: Request) -> None:
    from huggingface_hub import constants  # noqa: PLC0415

    timeouts = request.extensions["timeout"]
    for step, timeout_s in timeouts.items():
        if timeout_s is None:
            timeouts[step] = constants.HF_HUB_DOWNLOAD_TIMEOUT


def hub_file_url(model: str, name: str, commit: str) -> str:
    """Return the address of a file on the hub."""
    from huggingface_hub import hf_hub_url  # noqa: PLC0415 - slow to import

    return str(hf_hub_url(model, name, revision=commit))


def fetch_file(what: str, url: str, path: Path, size_bytes: int, advance: Advance) -> str:
    """Fetch what is missing of a file; returns the SHA-256 of the whole.

    Args:
        what: The file, as a person knows it.
        url: Of the file on the hub.
        path: Where it lies, perhaps in part.
        size_bytes: Of the whole.
        advance: Is told how far it is, what lies there already with it.

    Raises:
        ModelDownloadError: It comes no further.
        HfHubHTTPError: The hub refuses.
    """
    if path.exists() and path.stat().st_size > size_bytes:
        path.unlink()
    with path.open("a+b") as out:
        part = _Part(out, size_bytes, advance)
        tries = 0
        while part.done_bytes < size_bytes:
            start_bytes = part.done_bytes
            try:
                part.extend(url)
            except _CutError as cut:
                tries = 1 if part.done_bytes > start_bytes else tries + 1
                if tries >= _MAX_TRIES:
                    raise ModelDownloadError(
                        f"{what} came no further than {part.done_bytes:,} of {size_bytes:,} bytes: {cut}; run the same "
                        "command again, which goes on from there"
                    ) from cut
                time.sleep(min(8.0, 0.25 * 2**tries))
        # Its name will say that it is whole, and is not hashed again: a power cut must leave no other content.
        out.flush()
        os.fsync(out.fileno())
        return part.sha256


class _Part:
    """The beginning of a file, and the hash of it."""

    def __init__(self, out: IO[bytes], size_bytes: int, advance: Advance) -> None:
        self._out = out
        self._size_bytes = size_bytes
        self._advance = advance
        self._hash = hashlib.sha256()
        out.seek(0)
        while content := out.read(_READ_BYTES):
            self._hash.update(content)
        self.done_bytes = out.tell()
        advance(self.done_bytes, self.done_bytes)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def extend(self, url: str) -> None:
        """Ask for the rest once, and write what comes.

        Raises:
            _CutError: It has ended early.
        """
        with _asked(url, self.done_bytes) as answer:
            if self.done_bytes and answer.status_code != HTTPStatus.PARTIAL_CONTENT:
                self._begin_anew()
            if answer.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise _CutError("the hub has no such range")
            for content in answer.iter_bytes():
                self._add(content[: self._size_bytes - self.done_bytes + 1])
                if self.done_bytes > self._size_bytes:
                    return  # the byte too many spoils the hash
        if self.done_bytes < self._size_bytes:
            raise _CutError("the connection was closed")

    def _add(self, content: bytes) -> None:
        self._out.write(content)
        self._hash.update(content)
        self.done_bytes += len(content)
        self._advance(len(content), self.done_bytes)

    def _begin_anew(self) -> None:
        self._out.truncate(0)
        self._hash = hashlib.sha256()
        self._advance(-self.done_bytes, 0)
        self.done_bytes = 0


@contextmanager
def _asked(url: str, start_bytes: int) -> Iterator[Response]:
    """Ask for a file from a position on, with the library's own session: its token, proxies and redirects.

    Raises:
        _CutError: The network has failed, or the hub is busy.
        HfHubHTTPError: The hub refuses.
    """
    from huggingface_hub import constants  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # noqa: PLC0415
    from huggingface_hub.utils import (  # noqa: PLC0415
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if start_bytes:
        headers["Range"] = f"bytes={start_bytes}-"
    timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    try:
        with get_session().stream("GET", url, headers=headers, timeout=timeout_s) as answer:
            if answer.status_code in _TRANSIENT:
                raise _CutError(f"the hub answers {answer.status_code}")
            if answer.status_code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                hf_raise_for_status(answer)
            yield answer
    except HfHubHTTPError:
        raise
    except HTTPError as error:
        raise _CutError(without_passwords(str(error)) or type(error).__name__) from error
