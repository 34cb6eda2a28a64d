"""Preparation and start of generations: prompts and options to sequences of the engine.

Everything runs on the event loop except tokenising and template rendering: worker threads do these, so
that a long prompt never blocks the streams.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from machd.engine.protocol.media import FIRST_MEDIA_KEY, Media, MediaSpan
from machd.errors import (
    ContextLengthExceededError,
    GrammarError,
    InvalidRequestError,
    MachdError,
    OverloadedError,
    UnsupportedParameterError,
)
from machd.generations.encodings import Encodings
from machd.generations.fanout import Fanout
from machd.generations.generation import Generation, GenerationIdentity
from machd.generations.open_generations import GenerationLimits, OpenGenerations
from machd.reading.conversation import PreparedConversation, prepare_conversation
from machd.reading.guidance import NO_GUIDANCE, Guidance
from machd.reading.prompt_places import MediaPlaces, PromptPlaces
from machd.reading.text import CompletionText
from machd.request.adapter import Adapter, adapter_namespace
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation
from machd.request.generation import WHOLE_ROOM, GenerationOptions, Grammar, SamplingParams
from machd.request.media import media_of, without_tool_media
from machd.scheduler.subscriber import Priority, Resumption, SequenceRequest
from machd.served.open_work import ModelSuspendedError
from machd.served.served_model import ServedModel
from machd.served.turns import ModelState


class GenerationService:
    """Opens generations of one model."""

    def __init__(
        self,
        *,
        served: ServedModel,
        fanout: Fanout,
        open_: OpenGenerations,
        until_ready: Callable[[], Awaitable[None]],
        pause: Callable[[], ModelState | None] = lambda: None,
    ) -> None:
        """Wire the parts that a generation needs.

        Args:
            served: The model.
            fanout: Has the events of its engine.
            open_: All generations, of whatever model.
            until_ready: Waits for the model, which a request holds, where it is suspended.
            pause: Returns what the model does while another one has its turn, and None while it computes.
        """
        self.served = served
        self.pause = pause
        self._until_ready = until_ready
        self._fanout = fanout
        self._open = open_
        self.lifecycle = open_.lifecycle
        self.check_client = open_.check_client
        self.in_worker = open_.in_worker
        self.in_chat_worker = open_.in_chat_worker
        self.encodings = Encodings(served, open_)

    @property
    def limits(self) -> GenerationLimits:
        """Limits of one request, in force."""
        return self._open.limits

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Open generations of all models, oldest first."""
        return self._open.all

    async def prepare(
        self, conversation: Conversation, *, client: str = "", salt: str | None = None
    ) -> PreparedConversation:
        """Render and tokenise a conversation, and compile its constraint.

        Args:
            conversation: The conversation to prepare.
            client: Name of the API key, or ``anonymous``; images are shared within its namespace.
            salt: The client's salt, which separates cache namespaces; None without one.

        Raises:
            ChatTemplateMissingError: The model takes no conversations.
            GrammarError: A schema or grammar cannot be used.
            InvalidRequestError: The template refuses the conversation, or it has images or videos
                that the model does not take, or too many.
            KeyLimitError: The client has as many requests open as it may.
            OverloadedError: The work is not done in time.
        """
        omitted_media = 0
        if self.served.model.vision is None and self.limits.omits_tool_media:
            messages, omitted_media = without_tool_media(conversation.messages)
            conversation = replace(conversation, messages=messages)
        self._check_media(conversation)
        with self._open.preparing(client):
            decoded = await self._decoded(conversation, client, salt)
            prepared = await self.in_chat_worker(
                prepare_conversation, conversation, self.served.front, decoded
            )
            grammar = None
            for constraint in prepared.constraints:
                grammar = await self.compile(constraint, client=client)
        guidance = replace(prepared.guidance, grammar=grammar)
        return replace(prepared, guidance=guidance, omitted_media=omitted_media)

    async def _decoded(
        self, conversation: Conversation, client: str, salt: str | None
    ) -> dict[int, Media]:
        """Decode a conversation's images and videos; returns them by their sources' identities."""
        media, rules, processor = (
            media_of(conversation.messages),
            self.limits.media,
            self.served.media,
        )
        if not media:
            return {}
        assert processor is not None, "the model takes images"
        assert rules is not None, "images are held against rules"
        namespace = cache_namespace(client, salt, is_shared=self.limits.shares_prefixes)
        return {
            id(source): await self._open.decodings.decode(
                source,
                processor,
                rules,
                client=client,
                namespace=namespace,
                wait_s=self._open.max_preparation_s,
            )
            for source in media
        }

    async def compile(self, constraint: Constraint, *, client: str) -> Grammar:
        """Compile a grammar for the served model; while that is suspended, no time counts.

        Args:
            constraint: The constraint of the completion.
            client: Name of the API key, or ``anonymous``; clients compile in turns.

        Raises:
            GrammarError: It cannot be used.
            OverloadedError: The work is not done in time.
            UnavailableError: The model was suspended, and could not be loaded again.
        """
        grammar, wait_s = None, self._open.max_preparation_s
        while grammar is None:
            try:
                grammar = await self._open.compilations.compile(
                    self.served.grammars, constraint, client=client, wait_s=wait_s
                )
            except ModelSuspendedError:
                await self._until_ready()
            except TimeoutError:
                raise OverloadedError(
                    f"{constraint.param}: it was not compiled within {wait_s:g} s"
                ) from None
        self._check_keywords(grammar, param=constraint.param)
        return grammar

    def open(  # noqa: PLR0913 - one argument for each part of a request
        self,
        prompts: Sequence[tuple[int, ...]],
        options: GenerationOptions,
        identity: GenerationIdentity,
        *,
        prompt_param: str,
        guidance: Guidance = NO_GUIDANCE,
        media: tuple[MediaSpan, ...] = (),
        places: PromptPlaces | MediaPlaces | None = None,
    ) -> Generation:
        """Start ``options.n`` completions of every prompt.

        Args:
            prompts: Token ids.
            options: The request's options.
            identity: The client and the ids of the request.
            prompt_param: The request field that the prompts came from, for errors about them.
            guidance: Grammar and thinking of the completions, and how they are split.
            media: Images and videos of the one prompt that has any.
            places: Places of the first prompt's tokens in its conversation; None if no place is to be told.

        Raises:
            NotReadyError, DrainingError, EngineFaultError: No new work is taken.
            InvalidRequestError: The request asks for more than the limits or the context allow, or a
                prompt has no token, or one that the model does not know.
            KeyLimitError: The client has reached a limit of its own.
        """
        self.lifecycle.check_accepting()
        if identity.is_limited:
            self.check_client(identity.client)
        if options.n > self.limits.max_n:
            raise InvalidRequestError(
                f"n is {options.n}, and limits.max_n is {self.limits.max_n}", param="n"
            )
        if not options.in_turns:
            self._check_room(len(prompts), options.n, prompt_param)
        for prompt in prompts:
            self._check_prompt(prompt, prompt_param)
        max_tokens = [self._max_tokens(len(prompt), options, prompt_param) for prompt in prompts]
        requests = self._requests(prompts, max_tokens, options, identity, guidance, media)
        # The texts are made first: a failure before the stream is open needs no clean-up.
        markers = guidance.output.markers
        texts = [
            (
                request.sequence_id,
                CompletionText(
                    self.served.tokenizer.detokenizer(keeps=markers),
                    options.stop,
                    shows_stop=options.shows_stop,
                    min_tokens=options.sampling.min_tokens,
                ),
            )
            for request in requests
        ]
        at_once = self._sequences_at_once if options.in_turns else len(requests)
        later = map(_as_sibling, requests[at_once:])
        generation = Generation(
            identity,
            self._fanout.open([sequence_id for sequence_id, _ in texts]),
            texts,
            prompt_tokens=[len(prompt) for prompt in prompts],
            media_kinds=[one.media.kind for one in media],
            places=places,
            output=guidance.output,
            streams=options.stream,
            abort=self._abort,
            submit_next=partial(self._submit_next, later),
            on_close=self._closed,
            on_tokens=lambda tokens: self._open.spend(identity, tokens),
        )
        self._open.enter(generation)
        self.served.link.submit(tuple(requests[:at_once]))
        return generation

    @property
    def _sequences_at_once(self) -> int:
        """Most sequences that a request in turns has submitted: those of the slots, and as many to follow them."""
        slots = self.served.snapshot.slot_count
        return max(1, slots + min(slots, self.limits.max_queue))

    def _submit_next(self, later: Iterator[SequenceRequest]) -> None:
        if (request := next(later, None)) is not None:
            self.served.link.submit((request,))

    def _check_media(self, conversation: Conversation) -> None:
        """Refuse images and videos of a kind that the served model does not take, or too many."""
        media = media_of(conversation.messages)
        if not media:
            return
        if self.served.model.vision is None:
            param = media[0].param
            raise UnsupportedParameterError(
                f"{param}: the served model takes text only; serve a vision model with machd[vision], "
                "or send text",
                param=param,
            )
        max_images = self.limits.max_images
        if len(media) > max_images:
            param = media[max_images].param
            raise InvalidRequestError(
                f"{param}: the request has {len(media)} images and videos, and vision.max_images is "
                f"{max_images}; send fewer",
                param=param,
            )

    def _check_keywords(self, grammar: Grammar, *, param: str) -> None:
        """Refuse a schema with keywords that its grammar ignores, if the settings ask for that."""
        if grammar.ignored_keywords and self.limits.refuses_ignored_keywords:
            raise GrammarError(
                f"{param}: no grammar can hold {', '.join(grammar.ignored_keywords)}; leave that out, or "
                "set structured_output.strict to false",
                param=param,
            )

    def _check_room(self, prompts: int, n: int, prompt_param: str) -> None:
        """Refuse a request that could not be queued on an idle daemon either."""
        max_sequences = self.limits.max_queue + self.served.snapshot.slot_count
        if prompts * n > max_sequences:
            raise InvalidRequestError(
                f"{prompts} prompts with n {n} make {prompts * n} completions, and "
                f"limits.max_queue and the slots have room for {max_sequences}",
                param=prompt_param,
            )

    def _check_prompt(self, prompt: tuple[int, ...], prompt_param: str) -> None:
        """Refuse a prompt that the engine cannot compute.

        A tokenizer may have more tokens than the model: mlx would read out of bounds for those.
        """
        if not prompt:
            raise InvalidRequestError(
                f"{prompt_param}: the prompt holds no token; send some text", param=prompt_param
            )
        vocabulary_tokens = self.served.model.vocabulary_tokens
        unknown = (one for one in prompt if vocabulary_tokens <= one < FIRST_MEDIA_KEY)
        if max(prompt) >= vocabulary_tokens and (token_id := next(unknown, None)) is not None:
            raise InvalidRequestError(
                f"{prompt_param}: the text spells token {token_id} of the tokenizer, and the model "
                f"knows {vocabulary_tokens} tokens, from 0 on; leave it out",
                param=prompt_param,
            )

    def _requests(
        self,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: Sequence[int],
        options: GenerationOptions,
        identity: GenerationIdentity,
        guidance: Guidance,
        media: tuple[MediaSpan, ...],
    ) -> list[SequenceRequest]:
        stop_token_ids = frozenset(options.stop_token_ids)
        if not options.ignore_eos:
            stop_token_ids |= self.served.model.eos_token_ids
        _check_can_go_on(options, stop_token_ids)
        options = replace(options, sampling=replace(options.sampling, adapters=identity.adapters))
        sampling = _sampling_of_choices(options, guidance, stop_token_ids)
        client, salt = identity.client, options.cache_salt
        return [
            SequenceRequest(
                sequence_id=f"{identity.generation_id}/{prompt_index * options.n + choice}",
                group_id=identity.generation_id,
                prompt=prompt,
                sampling=sampling[choice],
                max_tokens=max_tokens[prompt_index],
                stop_token_ids=stop_token_ids,
                arrived_s=identity.arrived_s,
                request_id=identity.request_id,
                namespace=decode_namespace(client, salt),
                cache_namespace=cache_namespace(
                    client,
                    salt,
                    is_shared=self.limits.shares_prefixes,
                    adapters=identity.adapters,
                ),
                priority=Priority(options.priority),
                media=media,
            )
            for prompt_index, prompt in enumerate(prompts)
            for choice in range(options.n)
        ]

    def _max_tokens(self, prompt_tokens: int, options: GenerationOptions, prompt_param: str) -> int:
        """Return the most tokens that a completion of a prompt may have.

        Raises:
            ContextLengthExceededError: The context has no room for the requested tokens, or only for some and
                the settings do not clamp.
        """
        context_tokens, asked = self.served.model.context_tokens, options.max_tokens
        room = context_tokens - prompt_tokens
        is_wish = asked in (None, WHOLE_ROOM) or self.limits.clamps_max_tokens
        least = 0 if asked == 0 else 1
        if room < least or (not is_wish and asked is not None and asked > room):
            raise ContextLengthExceededError(
                context_tokens=context_tokens,
                prompt_tokens=prompt_tokens,
                asked_tokens=None if is_wish else asked,
                param="max_tokens" if room > 0 else prompt_param,
            )
        if asked is None:
            asked = self.limits.max_tokens_default
        elif asked == WHOLE_ROOM:
            asked = room
        return min(asked, room, self._kv_room(prompt_tokens) if is_wish else asked)

    def _kv_room(self, prompt_tokens: int) -> int:
        """Return the completion tokens that fit the KV budget with a prompt, on an idle daemon.

        A prompt that does not fit by itself is refused by admission.
        """
        budget_bytes = self.served.snapshot.kv_budget_bytes
        cache = self.served.model.cache
        if budget_bytes is None or not cache.bytes_per_token:
            return self.served.model.context_tokens
        tokens = (budget_bytes - cache.bytes_per_sequence) // cache.bytes_per_token
        return max(1, tokens - prompt_tokens)

    def _abort(self, sequence_ids: tuple[str, ...], error: MachdError | None) -> None:
        self.served.link.abort(sequence_ids, error)

    def _closed(self, generation: Generation) -> None:
        self._fanout.close(generation.sequence_ids)
        self._open.leave(generation)


def _as_sibling(request: SequenceRequest) -> SequenceRequest:
    """Mark a sequence as one whose group has begun: it waited behind its siblings, not for a slot."""
    return replace(request, resumption=Resumption(is_group_started=True))


def _check_can_go_on(options: GenerationOptions, stop_token_ids: frozenset[int]) -> None:
    """Refuse ``min_tokens`` if every allowed token ends the completion."""
    allowed = options.sampling.allowed_token_ids
    if options.sampling.min_tokens and allowed and stop_token_ids.issuperset(allowed):
        raise InvalidRequestError(
            "min_tokens: every token of allowed_token_ids ends the completion", param="min_tokens"
        )


def _sampling_of_choices(
    options: GenerationOptions, guidance: Guidance, stop_token_ids: frozenset[int]
) -> list[SamplingParams]:
    """Complete the client's sampling parameters; choices differ in their seeds only.

    Greedy choices get equal seeds, since they draw nothing and can then be coalesced.
    """
    sampling = replace(
        options.sampling,
        end_token_ids=tuple(sorted(stop_token_ids)) if options.sampling.min_tokens else (),
        predicted_token_ids=guidance.predicted_token_ids,
        grammar=guidance.grammar,
        thinking=guidance.thinking,
    )
    if sampling.temperature == 0:
        return [sampling] * options.n
    seed = secrets.randbits(63) if options.seed is None else options.seed
    return [replace(sampling, seed=seed + choice) for choice in range(options.n)]


def decode_namespace(client: str, salt: str | None) -> str:
    """Return the namespace in which requests may be coalesced: one client's, and one salt's.

    The latency of an answer shows whether the same request ran before, which a salt hides.
    """
    return _joined("key", client, salt)


def cache_namespace(
    client: str, salt: str | None, *, is_shared: bool, adapters: tuple[Adapter, ...] = ()
) -> str:
    """Return a request's namespace of the prefix cache: keys and values of an adapter are no other's, and not the model's.

    Args:
        client: Name of the API key, or ``anonymous``.
        salt: The client's salt, which separates cache namespaces; None without one.
        is_shared: Whether all clients share one namespace: ``cache.namespace``.
        adapters: Adapters that compute the prompt.
    """
    sharers = _joined("shared", salt) if is_shared else _joined("key", client, salt)
    return f"{adapter_namespace(adapters)}{sharers}"


def _joined(*parts: str | None) -> str:
    return msgspec.json.encode(parts).decode()
