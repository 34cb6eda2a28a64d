"""Inspection of a checkpoint with a vision tower, without its weights.

The model is built with lazy weights, and the checkpoint's processor runs in its own process, as when the model is served. So the
report's kinds of media and tokens of an image are those of a daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.tokenizer_files import directory_tokenizer
from machd.engine.loading.vision import (
    NO_MESSAGES,
    describe_vision,
    open_processor,
    why_text_only,
)
from machd.engine.protocol.engine import VisionDescription
from machd.engine.vision.media_processor import ProcessorFiles
from machd.engine.vision.mlx_vlm_import import has_vision, import_family
from machd.engine.vision.vision_model import VisionLanguageModel
from machd.errors import ChatTemplateMissingError

Bounds: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Limits time and memory of a block, and turns errors of foreign code into machd's."""


@dataclass(frozen=True, slots=True)
class VisionInspection:
    """The vision of a checkpoint with a vision tower.

    Attributes:
        reason: Why the checkpoint is served without its tower; empty if it is served with it.
        takes: Images and videos that it takes; None if it is served without its tower.
    """

    reason: str
    takes: VisionDescription | None = None


@dataclass(frozen=True, slots=True)
class InspectedVision:
    """A model with vision whose weights are not read.

    Attributes:
        family: mlx-vlm's name of the model family.
    """

    family: str
    model: VisionLanguageModel
    vision: VisionInspection


def text_only_inspection(checkpoint: Checkpoint) -> VisionInspection | None:
    """Tell why a checkpoint with a vision tower is served without it; None for one without a tower."""
    if not has_vision(checkpoint.config):
        return None
    return VisionInspection(
        why_text_only(checkpoint) or "the model is built by Python code of the checkpoint's own"
    )


def inspect_vision(
    checkpoint: Checkpoint, chat_template: str | None, building: Bounds
) -> InspectedVision:
    """Build the model of a checkpoint that is served with its tower, and try an image on its processor.

    Args:
        checkpoint: One that :func:`machd.engine.loading.vision.loads_vision`.
        chat_template: The setting ``model.chat_template``.
        building: Bounds of building the model.

    Raises:
        ModelError: One of its kinds: the error that serving the model would raise.
    """
    # Started first: it imports as much as this process, and both can do so at once.
    files = ProcessorFiles(checkpoint.path)
    try:
        family = import_family(checkpoint.path)
        with building():
            model = VisionLanguageModel(family.load_model())
        seen = _tried(files, checkpoint, chat_template)
    finally:
        files.close()
    return InspectedVision(family.name, model, seen)


def _tried(
    files: ProcessorFiles, checkpoint: Checkpoint, chat_template: str | None
) -> VisionInspection:
    """Try an image on the processor, in the words of the chat template."""
    try:
        tokenizer = directory_tokenizer(checkpoint, chat_template, trust_remote_code=False)
    except ChatTemplateMissingError:
        return VisionInspection(NO_MESSAGES)
    try:
        if not tokenizer.has_chat_template:
            return VisionInspection(NO_MESSAGES)
        takes = describe_vision(files, open_processor(files, tokenizer, max_bytes=0))
    finally:
        tokenizer.close()
    return VisionInspection("", takes)
