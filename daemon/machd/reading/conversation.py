"""Preparation of a conversation: its prompt, its constraints, and the parser of its answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from machd.engine.protocol.chat_format import JSON_TOOLS, ChatFormat, TextState
from machd.engine.protocol.engine import ModelFront
from machd.engine.protocol.media import Media, MediaSpan, token_ids_of
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import InvalidRequestError
from machd.reading.chat_output import ChatOutput
from machd.reading.guidance import Guidance
from machd.reading.keyed_prompt import KeyedPrompt, keyed_prompt
from machd.reading.normalised_messages import NormalisedMessages, PlacesInRequest, RemovedText
from machd.reading.prompt_places import MediaPlaces, Places, prompt_places
from machd.reading.prompt_rules import TEMPLATE_DATE, writes_date
from machd.reading.system_messages import merge_opening, place_system_messages
from machd.reading.tool_grammar import CallSpelling, answer_or_calls, arguments_alone, forced_calls
from machd.reading.tool_prompt import write_tools
from machd.reading.truncation import kept_messages, max_prompt_tokens
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation, ToolChoiceMode, template_tool
from machd.request.generation import WHOLE_ROOM, Thinking
from machd.settings.cache import PromptRuleName

NO_MEDIA: Mapping[int, Media] = {}


@dataclass(frozen=True, slots=True)
class PreparedConversation:
    """A prepared conversation.

    Attributes:
        prompt: Token ids.
        guidance: The grammar of the answer, and its parser.
        dropped_messages: Number of oldest messages that were left out to make the rest fit.
        constraints: Constraints to compile in this order; the last one is the answer's, the others only
            show which of a client's schemas is wrong.
        media: Images and videos of the prompt, in order.
        omitted_media: Number of images and videos in tools' results that a text-only model does not get.
        places: Places of the prompt's tokens in the conversation; None unless asked for, and where they are not known.
        removed: Texts of the conversation and of the template that rules took out of the prompt.
    """

    prompt: tuple[int, ...]
    guidance: Guidance
    dropped_messages: int = 0
    constraints: tuple[Constraint, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    omitted_media: int = 0
    places: Places | None = None
    removed: tuple[RemovedText, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt in the model's own tokens, those of images included."""
        return tuple(token_ids_of(self.prompt, self.media))


def prepare_conversation(
    conversation: Conversation,
    front: ModelFront,
    decoded: Mapping[int, Media] = NO_MEDIA,
    rules: Collection[PromptRuleName] = (),
) -> PreparedConversation:
    """Render and tokenise; for a worker thread, as a prompt may be a megabyte.

    ``decoded`` holds the conversation's images and videos by the identities of their sources; ``rules`` name what is taken
    out of the prompt.

    Raises:
        ChatTemplateMissingError: The model takes no conversations.
        GrammarError: A schema or grammar is beyond the bounds.
        InvalidRequestError: The template refuses the conversation, or the model does not support the
            request.
    """
    tokenizer = front.tokenizer
    calls = _Calls.of(conversation, tokenizer)
    normalised = NormalisedMessages(
        conversation.messages, rules, indices=conversation.message_indices
    )
    conversation = replace(conversation, messages=normalised.messages)
    is_dated = writes_date(tokenizer, rules)

    def rendered(
        messages: list[dict[str, object]],
        tools: Sequence[Mapping[str, object]] = calls.tools,
        *,
        is_dated: bool = is_dated,
    ) -> str:
        shown = replace(conversation, messages=messages)
        return _rendered(shown, tokenizer, replace(calls, tools=tuple(tools)), is_dated=is_dated)

    # The template writes the special tokens itself.
    encode = partial(tokenizer.encode, add_special_tokens=False)
    processor = front.media

    def tokenised(messages: list[dict[str, object]], *, is_dated: bool = is_dated) -> KeyedPrompt:
        render = partial(rendered, is_dated=is_dated)
        if decoded and processor is not None:
            return keyed_prompt(messages, decoded, processor, render=render, encode=encode)
        text = render(messages)
        return KeyedPrompt(text, tuple(encode(text)))

    kept = conversation.messages
    prompt, dropped_messages = tokenised(kept), 0
    limit_tokens = _limit_tokens(conversation, front.model.context_tokens)
    if len(prompt.keys) > limit_tokens:
        kept = kept_messages(
            conversation.messages, lambda fewer: len(tokenised(fewer).keys) <= limit_tokens
        )
        dropped_messages = len(conversation.messages) - len(kept)
        prompt = tokenised(kept)
        _check_latest_turn(conversation, len(prompt.keys))
    open_thought = _open_thought(conversation, calls.chat_format, prompt.text)
    thinking = _thinking(conversation, tokenizer, open_thought)
    output = ChatOutput(
        calls.chat_format,
        tools=calls.tools,
        starts_in=_starting_state(conversation, calls.chat_format, thinking),
        continues_thought=bool(open_thought),
        stops_after_call=calls.is_single,
        has_bare_calls=calls.are_bare,
        has_marked_calls=not calls.are_bare,
        is_forced=calls.are_forced,
        model_id=front.model.model_id,
    )
    constraints = _constraints(conversation, front, calls)
    predicted = _predicted(conversation, tokenizer, front.model.context_tokens)
    guidance = Guidance(None, thinking, predicted, output)
    dated = prompt if is_dated else tokenised(kept, is_dated=True)
    places: Places | None = None
    if conversation.is_located and prompt.spans:
        places = MediaPlaces(conversation.messages, prompt.spans)
    elif conversation.is_located:
        pieces = [tokenizer.token_bytes(one) for one in prompt.keys]
        places = prompt_places(
            conversation.messages,
            kept,
            prompt.text,
            pieces,
            tools=calls.tools,
            render=rendered,
        )
    return PreparedConversation(
        prompt.keys,
        guidance,
        dropped_messages,
        constraints,
        prompt.spans,
        places=None if places is None else PlacesInRequest(places, normalised),
        removed=(*normalised.removed, *_removed_date(len(dated.text) - len(prompt.text))),
    )


def _removed_date(characters: int) -> Iterator[RemovedText]:
    """Yield what the template did not write of a date, if it would have written one."""
    if characters:
        yield RemovedText(TEMPLATE_DATE, None, None, characters)


def _limit_tokens(conversation: Conversation, context_tokens: int) -> float:
    """Return the most tokens of the prompt before its oldest turns are left out."""
    asked = conversation.max_prompt_tokens
    return math.inf if asked is None else max_prompt_tokens(asked, context_tokens)


def _check_latest_turn(conversation: Conversation, prompt_tokens: int) -> None:
    """Refuse a limit of prompt tokens that the latest turn alone exceeds."""
    asked = conversation.max_prompt_tokens
    if asked is not None and asked != WHOLE_ROOM and prompt_tokens > asked:
        raise InvalidRequestError.at(
            "truncate_prompt_tokens",
            f"the system message and the latest turn alone have {prompt_tokens} "
            "tokens; send a larger number",
        )


def _predicted(
    conversation: Conversation, tokenizer: Tokenizer, context_tokens: int
) -> tuple[int, ...]:
    """Return the predicted text, cut to the longest possible answer."""
    if not conversation.prediction:
        return ()
    token_ids = tokenizer.encode(conversation.prediction, add_special_tokens=False)
    return tuple(token_ids[:context_tokens])


@dataclass(frozen=True, slots=True)
class _Calls:
    """The tools of a conversation, and the format of calls.

    Attributes:
        tools: Tools that the model may call, in the templates' shape.
        chat_format: The format in which the model writes calls.
        are_written_by_us: The template shows no tools, so that machd writes them into the messages.
        are_forced: The answer must consist of calls.
        is_single: At most one call is allowed.
    """

    tools: tuple[Mapping[str, object], ...]
    chat_format: ChatFormat
    are_written_by_us: bool
    are_forced: bool
    is_single: bool

    @classmethod
    def of(cls, conversation: Conversation, tokenizer: Tokenizer) -> _Calls:
        choice = conversation.tool_choice
        tools = conversation.tools if choice.mode is not ToolChoiceMode.NONE else ()
        chat_format = tokenizer.chat_format
        are_written_by_us = not chat_format.shows_tools
        are_forced = bool(tools) and choice.mode is ToolChoiceMode.REQUIRED
        return cls(
            tuple(template_tool(tool) for tool in tools),
            chat_format.with_json_calls() if are_written_by_us else chat_format,
            are_written_by_us,
            are_forced,
            bool(tools)
            and (not choice.allows_parallel or (are_forced and choice.name is not None)),
        )

    @property
    def are_json_between_markers(self) -> bool:
        """True if a grammar can express calls in the model's own format."""
        return self.chat_format.tool_format == JSON_TOOLS and self._has_markers

    @property
    def are_bare(self) -> bool:
        """True if calls are JSON without markers, by the model's format or by the grammar."""
        forces_json = self.are_forced and not self.are_json_between_markers
        return bool(self.tools) and (forces_json or not self._has_markers)

    @property
    def _has_markers(self) -> bool:
        return self.chat_format.tool_markers is not None

    def spelling(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> CallSpelling:
        """Return the spelling of calls in a grammar."""
        markers = self.chat_format.tool_markers
        if markers is None:
            return CallSpelling(argument_keys=("parameters", "arguments"))
        if self.are_json_between_markers:
            return CallSpelling.between(tokenizer, markers)
        if self.are_forced:
            return CallSpelling()
        return CallSpelling.native(tokenizer, markers[0], eos_token_ids)


def _rendered(
    conversation: Conversation, tokenizer: Tokenizer, calls: _Calls, *, is_dated: bool
) -> str:
    messages, tools = merge_opening(conversation.messages), calls.tools
    if calls.are_written_by_us:
        messages, tools = write_tools(messages, tools), ()
    messages = place_system_messages(messages, calls.chat_format)
    variables = dict(conversation.template_variables)
    if conversation.thinks is not None:
        variables["enable_thinking"] = conversation.thinks
    continues = conversation.continues_final_message
    try:
        return tokenizer.render_chat(
            messages,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tools=tools,
            variables=variables,
            writes_date=is_dated,
        )
    except InvalidRequestError as error:
        error.param = conversation.messages_param
        raise


def _open_thought(conversation: Conversation, chat_format: ChatFormat, prompt: str) -> str | None:
    """Return the text of a thought that is open at the prompt's end; None without one.

    The template opens a thought at the prompt's end, or the final message does if the answer continues it. A
    marker elsewhere, as in a question about it, opens none.
    """
    if chat_format.reasoning_markers is None:
        return None
    start, end = (marker.strip() for marker in chat_format.reasoning_markers)
    _, is_opened, rest = prompt.rpartition(start)
    final = conversation.messages[-1].get("content") if conversation.continues_final_message else ""
    said = rest.strip()
    is_last = isinstance(final, str) and final.rstrip().endswith(said)
    return said if is_opened and is_last and end not in rest else None


def _thinking(
    conversation: Conversation, tokenizer: Tokenizer, open_thought: str | None
) -> Thinking | None:
    """Return the markers of reasoning; None if the model has none or reasoning is switched off."""
    markers = tokenizer.chat_format.reasoning_markers
    if markers is None:
        return None
    start, end = markers
    is_open = open_thought is not None
    if conversation.thinks is False and not is_open:
        return None
    budget_tokens = conversation.thinking_budget_tokens
    if conversation.thinks is False and not open_thought:
        # A template without a switch opens thoughts even so; then they are closed at once.
        budget_tokens = 0
    return Thinking(
        tuple(tokenizer.encode(start, add_special_tokens=False)),
        tuple(tokenizer.encode(end, add_special_tokens=False)),
        is_open,
        budget_tokens,
    )


def _starting_state(
    conversation: Conversation, chat_format: ChatFormat, thinking: Thinking | None
) -> TextState:
    if thinking is not None and thinking.is_open:
        return TextState.REASONING
    return TextState.NORMAL if conversation.continues_final_message else chat_format.opening_state


def _constraints(
    conversation: Conversation, front: ModelFront, calls: _Calls
) -> tuple[Constraint, ...]:
    """Return the constraints to compile, the answer's last."""
    constraint = conversation.constraint
    if constraint is None and not calls.are_forced:
        return ()
    if calls.chat_format.opening_state is not TextState.NORMAL:
        param = "tool_choice" if constraint is None else constraint.param
        raise InvalidRequestError.at(
            param,
            "this model writes its answers as several messages, to which no grammar can "
            "be applied; leave it out",
        )
    if constraint is not None and not calls.tools:
        return (constraint,)
    spelling = calls.spelling(front.tokenizer, front.model.eos_token_ids)
    if calls.are_forced:
        alone = [arguments_alone(tool) for tool in conversation.tools]
        return (*alone, forced_calls(conversation.tools, conversation.tool_choice, spelling))
    assert constraint is not None, "without a constraint only forced calls have a grammar"
    return (answer_or_calls(constraint, conversation.tools, conversation.tool_choice, spelling),)
