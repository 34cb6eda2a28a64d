"""``python -m machd.engine.tokenizer.template_child``: the process that renders chat templates.

``template_renderer`` starts this process, sends it requests over the socket that is its standard
input, and kills it when it is late. It imports neither mlx nor mlx-lm.
"""

from __future__ import annotations

import gc
import json
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import TypedDict

from jinja2.exceptions import TemplateError

from machd.engine.backend.inspection_bounds import bounded
from machd.engine.backend.model_files import shortened
from machd.errors import ModelFormatError

HEADER = struct.Struct(">cQ")
"""Header of a message: its kind, and the number of bytes that follow."""

REQUEST, READY, RENDERED, REFUSED, TOO_MUCH, UNABLE = b"q", b"r", b"t", b"f", b"m", b"u"

CANNOT_RENDER = "the model's chat template cannot render these messages"

_MAX_MESSAGE_CHARS = 500
"""Length of a template's own words to a client."""

_FREE_CHARS = 1 << 20
_CHARS_PER_SENT_BYTE = 8
"""Bounds of a prompt text: a template adds its own words, and may repeat and indent a conversation."""

_CPU_S = 30
"""Processor time of one request after which the kernel ends a process that its parent left behind."""


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
    # The smallest part of transformers that renders: 1.5 s and 50 MiB.
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


def send_frame(channel: socket.socket, kind: bytes, content: bytes) -> None:
    """Write one message."""
    channel.sendall(HEADER.pack(kind, len(content)))
    channel.sendall(content)


def as_bytes(text: str) -> bytes:
    """UTF-8 that keeps lone surrogates, which JSON can spell."""
    return text.encode("utf-8", "surrogatepass")


def as_text(content: bytes) -> str:
    """Inverse of :func:`as_bytes`."""
    return content.decode("utf-8", "surrogatepass")


def main() -> None:
    """Answer requests until the parent closes its side."""
    for one in (signal.SIGINT, signal.SIGTERM):
        # Both go to a whole process group; the parent decides when this process ends.
        signal.signal(one, signal.SIG_IGN)
    with socket.socket(fileno=sys.stdin.fileno()) as channel, channel.makefile("rb") as requests:
        try:
            render_text("ready", [], {})
        except Exception:  # noqa: BLE001 - a broken installation; the parent reports it
            send_frame(channel, UNABLE, as_bytes(traceback.format_exc()))
            return
        send_frame(channel, READY, b"")
        try:
            while len(header := requests.read(HEADER.size)) == HEADER.size:
                _, size = HEADER.unpack(header)
                content = requests.read(size)
                if len(content) < size:
                    return
                request: RenderRequest = json.loads(as_text(content))
                _end_when_orphaned()
                kind, text = _answer(request, _FREE_CHARS + _CHARS_PER_SENT_BYTE * size)
                send_frame(channel, kind, as_bytes(text))
        except OSError:
            return  # the parent has ended


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


def _end_when_orphaned() -> None:
    """Let the kernel end the process after far more processor time than the parent waits."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


if __name__ == "__main__":
    main()
