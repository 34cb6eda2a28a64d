"""Inspection of a checkpoint's vision: the checkpoint's processor runs in its own process, as when the model is served.

So the report's kinds of media and tokens of an image are those of a daemon.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.opened import Opened
from machd.engine.loading.tokenizer_files import directory_tokenizer
from machd.engine.loading.vision import NO_MESSAGES, describe_vision, open_processor
from machd.engine.protocol.engine import VisionDescription
from machd.engine.vision.media_processor import ProcessorFiles
from machd.errors import ChatTemplateMissingError


@dataclass(frozen=True, slots=True)
class VisionInspection:
    """The vision of a checkpoint with a vision tower: why it is served without it, or what it takes with it."""

    reason: str
    takes: VisionDescription | None = None


def inspect_vision(
    opened: Opened, processor: ProcessorFiles | None, chat_template: str | None
) -> VisionInspection | None:
    """Try an image on the processor of a checkpoint, which is ended, in the words of the chat template.

    Raises:
        ModelError: One of its kinds: the error that serving the model would raise.
    """
    if processor is None:
        return VisionInspection(opened.vision_reason) if opened.vision_reason else None
    assert isinstance(opened.files, Checkpoint), "only a directory has a processor"
    with closing(processor):
        try:
            tokenizer = directory_tokenizer(opened.files, chat_template, trust_remote_code=False)
        except ChatTemplateMissingError:
            return VisionInspection(NO_MESSAGES)
        with closing(tokenizer):
            if not tokenizer.has_chat_template:
                return VisionInspection(NO_MESSAGES)
            front = open_processor(processor, tokenizer, max_bytes=0)
            return VisionInspection("", describe_vision(processor, front))
