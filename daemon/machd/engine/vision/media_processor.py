"""The process that decodes images and videos, as the daemon asks it, and a cache of its answers."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from machd.engine.backend.child_process import ChildStoppedError, SharedChild, as_text
from machd.engine.protocol.media import Media, MediaBounds, PlainArray
from machd.engine.vision.processor_child import (
    PROCESSED,
    TRUSTED,
    Processed,
    ProcessRequest,
    Ready,
)
from machd.errors import InvalidRequestError, ModelFormatError, OverloadedError
from machd.request.media import MediaKind, MediaSource

_CHILD_MODULE = "machd.engine.vision.processor_child"

_MAX_OPEN_BYTES = 1 << 30
"""Memory for processed files of requests that wait or run, beyond the cache's."""

_MEMORY_BYTES = 2 << 30
"""Memory that decoding one file may take: 16 million pixels are 200 MB in float32, and processors copy."""

RenderParts = Callable[[list[dict[str, object]]], str]
"""Renders a user's message of these parts to prompt text."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """Text that stands for an image or a video in a rendered prompt.

    Attributes:
        first: For the first one of a prompt.
        is_numbered: The 1 in it counts the prompt's images.
        is_part: The chat template writes it for a part of a message's content.
    """

    first: str
    is_numbered: bool = False
    is_part: bool = True

    def of(self, number: int) -> str:
        """Return the text of a prompt's ``number``-th one, from 1."""
        return self.first.replace("1", str(number)) if self.is_numbered else self.first


class ProcessorFiles:
    """The process for one checkpoint. Threads may share it, and wait for each other."""

    def __init__(self, directory: Path, *, trust_remote_code: bool = False) -> None:
        """Start the process; it loads the processor while the daemon goes on.

        Raises:
            OverloadedError: The system has no room for it.
        """
        self._name = directory.name
        trusted = (TRUSTED,) if trust_remote_code else ()
        self._child = SharedChild("images", _CHILD_MODULE, str(directory), *trusted)
        self._child.start()

    def ready(self) -> Ready:
        """Wait until the processor is loaded, and describe it.

        Raises:
            ModelFormatError: It cannot be loaded.
        """
        try:
            said = self._child.ready()
        except RuntimeError as error:
            raise ModelFormatError(
                f"the processor of {self._name} cannot be loaded: {error}"
            ) from error
        return msgspec.msgpack.decode(said, type=Ready)

    def ask(
        self, request: ProcessRequest, is_wanted: Callable[[], bool] | None = None
    ) -> Processed:
        """Decode and process one file, until nothing waits for it.

        Raises:
            ValueError: The file cannot be used; the message says why.
            OverloadedError: The system has no room for the process.
        """
        try:
            kind, content = self._child.ask(
                msgspec.msgpack.encode(request),
                limit_s=request.limit_s,
                memory_bytes=request.memory_bytes,
                is_wanted=is_wanted,
            )
        except ChildStoppedError as error:
            raise ValueError(f"the {request.kind} {error} to decode") from error
        if kind != PROCESSED:
            raise ValueError(as_text(content))
        return msgspec.msgpack.decode(content, type=Processed)

    def close(self) -> None:
        """End the process."""
        self._child.close()


class CheckpointProcessor:
    """A checkpoint's processor; satisfies :class:`machd.engine.protocol.media.MediaProcessor`."""

    def __init__(
        self,
        files: ProcessorFiles,
        placeholders: dict[MediaKind, Placeholder],
        *,
        max_bytes: int,
    ) -> None:
        """Take the process over."""
        self._files = files
        self._placeholders = placeholders
        self.max_bytes = max_bytes
        self._lock = threading.RLock()  # a file that the cache drops may be the last to be open
        self._known: OrderedDict[bytes, Media] = OrderedDict()
        self._bytes = self._open_bytes = 0

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """Kinds that the model takes."""
        return tuple(self._placeholders)

    @property
    def reads_parts(self) -> bool:
        """True if the chat template writes placeholders itself."""
        return self._placeholders[MediaKind.IMAGE].is_part

    def placeholder(self, kind: MediaKind, number: int) -> str:
        """Return the text that stands for a rendered prompt's ``number``-th one, from 1."""
        if kind not in self._placeholders:
            raise InvalidRequestError(f"the served model takes no {kind}", param="messages")
        return self._placeholders[kind].of(number)

    def process(
        self,
        source: MediaSource,
        bounds: MediaBounds,
        namespace: str,
        is_wanted: Callable[[], bool] | None = None,
    ) -> Media:
        """Decode and process one file, or take what is known of it."""
        assert source.content is not None, "URLs are fetched before"
        max_frames = min(source.max_frames or bounds.max_frames, bounds.max_frames)
        digest = _digest(source, max_frames, namespace)
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
            if self._open_bytes > self.max_bytes + _MAX_OPEN_BYTES:
                raise OverloadedError(
                    f"images and videos of other requests take {self._open_bytes >> 20} MiB; try again later"
                )
        request = ProcessRequest(
            kind=source.kind,
            content=source.content,
            placeholder=self.placeholder(source.kind, 1),
            fps=source.fps,
            max_frames=max_frames,
            max_pixels=bounds.max_pixels,
            limit_s=bounds.max_decode_s,
            memory_bytes=_MEMORY_BYTES,
        )
        try:
            processed = self._files.ask(request, is_wanted)
        except ValueError as error:
            raise InvalidRequestError(f"{source.param}: {error}", param=source.param) from error
        arrays = {
            name: PlainArray(one.shape, one.dtype, one.content)
            for name, one in processed.arrays.items()
        }
        media = Media(
            source.kind,
            digest,
            processed.token_ids,
            arrays,
            processed.text_before,
            processed.text_after,
        )
        self._keep(media)
        weakref.finalize(media, self._count, -media.nbytes)
        return media

    def close(self) -> None:
        """End the process, and drop what is known."""
        self._files.close()
        with self._lock:
            self._known.clear()
            self._bytes = 0

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._open_bytes += nbytes

    def _keep(self, media: Media) -> None:
        with self._lock:
            self._count(media.nbytes)
            if media.digest in self._known:
                return  # another request was as fast
            self._known[media.digest] = media
            self._bytes += media.nbytes
            while self._bytes > self.max_bytes and self._known:
                _, dropped = self._known.popitem(last=False)
                self._bytes -= dropped.nbytes


def _digest(source: MediaSource, max_frames: int, namespace: str) -> bytes:
    """Hash a file with its sampling, and with the namespace that may share what is computed of it."""
    assert source.content is not None, "URLs are fetched before"
    sampling = (source.fps, max_frames) if source.kind is MediaKind.VIDEO else ()
    digest = hashlib.blake2b(digest_size=32)
    for one in (namespace, str(source.kind), *map(str, sampling)):
        digest.update(len(one).to_bytes(4, "little") + one.encode())
    digest.update(source.content)
    return digest.digest()


_MARK = "zq7marker"
"""A word that no template contains; around a part it shows how the template writes that."""


def find_placeholder(render: RenderParts, kind: MediaKind, texts: Sequence[str]) -> Placeholder:
    """Find the text that stands for an image or a video in a rendered prompt.

    Where the template writes nothing for a part, the first of the processor's texts is to be written into the message.
    """
    text: dict[str, object] = {"type": "text", "text": _MARK}
    part: dict[str, object] = {"type": str(kind)}
    try:
        rendered = render([text, part, text, part, text])
    except InvalidRequestError:
        rendered = ""
    pieces = [one.strip() for one in rendered.split(_MARK)]
    if len(pieces) != _PIECES or not pieces[1]:
        return Placeholder(texts[0], "1" in texts[0], is_part=False)
    _, first, second, _ = pieces
    return Placeholder(first, first != second and first.replace("1", "2") == second)


_PIECES = 4
"""Texts around and between three marks."""
