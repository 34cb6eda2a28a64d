"""Made-up measurements."""

from __future__ import annotations

from machd.api.capabilities import Versions
from machd.bench.ceiling import CeilingAnswer
from machd.bench.figures import LevelFigures, ceilings_of
from machd.bench.level import Level, LevelTimings
from machd.bench.machine import MachineFacts
from machd.bench.report import BenchReport, ModelFacts, ServerFigures, WorkloadFacts
from machd.bench.timing import RequestTiming

__all__ = ["made_report", "made_timing"]


def made_timing(sent_s: float, *, first_s: float, gap_s: float, tokens: int) -> RequestTiming:
    """A request whose tokens come at even gaps, one in each event."""
    text_s = tuple(sent_s + first_s + index * gap_s for index in range(tokens))
    return RequestTiming(sent_s, text_s[-1], text_s, prompt_tokens=10, completion_tokens=tokens)


def made_report(*, url: str | None = None, slowness: float = 1.0) -> BenchReport:
    """Three modes at three concurrencies, with every field filled in where it can be."""
    measured = [
        LevelTimings(
            Level(mode, index, concurrency, None if url else width),
            tuple(
                made_timing(number, first_s=slowness, gap_s=0.05 * slowness, tokens=11)
                for number in range(concurrency)
            ),
        )
        for mode, width in (("single", 1), ("static", 4), ("continuous", 16))
        for index, concurrency in enumerate((1, 4, 16))
    ]
    bare = (
        [] if url else [CeilingAnswer(width, 10, 0.5, [0.05, 0.04, 0.06]) for width in (1, 4, 16)]
    )
    ceilings = ceilings_of(bare, max_tokens=11)
    return BenchReport(
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
        servers=[]
        if url
        else [
            ServerFigures(
                mode=mode,
                start_to_ready_s=123.4,
                ready_rss_bytes=5 * 2**30,
                end_rss_bytes=6 * 2**30,
                ready_beyond_weights_bytes=2**30,
                end_beyond_weights_bytes=2 * 2**30,
            )
            for mode in ("single", "static", "continuous")
        ],
    )
