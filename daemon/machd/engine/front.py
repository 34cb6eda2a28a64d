"""A model's front, opened from its files in a process that computes nothing.

Importing this module and opening a front imports neither mlx nor mlx-vlm: tokenizers need neither, and images are decoded
by a process of their own. Python code that a trusted checkpoint brings may import anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.backend.own_code import OwnCode
from machd.engine.encoding.encoder_files import find_encoder
from machd.engine.encoding.input_tokenizer import (
    TextInputTokenizer,
    encoder_tokenizer,
    open_inputs,
)
from machd.engine.loading.formats.checkpoint import Checkpoint
from machd.engine.loading.formats.opening import read_checkpoint
from machd.engine.loading.source import ModelSource
from machd.engine.loading.tokenizer_files import open_tokenizer
from machd.engine.loading.vision import open_processor
from machd.engine.protocol.encoder import InputTokenizer
from machd.engine.protocol.engine import GrammarCompiler, ModelDescription
from machd.engine.protocol.media import MediaProcessor
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.vision.media_processor import ProcessorFiles


@dataclass(frozen=True, slots=True)
class OpenedFront:
    """A front; satisfies :class:`machd.engine.protocol.engine.ModelFront`."""

    model: ModelDescription
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    media: MediaProcessor | None = None
    inputs: InputTokenizer | None = None

    def close(self) -> None:
        """End the processes that render chat templates and decode images."""
        self.tokenizer.close()
        if self.media is not None:
            self.media.close()


class Texts:
    """The tokenizer of a model that an engine loads meanwhile, and the processor of its images."""

    def __init__(
        self,
        source: ModelSource,
        checkpoint: Checkpoint | None = None,
        *,
        chat_template: str | None,
        trust_remote_code: bool,
    ) -> None:
        """Open the tokenizer, and start the processor's process where the checkpoint is served with its vision tower.

        ``checkpoint`` is what the model's files say, if they have been read.

        Raises:
            ModelError: One of its kinds: the files are not those of a model.
            OverloadedError: The system has no room for a process.
        """
        self._files: ProcessorFiles | None = None
        self._inputs: TextInputTokenizer | None = None
        encoder = find_encoder(source)
        if encoder is not None:
            self._inputs = open_inputs(encoder)
            self._tokenizer = encoder_tokenizer(encoder)
            return
        if checkpoint is None:
            checkpoint = read_checkpoint(source, OwnCode.of(is_trusted=trust_remote_code))
        if checkpoint.takes_images:
            self._files = ProcessorFiles(source.path, trust_remote_code=trust_remote_code)
        try:
            self._tokenizer, _ = open_tokenizer(
                checkpoint, chat_template, trust_remote_code=trust_remote_code
            )
        except BaseException:
            self._close_files()
            raise

    def front(self, description: ModelDescription, grammars: GrammarCompiler) -> OpenedFront:
        """Wait for the processor of images, if the loaded model takes any, and hand everything over.

        Raises:
            ModelError: One of its kinds: the files are no longer those that the engine has loaded.
            OverloadedError: The system has no room for a process.
        """
        if description.vision is None:
            self._close_files()  # without a chat template, or with ranks, a model with a tower takes no images
            return OpenedFront(description, self._tokenizer, grammars, inputs=self._inputs)
        assert self._files is not None, "the engine has loaded the same checkpoint"
        try:
            media = open_processor(
                self._files, self._tokenizer, max_bytes=description.vision.processed_bytes
            )
        except BaseException:
            self._close_files()
            raise
        return OpenedFront(description, self._tokenizer, grammars, media)

    def close(self) -> None:
        """End the processes that render chat templates and decode images."""
        self._tokenizer.close()
        self._close_files()

    def _close_files(self) -> None:
        if self._files is not None:
            self._files.close()
