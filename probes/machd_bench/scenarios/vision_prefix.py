"""Images and videos in the prefix cache: what each prompt finds of one that was there before.

The same image or video with the same question is a hit, with another question behind it a prefix hit.
Another image, one changed pixel, another ``fps`` or ``max_frames`` are misses. First tokens are those of
the steps, and medians over images and videos that come for the first time and again.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from machd.errors import StartupError
from machd_bench.answer import Answer
from machd_bench.bench import Bench
from machd_bench.pictures import NoVideoWriterError, Part, image_part, text_part, video_part
from machd_bench.report import Figure, Goal, Row, percentiles
from machd_bench.scenario import SERVED, Scenario
from machd_bench.scenarios.lookup import Lookup
from machd_bench.server import Server

_GOAL = 0.15
"""The most that the first token may take when the same image or video comes again, over the first time."""
_LEAST_JUDGED_TOKENS = 200
"""Below, a request costs so much beside its prompt that shares of a prompt's time say little."""
_TEMPLATE_SHARE = 0.25
"""Of a prompt, what may be found of a new image's: the chat template in front of it."""
_SOON = 0.5
"""Of a first prompt's time, for servers that do not say what they found."""
_TOKENS = 2
_ROUNDS = 3
_VIDEO_SECONDS = 4
_VIDEO_SHARE = 2
"""Frames are this much smaller a side than images."""
_QUESTION = text_part("What is this?")
_OTHER_QUESTION = text_part("Which colours do you see?")


@dataclass(slots=True)
class _Walk:
    """The steps and times of one mode."""

    bench: Bench
    server: Server
    steps: list[Row] = field(default_factory=list)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)

    async def ask(self, *parts: Part) -> Answer:
        answer = await ask_parts(self.server, parts, _TOKENS)
        self.bench.progress.advance()
        return answer

    async def step(
        self, name: str, expected: Lookup, parts: Sequence[Part], first_s: float | None = None
    ) -> float:
        """Ask once; ``first_s`` is the first token of the kind's first step, for the ratio."""
        answer = await self.ask(*parts)
        actual = _found(answer)
        first_s = answer.ttft_s if first_s is None else first_s
        passed = actual is expected
        if actual is Lookup.UNKNOWN:
            is_first = answer.ttft_s == first_s
            passed = is_first or (answer.ttft_s < _SOON * first_s) == (expected is not Lookup.MISS)
        figures: dict[str, Figure] = {
            "expected": expected.value,
            "actual": actual.value,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "ttft_s": answer.ttft_s,
            "ratio": answer.ttft_s / first_s,
            "verdict": "PASS" if passed else "MISSED",
        }
        self.steps.append(Row(case=name, figures=figures))
        return first_s

    async def images(self, seed: str, side: int) -> None:
        one, other = (image_part(f"{seed}/{name}", side) for name in ("one", "other"))
        changed = image_part(f"{seed}/one", side, changed_pixels=1)
        first_s = await self.step("1a image", Lookup.MISS, [one, _QUESTION])
        await self.step("1b again", Lookup.HIT, [one, _QUESTION], first_s)
        again = [one, _OTHER_QUESTION]
        await self.step("1c other question", Lookup.PREFIX_HIT, again, first_s)
        await self.step("1d other image", Lookup.MISS, [other, _QUESTION], first_s)
        await self.step("1e changed pixel", Lookup.MISS, [changed, _QUESTION], first_s)
        await self.step("1f first one again", Lookup.HIT, [one, _QUESTION], first_s)

    async def videos(self, seed: str, side: int) -> None:
        def parts(**fields: object) -> list[Part]:
            return [video_part(f"{seed}/video", side, _VIDEO_SECONDS, **fields), _QUESTION]

        first_s = await self.step("2a video", Lookup.MISS, parts(fps=2.0, max_frames=8))
        same = parts(fps=2.0, max_frames=8)
        await self.step("2b again", Lookup.HIT, same, first_s)
        again = [same[0], _OTHER_QUESTION]
        await self.step("2c other question", Lookup.PREFIX_HIT, again, first_s)
        await self.step("2d other fps", Lookup.MISS, parts(fps=1.0, max_frames=8), first_s)
        await self.step("2e other max_frames", Lookup.MISS, parts(fps=2.0, max_frames=4), first_s)

    async def time(self, kind: str, part: Part) -> None:
        for name, question in (
            (f"{kind}, first time", _QUESTION),
            (f"{kind}, again", _QUESTION),
            (f"{kind}, other question", _OTHER_QUESTION),
        ):
            answer = await self.ask(part, question)
            self.times_s.setdefault(name, []).append(answer.ttft_s)
            self.prompt_tokens[name] = answer.prompt_tokens

    def latencies(self) -> Iterator[Row]:
        for name, times_s in self.times_s.items():
            kind, _, which = name.partition(", ")
            ratio = statistics.median(times_s) / statistics.median(
                self.times_s[f"{kind}, first time"]
            )
            figures: dict[str, Figure] = {
                "prompt_tokens": self.prompt_tokens[name],
                "ttft_s": statistics.median(times_s),
                "ratio": ratio,
            }
            row = Row(case=name, figures=figures | percentiles("ttft", times_s))
            if which == "again":
                shown = self.prompt_tokens[name] >= _LEAST_JUDGED_TOKENS
                text = f"first token, the same {kind} again over the first time"
                row.goals.append(Goal.judge(text, "at most", _GOAL, ratio, shown=shown))
            yield row


async def ask_parts(server: Server, parts: Sequence[Part], max_tokens: int) -> Answer:
    """Stream a chat completion of one message with these parts.

    Raises:
        EngineFaultError: The server did not give one.
    """
    chat = replace(server, dialect=replace(server.dialect, is_chat=True))
    messages = [{"role": "user", "content": list(parts)}]
    return await chat.ask("", max_tokens, fields={"messages": messages})


def require_vision(server: Server, *, scenario: str) -> None:
    """Refuse a model that takes no images; a server that does not say is asked all the same.

    Raises:
        StartupError: It takes text only.
    """
    if server.capabilities is not None and not server.capabilities.features.vision:
        raise StartupError(
            f"the scenario {scenario} needs a model that takes images; name one, or leave MODEL out and "
            "give --vision to generate one"
        )


def _found(answer: Answer) -> Lookup:
    """Read a server's own count; the chat template alone is no hit."""
    found = Lookup.of(answer)
    is_template = (answer.cached_tokens or 0) <= _TEMPLATE_SHARE * answer.prompt_tokens
    return Lookup.MISS if found is Lookup.PREFIX_HIT and is_template else found


async def _vision_prefix(bench: Bench) -> AsyncGenerator[Row]:
    side, seed = bench.plan.image_side, f"{bench.plan.started_unix_s}/vision"
    with tempfile.TemporaryDirectory(prefix="machd-bench-") as folder:
        args = ("--cache-prefix", "--cache-disk-dir", str(Path(folder) / "blocks"))
        async with bench.serve(*args) as server:
            require_vision(server, scenario="vision-prefix")
            walk = _Walk(bench, server)
            await walk.ask(image_part(f"{seed}/warm-up", side), _QUESTION)
            bench.progress.say(f"{bench.mode}, images and videos")
            await walk.images(seed, side)
            for number in range(_ROUNDS):
                await walk.time("image", image_part(f"{seed}/{number}", side))
            try:
                await _videos(walk, seed, side // _VIDEO_SHARE)
            except NoVideoWriterError as error:
                bench.notes.append(f"vision-prefix: videos left out: {error}")
    passed = sum(step.figures["verdict"] == "PASS" for step in walk.steps)
    walk.steps[-1].goals.append(
        Goal.judge(
            "images and videos that were found, or were not, as they should",
            "at least",
            len(walk.steps),
            passed,
            unit="steps",
        )
    )
    for row in (*walk.steps, *walk.latencies()):
        yield row


async def _videos(walk: _Walk, seed: str, side: int) -> None:
    capabilities = walk.server.capabilities
    if capabilities is not None and not capabilities.features.video:
        walk.bench.notes.append("vision-prefix: videos left out: the model takes none")
        return
    await walk.videos(seed, side)
    for number in range(_ROUNDS):
        part = video_part(f"{seed}/video-{number}", side, _VIDEO_SECONDS, fps=2.0, max_frames=8)
        await walk.time("video", part)


VISION_PREFIX = Scenario(
    name="vision-prefix",
    about="what images and videos find in the prefix cache; ratios are to the first token of a new one",
    run=_vision_prefix,
    modes=SERVED,
    columns=("expected", "actual", "ttft_s", "ratio", "verdict"),
    requests=lambda _plan: 12 + 6 * _ROUNDS,
    starts_servers=True,
)
