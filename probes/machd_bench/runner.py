"""The order of a bench: the bare loop, mode after mode, and what starts servers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from msgspec.structs import replace

from machd.clock import Clock
from machd.errors import EngineFaultError
from machd.settings.model import Settings
from machd_bench.bare_model import BareModel
from machd_bench.bench import Bench, Mode, Plan, Progress, serve_args
from machd_bench.connection import Address
from machd_bench.report import Figure, Report, Row, machine_facts, model_facts
from machd_bench.scenario import Scenario
from machd_bench.scenarios.ceiling import CEILING, run_ceiling
from machd_bench.scenarios.sweep import SWEEP
from machd_bench.server import Server
from machd_bench.static_batches import StaticBatches

_SERVED = (Mode.SINGLE, Mode.CONTINUOUS)


@dataclass(slots=True)
class Runner:
    """One run. What is measured is collected in here.

    Attributes:
        show: Given a scenario and all its rows once its last mode is measured.
        failures: Scenarios that the server at the URL did not get through, and why.
    """

    plan: Plan
    scenarios: Sequence[Scenario]
    clock: Clock
    progress: Progress
    show: Callable[[Scenario, list[Row]], None]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    model: dict[str, Figure] = field(default_factory=dict)

    async def measure_url(
        self, url: str, api_key: str | None, model_id: str | None, extra: dict[str, object] | None
    ) -> Report:
        """Measure a server that runs already; a scenario that it fails is told, the rest go on.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It does not speak this API.
        """
        started_s, machine = self.clock.unix_s(), machine_facts()
        address = Address.of(url, api_key)
        server = await Server.find(address, self.clock, model_id=model_id, extra=extra)
        self.model = model_facts(server.model_id, server.capabilities)
        bench = self._bench(Mode.REMOTE, server=server)
        if not server.dialect.ignores_eos:
            self.notes.append("the server does not take ignore_eos: answers may have ended early")
        for scenario in self._of_mode(Mode.REMOTE):
            try:
                await self._run(scenario, bench)
            except EngineFaultError as error:
                self.failures.append(f"{scenario.name}: {error.message}")
            self.show(scenario, [row for row in self.rows if row.scenario == scenario.name])
        self.notes += self.failures
        return self._report(url, machine, started_s)

    async def measure_modes(
        self, modes: Iterable[Mode], settings: Settings, settings_args: Sequence[str]
    ) -> Report:
        """Measure each mode on servers of the bench's own, static batching first.

        Args:
            modes: At least one.
            settings: Of the model.
            settings_args: The same as flags.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: A server or the bare loop failed.
        """
        started_s, machine = self.clock.unix_s(), machine_facts()
        ordered = sorted(modes, key=lambda mode: mode is not Mode.STATIC)
        every = (*ordered, Mode.SETTINGS, Mode.BARE)
        last_mode = {scenario.name: mode for mode in every for scenario in self._of_mode(mode)}
        bare = BareModel(settings)
        try:
            if SWEEP in self.scenarios:
                widths = {
                    clients for clients in self.plan.concurrencies if ordered != [Mode.SINGLE]
                }
                await run_ceiling(
                    self._bench(Mode.BARE, bare=bare),
                    sorted(widths | ({1} if Mode.SINGLE in ordered else set())),
                )
            for mode in every:
                scenarios = self._of_mode(mode)
                streams = max((one.streams(self.plan) for one in scenarios), default=1)
                bench = self._bench(mode, bare=bare)
                bench.serve_args = serve_args(mode, streams, settings_args)
                if not bare.leaves_room or mode is Mode.SETTINGS:
                    await bare.close()
                await self._measure(bench, scenarios, last_mode)
                self.model = bench.model or self.model or bare.model
        finally:
            await bare.close()
        return self._report(None, machine, started_s)

    async def _measure(
        self, bench: Bench, scenarios: Sequence[Scenario], last_mode: dict[str, Mode]
    ) -> None:
        beside = [one for one in scenarios if not one.starts_servers]
        if bench.mode is Mode.STATIC and bench.bare is not None:
            bench.server = StaticBatches(bench.bare.run_batch, self.clock)
            self.notes.append(
                "static: mlx-lm's batch_generate without HTTP; a batch takes one request of every"
                " client, and their first tokens are there when it has ended"
            )
        if beside and bench.mode in _SERVED:
            async with bench.serve() as bench.server:
                for scenario in beside:
                    await self._run(scenario, bench)
                self._add_server_row(bench)
        else:
            for scenario in beside:
                await self._run(scenario, bench)
        for scenario in beside:
            self._show_if_last(scenario, bench.mode, last_mode)
        for scenario in scenarios:
            if scenario.starts_servers:
                await self._run(scenario, bench)
                self._show_if_last(scenario, bench.mode, last_mode)

    def _show_if_last(self, scenario: Scenario, mode: Mode, last_mode: dict[str, Mode]) -> None:
        if last_mode[scenario.name] is mode:
            self.show(scenario, [row for row in self.rows if row.scenario == scenario.name])

    async def _run(self, scenario: Scenario, bench: Bench) -> None:
        self.progress.say(f"{bench.mode}, {scenario.name}")
        async with aclosing(scenario.run(bench)) as rows:
            async for row in rows:
                self.rows.append(replace(row, scenario=scenario.name, mode=bench.mode.value))

    def _add_server_row(self, bench: Bench) -> None:
        """What the server of a mode is like that has given its last answer and still runs."""
        server = bench.remote
        assert server.process is not None, "started by the bench"
        assert server.capabilities is not None, "machd says what it is"
        decode_mode = server.capabilities.decode_mode
        weights_bytes = server.capabilities.model.weights_bytes
        ready_bytes, end_bytes = server.process.ready_rss_bytes, server.process.rss_bytes()
        figures: dict[str, Figure] = {
            "decode_mode": decode_mode.active,
            "decode_mode_reason": decode_mode.reason,
            "start_to_ready_s": server.process.start_to_ready_s,
            "ready_rss_bytes": ready_bytes,
            "end_rss_bytes": end_bytes,
            "ready_beyond_weights_bytes": ready_bytes - weights_bytes,
            "end_beyond_weights_bytes": end_bytes - weights_bytes,
        }
        self.rows.append(
            Row(scenario="server", mode=bench.mode.value, case="process", figures=figures)
        )
        if bench.mode is Mode.CONTINUOUS and decode_mode.active != "batched":
            self.notes.append(
                f"the server of the mode continuous decodes in mode {decode_mode.active}:"
                f" {decode_mode.reason}"
            )

    def _of_mode(self, mode: Mode) -> list[Scenario]:
        """What is measured of a mode; a sweep brings its ceiling."""
        chosen = [one for one in self.scenarios if mode in one.modes]
        has_levels = SWEEP in self.scenarios and CEILING not in self.scenarios
        return chosen + [CEILING] * (mode is Mode.BARE and has_levels)

    def _bench(
        self, mode: Mode, *, server: Server | None = None, bare: BareModel | None = None
    ) -> Bench:
        return Bench(
            self.plan,
            mode,
            self.clock,
            self.progress,
            server=server,
            bare=bare,
            rows=self.rows,
            notes=self.notes,
        )

    def _report(self, url: str | None, machine: dict[str, Figure], started_s: float) -> Report:
        levels = [row for row in self.rows if row.scenario == SWEEP.name]
        asked = sum(row.number("requests") for row in levels) * self.plan.max_tokens
        given = sum(row.number("completion_tokens") for row in levels)
        if given < asked:
            self.notes.append(f"answers ended early: {given:.0f} tokens of {asked:.0f} asked for")
        gapped = [row.number("tokens_per_event") for row in levels if row.number("gap_p50_s")]
        several = max(gapped, default=1.0)
        if several > 1.02:
            self.notes.append(
                f"up to {several:.2f} tokens came in one event; gaps are between such events"
            )
        return Report(
            started_at=datetime.fromtimestamp(started_s, UTC).isoformat(timespec="seconds"),
            url=url,
            machine=machine,
            model=self.model,
            plan=asdict(self.plan),
            rows=self.rows,
            goals=[goal for row in self.rows for goal in row.goals],
            notes=self.notes,
        )
