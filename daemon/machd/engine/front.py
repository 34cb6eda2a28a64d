"""A model's front, opened from its files in a process that computes nothing.

Importing this module and opening a front imports neither mlx nor mlx-vlm: tokenizers need neither, and images are decoded
by a process of their own. Python code that a trusted checkpoint brings may import anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.loading.checkpoint import read_checkpoint
from machd.engine.loading.gguf_header import read_gguf_header
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


def open_front(
    source: ModelSource,
    description: ModelDescription,
    grammars: GrammarCompiler,
    *,
    chat_template: str | None,
    trust_remote_code: bool,
    media_bytes: int,
) -> OpenedFront:
    """Open the tokenizer of a model that an engine has loaded, and its processor of images if it takes any.

    Args:
        source: The files that the engine has loaded.
        description: The engine's.
        grammars: Compiler for the model's vocabulary.
        chat_template: The setting ``model.chat_template``, as the engine has it.
        trust_remote_code: Whether the checkpoint's own Python code may run.
        media_bytes: Memory for processed images and videos.

    Raises:
        ModelError: One of its kinds: the files are no longer those that the engine has loaded.
        OverloadedError: The system has no room for a process.
    """
    files = None
    if description.vision is not None:
        # Started first: it imports for seconds, while this process does the same.
        files = ProcessorFiles(source.path, trust_remote_code=trust_remote_code)
    tokenizer = None
    try:
        read = (
            read_gguf_header(source.path)
            if source.kind is SourceKind.GGUF
            else read_checkpoint(source.path, trust_remote_code=trust_remote_code)
        )
        tokenizer, _ = open_tokenizer(read, chat_template, trust_remote_code=trust_remote_code)
        media = None if files is None else open_processor(files, tokenizer, max_bytes=media_bytes)
    except BaseException:
        if tokenizer is not None:
            tokenizer.close()
        if files is not None:
            files.close()
        raise
    return OpenedFront(description, tokenizer, grammars, media)
