"""``GET /``, ``/version``, ``/props`` and ``/slots``: what clients of other servers ask first."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import HttpMethod, Request, Response, get, route
from litestar.di import NamedDependency

from machd.dialects.server_info_wire import (
    GenerationDefaults,
    Modalities,
    SamplingDefaults,
    ServerProperties,
    ServerVersion,
    Slot,
    Welcome,
)
from machd.engine.protocol.step import ProposerKind
from machd.errors import UnavailableError
from machd.http.authentication import PUBLIC
from machd.http.context import ServerContext
from machd.http.failures import error_answer
from machd.request.generation import GenerationOptions, SamplingParams
from machd.serving.speculation_mode import decide_speculation


@route("/", http_method=[HttpMethod.GET, HttpMethod.HEAD], opt={PUBLIC: True})
async def get_root() -> Welcome:
    """Where the API begins. Clients and load balancers ask here whether anything answers."""
    return Welcome()


@get("/version")
async def get_version(context: NamedDependency[ServerContext]) -> ServerVersion:
    """The version of machd."""
    return ServerVersion(version=context.versions.machd)


@get("/props")
async def get_properties(context: NamedDependency[ServerContext]) -> ServerProperties:
    """The daemon and its model, in llama.cpp's shape."""
    service = context.service
    model = service.model
    template = service.tokenizer.chat_template
    properties = ServerProperties(
        default_generation_settings=GenerationDefaults(
            n_ctx=model.context_tokens,
            speculative=_is_speculative(context),
            params=_sampling_defaults(context.settings.limits.max_tokens_default),
        ),
        total_slots=context.loop.snapshot.slot_count,
        model_alias=model.model_id,
        model_path=model.model_id,
        modalities=Modalities(),
        build_info=f"machd {context.versions.machd}",
    )
    if template is None:
        return properties
    return msgspec.structs.replace(properties, chat_template=template)


@get("/slots")
async def get_slots(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> list[Slot] | Response[bytes]:
    """Every slot and whether it is at work; nothing of what is said there.

    With ``?fail_on_no_slot=1``, 503 when all of them are: a balancer asks so. That is no rejection of
    a request for a generation, and is not counted as one.
    """
    model = context.service.model
    snapshot = context.loop.snapshot
    if (
        request.query_params.get("fail_on_no_slot")
        and snapshot.running_count >= snapshot.slot_count
    ):
        return error_answer(request, UnavailableError("every slot is at work; try again later"))
    is_speculative = _is_speculative(context)
    return [
        Slot(
            id=index,
            n_ctx=model.context_tokens,
            speculative=is_speculative,
            is_processing=index < snapshot.running_count,
        )
        for index in range(snapshot.slot_count)
    ]


def _is_speculative(context: ServerContext) -> bool:
    model = context.service.model
    verdicts = context.loop.judge(model)
    decision = decide_speculation(context.settings.speculation, model, verdicts)
    return decision.active is not ProposerKind.OFF


def _sampling_defaults(max_tokens: int) -> SamplingDefaults:
    sampling, options = SamplingParams(), GenerationOptions()
    return SamplingDefaults(
        n_predict=max_tokens,
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
