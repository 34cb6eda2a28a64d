"""Weight formats by batch width: tokens/s of one model in each, and where one overtakes another.

A server for each format runs all the time, and each width is measured of one after the other, round by
round, so that a machine whose speed drifts slows all of them. Their first tokens are not counted: what is compared
is steps of so many rows, which read the weights once each.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.resources import files

import msgspec
import numpy as np
from msgspec import Struct

from machd.errors import StartupError
from machd_bench.answer import Answer, all_gaps_s, tokens_per_second
from machd_bench.bench import Bench, Mode, together
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
"""Formats, and the settings that serve a model in them."""
WIDTHS = (1, 2, 4, 8, 16)
_ROUNDS = 3
_ASKED = ("nvfp4", "affine2")
"""The pair of which it is claimed that the first wins from width 4 on."""
_TEXT = files("machd_bench.scenarios") / "speculation_prompts" / "quote-letter.txt"


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
        return [tokens_per_second(answers) for answers in self.rounds[width]]

    def row(self, width: int, first: _Format) -> Row:
        answers = [answer for of_round in self.rounds[width] for answer in of_round]
        step_s = float(np.median(list(all_gaps_s(answers))))
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
    """Find the first of the widths from which one format is faster than another at every width.

    Args:
        faster: For each width the tokens/s of each round.
        slower: The same of the other format, round by round.

    Returns:
        An index, or None if there is no such width. A lead counts if most rounds have it.
    """
    begin: int | None = None
    for index, (one, other) in enumerate(zip(faster, slower, strict=True)):
        leads = statistics.median([a / b for a, b in zip(one, other, strict=True)]) > 1
        begin = (index if begin is None else begin) if leads else None
    return begin


async def _perplexity(server: Server) -> float:
    """Of a fixed text: the exponential of the mean negative log-probability of its tokens."""
    body = {
        "model": server.model_id,
        "prompt": _TEXT.read_text(encoding="utf-8").strip(),
        "max_tokens": 1,
        "echo": True,
        "logprobs": 0,
    }
    exchange = await server.exchange("/v1/completions", msgspec.json.encode(body))
    found = msgspec.json.decode(exchange.body, type=_Completion).choices[0].logprobs.token_logprobs
    known = [one for one in found[:-1] if one is not None]
    return float(np.exp(-np.mean(known)))


async def _opened(bench: Bench, stack: AsyncExitStack) -> list[_Format]:
    """Start a server for each format that the backend computes, as long as there is room."""
    formats: list[_Format] = []
    for name in bench.plan.weight_formats or FORMATS:
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
    """Ask all formats in turns, each for so many answers at once."""
    warm_up = bench.prompts(f"warm-up-{width}", width, 8)
    for one in formats:
        await together(one.server.ask(prompt, 3) for prompt in warm_up)
    for number in range(_ROUNDS):
        bench.progress.say(f"width {width}, round {number + 1}")
        prompts = bench.prompts(f"format-{width}-{number}", width, 16)
        for one in reversed(formats) if number % 2 else formats:
            work = (one.server.ask(prompt, bench.plan.max_tokens) for prompt in prompts)
            one.rounds.setdefault(width, []).append(await together(work))
            bench.progress.advance(width)


async def _weight_formats(bench: Bench) -> AsyncGenerator[Row]:
    async with AsyncExitStack() as stack:
        formats = await _opened(bench, stack)
        for width in bench.plan.widths:
            await _measure(bench, formats, width)
    for one in formats:
        for width in bench.plan.widths:
            yield one.row(width, formats[0])
    bench.notes.extend(_crossovers(formats, bench.plan.widths))


def _crossovers(formats: Sequence[_Format], widths: Sequence[int]) -> list[str]:
    """Say of each pair which is faster, and from which width on; first of the pair that was asked for."""
    names = {one.name: one for one in formats}
    pairs = [(one, other) for one in names for other in names if one != other]
    sentences: list[str] = []
    for one, other in sorted(pairs, key=lambda pair: pair != _ASKED):
        index = overtakes(
            [names[one].tps(width) for width in widths],
            [names[other].tps(width) for width in widths],
        )
        if index:
            sentences.append(f"{one} is faster than {other} from width {widths[index]} on")
        elif index == 0:
            sentences.append(f"{one} is faster than {other} at every width here")
        elif (one, other) == _ASKED:
            sentences.append(f"{one} is faster than {other} at no width here")
    return sentences


WEIGHT_FORMATS = Scenario(
    name="formats",
    about="one model in each weight format, by how many rows decode together; ratios are to the first format",
    run=_weight_formats,
    modes=frozenset({Mode.CONTINUOUS}),
    columns=("tps", "tps_ratio", "step_ms", "weights_bytes", "weights_gb_per_s", "perplexity"),
    streams=lambda plan: max(plan.widths),
    requests=lambda plan: len(plan.weight_formats or FORMATS) * _ROUNDS * sum(plan.widths),
    starts_servers=True,
    has_goal=False,
)
