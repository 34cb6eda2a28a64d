"""A checkpoint with a vision tower: whether it is served with it, and its processor in a process of its own. Imports no mlx."""

from __future__ import annotations

import io

from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.protocol.engine import VisionDescription
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.vision.families import why_refused
from machd.engine.vision.media_processor import (
    CheckpointProcessor,
    ProcessorFiles,
    find_placeholder,
)
from machd.engine.vision.mlx_vlm_import import has_vision, is_installed
from machd.engine.vision.processor_child import ProcessRequest
from machd.errors import ModelCodeError, ModelFormatError
from machd.installed import how_to_install
from machd.request.media import MediaKind

EXAMPLE_PIXELS = 448
"""Side of the image whose tokens are told."""

_EXAMPLE_LIMIT_S = 60.0
_EXAMPLE_MEMORY_BYTES = 1 << 30

_NO_WEIGHTS = (
    "config.json names a vision tower, and the weights hold none (mlx_lm.convert leaves it out), so the model "
    "serves text only; for images take a checkpoint that mlx_vlm.convert made"
)

NO_MESSAGES = "images come in messages, and without a chat template the model takes no messages"

_NOT_INSTALLED = (
    "the checkpoint has a vision tower, and the extra vision is not installed, so it serves text only; "
    "for images: {how}"
)


def loads_vision(checkpoint: Checkpoint) -> bool:
    """Tell whether a checkpoint is served with its vision tower."""
    is_served = not why_refused(checkpoint.config)
    is_usable = is_served and is_installed() and not checkpoint.has_own_model
    return is_usable and has_vision(checkpoint.config) and _has_vision_weights(checkpoint)


def why_text_only(checkpoint: Checkpoint) -> str:
    """Return why a checkpoint with a vision tower is served without it; empty for all others."""
    if not has_vision(checkpoint.config) or loads_vision(checkpoint):
        return ""
    if reason := why_refused(checkpoint.config):
        return (
            f"the checkpoint has a vision tower, but images are not served: {reason}; it serves text only, and "
            "docs/concepts/vision.md lists the families that take images"
        )
    if not _has_vision_weights(checkpoint):
        return _NO_WEIGHTS
    return "" if is_installed() else _NOT_INSTALLED.format(how=how_to_install("vision"))


def _has_vision_weights(checkpoint: Checkpoint) -> bool:
    return any("vision" in name or "visual" in name for name in checkpoint.tensors)


def refuse_own_code(checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
    """Refuse a checkpoint that would be served with vision and brings Python code, before mlx-vlm and transformers see it.

    Raises:
        ModelCodeError: Its files name classes for transformers to import, whose code is there and may not run.
    """
    if checkpoint.has_runnable_code and not trust_remote_code and loads_vision(checkpoint):
        raise ModelCodeError(
            f"{checkpoint.path.name} brings Python code of its own for its images, named in "
            f"{checkpoint.code_files[0]}: read it, and serve the model with `--model-trust-remote-code` if "
            "you trust it, or try it without its .py files, which few families need"
        )


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
    """Try an image on a processor, and describe what it takes.

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
