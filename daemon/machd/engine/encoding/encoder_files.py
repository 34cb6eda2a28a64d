"""An encoder's checkpoint: what its own files say of it, read and checked without mlx and without a weight."""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.source import ModelSource
from machd.engine.protocol.encoder import EncoderDescription


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """The files of an encoder, which agree with each other.

    Attributes:
        checkpoint: Configuration and headers of the weights.
        description: What comes of a text.
        lowercases: Texts are put into lower case before the tokenizer.
        strips: White space around a text is taken away before.
    """

    checkpoint: Checkpoint
    description: EncoderDescription
    lowercases: bool = False
    strips: bool = False


def find_encoder(source: ModelSource) -> EncoderFiles | None:
    """Read an encoder's files; None for a model that generates text.

    Raises:
        ModelError: One of its kinds: an encoder's files that contradict each other, or ask for what machd does not do.
    """
    del source
    return None
