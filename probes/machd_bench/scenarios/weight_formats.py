"""Weight formats by batch width: tokens/s of one model in each, and the width at which one overtakes another.

The servers of all formats run at the same time, and each width is measured on one after the other, round by round, so that a
machine whose speed drifts slows all of them. Only decode is compared: steps of so many rows, which read the weights
once each.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import permutations

import msgspec
import numpy as np
from msgspec import Struct

from machd.errors import StartupError
from machd_bench.answer import Answer, all_gaps_s
from machd_bench.bench import Bench, Mode, together
from machd_bench.perplexity_text import perplexity_text
from machd_bench.report import Row
from machd_bench.scenario import Scenario
from machd_bench.server import Server

FORMATS: Mapping[str, tuple[str, ...]] = {
    "f32": ("--model-dtype", "float32"),
    "bf16": ("--model-dtype", "bfloat16"),
    **{
        name: ("--model-quantize", name)
        for name in ("affine8", "affine4", "affine2", "mxfp8", "mxfp4", "nvfp4")
    },
}
"""Formats, and the flags that serve a model in them."""
WIDTHS = (1, 2, 4, 8, 16)
_ROUNDS = 3
_PROMPT_TOKENS, _NEW_TOKENS = 4, 10
"""Few, because a quantised product on the CPU takes each row by itself: up to 3 s a step of 16 rows."""

_LEAD = 1.03
"""Ratio of tokens/s above which a format is faster than another; rounds differ by less without a cause."""

_SCORING_TIMEOUT_S = 600.0
LEFT_OUT = "left out"
"""A format's verdict where there is no room for it, or the backend does not compute it; a note says why."""

_CLAIMED = ("nvfp4", "affine2")
"""The pair of which the ds4 batched-decode issue claims that the first is faster from width 4 on."""


class _Logprobs(Struct):
    token_logprobs: list[float | None]


class _Choice(Struct):
    logprobs: _Logprobs


class _Completion(Struct):
    choices: list[_Choice]


@dataclass(slots=True)
class _Format:
    name: str
    server: Server
    perplexity: float
    rounds: dict[int, list[list[Answer]]] = field(default_factory=dict)

    def tps(self, width: int) -> list[float]:
        """Return the tokens/s of each round's decode."""
        return [width / float(np.median(list(all_gaps_s(one)))) for one in self.rounds[width]]

    def row(self, width: int, first: _Format) -> Row:
        """Return the figures of a width; ratios are to another format."""
        step_s = width / statistics.median(self.tps(width))
        weights_bytes = (
            self.server.capabilities.model.weights_bytes if self.server.capabilities else 0
        )
        ratios = [one / its for one, its in zip(self.tps(width), first.tps(width), strict=True)]
        return Row(
            case=f"{self.name}, width {width}",
            figures={
                "format": self.name,
                "width": width,
                "tps": statistics.median(self.tps(width)),
                "tps_ratio": statistics.median(ratios),
                "step_ms": step_s * 1e3,
                "weights_bytes": weights_bytes,
                "weights_gb_per_s": weights_bytes / step_s / 1e9,
                "perplexity": self.perplexity,
            },
        )


def overtakes(faster: Sequence[Sequence[float]], slower: Sequence[Sequence[float]]) -> int | None:
    """Return the first width from which one format is faster than another at every width.

    Args:
        faster: For each width the tokens/s of each round.
        slower: The same of the other format, round by round.

    Returns:
        Its index, or None without such a width. Faster at a width means by 3 % in the median round.
    """
    begin: int | None = None
    for index, (one, other) in enumerate(zip(faster, slower, strict=True)):
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        leads = statistics.median(ratios) > _LEAD
        begin = (index if begin is None else begin) if leads else None
    return begin


async def _perplexity(server: Server) -> float:
    """Return a model's perplexity on the fixed text."""
    body = {
        "model": server.model_id,
        "prompt": perplexity_text(),
        "max_tokens": 1,
        "echo": True,
        "logprobs": 0,
    }
    exchange = await server.exchange(
        "/v1/completions", msgspec.json.encode(body), timeout_s=_SCORING_TIMEOUT_S
    )
    found = msgspec.json.decode(exchange.body, type=_Completion).choices[0].logprobs.token_logprobs
    known = [one for one in found[:-1] if one is not None]
    return float(np.exp(-np.mean(known)))


async def _opened(bench: Bench, stack: AsyncExitStack, names: Iterable[str]) -> list[_Format]:
    """Start a server for each format that the backend computes, as far as memory allows."""
    formats: list[_Format] = []
    for name in names:
        if formats and not bench.has_room(formats[0].server, name):
            break
        args = ("--no-cache-prefix", "--speculation-mode", "off", *FORMATS[name])
        try:
            server = await stack.enter_async_context(bench.serve(*args))
        except StartupError as error:
            bench.notes.append(f"{name} left out: {error}")
        else:
            formats.append(_Format(name, server, await _perplexity(server)))
    return formats


async def _measure(bench: Bench, formats: Sequence[_Format], width: int) -> None:
    """Ask each format in turns for so many answers at once."""
    warm_up = bench.prompts(f"warm-up-{width}", width, _PROMPT_TOKENS)
    for one in formats:
        await together(one.server.ask(prompt, 3) for prompt in warm_up)
    for number in range(_ROUNDS):
        bench.progress.say(f"width {width}, round {number + 1}")
        prompts = bench.prompts(f"format-{width}-{number}", width, _PROMPT_TOKENS)
        for one in reversed(formats) if number % 2 else formats:
            work = (one.server.ask(prompt, _NEW_TOKENS) for prompt in prompts)
            one.rounds.setdefault(width, []).append(await together(work))
            bench.progress.advance(width)


async def _weight_formats(bench: Bench) -> AsyncGenerator[Row]:
    names = bench.plan.weight_formats or tuple(FORMATS)
    async with AsyncExitStack() as stack:
        formats = await _opened(bench, stack, names)
        for width in bench.plan.widths:
            await _measure(bench, formats, width)
    for one in formats:
        for width in bench.plan.widths:
            yield one.row(width, formats[0])
    opened = {one.name for one in formats}
    for name in names:
        if opened and name not in opened:  # else nothing was measured, which is said otherwise
            yield Row(case=f"{name}, {LEFT_OUT}", figures={"format": name, "verdict": LEFT_OUT})
    bench.notes.extend(_crossovers(formats, bench.plan.widths))


def _crossovers(formats: Sequence[_Format], widths: Sequence[int]) -> list[str]:
    """Tell from which width on each format is faster than others; first about the pair of the claim."""
    tps = {one.name: [one.tps(width) for width in widths] for one in formats}
    slower: dict[tuple[str, int], list[str]] = {}
    for one, other in permutations(tps, 2):
        index = overtakes(tps[one], tps[other])
        if index is not None:
            slower.setdefault((one, index), []).append(other)
    sentences: list[str] = []
    if set(_CLAIMED) <= set(tps):
        index = overtakes(*(tps[name] for name in _CLAIMED))
        begin = "at no width here" if index is None else _from_width(widths, index)
        sentences.append(f"{_CLAIMED[0]} is faster than {_CLAIMED[1]} {begin}")
    for (one, index), others in slower.items():
        sentences.append(f"{one}: {_from_width(widths, index)}, faster than {', '.join(others)}")
    return sentences


def _from_width(widths: Sequence[int], index: int) -> str:
    return f"from width {widths[index]} on" if index else "at every width here"


WEIGHT_FORMATS = Scenario(
    name="formats",
    about="one model in each weight format, by batch width; ratios are to the first format",
    run=_weight_formats,
    modes=frozenset({Mode.BATCHED}),
    columns=("tps", "tps_ratio", "step_ms", "weights_bytes", "weights_gb_per_s", "perplexity"),
    streams=lambda plan: max(plan.widths),
    requests=lambda plan: len(plan.weight_formats or FORMATS) * _ROUNDS * sum(plan.widths),
    starts_servers=True,
    has_goal=False,
)
