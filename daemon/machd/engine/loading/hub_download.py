"""A model's files from the hub, fetched into the cache of ``huggingface_hub``.

Large files, whose SHA-256 the hub tells, are streamed here, because the library keeps nothing of a transfer that was cut:
here the next try, or the next run, asks for the rest. Their hash is checked before they count as fetched. The library then
fetches the small files and makes the snapshot, so that every program that reads its cache finds the model.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from machd.clock import SystemClock, Throttle
from machd.engine.loading.hub_cache import (
    hub_cache,
    hub_endpoint,
    open_lock,
    repository_directory,
)
from machd.engine.loading.hub_errors import hide_passwords, named_hub_errors, no_hub
from machd.engine.loading.hub_transfer import bound_waiting, fetch_file, hub_file_url
from machd.engine.protocol.downloads import (
    Downloaded,
    DownloadOrder,
    DownloadPlanned,
    DownloadProgress,
    DownloadWaiting,
    Observe,
)
from machd.errors import ModelDownloadError, ModelNotFoundError
from machd.gguf_parts import gguf_name, is_gguf

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

HUB_FILES = (
    "model*.safetensors",  # the files that mlx-lm fetches and reads
    "?_*/model.safetensors",  # layers behind an encoder, such as 2_Dense
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
"""Files that are fetched: data only, no pickled weights (``.bin``, ``.pt``) and no code."""

_NEVER = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.py", "*.sh", "*.so")
"""Files that are not fetched whatever is asked for: they are code, or run it when they are read."""

_WEIGHTS = ("*.safetensors", "*.gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPORT_S = 0.1
_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is to be on this machine.

    Attributes:
        digest: Its SHA-256, which is its name in the cache; None for a small file, which the hub keeps in Git.
        git_id: Of its content, as Git hashes it.
    """

    name: str
    size_bytes: int
    digest: str | None
    git_id: str


def download(order: DownloadOrder, observe: Observe) -> Downloaded:
    """Fetch what is missing of a model; waits while another process fetches it.

    Raises:
        ModelNotFoundError: The hub has no such model, revision or files.
        ModelDownloadError: Fetching failed; the message says what to do. What has come stays for the next run, apart from
            what has a wrong hash.
    """
    from huggingface_hub.utils import disable_progress_bars  # noqa: PLC0415

    disable_progress_bars()
    bound_waiting()
    hide_passwords()
    with named_hub_errors(order.model, order.revision):
        return _Download(order, observe).run()


class _Download:
    """One run."""

    def __init__(self, order: DownloadOrder, observe: Observe) -> None:
        self._order = order
        self._observe = observe
        self._cache = hub_cache()
        self._repository = repository_directory(self._cache, order.model)
        self._commit = ""
        self._completed_bytes = 0
        self._throttle = Throttle(SystemClock(), _REPORT_S)

    def run(self) -> Downloaded:
        files = self._chosen(self._asked())
        with open_lock(self._cache, self._order.model) as lock:
            self._wait_for(lock)
            total_bytes = sum(one.size_bytes for one in files)
            missing = [one for one in files if not self._is_here(one)]
            partial_bytes = sum(map(self._partial_bytes, missing))
            self._completed_bytes = total_bytes - sum(one.size_bytes for one in missing)
            self._observe(
                DownloadPlanned(
                    model=self._order.model,
                    revision=self._commit,
                    files=len(files),
                    total_bytes=total_bytes,
                    completed_bytes=self._completed_bytes + partial_bytes,
                )
            )
            self._check_space(sum(one.size_bytes for one in missing) - partial_bytes)
            self._check_plain(missing)
            for file in missing:
                if file.digest is not None:
                    self._fetch(file, file.digest)
            snapshot = self._snapshot(files)
            for file in missing:
                if file.digest is None:
                    self._check_small(snapshot, file)
        ggufs = [one.name for one in files if is_gguf(one.name) and _is_first_part(one.name)]
        is_one = len(ggufs) == 1 and not any(fnmatch(one.name, HUB_FILES[0]) for one in files)
        return Downloaded(
            model=self._order.model,
            revision=self._commit,
            path=str(snapshot / ggufs[0] if is_one else snapshot),
            total_bytes=total_bytes,
        )

    def _asked(self) -> list[_File]:
        """Ask the hub for the commit and its files."""
        from huggingface_hub import HfApi  # noqa: PLC0415

        try:
            info = HfApi().model_info(
                self._order.model, revision=self._order.revision, files_metadata=True
            )
        except (TypeError, LookupError, AttributeError) as error:
            raise no_hub("describes no model") from error
        if info.sha is None or info.siblings is None:
            raise no_hub("tells no commit and no files")
        self._commit = info.sha
        return [_file(one) for one in info.siblings]

    def _chosen(self, files: Sequence[_File]) -> list[_File]:
        """Choose the files to fetch: of a GGUF model that is split, all parts where the name of one is asked for, or the whole's.

        Raises:
            ModelNotFoundError: There are none, or no weights among them.
        """
        patterns = self._order.include or HUB_FILES
        asked = {
            _whole_name(one.name)
            for one in files
            for pattern in patterns
            if fnmatch(one.name.lower(), pattern.lower())
            or fnmatch(_whole_name(one.name).lower(), pattern.lower())
        }
        chosen = [
            one
            for one in files
            if _whole_name(one.name) in asked
            and not any(fnmatch(one.name.lower(), pattern) for pattern in _NEVER)
        ]
        has_weights = any(fnmatch(one.name.lower(), kind) for one in chosen for kind in _WEIGHTS)
        if chosen and (has_weights or self._order.include):
            return chosen
        ggufs = sorted({_whole_name(one.name) for one in files if is_gguf(one.name)})
        what = "that --include names" if self._order.include else "model*.safetensors"
        said = f"{self._order.model} has no file {what}"
        if ggufs:
            said += f"; --include takes one of its GGUF files: {', '.join(ggufs[:20])}"
        raise ModelNotFoundError(said)

    def _wait_for(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._observe(DownloadWaiting(model=self._order.model))
            fcntl.flock(lock, fcntl.LOCK_EX)

    def _check_plain(self, missing: Sequence[_File]) -> None:
        from huggingface_hub import constants  # noqa: PLC0415

        for file in missing:
            if file.size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
                raise ModelDownloadError(
                    f"{file.name} has {file.size_bytes / _GB:.0f} GB, more than the hub gives over HTTP; no file "
                    f"was fetched: `hf download {self._order.model}` puts it into the same cache"
                )

    def _check_space(self, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._cache).free
        if needed_bytes > free_bytes:
            raise ModelDownloadError(
                f"{self._order.model} needs {needed_bytes / _GB:.2f} GB, and {self._cache} has "
                f"{free_bytes / _GB:.2f} GB free; nothing was fetched: free some space, or point HF_HUB_CACHE elsewhere"
            )

    def _is_here(self, file: _File) -> bool:
        if file.digest is not None:
            return self._blob(file.digest).is_file()
        # The library writes small files without fsync, so one of a machine that lost power may be damaged.
        path = self._repository / "snapshots" / self._commit / file.name
        if not path.is_file():
            return False
        if _git_id(path) == file.git_id:
            return True
        _delete_with_blob(path)
        return False

    def _blob(self, digest: str) -> Path:
        return self._repository / "blobs" / digest

    def _partial(self, digest: str) -> Path:
        return self._blob(f"{digest}.incomplete")

    def _partial_bytes(self, file: _File) -> int:
        try:
            size_bytes = 0 if file.digest is None else self._partial(file.digest).stat().st_size
        except OSError:
            return 0
        return size_bytes if size_bytes <= file.size_bytes else 0

    def _fetch(self, file: _File, digest: str) -> None:
        """Fetch a large file.

        Raises:
            ModelDownloadError: It comes no further, or has the wrong hash.
        """
        before_bytes = self._completed_bytes
        partial = self._partial(digest)
        partial.parent.mkdir(parents=True, exist_ok=True)
        is_resumed = self._partial_bytes(file) > 0
        found = self._stream(file, digest, partial)
        if found != digest and is_resumed:
            # What an earlier run has left may be what is wrong.
            partial.unlink()
            self._completed_bytes = before_bytes
            found = self._stream(file, digest, partial)
        if found != digest:
            partial.unlink()
            raise ModelDownloadError(
                f"{file.name} of {self._order.model} has the SHA-256 {found}, and the hub says {digest}: it was changed "
                "on the way, or the hub has a damaged file; it was deleted. Run the same command again"
            )
        partial.replace(self._blob(digest))
        self._report(file, digest, file.size_bytes, is_due=True)

    def _stream(self, file: _File, digest: str, partial: Path) -> str:
        """Fetch what is missing of a file; returns the SHA-256 of the whole."""

        def advance(new_bytes: int, done_bytes: int) -> None:
            self._completed_bytes += new_bytes
            self._report(file, digest, done_bytes)

        return fetch_file(
            f"{file.name} of {self._order.model}",
            hub_file_url(self._order.model, file.name, self._commit),
            partial,
            file.size_bytes,
            advance,
        )

    def _report(self, file: _File, digest: str, done_bytes: int, *, is_due: bool = False) -> None:
        if not is_due and not self._throttle.is_due():
            return
        self._observe(
            DownloadProgress(
                file=file.name,
                digest=digest,
                total_bytes=file.size_bytes,
                completed_bytes=done_bytes,
                all_completed_bytes=self._completed_bytes,
            )
        )

    def _snapshot(self, files: Sequence[_File]) -> Path:
        """Have the library fetch the small files, and make the snapshot of all."""
        from huggingface_hub import snapshot_download  # noqa: PLC0415

        snapshot = Path(
            snapshot_download(
                self._order.model,
                revision=self._order.revision,
                allow_patterns=[glob.escape(one.name) for one in files],
            )
        )
        if snapshot.name != self._commit:
            raise ModelDownloadError(
                f"{self._order.model} was changed on the hub meanwhile; run the same command again"
            )
        return snapshot

    def _check_small(self, snapshot: Path, file: _File) -> None:
        path = snapshot / file.name
        found = _git_id(path)
        if found != file.git_id:
            _delete_with_blob(path)
            raise ModelDownloadError(
                f"{file.name} of {self._order.model} has the Git id {found}, and the hub says {file.git_id}: "
                "it was changed on the way; it was deleted. Run the same command again"
            )
        self._completed_bytes += file.size_bytes
        self._report(file, file.git_id, file.size_bytes, is_due=True)


def _git_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _delete_with_blob(link: Path) -> None:
    link.resolve().unlink(missing_ok=True)
    link.unlink(missing_ok=True)


def _file(sibling: RepoSibling) -> _File:
    lfs = sibling.lfs
    size_bytes = sibling.size if lfs is None else lfs.size
    if size_bytes is None or sibling.blob_id is None:
        raise ModelDownloadError(
            f"the hub at {hub_endpoint()} tells no size of {sibling.rfilename}"
        )
    if lfs is not None and not _SHA256.fullmatch(lfs.sha256):
        raise ModelDownloadError(
            f"the hub at {hub_endpoint()} tells no hash of {sibling.rfilename}"
        )
    digest = None if lfs is None else lfs.sha256
    return _File(sibling.rfilename, size_bytes, digest, sibling.blob_id)


def _whole_name(name: str) -> str:
    """Return the name that the parts of a split GGUF file share; any other file's own."""
    path = PurePosixPath(name)
    part = gguf_name(path)
    is_part = is_gguf(name) and part.count > 1
    return str(path.with_name(f"{part.model}{path.suffix}")) if is_part else name


def _is_first_part(name: str) -> bool:
    return gguf_name(PurePosixPath(name)).number == 1
