"""``python -m machd.engine.tokenizer.template_child``: the process that renders chat templates.

``template_renderer`` starts this process and kills it when it is late; see
:mod:`machd.engine.backend.child_process`. It imports neither mlx nor mlx-lm.
"""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Mapping, Sequence
from typing import TypedDict

from jinja2.exceptions import TemplateError

from machd.engine.backend.child_process import (
    READY,
    UNABLE,
    as_bytes,
    as_text,
    parent_channel,
    requests_of,
    send_frame,
)
from machd.engine.backend.inspection_bounds import bounded
from machd.engine.backend.model_files import shortened
from machd.engine.backend.transformers_import import import_transformers
from machd.errors import ModelFormatError

RENDERED, REFUSED, TOO_MUCH = b"t", b"f", b"m"

CANNOT_RENDER = "the model's chat template cannot render these messages"

_MAX_MESSAGE_CHARS = 500
"""Length of a template's own words to a client."""

_FREE_CHARS = 1 << 20
_CHARS_PER_SENT_BYTE = 8
"""Bounds of a prompt text: a template adds its own words, and may repeat and indent a conversation."""


class RenderRequest(TypedDict):
    """The parent's request, sent as JSON; ``arguments`` are further ones for transformers."""

    template: str
    messages: Sequence[Mapping[str, object]]
    arguments: Mapping[str, object]
    limit_s: float
    memory_bytes: int


def render_text(
    template: str,
    messages: Sequence[Mapping[str, object]],
    arguments: Mapping[str, object],
) -> str:
    """Render a conversation to prompt text in transformers' sandbox."""
    # The smallest part of transformers that renders: 0.8 s and 50 MiB.
    import_transformers()
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    texts, _ = render_jinja_template(
        conversations=[messages], chat_template=template, **dict(arguments)
    )
    return str(texts[0])


def refusal_message(error: Exception, *, continues: bool) -> str | None:
    """Put a template's failure into words for a client; None for an error of no template.

    A template is a program: content that it does not expect raises errors anywhere in it.
    """
    if isinstance(error, TemplateError):
        said = shortened(str(error.message or error), _MAX_MESSAGE_CHARS)
        return f"the model's chat template refuses these messages: {said}"
    if isinstance(error, ValueError) and continues:
        # The library's message quotes the conversation.
        return (
            "the model's chat template does not show the final message as it is, so it cannot be "
            "continued; send a user message after it"
        )
    if isinstance(error, TypeError | ValueError | LookupError | AttributeError):
        return f"{CANNOT_RENDER}: {shortened(str(error), _MAX_MESSAGE_CHARS)}"
    if isinstance(
        error, ArithmeticError | AssertionError | RuntimeError | MemoryError | SyntaxError
    ):
        return f"{CANNOT_RENDER}: {type(error).__name__} in it"
    return None


def main() -> None:
    """Answer requests until the parent closes its side."""
    with parent_channel() as channel:
        try:
            render_text("ready", [], {})
        except Exception:  # noqa: BLE001 - a broken installation; the parent reports it
            send_frame(channel, UNABLE, as_bytes(traceback.format_exc()))
            return
        send_frame(channel, READY, b"")
        for content in requests_of(channel):
            request: RenderRequest = json.loads(as_text(content))
            kind, text = _answer(request, _FREE_CHARS + _CHARS_PER_SENT_BYTE * len(content))
            send_frame(channel, kind, as_bytes(text))


def _answer(request: RenderRequest, max_chars: int) -> tuple[bytes, str]:
    try:
        with bounded(
            "rendering the model's chat template",
            seconds=request["limit_s"],
            memory_bytes=request["memory_bytes"],
            hint="shorten the conversation, or serve the model with another template",
        ):
            return _rendered(request, max_chars)
    except ModelFormatError as error:
        gc.collect()  # the template's objects are cyclic, and the next request needs their memory
        return TOO_MUCH, error.message


def _rendered(request: RenderRequest, max_chars: int) -> tuple[bytes, str]:
    arguments = request["arguments"]
    try:
        text = render_text(request["template"], request["messages"], arguments)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any error is the template's
        continues = bool(arguments.get("continue_final_message"))
        message = refusal_message(error, continues=continues)
        return REFUSED, message or f"{CANNOT_RENDER}: {type(error).__name__} in it"
    if len(text) > max_chars:
        return TOO_MUCH, (
            f"rendering the model's chat template makes {len(text)} characters of this "
            f"conversation, and {max_chars} are the limit"
        )
    return RENDERED, text


if __name__ == "__main__":
    main()
