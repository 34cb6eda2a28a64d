"""Requests of Ollama's ``/api/chat`` and ``/api/generate``: messages, options, format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.wire import bounds
from machd.dialects.wire.generation_request import GenerationRequest, SamplingFields
from machd.dialects.wire.idle_time import read_keep_alive
from machd.dialects.wire.media import media_from_base64
from machd.dialects.wire.other_servers import FalseOnly, OneOnly, TrueOnly, ZeroOnly
from machd.dialects.wire.raw_json import Allowance, JsonObject, raw_object
from machd.dialects.wire.reasoning import ReasoningOptions, reasoning_options
from machd.dialects.wire.refusal import Ignored, Refused, only, refuse_unsupported
from machd.dialects.wire.response_format import ollama_constraint
from machd.dialects.wire.tools import ChatToolList, chat_tools
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation, template_call
from machd.request.generation import WHOLE_ROOM, GenerationOptions
from machd.request.media import MediaKind, message_content

Images: TypeAlias = Annotated[list[bounds.MediaText], Meta(max_length=1024)]
"""Files of images, each in base64."""


class OllamaCalledFunction(Struct, frozen=True, kw_only=True):
    """The function of a call, with its arguments as an object.

    Attributes:
        index: Ignored; calls count in their order.
    """

    name: bounds.CallId
    arguments: JsonObject
    index: Ignored = UNSET


class OllamaToolCall(Struct, frozen=True, kw_only=True):
    """A call that the model made; Ollama's older clients drop its id."""

    function: OllamaCalledFunction
    id: bounds.CallId | None = None


class OllamaMessage(Struct, frozen=True, kw_only=True):
    """One turn.

    Attributes:
        thinking: What the assistant thought.
        tool_name: Of a tool's message, the function that it answers for.
        tool_call_id: Of a tool's message, the call that it answers.
        images: Of a user's or a tool's message; they stand before its text.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: bounds.ContentText | None = None
    thinking: bounds.ContentText | None = None
    tool_calls: Annotated[list[OllamaToolCall], Meta(max_length=bounds.MAX_TOOLS)] | None = None
    tool_name: bounds.Label | None = None
    tool_call_id: bounds.Label | None = None
    images: Images | None = None

    @property
    def text(self) -> str:
        """Its content; none is empty."""
        return self.content or ""


OllamaMessageList: TypeAlias = Annotated[list[OllamaMessage], Meta(max_length=8192)]
"""A conversation, oldest message first; none at all asks whether the model is loaded."""

_IMAGE_ROLES = ("user", "tool")


def ollama_template_messages(messages: Sequence[OllamaMessage]) -> list[dict[str, object]]:
    """Messages as :class:`machd.request.conversation.Conversation` has them.

    Calls without an id get one, and a result without the id of its call answers the oldest open
    call of its function, or else the oldest open call. Images are decoded from base64, for a worker
    thread.

    Raises:
        InvalidRequestError: The arguments of calls are nested too deeply or have too many parts, or
            images are not base64 or belong to the system or the assistant.
    """
    seen = []
    open_calls: dict[str, str] = {}
    allowance = Allowance()
    for index, message in enumerate(messages):
        param = f"messages[{index}].images"
        if message.images and message.role not in _IMAGE_ROLES:
            raise InvalidRequestError.at(
                param,
                'images are taken in messages of the roles "user" and "tool" only; send '
                "them in one of these",
            )
        content = _content(message.images, message.text, param=param)
        one: dict[str, object] = {"role": message.role, "content": content}
        if message.role == "assistant":
            one |= _assistant_fields(message, open_calls, allowance, position=index)
        elif message.role == "tool":
            one |= _result_fields(message, open_calls)
        seen.append(one)
    return seen


def _content(
    images: Sequence[str] | None, text: str, *, param: str
) -> str | list[dict[str, object]]:
    if not images:
        return text
    sources = [
        media_from_base64(data, MediaKind.IMAGE, param=f"{param}[{index}]")
        for index, data in enumerate(images)
    ]
    return message_content([*sources, text])


def _assistant_fields(
    message: OllamaMessage, open_calls: dict[str, str], allowance: Allowance, *, position: int
) -> dict[str, object]:
    """Return the fields of an assistant's message beside its text; its calls become open."""
    fields: dict[str, object] = {}
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        call_id = call.id or f"call_{position}_{index}"
        open_calls[call_id] = call.function.name
        arguments = raw_object(
            call.function.arguments,
            param=f"messages[{position}].tool_calls[{index}].function.arguments",
            max_bytes=None,
            allowance=allowance,
        )
        calls.append(template_call(call_id, call.function.name, arguments))
    if calls:
        fields["tool_calls"] = calls
    return fields


def _result_fields(message: OllamaMessage, open_calls: dict[str, str]) -> dict[str, object]:
    """The call that a tool's message answers, which is open no longer, and its function's name."""
    named = [call for call, name in open_calls.items() if name == message.tool_name]
    call_id = message.tool_call_id or next(iter(named or open_calls), "")
    name = message.tool_name or open_calls.get(call_id)
    open_calls.pop(call_id, None)
    return {"tool_call_id": call_id, **({"name": name} if name else {})}


_DEFAULTS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
"""Ollama's documented defaults, on which a client that names no number counts."""

_FRESH_SEED = -1
_WHOLE_TEXT = -1

_Tokens: TypeAlias = Annotated[int, Meta(ge=-2, le=2**31 - 1)]
_LastTokens: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class OllamaOptions(Struct, frozen=True, kw_only=True):
    """Sampling parameters. Null means the default.

    Attributes:
        num_predict: Tokens of completion; -1 and -2 for all that fit, 0 for the default.
        repeat_last_n: Tokens over which penalties look. machd's look at the whole text (-1); 0
            switches penalties off.
        num_ctx: Ignored, as the context is always as long as the model's.
    """

    temperature: bounds.Temperature | None = None
    top_p: bounds.TopP | None = None
    top_k: bounds.TopK | None = None
    min_p: bounds.MinP | None = None
    seed: bounds.Seed | None = None
    num_predict: _Tokens | None = None
    stop: bounds.Stop | None = None
    repeat_penalty: bounds.RepetitionPenalty | None = None
    presence_penalty: bounds.Penalty | None = None
    frequency_penalty: bounds.Penalty | None = None
    repeat_last_n: _LastTokens | None = None

    typical_p: OneOnly = UNSET
    tfs_z: OneOnly = UNSET
    mirostat: ZeroOnly = UNSET
    penalize_newline: TrueOnly = UNSET

    mirostat_tau: Ignored = UNSET
    mirostat_eta: Ignored = UNSET
    num_ctx: Ignored = UNSET
    num_keep: Ignored = UNSET
    num_batch: Ignored = UNSET
    num_gpu: Ignored = UNSET
    main_gpu: Ignored = UNSET
    num_thread: Ignored = UNSET
    numa: Ignored = UNSET
    low_vram: Ignored = UNSET
    f16_kv: Ignored = UNSET
    use_mmap: Ignored = UNSET
    use_mlock: Ignored = UNSET
    logits_all: Ignored = UNSET
    vocab_only: Ignored = UNSET
    embedding_only: Ignored = UNSET

    def check(self) -> None:
        """Raise UnsupportedParameterError if an option asks for what machd does not do."""
        refuse_unsupported(self, where="options.")
        penalises = (
            self.repeat_penalty not in (None, 1.0)
            or self.presence_penalty
            or self.frequency_penalty
        )
        if penalises and self.repeat_last_n not in (None, _WHOLE_TEXT, 0):
            raise UnsupportedParameterError.at(
                "options.repeat_last_n",
                "penalties look at the whole text; leave it out, or send -1",
            )

    def generation_options(self, *, top_logprobs: int | None, stream: bool) -> GenerationOptions:
        """Return the options of the generation, free of this dialect."""
        asked_tokens = self.num_predict or None
        looks_back = self.repeat_last_n != 0
        shared = SamplingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty if looks_back else 1.0,
            presence_penalty=self.presence_penalty if looks_back else None,
            frequency_penalty=self.frequency_penalty if looks_back else None,
            seed=None if self.seed == _FRESH_SEED else self.seed,
            stop=self.stop,
            stream=stream,
        )
        options = shared.shared_options(
            max_tokens=None if asked_tokens is None else max(asked_tokens, WHOLE_ROOM),
            top_logprobs=top_logprobs,
        )
        return options.with_defaults(_DEFAULTS)


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
    """Fields of both endpoints.

    Attributes:
        stream: True unless given, as in Ollama's API.
        keep_alive: How long the model stays loaded without requests, from now on; heeded for an operator, where there are
            several models.
        return_cache_diagnosis: An extension, as in chat completions.
        truncate: Ignored: a prompt that does not fit is always refused.
        shift: Ignored: a completion ends where the context does.
    """

    takes_media: ClassVar[bool] = True

    stream: bool | None = None
    format: OllamaFormat = UNSET
    options: OllamaOptions | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    return_cache_diagnosis: bool | None = None

    keep_alive: Ignored = UNSET
    truncate: Ignored = UNSET
    shift: Ignored = UNSET
    debug_render_only: FalseOnly = UNSET

    @property
    def is_stream(self) -> bool:
        """Whether it asks for a stream; what asks for no text is answered in one piece."""
        return self.stream is not False and self.asks_for_text

    @property
    def asks_for_text(self) -> bool:
        """Whether there is something to answer; otherwise it loads or unloads the model."""
        return True

    @property
    def idle_s(self) -> float | None:
        """Idle seconds after which the model is to be unloaded, as :attr:`GenerationRequest.idle_s`."""
        return read_keep_alive(self.keep_alive)

    def checked(self) -> Self:
        """Check as :meth:`GenerationRequest.checked`, and that ``format`` has one of its two forms."""
        refuse_unsupported(self)
        if self.options is not None:
            self.options.check()
        self.constraint()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    def constraint(self) -> Constraint | None:
        """Return the constraint that ``format`` asks for, as :func:`ollama_constraint`; None for any text."""
        return ollama_constraint(self.format)

    def generation(self) -> GenerationOptions:
        """Return the options of the generation, free of this dialect."""
        return (self.options or OllamaOptions()).generation_options(
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            stream=self.is_stream,
        )

    def reasoning(self) -> ReasoningOptions:
        """Return the reasoning options that ``think`` asks for."""
        if isinstance(self.think, str):
            return reasoning_options(effort=self.think, variables=None, budgets={})
        return ReasoningOptions(thinks=self.think, budget_tokens=None, template_variables={})


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """A conversation to continue; one without messages asks whether the model is loaded."""

    messages: OllamaMessageList | None = None
    tools: ChatToolList | None = None

    @property
    def asks_for_text(self) -> bool:
        """Whether it has messages."""
        return bool(self.messages)

    def conversation(self) -> Conversation:
        """Return the conversation to continue, free of this dialect.

        An assistant's text at the end is continued where it stops, as Ollama does.

        Raises:
            InvalidRequestError: Two tools have one name, a schema or a call's arguments are beyond
                their bounds, or an image is not base64.
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
            is_located=bool(self.return_cache_diagnosis),
        )


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """A prompt to answer; an empty one without images asks whether the model is loaded.

    Attributes:
        images: They stand before the prompt.
        raw: The prompt is continued as it stands, without a chat template.
        context: Refused: a conversation is continued at ``/api/chat``, by its messages.
    """

    prompt: bounds.ContentText | None = None
    system: bounds.ContentText | None = None
    raw: bool | None = None

    suffix: _EmptyTextOnly = UNSET
    images: Images | None = None
    context: Refused = UNSET
    # A template is code that runs in the daemon (CVE-2025-61620): it comes with the model only.
    template: _EmptyTextOnly = UNSET
    width: ZeroOnly = UNSET
    height: ZeroOnly = UNSET
    steps: ZeroOnly = UNSET

    @property
    def asks_for_text(self) -> bool:
        """Whether it has a prompt."""
        return bool(self.prompt or self.images)

    def checked(self) -> Self:
        """The request, as :meth:`OllamaRequest.checked`; a raw prompt has no system message and no image."""
        if self.raw and self.system:
            raise InvalidRequestError(
                "system and raw contradict each other; send one of them", param="system"
            )
        if self.raw and self.think:
            raise InvalidRequestError(
                "think and raw contradict each other; send one of them", param="think"
            )
        if self.raw and self.images:
            raise InvalidRequestError(
                "images and raw contradict each other, as a template says where images stand; send "
                "one of them",
                param="images",
            )
        return OllamaRequest.checked(self)

    def conversation(self) -> Conversation:
        """The prompt as a user's message, after the system message if there is one.

        Raises:
            InvalidRequestError: An image is not base64.
        """
        content = _content(self.images, self.prompt or "", param="images")
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        reasoning = self.reasoning()
        return Conversation(
            messages=messages,
            messages_param="prompt",
            constraint=self.constraint(),
            thinks=reasoning.thinks,
            template_variables=reasoning.template_variables,
            is_located=bool(self.return_cache_diagnosis),
            message_indices=[None] * len(messages),
        )


class OllamaShowRequest(Struct, frozen=True, kw_only=True):
    """The model that facts are asked of.

    Attributes:
        name: What ``model`` was called before.
    """

    model: bounds.ModelName | None = None
    name: bounds.ModelName | None = None
    verbose: Ignored = UNSET
