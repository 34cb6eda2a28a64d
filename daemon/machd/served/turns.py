"""Which model gets the memory next: what is loaded, unloaded and suspended now.

A pure function of what the models do. One model loads at a time, in the order in which they were asked for. Its engine
process opens the files and says what they need; then whoever is idle gives way, the least recently used first; where that is
not enough and the model has waited for :attr:`Rules.max_turn_s`, so do models that are busy, the longest served first: their
answers go on later, from their tokens. Weights are read only once the memory for them is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf


class ModelState(StrEnum):
    """What a model does."""

    UNLOADED = "unloaded"
    """It has no engine process."""

    LOADING = "loading"
    """Its engine process opens the files, waits for memory, or reads the weights."""

    READY = "ready"
    """Requests are computed."""

    SUSPENDING = "suspending"
    """Its engine process ends; what is open is kept."""

    FAILED = "failed"
    """It could not be loaded, or its engine has failed for good."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One model, as far as the memory is concerned.

    Attributes:
        needed_bytes: Weights, working memory and KV budget; None until its process has opened its files. That of an earlier
            process is known as long as files and settings are the same.
        is_granted: It has been given that memory.
        is_pinned: It gives way to no other model.
        leases: Requests that hold it.
        waiting_since_s: When the oldest of those came that wait for it; None where none does.
        ready_since_s: When it was last loaded.
        idle_since_s: When its last lease ended.
        ttl_s: Idle seconds after which it is unloaded; None for never.
        is_unwanted: It is to be unloaded as soon as it is idle.
    """

    name: str
    state: ModelState
    needed_bytes: int | None = None
    is_granted: bool = False
    is_pinned: bool = False
    leases: int = 0
    waiting_since_s: float | None = None
    ready_since_s: float = 0.0
    idle_since_s: float = 0.0
    ttl_s: float | None = None
    is_unwanted: bool = False

    @property
    def holds_memory(self) -> bool:
        """Whether its needs are reserved: from the grant until its process has ended."""
        is_between = self.state in {ModelState.LOADING, ModelState.SUSPENDING}
        return self.state is ModelState.READY or (is_between and self.is_granted)

    @property
    def reserved_bytes(self) -> int:
        """Its needs, where they are reserved."""
        return (self.needed_bytes or 0) if self.holds_memory else 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What the models share.

    Attributes:
        budget_bytes: Memory of all of them; None while it is not known.
        max_turn_s: How long a busy model may be served while another one waits.
    """

    budget_bytes: int | None
    max_turn_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be done now.

    Attributes:
        start: Model whose engine process is to be started, and to open the files.
        grant: Model that may read its weights.
        refuse: Model that can never have the memory that it needs.
        give_way: Models that are to be unloaded or suspended.
        wake_s: When to look again, if nothing happens before; infinite for never.
    """

    start: str | None = None
    grant: str | None = None
    refuse: str | None = None
    give_way: tuple[str, ...] = ()
    wake_s: float = inf


def next_turn(claims: Sequence[Claim], rules: Rules, now_s: float) -> Turn:
    """Return what is to be done for the models at a moment.

    Args:
        claims: All models.
        rules: What they share.
        now_s: On the monotonic clock, as all times of the claims.
    """
    outlived, wake_s = _outlived(claims, now_s)
    loading = next((one for one in claims if one.state is ModelState.LOADING), None)
    if loading is None:
        asked = [one for one in claims if one.state is ModelState.UNLOADED]
        waiting = [one for one in asked if one.waiting_since_s is not None]
        first = min(waiting, key=_waiting_since_s, default=None)
        if first is None:
            return Turn(give_way=outlived, wake_s=wake_s)
        if _can_never_fit(first, claims, rules):
            return Turn(refuse=first.name, give_way=outlived, wake_s=wake_s)
        return Turn(start=first.name, give_way=outlived, wake_s=wake_s)
    if loading.is_granted or loading.needed_bytes is None or rules.budget_bytes is None:
        return Turn(give_way=outlived, wake_s=wake_s)
    others = [one for one in claims if one is not loading]
    if _can_never_fit(loading, claims, rules):
        return Turn(refuse=loading.name, give_way=outlived, wake_s=wake_s)
    free_bytes = rules.budget_bytes - sum(one.reserved_bytes for one in others)
    if loading.needed_bytes <= free_bytes:
        return Turn(grant=loading.name, give_way=outlived, wake_s=wake_s)
    leaving = [one for one in others if one.state is ModelState.SUSPENDING or one.name in outlived]
    coming_bytes = sum(one.reserved_bytes for one in leaving)
    missing_bytes = loading.needed_bytes - free_bytes - coming_bytes
    movable = [
        one
        for one in others
        if one.state is ModelState.READY and not one.is_pinned and one.name not in outlived
    ]
    victims, due_s = _victims(movable, missing_bytes, _waiting_since_s(loading), rules, now_s)
    return Turn(give_way=(*outlived, *victims), wake_s=min(wake_s, due_s))


def _can_never_fit(claim: Claim, claims: Iterable[Claim], rules: Rules) -> bool:
    """Whether a model is known to need more than pinned ones leave."""
    if claim.needed_bytes is None or rules.budget_bytes is None:
        return False
    pinned_bytes = sum(one.reserved_bytes for one in claims if one.is_pinned and one is not claim)
    return claim.needed_bytes > rules.budget_bytes - pinned_bytes


def _victims(
    movable: Sequence[Claim],
    missing_bytes: int,
    waiting_since_s: float,
    rules: Rules,
    now_s: float,
) -> tuple[tuple[str, ...], float]:
    """Choose the models that give way; returns their names, or none and when there may be some."""
    idle = sorted((one for one in movable if not one.leases), key=lambda one: one.idle_since_s)
    chosen = _enough(idle, missing_bytes)
    if chosen is not None:
        return chosen, inf
    busy = sorted((one for one in movable if one.leases), key=lambda one: one.ready_since_s)
    over = [one for one in busy if now_s >= one.ready_since_s + rules.max_turn_s]
    if now_s >= waiting_since_s + rules.max_turn_s:
        chosen = _enough([*idle, *over], missing_bytes)
    if chosen is not None:
        return chosen, inf
    times = (waiting_since_s, *(one.ready_since_s for one in busy))
    ends = [end_s for one in times if (end_s := one + rules.max_turn_s) > now_s]
    return (), min(ends, default=inf)


def _enough(candidates: Sequence[Claim], missing_bytes: int) -> tuple[str, ...] | None:
    """Return the first candidates that free enough, without those of them that are not needed; None if all are too few."""
    taken: list[Claim] = []
    freed_bytes = 0
    for one in candidates:
        if freed_bytes >= missing_bytes:
            break
        taken.append(one)
        freed_bytes += one.reserved_bytes
    if freed_bytes < missing_bytes:
        return None
    for one in tuple(taken):
        if freed_bytes - one.reserved_bytes >= missing_bytes:
            taken.remove(one)
            freed_bytes -= one.reserved_bytes
    return tuple(one.name for one in taken)


def _outlived(claims: Iterable[Claim], now_s: float) -> tuple[tuple[str, ...], float]:
    """Return the idle models whose time is over, and when the next one's is."""
    names, wake_s = list[str](), inf
    for one in claims:
        is_idle = one.state is ModelState.READY and not one.leases
        if not is_idle or (one.ttl_s is None and not one.is_unwanted):
            continue
        end_s = now_s if one.is_unwanted or one.ttl_s is None else one.idle_since_s + one.ttl_s
        if now_s >= end_s:
            names.append(one.name)
        else:
            wake_s = min(wake_s, end_s)
    return tuple(names), wake_s


def _waiting_since_s(claim: Claim) -> float:
    """When the oldest request came that waits; infinite where none does, and then no busy model gives way for it."""
    return inf if claim.waiting_since_s is None else claim.waiting_since_s
