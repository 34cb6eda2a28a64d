"""A model's front, opened from its files in a process that computes nothing.

Importing this module and opening a front imports neither mlx nor mlx-vlm: tokenizers need neither, and images are decoded
by a process of their own. Python code that a trusted checkpoint brings may import anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.loading.formats.checkpoint import read_checkpoint
from machd.engine.loading.formats.gguf_header import read_gguf_header
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.loading.tokenizer_files import open_tokenizer
from machd.engine.loading.vision import open_processor
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

    def close(self) -> None:
        """End the processes that render chat templates and decode images."""
        self.tokenizer.close()
        if self.media is not None:
            self.media.close()


class Texts:
    """The tokenizer of a model that an engine loads meanwhile, and what else its front opens."""

    def __init__(
        self, source: ModelSource, *, chat_template: str | None, trust_remote_code: bool
    ) -> None:
        """Open the tokenizer.

        Args:
            source: The files that the engine loads.
            chat_template: The setting ``model.chat_template``, as the engine has it.
            trust_remote_code: Whether the checkpoint's own Python code may run.

        Raises:
            ModelError: One of its kinds: the files are not those of a model.
            OverloadedError: The system has no room for a process.
        """
        self._source = source
        self._trusts = trust_remote_code
        read = (
            read_gguf_header(source.path)
            if source.kind is SourceKind.GGUF
            else read_checkpoint(source.path, trust_remote_code=trust_remote_code)
        )
        self._tokenizer, _ = open_tokenizer(
            read, chat_template, trust_remote_code=trust_remote_code
        )

    def front(self, description: ModelDescription, grammars: GrammarCompiler) -> OpenedFront:
        """Open the processor of images, if the loaded model takes any, and hand everything over.

        Args:
            description: The engine's.
            grammars: Compiler for the model's vocabulary.

        Raises:
            ModelError: One of its kinds: the files are no longer those that the engine has loaded.
            OverloadedError: The system has no room for a process.
        """
        if description.vision is None:
            return OpenedFront(description, self._tokenizer, grammars)
        files = ProcessorFiles(self._source.path, trust_remote_code=self._trusts)
        try:
            media = open_processor(
                files, self._tokenizer, max_bytes=description.vision.processed_bytes
            )
        except BaseException:
            files.close()
            raise
        return OpenedFront(description, self._tokenizer, grammars, media)

    def close(self) -> None:
        """End the process that renders chat templates."""
        self._tokenizer.close()
