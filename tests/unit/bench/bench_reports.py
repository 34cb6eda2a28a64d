"""Made-up measurements."""

from __future__ import annotations

from msgspec.structs import replace
from unit.bench.speculation_samples import made_speculation

from machd.bench.ceiling import CeilingAnswer
from machd.bench.coalescing import CoalescingFigures
from machd.bench.figures import LevelFigures, ceilings_of
from machd.bench.goals import goals_of
from machd.bench.guarantees.figures import GuaranteeFigures
from machd.bench.level import Level, LevelTimings
from machd.bench.long_prompt import LongPromptFigures
from machd.bench.machine import MachineFacts
from machd.bench.model_facts import ModelFacts
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.prefix.full_cache import FullCacheFigures
from machd.bench.prefix.kv_formats import KvFormatFigures
from machd.bench.prefix.latency import PrefixLatencyFigures
from machd.bench.prefix.server import CacheReading
from machd.bench.prefix.sharing import SharedPrompt, SharingFigures
from machd.bench.prefix.steps import Lookup, StepFigures
from machd.bench.report import BenchReport, ServerFigures, WorkloadFacts
from machd.bench.staggered import Arrivals, StaggeredFigures, StaggeredTimings, staggered_figures
from machd.bench.statistics import Distribution
from machd.bench.structured import StructuredFigures, StructuredRound
from machd.bench.timing import RequestTiming
from machd.capabilities.versions import Versions


def made_timing(sent_s: float, *, first_s: float, gap_s: float, tokens: int) -> RequestTiming:
    """A request whose tokens come at even gaps, one in each event."""
    text_s = tuple(sent_s + first_s + index * gap_s for index in range(tokens))
    return RequestTiming(sent_s, text_s[-1], text_s, prompt_tokens=10, completion_tokens=tokens)


def made_report(*, url: str | None = None, slowness: float = 1.0) -> BenchReport:
    """Three modes at three concurrencies, with every field filled in where it can be."""
    measured = [
        LevelTimings(
            Level(mode, f"level-{concurrency}", concurrency, None if url else width),
            tuple(
                made_timing(number, first_s=slowness, gap_s=0.05 * slowness, tokens=11)
                for number in range(concurrency)
            ),
        )
        for mode, width in (("single", 1), ("static", 4), ("continuous", 16))
        for concurrency in (1, 4, 16)
    ]
    bare = (
        [] if url else [CeilingAnswer(width, 10, 0.5, [0.05, 0.04, 0.06]) for width in (1, 4, 16)]
    )
    ceilings = ceilings_of(bare)
    report = BenchReport(
        started_at="2026-01-01T00:00:00+00:00",
        url=url,
        machine=MachineFacts.read(),
        model=ModelFacts(
            id="organisation/a-model-with-a-rather-long-name-8B-Instruct-4bit",
            weights_bytes=4 * 2**30,
            dtype="bfloat16",
            quantization="affine 4-bit, group 64",
            backend="cpu",
            blas="OpenBLAS 0.3.21",
            versions=Versions(machd="0.1.0", mlx="0.32.4", mlx_lm="0.32.2"),
        ),
        workload=WorkloadFacts(
            requests=8,
            prompt_tokens=10,
            max_tokens=11,
            seed=1,
            endpoint="/v1/chat/completions",
            ignores_eos=False,
        ),
        levels=[LevelFigures.of(level, ceilings) for level in measured],
        ceilings=ceilings,
        staggered=_staggered(slowness),
        long_prompt=[_long_prompt(slowness)],
        coalescing=[
            CoalescingFigures(
                mode="continuous",
                copies=3,
                rounds=3,
                alone_s=2.0 * slowness,
                together_s=2.1 * slowness,
                ratio=1.05,
                coalesced=2,
            )
        ],
        structured=[_structured(slowness)],
        prefix=[] if url else [made_prefix(slowness)],
        speculation=None if url else made_speculation(slowness),
        guarantees=[] if url else made_guarantees(slowness),
        goals=[],
        servers=[]
        if url
        else [
            ServerFigures(
                mode=mode,
                decode_mode="batched" if mode == "continuous" else "single",
                decode_mode_reason="because",
                start_to_ready_s=123.4,
                ready_rss_bytes=5 * 2**30,
                end_rss_bytes=6 * 2**30,
                ready_beyond_weights_bytes=2**30,
                end_beyond_weights_bytes=2 * 2**30,
            )
            for mode in ("single", "continuous")
        ],
    )
    return replace(report, goals=goals_of(report))


def made_guarantees(slowness: float = 1.0) -> list[GuaranteeFigures]:
    """One that is kept, one that its worst try misses, and one that was not measured."""
    return [
        GuaranteeFigures.of("a bad body is refused", 2.0, [0.5 * slowness] * 3),
        GuaranteeFigures.of("SIGTERM ends a daemon", 1.0, [0.3, 0.2, 1.2 * slowness]),
        GuaranteeFigures.of("a chat is answered", 5.0, [], "the model has no chat template"),
    ]


def _staggered(slowness: float) -> list[StaggeredFigures]:
    measured = [
        StaggeredTimings(
            mode,
            tuple(
                made_timing(number / 4, first_s=first_s * slowness, gap_s=0.1, tokens=11)
                for number in range(4)
            ),
        )
        for mode, first_s in (("single", 2.0), ("static", 7.0), ("continuous", 1.0))
    ]
    return staggered_figures(measured, Arrivals(rounds=1), static="static")


def _long_prompt(slowness: float) -> LongPromptFigures:
    """Two streams of ten tokens, and a prompt whose first token comes between their last ones."""
    streams = [[(start + index) * slowness for index in range(10)] for start in (0.0, 0.5)]
    joined = made_timing(5 * slowness, first_s=3.0 * slowness, gap_s=0.1, tokens=4)
    return LongPromptFigures.of("continuous", streams, joined, joined.ended_s + 2 * slowness)


def _structured(slowness: float) -> StructuredFigures:
    """Four streams, two of them with schemas, whose gaps are a quarter longer than without."""

    def answers(count: int, gap_s: float) -> tuple[RequestTiming, ...]:
        return tuple(
            made_timing(0, first_s=gap_s * slowness, gap_s=gap_s * slowness, tokens=11)
            for _ in range(count)
        )

    one = StructuredRound(answers(4, 0.04), answers(2, 0.05), answers(2, 0.05))
    return StructuredFigures.of("continuous", [one])


def made_prefix(slowness: float = 1.0) -> PrefixFigures:
    """A cache that finds what it should but for one step, and reaches its goals but for two."""
    timings = [made_timing(0, first_s=slowness, gap_s=slowness, tokens=8)] * 10
    readings = [
        CacheReading(bytes=size * 1_000_000, bytes_saved=saved * 1_000_000, shared_blocks=saved)
        for size, saved in ((300, 0), (340, 200), (590, 200))
    ]
    return PrefixFigures(
        mode="continuous",
        steps=[
            _step("1a", "first request", Lookup.MISS, 0, slowness),
            _step("4a", "restarted, same prompt", Lookup.HIT, 999, slowness / 10),
            _step("4b", "restarted, longer prompt", Lookup.PREFIX_HIT, 17, slowness),
        ],
        latency=PrefixLatencyFigures(
            rounds=4,
            prompt_tokens=1000,
            new_tokens=20,
            cold=_seconds(4.0 * slowness),
            warm=_seconds(0.2 * slowness),
            prefix=_seconds(0.6 * slowness),
            restarted=_seconds(2.0 * slowness),
            warm_ratio=0.05,
            prefix_ratio=0.15,
            restarted_ratio=0.5,
        ),
        sharing=SharingFigures.of(
            SharedPrompt(), (timings, timings), (readings[0], readings[1], readings[2])
        ),
        full_cache=FullCacheFigures(
            limit_bytes=92_000_000,
            prompt_tokens=250,
            pairs=24,
            full=_seconds(2.0 * slowness),
            without=_seconds(1.9 * slowness),
            cost_share=0.05,
            cost_quartiles=(0.04, 0.11),
            evictions=144,
            highest_bytes=89_900_000,
            full_rss_bytes=11_906_900_000,
            without_rss_bytes=11_815_100_000,
        ),
        kv_formats=[
            _kv_format("none", 0.0123, 1.0, 1.0, slowness),
            _kv_format("turboquant", 0.1, 0.123, 6.04, slowness),
            _kv_format("affine8", 0.01, 0.91, 1.88, slowness),
        ],
        skipped=["affine4: the model has no such caches"],
    )


def _step(
    step: str, description: str, expected: Lookup, cached_tokens: int, ttft_s: float
) -> StepFigures:
    return StepFigures(
        step=step,
        description=description,
        expected=expected,
        actual=expected,
        prompt_tokens=1000,
        cached_tokens=cached_tokens,
        least_cached_tokens=900 if expected is Lookup.PREFIX_HIT else 0,
        ttft_s=ttft_s,
        passed=expected is not Lookup.PREFIX_HIT,
    )


def _kv_format(
    name: str, gap_s: float, speed_ratio: float, rows_ratio: float, slowness: float
) -> KvFormatFigures:
    return KvFormatFigures(
        format=name,
        decode_mode="batched",
        streams=16,
        rounds=3,
        completion_tokens=3072,
        generation_tps=speed_ratio * 1000 / slowness,
        speed_ratio=speed_ratio,
        itl=_seconds(gap_s * slowness),
        bytes_per_token=round(131_072 / rows_ratio),
        reserved_bytes=round(2**30 / rows_ratio),
        rows_ratio=rows_ratio,
    )


def _seconds(value_s: float) -> Distribution:
    return Distribution(count=4, mean_s=value_s, p50_s=value_s, p90_s=value_s, p99_s=value_s)
