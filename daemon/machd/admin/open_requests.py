"""Open requests for an operator: their clients, phases and progress, never their texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, Struct, UnsetType, structs

from machd.admin.context import AdminContext
from machd.clock import Clock
from machd.generations.encodings import Encoding
from machd.generations.generation import Generation
from machd.generations.prefill_progress import Phase, phase_of, prefill_progress
from machd.link.snapshot import LoopSnapshot
from machd.scheduler.events import DecodeMode
from machd.scheduler.waits import WaitReason
from machd.served.served_models import ServedModels
from machd.served.waiting_request import WaitingRequest


class OpenRequest(Struct, frozen=True, kw_only=True):
    """One open generation, a request to an encoder, or a request that waits for its model.

    Attributes:
        id: The answer's id; of a request that waits for its model another one, which is unique as well.
        request_id: Of its X-Request-Id header; the client may have chosen it, and it need not be
            unique.
        endpoint: Such as ``chat_completions``.
        client: Name of the API key, or ``anonymous``.
        state: ``running`` once one of its sequences has a slot, and of an encoder always.
        phase: ``waiting`` while none of its sequences has a slot, also of one that had one before; ``decode`` from its
            first token on. Of an encoder ``prefill``.
        waits_for: What it needs before it runs; null unless it waits.
        age_s: Since it came.
        ttft_s: From then to its first token; null before that.
        prompt_tokens: Of all its prompts; 0 while it waits for its model.
        prefilled_tokens: Of these, computed or found in the prefix cache so far.
        prefill_tokens_per_s: Prompt tokens computed a second since it got its slot, those found in the prefix cache not
            counted; null outside of its prefill, and before any is computed.
        prefill_left_s: Seconds until its prompt is computed, at that rate; null where that is not known.
        completion_tokens: Of all its completions, so far.
        tokens_per_s: Completion tokens a second since its first one; null before the second.
        decode_mode: Null while it waits, and of an encoder.
        adapter: Name of its adapter, several joined by a plus sign; null for the model itself.
        model: Left out by a daemon of one model.
    """

    id: str
    request_id: str
    endpoint: str
    client: str
    state: Literal["waiting", "running"]
    phase: Phase
    waits_for: WaitReason | None = None
    age_s: float
    ttft_s: float | None = None
    prompt_tokens: int
    prefilled_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    prefill_left_s: float | None = None
    completion_tokens: int = 0
    tokens_per_s: float | None = None
    decode_mode: DecodeMode | None = None
    adapter: str | None = None
    model: str | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class _Moment:
    """Counts of all models' sequences at one moment.

    Attributes:
        prefilled_tokens: Of running sequences, by their ids.
    """

    clock: Clock
    now_s: float
    snapshots: Mapping[str, LoopSnapshot]
    prefilled_tokens: Mapping[str, int] = field(default_factory=dict)


def open_requests(admin: AdminContext) -> list[OpenRequest]:
    """Return the open requests, the oldest first."""
    snapshots = _snapshots(admin.models)
    moment = _Moment(
        admin.clock,
        admin.clock.monotonic_s(),
        snapshots,
        {
            sequence_id: tokens
            for one in snapshots.values()
            for sequence_id, tokens in one.prefilled_tokens.items()
        },
    )
    requests = [_waiting(one, moment) for one in admin.models.waiting_requests]
    requests += [_generation(one, moment) for one in admin.open_generations.all]
    requests += [_encoding(one, moment) for one in admin.open_generations.encodings]
    requests.sort(key=lambda one: -one.age_s)
    if admin.models.is_one:
        requests = [structs.replace(one, model=UNSET) for one in requests]
    return requests


def _snapshots(models: ServedModels) -> dict[str, LoopSnapshot]:
    """Return each model's counts, by the name that its requests have."""
    return {one.shown_name: one.served.snapshot for one in models.with_leaving}


def _waiting(waiting: WaitingRequest, moment: _Moment) -> OpenRequest:
    asker = waiting.asker
    return OpenRequest(
        id=waiting.waiting_id,
        request_id=asker.request_id,
        endpoint=asker.endpoint,
        client=asker.client,
        state="waiting",
        phase="waiting",
        waits_for=WaitReason.MODEL,
        age_s=round(moment.now_s - asker.arrived_s, 3),
        prompt_tokens=0,
        adapter=asker.adapter,
        model=waiting.model.shown_name,
    )


def _generation(generation: Generation, moment: _Moment) -> OpenRequest:
    identity, usage = generation.identity, generation.usage
    admission, token_s = generation.admission, generation.first_token_s
    snapshot = moment.snapshots.get(identity.model)
    phase = phase_of(generation, moment.prefilled_tokens, snapshot)
    waits_for = None
    if phase == "waiting":
        waits = snapshot.waits if snapshot is not None else None
        waits_for = WaitReason.TURN if waits is None else waits.of(generation.open_sequences)
    progress = prefill_progress(generation, moment.prefilled_tokens, snapshot, moment.clock)
    is_prefill = phase == "prefill" and snapshot is not None
    return OpenRequest(
        id=identity.generation_id,
        request_id=identity.request_id,
        endpoint=identity.endpoint,
        client=identity.client,
        state="waiting" if admission is None else "running",
        phase=phase,
        waits_for=waits_for,
        age_s=round(moment.now_s - identity.arrived_s, 3),
        ttft_s=None if token_s is None else round(token_s - identity.arrived_s, 3),
        prompt_tokens=usage.prompt_tokens,
        prefilled_tokens=progress.prefilled_tokens,
        prefill_tokens_per_s=_rounded(progress.tokens_per_s) if is_prefill else None,
        prefill_left_s=_rounded(progress.left_s) if is_prefill else None,
        completion_tokens=usage.completion_tokens,
        tokens_per_s=_rounded(generation.generation_tps),
        decode_mode=None if admission is None else admission.decode_mode,
        adapter=identity.adapter_name,
        model=identity.model,
    )


def _encoding(encoding: Encoding, moment: _Moment) -> OpenRequest:
    identity = encoding.identity
    return OpenRequest(
        id=identity.generation_id,
        request_id=identity.request_id,
        endpoint=identity.endpoint,
        client=identity.client,
        state="running",
        phase="prefill",
        age_s=round(moment.now_s - identity.arrived_s, 3),
        prompt_tokens=encoding.prompt_tokens,
        model=identity.model,
    )


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)
