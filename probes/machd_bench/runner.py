"""The order of a bench: the bare loop, mode after mode, and what starts servers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from machd.errors import EngineFaultError
from machd.settings.model import Settings
from machd_bench.bare_model import BareModel
from machd_bench.bench import Bench, Mode, serve_args
from machd_bench.connection import Address
from machd_bench.report import Figure, Report, Row, machine_facts, model_facts
from machd_bench.scenario import Scenario
from machd_bench.scenarios.ceiling import CEILING, run_ceiling
from machd_bench.scenarios.sweep import SWEEP
from machd_bench.server import Server
from machd_bench.static_batches import StaticBatches

_UNMEASURED = ("facts", "off")
"""Values of ``probe.on_start`` with which a verdict that is not known stays so."""
_SEVERAL = 1.02
"""Tokens in one event from which on gaps between events get a note."""
_STATIC_NOTE = (
    "static: mlx-lm's batch_generate without HTTP; a batch takes one request of every client, and"
    " their first tokens are there when it has ended"
)


@dataclass(slots=True)
class Runner:
    """One run. Its rows and notes are collected in the bench that every mode's is made from.

    Attributes:
        show: Given a scenario and all its rows once its last mode is measured.
        failures: Scenarios that the server at the URL did not get through, and why.
    """

    bench: Bench
    scenarios: Sequence[Scenario]
    show: Callable[[Scenario, list[Row]], None]
    failures: list[str] = field(default_factory=list)
    machine: dict[str, Figure] = field(default_factory=machine_facts)

    async def measure_url(
        self, url: str, api_key: str | None, model_id: str | None, extra: dict[str, object] | None
    ) -> Report:
        """Measure a server that runs already; a scenario that it fails is told, the rest go on.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It does not speak this API.
        """
        address, clock = Address.of(url, api_key), self.bench.clock
        server = await Server.find(address, clock, model_id=model_id, extra=extra)
        model = model_facts(server.model_id, server.capabilities)
        bench = replace(self.bench, mode=Mode.REMOTE, server=server)
        if not server.dialect.ignores_eos:
            bench.notes.append("the server does not take ignore_eos: answers may have ended early")
        for scenario in self._of_mode(Mode.REMOTE):
            try:
                await self._run(scenario, bench)
            except EngineFaultError as error:
                self.failures.append(f"{scenario.name}: {error.message}")
            self._show(scenario)
        bench.notes.extend(self.failures)
        return self._report(url, model)

    async def measure_modes(
        self, modes: Iterable[Mode], settings: Settings, settings_args: Sequence[str]
    ) -> Report:
        """Measure each mode on servers of the bench's own, static batching first.

        ``settings_args`` are the settings as flags.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: A server or the bare loop failed.
        """
        ordered = sorted(modes, key=lambda mode: mode is not Mode.STATIC)
        every = (*ordered, Mode.SETTINGS, Mode.BARE)
        last_mode = {scenario.name: mode for mode in every for scenario in self._of_mode(mode)}
        bare, model = BareModel(settings), dict[str, Figure]()
        try:
            if SWEEP in self.scenarios:
                widths = set(self.bench.plan.concurrencies) if ordered != [Mode.SINGLE] else set()
                widths |= {1} if Mode.SINGLE in ordered else set()
                await run_ceiling(replace(self.bench, bare=bare), sorted(widths))
            for mode in every:
                scenarios = self._of_mode(mode)
                streams = max((one.streams(self.bench.plan) for one in scenarios), default=1)
                args = serve_args(mode, streams, settings_args)
                bench = replace(self.bench, mode=mode, bare=bare, serve_args=args)
                bench.names_model = settings.model.path is not None
                bench.is_measured = settings.probe.on_start not in _UNMEASURED
                if not bare.leaves_room or mode is Mode.SETTINGS:
                    await bare.close()
                await self._measure(bench, scenarios)
                for scenario in scenarios:
                    if last_mode[scenario.name] is mode:
                        self._show(scenario)
                model = bench.model or model or bare.model
        finally:
            await bare.close()
        return self._report(None, model)

    async def _measure(self, bench: Bench, scenarios: Sequence[Scenario]) -> None:
        """Measure what needs the mode's server first, then what starts servers of its own."""
        async with AsyncExitStack() as stack:
            beside = [one for one in scenarios if not one.starts_servers]
            if bench.mode is Mode.STATIC and bench.bare is not None:
                bench.server = StaticBatches(bench.bare.run_batch, bench.clock)
                bench.notes.append(_STATIC_NOTE)
            elif beside and bench.mode is not Mode.BARE:
                bench.server = await stack.enter_async_context(bench.serve())
            for scenario in beside:
                await self._run(scenario, bench)
            if isinstance(bench.server, Server):
                self._add_server_row(bench, bench.server)
        for scenario in scenarios:
            if scenario.starts_servers:
                await self._run(scenario, bench)

    async def _run(self, scenario: Scenario, bench: Bench) -> None:
        bench.progress.say(f"{bench.mode}, {scenario.name}")
        try:
            async with aclosing(scenario.run(bench)) as rows:
                async for row in rows:
                    row.scenario, row.mode = scenario.name, bench.mode.value
                    bench.rows.append(row)
        except OSError as error:
            raise EngineFaultError(f"the server left a request unanswered: {error}") from error

    def _add_server_row(self, bench: Bench, server: Server) -> None:
        """Add the figures of a mode's server after its last answer, while it still runs."""
        facts, process = server.capabilities, server.process
        assert facts is not None, "machd says what it is"
        assert process is not None, "started by the bench"
        figures: dict[str, Figure] = {
            "decode_mode": facts.decode_mode.active,
            "decode_mode_reason": facts.decode_mode.reason,
            "start_to_ready_s": process.start_to_ready_s,
            "ready_rss_bytes": process.ready_rss_bytes,
            "end_rss_bytes": process.rss_bytes(),
        }
        mode = bench.mode.value
        bench.rows.append(Row(scenario="server", mode=mode, case="process", figures=figures))
        if bench.mode is Mode.BATCHED and facts.decode_mode.active != "batched":
            decodes = f"{facts.decode_mode.active}: {facts.decode_mode.reason}"
            bench.notes.append(f"the server of the mode batched decodes in mode {decodes}")

    def _of_mode(self, mode: Mode) -> list[Scenario]:
        """The scenarios of a mode; a sweep brings its ceiling."""
        chosen = [one for one in self.scenarios if mode in one.modes]
        has_levels = SWEEP in self.scenarios and CEILING not in self.scenarios
        return chosen + [CEILING] * (mode is Mode.BARE and has_levels)

    def _show(self, scenario: Scenario) -> None:
        self.show(scenario, [row for row in self.bench.rows if row.scenario == scenario.name])

    def _report(self, url: str | None, model: dict[str, Figure]) -> Report:
        rows, notes, plan = self.bench.rows, self.bench.notes, self.bench.plan
        levels = [row for row in rows if row.scenario == SWEEP.name]
        asked = sum(row.number("requests") for row in levels) * plan.max_tokens
        given = sum(row.number("completion_tokens") for row in levels)
        if given < asked:
            notes.append(f"answers ended early: {given:.0f} tokens of {asked:.0f} asked for")
        gapped = [row.number("tokens_per_event") for row in levels if row.number("gap_p50_s")]
        if (several := max(gapped, default=1.0)) > _SEVERAL:
            notes.append(f"up to {several:.2f} tokens came in one event; gaps are between events")
        return Report(
            started_at=datetime.fromtimestamp(plan.started_unix_s, UTC).isoformat(),
            url=url,
            machine=self.machine,
            model=model,
            plan=asdict(plan),
            rows=rows,
            goals=[goal for row in rows for goal in row.goals],
            notes=notes,
        )
