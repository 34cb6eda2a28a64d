"""What ``machd bench --prefix`` is to do: chosen on the command line, the same for every mode."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from machd.bench.prefix.full_cache import FullCacheLoad
from machd.bench.prefix.kv_formats import KV_ROUNDS, KV_STREAMS
from machd.bench.prefix.latency import LEAST_JUDGED_TOKENS
from machd.bench.prefix.sharing import SharedPrompt
from machd.bench.prefix.steps import LIVE_STEPS, RESTARTED_STEPS


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """The loads.

    Attributes:
        tokens: Of a prompt, and of the beginning that a longer one shares.
        rounds: New prompts whose times are taken.
        restarts: Of the server; each is asked for some of the rounds' prompts.
        kv_formats: Values of ``cache.kv_quantization`` that are compared; none by default.
    """

    tokens: int = 1000
    sharing: SharedPrompt = field(default_factory=SharedPrompt)
    rounds: int = 4
    restarts: int = 2
    kv_formats: tuple[str, ...] = ()

    @classmethod
    def sized(
        cls, tokens: int, sharing: SharedPrompt, kv_formats: tuple[str, ...] = ()
    ) -> PrefixPlan:
        """A plan that is as short as its prompts: of times that nobody judges a few are enough."""
        plan = cls(tokens, sharing, kv_formats=kv_formats)
        return plan if tokens >= LEAST_JUDGED_TOKENS else replace(plan, rounds=2, restarts=1)

    @property
    def width(self) -> int:
        """The most requests that are open at once."""
        return max(self.sharing.users, KV_STREAMS if self.kv_formats else 1)

    @property
    def full_cache(self) -> FullCacheLoad:
        """What a full cache is asked."""
        return FullCacheLoad.within(self.tokens)

    @property
    def rounds_after_restart(self) -> int:
        """Prompts that are asked for after each restart."""
        return -(-self.rounds // self.restarts)

    @property
    def remote_requests(self) -> int:
        """Requests that a server at a URL gets, for the progress bar."""
        return LIVE_STEPS + 3 * self.rounds + self.sharing.requests

    @property
    def requests(self) -> int:
        """Requests that a mode's servers get."""
        restarted = RESTARTED_STEPS + self.rounds
        return self.remote_requests + restarted + self.full_cache.requests

    @property
    def kv_requests(self) -> int:
        """Requests that the formats' servers get."""
        return len(self.kv_formats) * KV_ROUNDS * KV_STREAMS
