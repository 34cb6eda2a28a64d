"""What a download from the hub says of itself, as a program reads it: one JSON object on each line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct

MAIN_REVISION = "main"
"""The hub's name of a repository's newest revision."""


class DownloadPlanned(Struct, frozen=True, kw_only=True, tag_field="status", tag="planned"):
    """The hub has said which files there are.

    Attributes:
        revision: The commit that is fetched.
        completed_bytes: What is on this machine already.
    """

    model: str
    revision: str
    files: int
    total_bytes: int
    completed_bytes: int


class DownloadWaiting(Struct, frozen=True, kw_only=True, tag_field="status", tag="waiting"):
    """Another process fetches the same model; this one goes on when that has ended."""

    model: str


class DownloadProgress(Struct, frozen=True, kw_only=True, tag_field="status", tag="downloading"):
    """Bytes have come.

    Attributes:
        digest: SHA-256 of the file, or the Git id of a small one.
        total_bytes: Of the file.
        completed_bytes: Of the file.
        all_completed_bytes: Of all files.
    """

    file: str
    digest: str
    total_bytes: int
    completed_bytes: int
    all_completed_bytes: int


class Downloaded(Struct, frozen=True, kw_only=True, tag_field="status", tag="success"):
    """Every file is here, and its hash is right.

    Attributes:
        path: What `machd serve` takes: the directory, or the one GGUF file.
        note: Why the daemon that fetched it does not serve it; empty where it does, or fetched nothing.
    """

    model: str
    revision: str
    path: str
    total_bytes: int
    note: str = ""


class DownloadFailed(Struct, frozen=True, kw_only=True, tag_field="status", tag="error"):
    """It has ended without the model; what is complete stays.

    Attributes:
        code: As of :mod:`machd.errors`.
    """

    code: str
    message: str


DownloadEvent: TypeAlias = (
    DownloadPlanned | DownloadWaiting | DownloadProgress | Downloaded | DownloadFailed
)

Observe: TypeAlias = Callable[[DownloadEvent], None]


class DownloadOrder(Struct, frozen=True, kw_only=True):
    """What is to be fetched.

    Attributes:
        model: ``ORG/NAME`` on the hub.
        revision: A branch, a tag or a commit.
        include: Patterns of the files; none for those that mlx-lm reads.
    """

    model: str
    revision: str = MAIN_REVISION
    include: tuple[str, ...] = ()
