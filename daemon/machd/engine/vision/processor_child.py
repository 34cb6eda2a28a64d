"""``python -m machd.engine.vision.processor_child DIRECTORY [trusted]``: the process that decodes images and videos.

Codecs and processors work on bytes that anybody may send, so they run beside the daemon: a file that takes too long, too much
memory, or ends the process costs its own request alone. The checkpoint's processor is mlx-vlm's, or transformers' without torch.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from machd.engine.backend.child_process import (
    READY,
    UNABLE,
    allow_processor_s,
    as_bytes,
    parent_channel,
    requests_of,
    send_frame,
)
from machd.engine.backend.inspection_bounds import bounded, printable
from machd.engine.backend.model_files import shortened
from machd.engine.vision.families import IMAGE_TEXTS, VIDEO_FAMILIES
from machd.errors import ModelFormatError
from machd.request.media import MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSED, REFUSED = b"p", b"f"

TRUSTED = "trusted"
"""The argument that lets the checkpoint's own Python code run."""

_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MAX_SCANS = 64
"""Scans of a JPEG, each of which costs as much as all pixels. Encoders write 10 to 20."""

_MARKERS_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a segment: TEM, RST0 to RST7 and SOI."""

_SCAN_DATA_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""A marker that ends a scan's data, in which 0xFF is followed by zero or a restart marker."""

_START_OF_SCAN = 0xDA
_MAX_MESSAGE_CHARS = 200
_ISO_MEDIA_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"})
_TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""What processors say of the text, which the daemon knows by itself."""


class ProcessRequest(msgspec.Struct, frozen=True):
    """One file to decode and process.

    Attributes:
        placeholder: Text that stands for one image or video in a rendered prompt.
        fps: Frames to take of each second of a video; None leaves it to the processor.
    """

    kind: MediaKind
    content: bytes
    placeholder: str
    fps: float | None
    max_frames: int
    max_pixels: int
    limit_s: float
    memory_bytes: int


class ProcessedArray(msgspec.Struct, frozen=True):
    """An array in C order. Its content lies in the message that it came with, of which it is most."""

    shape: tuple[int, ...]
    dtype: str
    content: memoryview


class Processed(msgspec.Struct, frozen=True):
    """One file as a processor gives it: tokens, and arrays for the model's encoder.

    Attributes:
        token_ids: From the first special token to the last.
        text_before: Text that the processor writes in front of them.
        text_after: Text that it writes behind them.
    """

    token_ids: tuple[int, ...]
    arrays: dict[str, ProcessedArray]
    text_before: str = ""
    text_after: str = ""


class Ready(msgspec.Struct, frozen=True):
    """Description of the checkpoint's processor, sent once it is loaded.

    Attributes:
        image_texts: Texts that may stand for an image in a prompt, the likeliest first.
        has_video: It takes videos, and those of its family are served.
    """

    name: str
    image_texts: tuple[str, ...]
    has_video: bool


class _RefusedError(Exception):
    """The file cannot be used; the message completes "the image …"."""


def main() -> None:
    """Load the checkpoint's processor, then answer requests until the parent closes its side."""
    with parent_channel() as channel:
        try:
            directory, *words = sys.argv[1:]
            family, processor = _load_processor(directory, trust_remote_code=TRUSTED in words)
            ready = msgspec.msgpack.encode(_described(family, processor))
        except BaseException as error:  # noqa: BLE001 - any library's, about the checkpoint's files
            send_frame(channel, UNABLE, as_bytes(printable(error)))
            return
        send_frame(channel, READY, ready)
        for content in requests_of(channel):
            request = msgspec.msgpack.decode(content, type=ProcessRequest)
            allow_processor_s(request.limit_s)
            send_frame(channel, *_answer(processor, request))


def _load_processor(directory: str, *, trust_remote_code: bool) -> tuple[str, Any]:
    """Load a checkpoint's processor, and the name of its family; mlx-vlm's and transformers' have no common class."""
    import mlx.core as mx  # noqa: PLC0415 - the first import of this process

    # The daemon has the device; what is small is computed here.
    mx.set_default_device(mx.cpu)
    from machd.engine.vision.mlx_vlm_import import import_family  # noqa: PLC0415 - imports mlx-vlm

    family = import_family(directory)
    return family.name, family.load_processor(trust_remote_code=trust_remote_code)


def _described(family: str, processor: Any) -> Ready:  # noqa: ANN401 - see _load_processor
    tokenizer = getattr(processor, "tokenizer", processor)
    named = [IMAGE_TEXTS.get(family)]
    named += [getattr(processor, name, None) for name in ("boi_token", "image_token")]
    named += [getattr(tokenizer, name, None) for name in ("boi_token", "image_token")]
    texts = [str(one) for one in named if one] + ["<image>"]
    return Ready(
        name=type(processor).__name__,
        image_texts=tuple(dict.fromkeys(texts)),
        has_video=family in VIDEO_FAMILIES
        and getattr(processor, "video_processor", None) is not None,
    )


def _answer(processor: Any, request: ProcessRequest) -> tuple[bytes, bytes]:  # noqa: ANN401 - the same
    try:
        with (
            warnings.catch_warnings(),
            bounded(
                f"decoding the {request.kind}",
                seconds=request.limit_s,
                memory_bytes=request.memory_bytes,
                hint="send a smaller one",
            ),
        ):
            warnings.simplefilter("ignore")
            return PROCESSED, msgspec.msgpack.encode(_processed(processor, request))
    except _RefusedError as error:
        return REFUSED, as_bytes(f"the {request.kind} {error}")
    except ModelFormatError as error:
        return REFUSED, as_bytes(error.message)


def _processed(processor: Any, request: ProcessRequest) -> Processed:  # noqa: ANN401 - the same
    if request.kind is MediaKind.IMAGE:
        return _inputs(processor, request.placeholder, images=[_decoded_image(request)])
    if getattr(processor, "video_processor", None) is None:
        raise _RefusedError("cannot be used: the served model takes images and no video")
    if not _is_video(request.content):
        raise _RefusedError("is no MP4, MOV, WebM, Matroska or AVI file")
    with tempfile.NamedTemporaryFile(suffix=".video") as file:
        file.write(request.content)
        file.flush()
        _check_video(file.name, request.max_pixels)
        rate = {} if request.fps is None else {"fps": request.fps}
        return _inputs(
            processor,
            request.placeholder,
            videos=[file.name],
            max_frames=request.max_frames,
            **rate,
        )


def _inputs(processor: Any, placeholder: str, **given: Any) -> Processed:  # noqa: ANN401 - the same
    """Process one image or video as mlx-vlm's own generation does."""
    try:
        inputs = _called(processor, placeholder, given)
    except MemoryError:
        raise
    except Exception as error:  # a processor's own error about a file it does not expect
        said = shortened(f"{type(error).__name__}: {error}", _MAX_MESSAGE_CHARS)
        raise _RefusedError(f"cannot be processed for this model ({said})") from error
    tokenizer = getattr(processor, "tokenizer", processor)
    token_ids = np.array(inputs["input_ids"]).reshape(-1).tolist()
    text_before, own_ids, text_after = without_text(tokenizer, token_ids)
    return Processed(tuple(own_ids), _arrays(inputs), text_before, text_after)


def _called(processor: Any, placeholder: str, given: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ANN401 - the same
    """Call the processor as mlx-vlm does, or with nothing but the placeholder and the file.

    The second way is for processors that hand mlx-vlm's options on to an image processor of transformers, which
    refuses them (llava).
    """
    from mlx_vlm.utils import prepare_inputs  # noqa: PLC0415 - imported with the processor

    try:
        inputs: Mapping[str, Any] = prepare_inputs(
            processor, prompts=placeholder, add_special_tokens=False, **given
        )
    except ValueError:
        if "images" not in given:
            raise
        inputs = dict(processor(text=[placeholder], images=given["images"]))
        begun = processor.tokenizer("")["input_ids"]
        token_ids = np.array(inputs["input_ids"]).reshape(-1)
        if begun and token_ids[: len(begun)].tolist() == begun:
            inputs = {**inputs, "input_ids": token_ids[len(begun) :]}
    return inputs


def without_text(tokenizer: Any, token_ids: list[int]) -> tuple[str, list[int], str]:  # noqa: ANN401 - the same
    """Split a media's tokens from the text around them, which grows together with the prompt's text.

    A special token ends every other token, so what lies between the first and the last is tokenised alone as in
    any prompt. Tokens stay where text would not give them again.
    """
    known: Collection[int] = tokenizer.all_special_ids
    known = getattr(tokenizer, "added_tokens_decoder", known)
    special = [at for at, one in enumerate(token_ids) if one < 0 or one in known]
    if not special:
        return "", token_ids, ""
    first, end = special[0], special[-1] + 1
    parts = (token_ids[:first], token_ids[end:])
    before, after = (
        tokenizer.decode(one, skip_special_tokens=False) if one else "" for one in parts
    )
    for text, part in zip((before, after), parts, strict=True):
        if list(tokenizer.encode(text, add_special_tokens=False)) != part:
            return "", token_ids, ""
    return before, token_ids[first:end], after


def _arrays(inputs: Mapping[str, Any]) -> dict[str, ProcessedArray]:
    found: dict[str, ProcessedArray] = {}
    for name, value in inputs.items():
        if value is None or name in _TEXT_INPUTS:
            continue
        try:
            array = np.ascontiguousarray(np.array(value))
        except (TypeError, ValueError):
            continue  # a list of texts, or of arrays of several shapes, is for the processor alone
        if array.dtype.kind in "biuf":
            content = array.reshape(-1).view(np.uint8).data
            found[name] = ProcessedArray(array.shape, array.dtype.str, content)
    return found


def _decoded_image(request: ProcessRequest) -> Image:
    """Decode an image of a known format to RGB, turned as its EXIF data say."""
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 - a part of the extra

    Image.MAX_IMAGE_PIXELS = None  # ours is a limit, Pillow's a warning
    try:
        image = Image.open(io.BytesIO(request.content), formats=_IMAGE_FORMATS)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise _RefusedError("is no PNG, JPEG, WebP or GIF file") from error
    width, height = image.size
    if width * height > request.max_pixels:
        raise _RefusedError(
            f"has {width} x {height} pixels, and vision.max_image_pixels is {request.max_pixels}"
        )
    if image.format in ("JPEG", "MPO") and _scans(request.content) > _MAX_SCANS:
        raise _RefusedError(f"has more than {_MAX_SCANS} scans; save it as a plain JPEG")
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I"):  # 16 bits a pixel, which convert would clip at 255
            turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
        return turned.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # every codec has errors of its own for damaged files
        raise _RefusedError("is damaged or cut short") from error


def _scans(content: bytes) -> int:
    """Count the scans of a JPEG's first image, in segments of which each says its length (ITU T.81, annex B)."""
    scans, at = 0, 2
    # Decoders pass over what is no marker, and so does the count.
    while 0 <= (at := content.find(0xFF, at)) <= len(content) - 4:
        marker = content[at + 1]
        if marker in (0x00, 0xFF):  # no marker, and filling in front of one
            at += 1
            continue
        if marker in _MARKERS_ALONE:
            at += 2
            continue
        at += 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        if marker == _START_OF_SCAN:
            scans += 1
            found = _SCAN_DATA_MARKER.search(content, at)
            if found is None:
                break
            at = found.start()
    return scans


def _is_video(content: bytes) -> bool:
    """Return whether a file begins as a container of one video.

    OpenCV also reads playlists, which name other files and hosts.
    """
    is_iso_media = content[4:8] in _ISO_MEDIA_BOXES
    is_matroska = content.startswith(b"\x1a\x45\xdf\xa3")
    return is_iso_media or is_matroska or (content[:4], content[8:12]) == (b"RIFF", b"AVI ")


def _check_video(path: str, max_pixels: int) -> None:
    """Refuse a video that OpenCV cannot read, without a known number of frames, or with too large ones."""
    import cv2  # noqa: PLC0415 - a dependency of mlx-vlm

    capture = cv2.VideoCapture(path)
    try:
        width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
        height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
        frames = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        is_open = capture.isOpened()
    finally:
        capture.release()
    if not is_open or width < 1 or height < 1:
        raise _RefusedError(
            "cannot be read by OpenCV: it is damaged, cut short, or its codec is unknown"
        )
    if frames < 1:
        raise _RefusedError("does not say how many frames it has; convert it to MP4")
    if width * height > max_pixels:
        raise _RefusedError(
            f"has frames of {width} x {height} pixels, and vision.max_image_pixels is {max_pixels}"
        )


if __name__ == "__main__":
    main()
