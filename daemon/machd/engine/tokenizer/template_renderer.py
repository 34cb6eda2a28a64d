"""Rendering of a checkpoint's chat template: conversations to prompt text, within bounds.

A template is a stranger's program. A template that machd knows by its hash is rendered here; any
other in a process of its own (:mod:`machd.engine.tokenizer.template_child`), because one expression
can hold the interpreter's lock, and with it every stream and ``/health``, for minutes. The process
bounds its own time and memory where it can; this side kills it where it cannot.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from machd.engine.backend.child_process import (
    ChildStoppedError,
    SharedChild,
    as_bytes,
    as_text,
)
from machd.engine.tokenizer.template_child import (
    CANNOT_RENDER,
    REFUSED,
    RENDERED,
    TOO_MUCH,
    RenderRequest,
    refusal_message,
    render_text,
)
from machd.errors import InvalidRequestError, TemplateLimitError

_KNOWN_TEMPLATES = frozenset(
    {
        # SmolLM2-135M-Instruct, the embedded model.
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    }
)
"""SHA-256 of templates that were reviewed: their time is proportional to the conversation."""

_CHILD_MODULE = "machd.engine.tokenizer.template_child"

MARK = "zq7marker"
"""A word that no template contains; found in a prompt, the template shows what held it."""

SYSTEM: dict[str, object] = {"role": "system", "content": MARK}
USER: dict[str, object] = {"role": "user", "content": "Hello"}
TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": MARK,
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What to look up."}},
            "required": ["key"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class RenderBounds:
    """Limits of rendering one conversation: wall time, and memory that its process may gain."""

    limit_s: float = 5.0
    memory_bytes: int = 256 << 20


class TemplateRenderer:
    """Renders chat templates; threads may share it, and wait for each other.

    The process is started by :meth:`start` or by the first template that needs it. It ends with
    :meth:`close`, with this object, or with this program, whatever comes first.
    """

    def __init__(self, bounds: RenderBounds | None = None) -> None:
        self._bounds = bounds or RenderBounds()
        self._child = SharedChild("the chat template", _CHILD_MODULE)

    def start(self) -> None:
        """Let the process begin its imports; returns at once."""
        self._child.start()

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, object]],
        arguments: Mapping[str, object],
    ) -> str:
        """Render a conversation; the arguments are those of transformers' ``render_jinja_template``.

        Raises:
            InvalidRequestError: The template refuses the conversation; its own words are given.
            TemplateLimitError: It was stopped.
            OverloadedError: The system has no room for a process.
            RuntimeError: The process cannot start, or does not answer as it should.
        """
        if is_known_template(template):
            with refusals_as_errors(arguments):
                return render_text(template, messages, arguments)
        request = RenderRequest(
            template=template,
            messages=messages,
            arguments=arguments,
            limit_s=self._bounds.limit_s,
            memory_bytes=self._bounds.memory_bytes,
        )
        bounds = self._bounds
        try:
            kind, content = self._child.ask(
                as_bytes(json.dumps(request, ensure_ascii=False)),
                limit_s=bounds.limit_s,
                memory_bytes=bounds.memory_bytes,
            )
        except ChildStoppedError as error:
            raise TemplateLimitError(f"{CANNOT_RENDER}: it {error}", param="messages") from error
        text = as_text(content)
        if kind == RENDERED:
            return text
        if kind == REFUSED:
            raise InvalidRequestError(text, param="messages")
        if kind == TOO_MUCH:
            raise TemplateLimitError(text, param="messages")
        raise RuntimeError(f"the process for chat templates cannot work: {text}")

    def close(self) -> None:
        """End the process."""
        self._child.close()


def is_known_template(template: str) -> bool:
    """Tell whether machd renders a template in its own process."""
    digest = hashlib.sha256(template.encode("utf-8", "surrogatepass")).hexdigest()
    return digest in _KNOWN_TEMPLATES


def without_date(template: str) -> str:
    """Return a template that gets an empty text wherever it asks for the date.

    A macro of the same name stands before transformers' function. Its line is trimmed, so all else is rendered as before.
    """
    return "{%- macro strftime_now(format) %}{% endmacro %}\n" + template


@contextmanager
def refusals_as_errors(arguments: Mapping[str, object]) -> Iterator[None]:
    """Turn what a template raises into InvalidRequestError; other errors pass."""
    try:
        yield
    except Exception as error:
        continues = bool(arguments.get("continue_final_message"))
        message = refusal_message(error, continues=continues)
        if message is None:
            raise
        raise InvalidRequestError(message, param="messages") from error
