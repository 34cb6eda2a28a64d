"""Files of the pages, as they lie in the package."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

FILES = Path(__file__).parent / "files"

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""By suffix; what has another one, such as a licence, is not served."""

_ETAG_BYTES = 12


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file.

    Attributes:
        etag: Names the content.
    """

    content: bytes
    media_type: str
    etag: str


@cache
def read_files(*folders: str) -> Mapping[str, PageFile]:
    """Read the files of folders, once a process, by their path below :data:`FILES`, such as ``shared/base.css``."""
    found: dict[str, PageFile] = {}
    for folder in folders:
        for path in sorted((FILES / folder).rglob("*")):
            media_type = _MEDIA_TYPES.get(path.suffix)
            if media_type is not None:
                content = path.read_bytes()
                etag = hashlib.sha256(content).hexdigest()[: 2 * _ETAG_BYTES]
                name = path.relative_to(FILES).as_posix()
                found[name] = PageFile(content, media_type, f'"{etag}"')
    return MappingProxyType(found)
