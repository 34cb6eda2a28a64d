"""Requests of ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.responses.items import InputItem, ItemChain, item_chain, item_messages
from machd.dialects.responses.tools import (
    ResponsesToolChoice,
    ResponsesToolList,
    SchemaTextFormat,
    left_out_kinds,
    responses_tool_choice,
    responses_tools,
)
from machd.dialects.wire import bounds
from machd.dialects.wire.generation_request import SamplingFields, ServiceTier, agreed_tokens
from machd.dialects.wire.other_servers import FalseOnly
from machd.dialects.wire.reasoning import ReasoningEffort, reasoning_options
from machd.dialects.wire.refusal import Ignored, Refused, only, refuse_unsupported
from machd.dialects.wire.response_format import (
    JsonObjectFormat,
    TextFormat,
    json_schema_constraint,
    object_format_constraint,
)
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation
from machd.request.generation import WHOLE_ROOM, GenerationOptions

_MediumOnly: TypeAlias = Annotated[Raw | UnsetType, only("medium")]
_StandardOnly: TypeAlias = Annotated[Raw | UnsetType, only("standard")]
_AutoOnly: TypeAlias = Annotated[Raw | UnsetType, only("auto")]
_OneOnly: TypeAlias = Annotated[Raw | UnsetType, only(1)]

_LOGPROBS = "message.output_text.logprobs"
_SummaryKind: TypeAlias = Literal["auto", "concise", "detailed"]
_Include: TypeAlias = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Only log-probabilities are ever there to include; the rest belongs to tools that never run."""

InputItems = Annotated[list[InputItem], Meta(max_length=8192)]


class TextRequest(Struct, frozen=True, kw_only=True):
    """``text``: the form of the answer."""

    format: TextFormat | JsonObjectFormat | SchemaTextFormat | None = None
    verbosity: _MediumOnly = UNSET

    def constraint(self) -> Constraint | None:
        """Return the constraint of the answer; None for any text. A schema is checked."""
        match self.format:
            case JsonObjectFormat():
                return object_format_constraint(self.format, param="text.format")
            case SchemaTextFormat(schema=schema):
                return json_schema_constraint(schema, param="text.format.schema")
            case _:
                return None


class ReasoningRequest(Struct, frozen=True, kw_only=True):
    """``reasoning``: whether and how much the model is to think.

    Attributes:
        summary: Accepted; the thoughts themselves are in the answer.
        generate_summary: OpenAI's older word for ``summary``.
    """

    effort: ReasoningEffort | None = None
    summary: _SummaryKind | None = None
    generate_summary: _SummaryKind | None = None
    context: _AutoOnly = UNSET
    mode: _StandardOnly = UNSET


class ResponsesStreamOptions(Struct, frozen=True, kw_only=True):
    """``stream_options``.

    Attributes:
        include_obfuscation: Accepted; machd pads nothing.
    """

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """Something to answer, perhaps after an earlier response. Null means the default throughout.

    Of the shared fields all but ``temperature``, ``top_p`` and ``stream`` are extensions. From
    ``background`` on are OpenAI's fields that machd refuses, and those of other endpoints that would
    change the answer if they were meant here.
    """

    takes_media: ClassVar[bool] = True

    input: bounds.ContentText | InputItems
    instructions: bounds.ContentText | None = None
    previous_response_id: bounds.Label | None = None
    store: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: bounds.MaxTokens | None = None
    top_logprobs: bounds.TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[_Include], Meta(max_length=16)] | None = None
    tools: ResponsesToolList | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextRequest | None = None
    reasoning: ReasoningRequest | None = None
    metadata: bounds.Metadata | None = None
    service_tier: ServiceTier | None = None
    user: bounds.UnusedLabel | None = None
    safety_identifier: bounds.UnusedLabel | None = None
    prompt_cache_key: bounds.UnusedLabel | None = None
    prompt_cache_retention: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET
    max_tool_calls: bounds.MaxToolCalls | None = None

    background: FalseOnly = UNSET
    conversation: Refused = UNSET
    context_management: Refused = UNSET
    moderation: Refused = UNSET
    prompt: Refused = UNSET

    n: _OneOnly = UNSET
    max_tokens: Refused = UNSET
    max_completion_tokens: Refused = UNSET
    response_format: Refused = UNSET
    reasoning_effort: Refused = UNSET
    logit_bias: Refused = UNSET
    ignore_eos: FalseOnly = UNSET
    stop_token_ids: Refused = UNSET
    structured_outputs: Refused = UNSET
    chat_template: Refused = UNSET
    chat_template_kwargs: Refused = UNSET

    def checked(self) -> Self:
        """Check as the base class does, but for what needs stored items: see :meth:`continued`."""
        refuse_unsupported(self)
        if self.text is not None:
            refuse_unsupported(self.text, where="text.")
        if self.reasoning is not None:
            refuse_unsupported(self.reasoning, where="reasoning.")
        agreed_tokens({"max_output_tokens": self.max_output_tokens})
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            item.checked(f"input[{index}]")
        self._continued([], [])
        return self

    @property
    def is_stored(self) -> bool:
        """True if the response is kept, which is OpenAI's default."""
        return self.store is not False

    @property
    def used_tier(self) -> str:
        """``service_tier`` as the answer repeats it."""
        return "default" if self.service_tier in (None, "auto") else self.service_tier

    @property
    def referenced_ids(self) -> list[str]:
        """Ids of stored items that the input stands on."""
        given = self.input if isinstance(self.input, list) else ()
        return [item.id for item in given if item.type == "item_reference" and item.id]

    @property
    def left_out_kinds(self) -> list[str]:
        """Kinds of the tools that the model is not shown."""
        return left_out_kinds(self.tools)

    def options(self) -> GenerationOptions:
        """Return the options of the generation, free of this dialect."""
        shows_logprobs = bool(self.top_logprobs) or _LOGPROBS in (self.include or ())
        return self.shared_options(
            max_tokens=self.max_output_tokens,
            top_logprobs=(self.top_logprobs or 0) if shows_logprobs else None,
            service_tier=self.service_tier,
        )

    def chain(self, *, previous: tuple[bytes, ...], referenced: dict[str, bytes]) -> ItemChain:
        """The items of the conversation, as :func:`item_chain`.

        Raises:
            InvalidRequestError: A reference leads nowhere.
        """
        return item_chain(self.input, previous=previous, referenced=referenced)

    def continued(self, chain: ItemChain) -> Conversation:
        """Return the conversation to continue, free of this dialect. Earlier instructions do not carry over.

        Raises:
            InvalidRequestError: A call has no output, an output no call, or the like.
        """
        told = item_messages(chain.items, instructions=self.instructions)
        return self._continued(told.messages, told.indices)

    def _continued(
        self, messages: list[dict[str, object]], indices: Sequence[int | None]
    ) -> Conversation:
        choice, tools = responses_tool_choice(
            self.tool_choice,
            responses_tools(self.tools),
            parallel_tool_calls=self.parallel_tool_calls,
            left_out=self.left_out_kinds,
        )
        reasoning = reasoning_options(
            effort=self.reasoning.effort if self.reasoning else None, variables=None, budgets={}
        )
        return Conversation(
            messages=messages,
            messages_param="input",
            tools=tools,
            tool_choice=choice,
            constraint=self.text.constraint() if self.text else None,
            thinks=reasoning.thinks,
            thinking_budget_tokens=reasoning.budget_tokens,
            template_variables=reasoning.template_variables,
            is_located=bool(self.return_cache_diagnosis),
            message_indices=indices,
            max_prompt_tokens=WHOLE_ROOM if self.truncation == "auto" else None,
        )
