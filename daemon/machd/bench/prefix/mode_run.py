"""What is asked of one mode's servers: the same prompts before a restart and after it."""

from __future__ import annotations

from machd.bench.modes import Mode
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.prefix.full_cache import FullCacheFigures
from machd.bench.prefix.kv_formats import KvFormatFigures
from machd.bench.prefix.latency import PrefixLatency
from machd.bench.prefix.plan import PrefixPlan
from machd.bench.prefix.prompts import PromptSource
from machd.bench.prefix.server import CachingServer
from machd.bench.prefix.sharing import SharingFigures, run_sharing
from machd.bench.prefix.steps import PrefixSteps


class ModeRun:
    """A run of one mode, from its first server to its last.

    Attributes:
        full_cache: Set by who measures it, with servers of their own.
        kv_formats: As ``full_cache``.
    """

    def __init__(self, plan: PrefixPlan, source: PromptSource) -> None:
        """Prepare; nothing is asked yet."""
        self._plan = plan
        self._source = source
        self._steps = PrefixSteps(source, plan.tokens)
        self._latency = PrefixLatency(source, plan.tokens)
        self._sharing: SharingFigures | None = None
        self.full_cache: FullCacheFigures | None = None
        self.kv_formats: list[KvFormatFigures] = []

    async def measure(self, server: CachingServer) -> None:
        """Make the steps, and take times.

        Raises:
            EngineFaultError: A request was not answered.
        """
        await self._steps.walk(server)
        await self._latency.measure(server, self._plan.rounds)

    async def measure_sharing(self, server: CachingServer) -> None:
        """Let many users ask with one system prompt.

        Raises:
            EngineFaultError: A request was not answered.
        """
        self._sharing = await run_sharing(server, self._source, self._plan.sharing)

    async def measure_restarted(self, server: CachingServer, *, is_first: bool) -> None:
        """Ask a server that was restarted for what the one before it knew.

        Raises:
            EngineFaultError: A request was not answered.
        """
        if is_first:
            await self._steps.walk_restarted(server)
        await self._latency.measure_restarted(server, self._plan.rounds_after_restart)

    def figures(self, mode: Mode, skipped: list[str]) -> PrefixFigures:
        """Sum up.

        Args:
            mode: Whose.
            skipped: What was not measured, and why.
        """
        return PrefixFigures(
            mode=mode.name,
            steps=self._steps.figures,
            latency=self._latency.figures(),
            sharing=self._sharing,
            full_cache=self.full_cache,
            kv_formats=self.kv_formats,
            skipped=skipped,
        )
