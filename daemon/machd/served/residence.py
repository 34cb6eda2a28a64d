"""How a model lives beside others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Residence:
    """How a model lives beside others.

    Attributes:
        is_pinned: It gives way to no other model.
        ttl_s: Idle seconds after which it is unloaded; None for never.
        keeps_kv_budget: Its KV budget is its own table's, which may be more than one context takes.
    """

    is_pinned: bool = False
    ttl_s: float | None = None
    keeps_kv_budget: bool = False
