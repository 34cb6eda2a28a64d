"""Load a model with a vision tower: mlx-vlm's model, and the checkpoint's processor in a process of its own.

Building the model imports mlx; opening the processor does not.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from machd.engine.backend.inspection_bounds import printable
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.protocol.engine import VisionDescription
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.vision.media_processor import (
    CheckpointProcessor,
    ProcessorFiles,
    find_placeholder,
)
from machd.engine.vision.mlx_vlm_import import import_family
from machd.engine.vision.processor_child import ProcessRequest
from machd.errors import ModelError, ModelFormatError
from machd.request.media import MediaKind

if TYPE_CHECKING:
    from machd.engine.vision.vision_model import VisionLanguageModel  # imports mlx

EXAMPLE_PIXELS = 448
"""Side in pixels of the test image, whose number of tokens is reported."""

_EXAMPLE_LIMIT_S = 60.0
_EXAMPLE_MEMORY_BYTES = 1 << 30

NO_MESSAGES = "images come in messages, and without a chat template the model takes no messages"


@dataclass(frozen=True, slots=True)
class LoadedVision:
    """A model with vision before its weights are read.

    Attributes:
        family: mlx-vlm's name of the model family.
        model: Lazily loaded.
        files: The processor's process.
    """

    family: str
    model: VisionLanguageModel
    files: ProcessorFiles


def build_vision_model(
    checkpoint: Checkpoint,
    *,
    trust_remote_code: bool,
    bounds: Callable[[str], AbstractContextManager[None]],
) -> LoadedVision:
    """Build the model with lazy weights, and start the process that loads the processor.

    Args:
        checkpoint: One that takes images.
        trust_remote_code: Whether the checkpoint's own Python code may run.
        bounds: Limits of building the model, by its name.

    Raises:
        ModelArchitectureError: mlx-vlm has no such family.
        ModelFormatError: The files do not fit it.
        OverloadedError: The system has no room for a process.
    """
    from machd.engine.vision.vision_model import VisionLanguageModel  # noqa: PLC0415 - imports mlx

    # Started first: it imports as much as this process, and both can do so at once.
    files = ProcessorFiles(checkpoint.path, trust_remote_code=trust_remote_code)
    try:
        family = import_family(checkpoint.path)
        try:
            with bounds("building the model"):
                model = VisionLanguageModel(family.load_model())
        except ModelError:
            raise
        except Exception as error:  # mlx-vlm's, about files that do not fit its classes
            raise ModelFormatError(
                f"mlx-vlm's {family.name} cannot be built from {checkpoint.path.name}: {printable(error)}"
            ) from error
    except BaseException:
        files.close()
        raise
    return LoadedVision(family.name, model, files)


def open_processor(
    files: ProcessorFiles, tokenizer: Tokenizer, *, max_bytes: int
) -> CheckpointProcessor:
    """Wait for the processor, and find how prompts spell images and videos.

    Args:
        files: The processor's process, which is taken over.
        tokenizer: Renders conversations.
        max_bytes: Memory for processed files.

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
