"""What ``POST /api/chat`` and ``POST /api/generate`` take: Ollama's fields.

A field that would change the answer is done or refused by name. How long
Ollama would keep the model (``keep_alive``) changes no answer and is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.ollama.messages import OllamaMessageList, ollama_template_messages
from machd.dialects.ollama.options import OllamaOptions
from machd.dialects.wire.bounds import (
    ContentText,
    ModelName,
    TopLogprobs,
)
from machd.dialects.wire.generation_request import GenerationRequest
from machd.dialects.wire.other_servers import FalseOnly, ZeroOnly
from machd.dialects.wire.reasoning import ReasoningOptions, reasoning_options
from machd.dialects.wire.refusal import Ignored, Refused, neutral_values, only, refuse_unsupported
from machd.dialects.wire.response_format import ollama_constraint
from machd.dialects.wire.tools import ChatToolList, chat_tools
from machd.errors import InvalidRequestError
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation
from machd.request.generation import GenerationOptions

_EmptyTextOnly: TypeAlias = Annotated[Raw | UnsetType, only("")]

OllamaFormat: TypeAlias = Annotated[
    Raw | UnsetType,
    Meta(
        description='"json" for any JSON object, or a JSON schema.',
        extra_json_schema={
            "anyOf": [{"type": "object"}, {"type": "null"}, {"enum": ["", "json"]}],
        },
    ),
]
"""What the answer has to look like; kept as text."""

Think: TypeAlias = bool | Literal["low", "medium", "high", "max"]
"""Whether the model thinks first, and how much."""


class OllamaRequest(GenerationRequest, frozen=True, kw_only=True):
    """What both endpoints take.

    Attributes:
        stream: True unless given, as in Ollama's API.
        truncate: Ignored: a prompt that does not fit is always refused.
        shift: Ignored: a completion ends where the context does.
    """

    stream: bool | None = None
    format: OllamaFormat = UNSET
    options: OllamaOptions | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    keep_alive: Ignored = UNSET
    truncate: Ignored = UNSET
    shift: Ignored = UNSET
    debug_render_only: FalseOnly = UNSET

    def checked(self) -> Self:
        """The request, if its fields go together and ask for nothing that machd does not do.

        Raises:
            InvalidRequestError: ``format`` is neither of its two forms, or ``top_logprobs`` comes
                without ``logprobs``.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        refuse_unsupported(self, _NEUTRAL_BY_TYPE[type(self)])
        if self.options is not None:
            self.options.check()
        self.constraint()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    def constraint(self) -> Constraint | None:
        """What ``format`` asks for; None for any text.

        Raises:
            InvalidRequestError: It is neither ``"json"`` nor a JSON schema, or the schema is too
                long.
        """
        return ollama_constraint(self.format)

    def generation(self) -> GenerationOptions:
        """What is asked of the generation, free of this dialect."""
        return (self.options or OllamaOptions()).generation_options(
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            stream=self.stream is not False,
        )

    def reasoning(self) -> ReasoningOptions:
        """What ``think`` asks for."""
        if isinstance(self.think, str):
            return reasoning_options(effort=self.think, variables=None, budgets={})
        return ReasoningOptions(thinks=self.think, budget_tokens=None, template_variables={})


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """A conversation to continue; one without messages asks whether the model is loaded."""

    messages: OllamaMessageList | None = None
    tools: ChatToolList | None = None

    def conversation(self) -> Conversation:
        """What is to be continued, free of this dialect.

        An assistant's text at the end is continued where it stops, as Ollama does.

        Raises:
            UnsupportedParameterError: A message holds images.
            InvalidRequestError: Two tools have one name, or a schema or a call's arguments are
                beyond their bounds.
        """
        assert self.messages, "a request without messages asks for no answer"
        messages, last = self.messages, self.messages[-1]
        reasoning = self.reasoning()
        return Conversation(
            messages=ollama_template_messages(messages),
            tools=chat_tools(self.tools),
            constraint=self.constraint(),
            thinks=reasoning.thinks,
            template_variables=reasoning.template_variables,
            continues_final_message=(
                last.role == "assistant" and not last.tool_calls and bool(last.text.strip())
            ),
        )


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """A prompt to answer; an empty one asks whether the model is loaded.

    Attributes:
        raw: The prompt is continued as it stands, without a chat template.
        context: Refused: a conversation is continued at ``/api/chat``, by its messages.
    """

    prompt: ContentText | None = None
    system: ContentText | None = None
    raw: bool | None = None

    suffix: _EmptyTextOnly = UNSET
    context: Refused = UNSET
    images: Refused = UNSET
    # A template is code that runs in the daemon (CVE-2025-61620): it comes with the model only.
    template: _EmptyTextOnly = UNSET
    width: ZeroOnly = UNSET
    height: ZeroOnly = UNSET
    steps: ZeroOnly = UNSET

    def checked(self) -> Self:
        """The request, as :meth:`OllamaRequest.checked`; a raw prompt has no system message."""
        if self.raw and self.system:
            raise InvalidRequestError(
                "system and raw contradict each other; send one of them", param="system"
            )
        if self.raw and self.think:
            raise InvalidRequestError(
                "think and raw contradict each other; send one of them", param="think"
            )
        return OllamaRequest.checked(self)

    def conversation(self) -> Conversation:
        """The prompt as a user's message, after the system message if there is one."""
        messages: list[dict[str, object]] = [{"role": "user", "content": self.prompt or ""}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        reasoning = self.reasoning()
        return Conversation(
            messages=messages,
            messages_param="prompt",
            constraint=self.constraint(),
            thinks=reasoning.thinks,
            template_variables=reasoning.template_variables,
        )


class OllamaShowRequest(Struct, frozen=True, kw_only=True):
    """The model that facts are asked of.

    Attributes:
        name: What ``model`` was called before.
    """

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: Ignored = UNSET


_NEUTRAL_BY_TYPE: Mapping[type[Struct], Mapping[str, tuple[object, ...]]] = {
    type_: neutral_values(type_) for type_ in (OllamaChatRequest, OllamaGenerateRequest)
}
