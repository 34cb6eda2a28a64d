"""An image arrives while other streams run: what it costs them, and what they cost it.

One gap as long as the whole encoding, among a thousand others, is not in the 99th percentile. So the
longest gap has a goal of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from machd_bench.answer import Answer
from machd_bench.bench import Bench
from machd_bench.pictures import image_part, text_part
from machd_bench.report import Goal, Row
from machd_bench.scenario import BATCHED, Scenario
from machd_bench.scenarios.long_prompt import ANSWER_TOKENS, STREAMS, measure_join
from machd_bench.scenarios.vision_prefix import ask_parts, require_vision
from machd_bench.server import Server

_SIDE = 1000
"""Pixels of a side: one megapixel."""
_LONGEST_GOAL = 10.0
"""The most by which the longest gap may exceed the usual one while an image is encoded."""
_MAX_TOKENS = 4096
"""Tokens after which the streams would end; an encoder may take a minute, and they run meanwhile."""


async def _image_join(bench: Bench) -> AsyncGenerator[Row]:
    server = bench.server
    assert isinstance(server, Server), "its modes have a server"
    require_vision(server, scenario="image-join")
    parts = [image_part(f"{bench.plan.started_unix_s}/join", _SIDE), text_part("What is this?")]

    async def join() -> Answer:
        answer = await ask_parts(server, parts, ANSWER_TOKENS)
        bench.progress.advance()
        return answer

    row = await measure_join(bench, "image-join", join, what="the image", max_tokens=_MAX_TOKENS)
    text, ratio = "longest gap meanwhile over median gap before", row.number("longest_ratio")
    row.goals.append(Goal.judge(text, "at most", _LONGEST_GOAL, ratio))
    yield row


IMAGE_JOIN = Scenario(
    name="image-join",
    about="an image of a megapixel joins running streams; gaps between their tokens before and during it",
    run=_image_join,
    modes=BATCHED,
    columns=(
        "ttft_s",
        "before_gap_p50_s",
        "during_gap_p99_s",
        "p99_ratio",
        "longest_gap_s",
        "longest_ratio",
    ),
    streams=lambda _plan: STREAMS + 1,
    requests=lambda _plan: 1,
)
