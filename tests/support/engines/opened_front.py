"""``python -m support.engines.opened_front``: fronts in a process without mlx, and what they answer.

Reads a list of :class:`Opening` from standard input, and writes one of :class:`Opened`.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import msgspec

from machd.engine.front import Texts
from machd.engine.loading.source import ModelSource, SourceKind
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.media import MediaBounds, MediaProcessor
from machd.engine.protocol.tokenizer import Tokenizer
from machd.request.constraint import Constraint
from machd.request.media import MediaKind, MediaSource

COMPUTING = (
    *("mlx", "mlx.core", "mlx_vlm", "llguidance", "torch"),
    *("mlx_lm.utils", "mlx_lm.generate", "mlx_lm.models"),
)
"""Modules that compute, or import some that do."""

_TEXT = "Grüße, 世界! 👋 <|im_start|> def f(x):\n    return x"
_CALL = '{"name": "look_up", "arguments": {"key": "a"}}'
_MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 6 times 7?"},
]
_BOUNDS = MediaBounds(max_pixels=1 << 20, max_frames=1, max_decode_s=60.0)


class Opening(msgspec.Struct, frozen=True):
    """A model to open, and an image to ask its front for.

    Attributes:
        description: The engine's.
    """

    kind: SourceKind
    path: str
    description: ModelDescription
    image: bytes = b""


class Answers(msgspec.Struct, frozen=True):
    """Answers about some texts.

    Attributes:
        pieces: What a detokenizer makes of each token.
        chat_format: All but its parser, as text.
        call: What its parser makes of a call; None without one.
        fill: A prompt to fill in the middle; None for a model without.
        facts: Sizes, special tokens, and bytes of tokens, as text.
    """

    token_ids: list[int]
    decoded: str
    pieces: list[str]
    rendered: str
    chat_format: str
    call: object
    fill: list[int] | None
    facts: str


class Seen(msgspec.Struct, frozen=True):
    """An image as the front's processor gives it.

    Attributes:
        arrays: Types, shapes and hashes.
    """

    placeholder: str
    reads_parts: bool
    token_ids: list[int]
    arrays: dict[str, str]


class Opened(msgspec.Struct, frozen=True):
    """A front's answers.

    Attributes:
        seen: None for a model that takes text only.
        computing: Those of :data:`COMPUTING` that its process has imported.
    """

    answers: Answers
    seen: Seen | None
    computing: list[str]


class _NoGrammars:
    def is_separate(self, constraint: Constraint) -> NoReturn:
        raise NotImplementedError

    def compile(self, constraint: Constraint, *, is_wanted: object = None) -> NoReturn:
        raise NotImplementedError


def answers_of(tokenizer: Tokenizer) -> Answers:
    """Ask a tokenizer what requests ask it."""
    token_ids = tokenizer.encode(_TEXT, add_special_tokens=True)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(one) for one in token_ids]
    chat, fill = tokenizer.chat_format, tokenizer.fill_format
    shown = {one.name: getattr(chat, one.name) for one in fields(chat) if one.name != "parse"}
    facts = (
        *(tokenizer.vocabulary_tokens, sorted(tokenizer.special_token_ids), tokenizer.info),
        *(tokenizer.knows_token_bytes, tokenizer.template_notes()),
        [tokenizer.token_bytes(one) for one in token_ids],
    )
    return Answers(
        token_ids=token_ids,
        decoded=tokenizer.decode(token_ids),
        pieces=[*pieces, detokenizer.finish()],
        rendered=tokenizer.render_chat(_MESSAGES),
        chat_format=repr(shown),
        call=None if chat.tool_markers is None else chat.parse(_CALL, []),
        fill=None if fill is None else list(fill.prompt("x = ", "\nprint(x)")),
        facts=repr(facts),
    )


def image_of(media: MediaProcessor, content: bytes) -> Seen:
    """Ask a processor for an image."""
    source = MediaSource(MediaKind.IMAGE, param="image", content=content)
    processed = media.process(source, _BOUNDS, "namespace")
    return Seen(
        media.placeholder(MediaKind.IMAGE, 1),
        media.reads_parts,
        list(processed.token_ids),
        {
            name: f"{one.dtype} {one.shape} {hashlib.sha256(one.content).hexdigest()}"
            for name, one in processed.arrays.items()
        },
    )


def _opened(opening: Opening) -> Opened:
    path = Path(opening.path)
    source = ModelSource(opening.kind, path, path.stem)
    texts = Texts(source, chat_template=None, trust_remote_code=False)
    front = texts.front(opening.description, _NoGrammars())
    try:
        answers = answers_of(front.tokenizer)
        seen = None if front.media is None else image_of(front.media, opening.image)
    finally:
        front.close()
    return Opened(answers, seen, [one for one in COMPUTING if one in sys.modules])


def main() -> None:
    """Open fronts one after another, ask them, and write what they said."""
    openings = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Opening])
    sys.stdout.buffer.write(msgspec.json.encode([_opened(one) for one in openings]))


if __name__ == "__main__":
    main()
