"""A checkpoint with a vision tower: whether it is served with it, and its processor in a process of its own. Imports no mlx."""

from __future__ import annotations

import io

from machd.engine.protocol.engine import VisionDescription
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.vision.media_processor import (
    CheckpointProcessor,
    ProcessorFiles,
    find_placeholder,
)
from machd.engine.vision.processor_child import ProcessRequest
from machd.errors import ModelFormatError
from machd.request.media import MediaKind

EXAMPLE_PIXELS = 448
"""Side in pixels of the test image, whose number of tokens is reported."""

_EXAMPLE_LIMIT_S = 60.0
_EXAMPLE_MEMORY_BYTES = 1 << 30

NO_MESSAGES = "images come in messages, and without a chat template the model takes no messages"


def open_processor(
    files: ProcessorFiles, tokenizer: Tokenizer, *, max_bytes: int
) -> CheckpointProcessor:
    """Wait for the processor, and find how prompts spell images and videos.

    Raises:
        ModelFormatError: The processor cannot be loaded.
    """
    ready = files.ready()

    def render(parts: list[dict[str, object]]) -> str:
        return tokenizer.render_chat([{"role": "user", "content": parts}])

    placeholder = find_placeholder(render, MediaKind.IMAGE, ready.image_texts)
    placeholders = {MediaKind.IMAGE: placeholder}
    if ready.has_video:
        video = find_placeholder(render, MediaKind.VIDEO, ready.image_texts)
        if video.is_part:
            placeholders[MediaKind.VIDEO] = video
    return CheckpointProcessor(files, placeholders, max_bytes=max_bytes)


def describe_vision(files: ProcessorFiles, processor: CheckpointProcessor) -> VisionDescription:
    """Process a test image, and describe the media that the processor takes.

    Raises:
        ModelFormatError: It processes no image.
    """
    from PIL import Image  # noqa: PLC0415 - a part of the extra

    written = io.BytesIO()
    Image.new("RGB", (EXAMPLE_PIXELS, EXAMPLE_PIXELS), "white").save(written, "PNG")
    request = ProcessRequest(
        kind=MediaKind.IMAGE,
        content=written.getvalue(),
        placeholder=processor.placeholder(MediaKind.IMAGE, 1),
        fps=None,
        max_frames=1,
        max_pixels=EXAMPLE_PIXELS**2,
        limit_s=_EXAMPLE_LIMIT_S,
        memory_bytes=_EXAMPLE_MEMORY_BYTES,
    )
    try:
        processed = files.ask(request)
    except ValueError as error:
        raise ModelFormatError(f"the model's processor takes no image: {error}") from error
    return VisionDescription(
        processor.kinds, files.ready().name, len(processed.token_ids), processor.max_bytes
    )
