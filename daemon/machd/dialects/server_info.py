"""Endpoints that clients of other servers ask: vLLM's version, llama.cpp's properties and slots.

The shapes are those servers'; what is not true of machd is left out of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from litestar import Request, Response
from litestar.di import NamedDependency
from msgspec import UNSET, Struct, UnsetType, structs

from machd.dialects.endpoint import endpoint
from machd.engine.protocol.step import ProposerKind
from machd.errors import UnavailableError
from machd.generations.generation import SequenceCounts
from machd.generations.prefill_progress import PrefillProgress, age_s
from machd.http.context import ServerContext
from machd.http.failures import error_answer
from machd.link.snapshot import LoopSnapshot
from machd.request.generation import GenerationOptions


class Welcome(Struct, frozen=True, kw_only=True):
    """The server's name and the beginning of its API.

    Attributes:
        base_url: What a client's base URL ends in where it does not add ``/v1`` itself.
    """

    server: Literal["machd"] = "machd"
    base_url: Literal["/v1"] = "/v1"
    openapi: Literal["/openapi.json"] = "/openapi.json"
    health: Literal["/health"] = "/health"


class ServerVersion(Struct, frozen=True, kw_only=True):
    """machd's version."""

    version: str


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Defaults of a request that says nothing else."""

    n_predict: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    stream: bool


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """Properties that hold for every request.

    Attributes:
        n_ctx: Positions that prompt and completion of one sequence share, in tokens.
        speculative: Whether draft tokens are proposed.
    """

    n_ctx: int
    speculative: bool
    params: SamplingDefaults


class Modalities(Struct, frozen=True, kw_only=True):
    """Kinds of input that the model reads besides text."""

    vision: bool
    audio: Literal[False] = False


class ServerProperties(Struct, frozen=True, kw_only=True):
    """The daemon and its model, as ``GET /props`` tells them.

    Attributes:
        total_slots: Sequences that can run at the same time.
        model_path: The model's name; machd tells no paths.
        chat_template: The Jinja source of conversations; left out where there is none.
    """

    default_generation_settings: GenerationDefaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str | UnsetType = UNSET
    modalities: Modalities
    build_info: str


class NoGenerationDefaults(Struct, frozen=True, kw_only=True):
    """Properties that differ between models, and so are empty."""

    params: dict[str, int] = {}
    n_ctx: Literal[0] = 0


class RouterProperties(Struct, frozen=True, kw_only=True):
    """A daemon with several models, as ``GET /props`` of llama.cpp's router tells it (``tools/server/server-models.cpp``).

    Attributes:
        max_instances: Number of models; how many of them are loaded at once, their sizes decide.
        models_autoload: Whether a request loads the model that it asks for.
    """

    role: Literal["router"] = "router"
    max_instances: int
    models_autoload: bool
    model_alias: Literal["machd"] = "machd"
    model_path: Literal["none"] = "none"
    default_generation_settings: NoGenerationDefaults = NoGenerationDefaults()
    build_info: str


class NextToken(Struct, frozen=True, kw_only=True):
    """The answer of a slot's sequence so far; ``n_decoded`` are its tokens."""

    n_decoded: int


class Slot(Struct, frozen=True, kw_only=True):
    """A place for a running sequence.

    What follows ``is_processing`` is there while a sequence runs in it. The fields are llama.cpp's, where it has them.

    Attributes:
        id: Slots are alike, so that those with the lowest ids are shown as the ones at work.
        n_ctx: Positions that prompt and completion share, in tokens.
        speculative: Whether draft tokens are proposed.
        is_processing: Whether a sequence runs in it.
        n_prompt_tokens: Tokens of its prompt.
        n_prompt_tokens_processed: Of these, computed so far.
        n_prompt_tokens_cache: Of these, found in the prefix cache.
        next_token: One entry.
        prompt_per_second: Prompt tokens computed a second; left out once all are, and before it is known.
        prompt_left_ms: Time until all are, at that rate; left out with it.
    """

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    n_prompt_tokens: int | UnsetType = UNSET
    n_prompt_tokens_processed: int | UnsetType = UNSET
    n_prompt_tokens_cache: int | UnsetType = UNSET
    next_token: list[NextToken] | UnsetType = UNSET
    prompt_per_second: float | UnsetType = UNSET
    prompt_left_ms: int | UnsetType = UNSET


@endpoint("GET|HEAD /", Welcome, also=(503,), public=True)
async def get_root() -> Welcome:
    """Point to the API.

    Clients and load balancers ask here whether anything answers.
    """
    return Welcome()


@endpoint("GET /version", ServerVersion)
async def get_version(context: NamedDependency[ServerContext]) -> ServerVersion:
    """machd's version, in vLLM's shape."""  # noqa: D403 - its name
    return ServerVersion(version=context.versions.machd)


@endpoint("GET /props", ServerProperties, RouterProperties)
async def get_properties(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ServerProperties | RouterProperties:
    """The daemon and its model, in llama.cpp's shape.

    Where there are several models and the query names none, the router's: llama.cpp's page then loads and unloads them.
    """
    if not context.models.is_one and "model" not in request.query_params:
        return RouterProperties(
            max_instances=len(list(context.models)),
            models_autoload=context.settings.models.autoload,
            build_info=f"machd {context.versions.machd}",
        )
    model = context.served.model
    template = context.served.tokenizer.chat_template
    return ServerProperties(
        default_generation_settings=GenerationDefaults(
            n_ctx=model.context_tokens,
            speculative=_is_speculative(context),
            params=_sampling_defaults(context),
        ),
        total_slots=context.served.snapshot.slot_count,
        model_alias=model.model_id,
        model_path=model.model_id,
        chat_template=UNSET if template is None else template,
        modalities=Modalities(vision=model.vision is not None),
        build_info=f"machd {context.versions.machd}",
    )


@endpoint("GET /slots", list[Slot])
async def get_slots(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
) -> list[Slot] | Response[bytes]:
    """The slots and which of them are at work, in llama.cpp's shape.

    With ``?fail_on_no_slot=1``, 503 when all of them are: a balancer asks so. That is no rejection of
    a request for a generation, and is not counted as one.
    """
    model = context.served.model
    snapshot = context.served.snapshot
    if (
        request.query_params.get("fail_on_no_slot")
        and snapshot.running_count >= snapshot.slot_count
    ):
        return error_answer(request, UnavailableError("every slot is at work; try again later"))
    slots = [
        Slot(
            id=index,
            n_ctx=model.context_tokens,
            speculative=_is_speculative(context),
            is_processing=index < snapshot.running_count,
        )
        for index in range(snapshot.slot_count)
    ]
    busy = [_busy(*one) for one in zip(slots, _running(context, snapshot), strict=False)]
    return busy + slots[len(busy) :]


def _running(
    context: ServerContext, snapshot: LoopSnapshot
) -> Iterator[tuple[SequenceCounts, PrefillProgress]]:
    """Yield the tokens of each running sequence, the oldest request first."""
    running, clock = snapshot.prefilled_tokens, context.clock
    for generation in context.service.generations:
        for sequence_id in generation.sequence_ids:
            if sequence_id in running:
                counts = generation.counts_of(sequence_id)
                elapsed_s = 0.0
                if counts.admitted_s is not None:
                    elapsed_s = clock.monotonic_s() - counts.admitted_s
                yield (
                    counts,
                    PrefillProgress.of(
                        counts.prompt_tokens,
                        counts.cached_tokens,
                        running[sequence_id],
                        elapsed_s=elapsed_s,
                        age_s=age_s(snapshot, clock),
                    ),
                )


def _busy(slot: Slot, running: tuple[SequenceCounts, PrefillProgress]) -> Slot:
    counts, progress = running
    is_prefill = counts.completion_tokens == 0 and progress.tokens_per_s is not None
    return structs.replace(
        slot,
        is_processing=True,
        n_prompt_tokens=progress.prompt_tokens,
        n_prompt_tokens_processed=max(0, progress.prefilled_tokens - progress.cached_tokens),
        n_prompt_tokens_cache=progress.cached_tokens,
        next_token=[NextToken(n_decoded=counts.completion_tokens)],
        prompt_per_second=round(progress.tokens_per_s or 0.0, 3) if is_prefill else UNSET,
        prompt_left_ms=round((progress.left_s or 0.0) * 1000) if is_prefill else UNSET,
    )


def _is_speculative(context: ServerContext) -> bool:
    return context.served.speculation.active is not ProposerKind.OFF


def _sampling_defaults(context: ServerContext) -> SamplingDefaults:
    named = context.served.model.default_sampling.named
    options = GenerationOptions(unsaid=frozenset(named)).with_defaults(named)
    sampling = options.sampling
    return SamplingDefaults(
        n_predict=context.settings.limits.max_tokens_default,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        ignore_eos=options.ignore_eos,
        stream=options.stream,
    )
