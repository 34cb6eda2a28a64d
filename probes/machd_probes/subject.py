"""The subject of a probe: a loaded model, the engine around it, and the answers of its rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlx.nn.layers.base import Module
from msgspec import structs

from machd.capabilities.evidence import Evidence, Outcome
from machd.capabilities.facts import LayerCacheFacts
from machd.engine.protocol.engine import Engine, ModelDescription
from machd.engine.protocol.step import Lane, SampledToken
from machd.request.generation import SamplingParams
from machd_probes.bounded import (
    OutOfTimeError,
    ReplaceableWatch,
    Watch,
    WatchedEngine,
    without_end,
)
from machd_probes.comparison import compared, largest_difference, tolerated
from machd_probes.finding import Finding, no_data
from machd_probes.passes import Logprobs, Passes, compared_passes
from machd_probes.play import GREEDY, Join, play
from machd_probes.scripts import LENGTHS, Script, random_prompt

_LEAST_FLOORS = {"bfloat16": 8e-3, "float16": 1e-3}
"""In nats: a log-probability of about 8 to the dtype's own resolution (2^-8 and 2^-11) moves by some
hundredths and thousandths; eight times this is tolerated."""

COARSEST_FLOOR = 0.5
"""In nats. Above it what a prompt's chunks change is no rounding, so it is no floor."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The amount that a probe may compute.

    Attributes:
        tokens: Of each row's completion.
        top_logprobs: The likeliest tokens that are compared at each position.
        lengths: Tokens of the rows' prompts; as many as :data:`~machd_probes.scripts.LENGTHS`.
        scripts: Names of the ways in which rows share a batch.
        has_long_row: Whether one prompt is long enough to make caches grow.
    """

    tokens: int = 8
    top_logprobs: int = 32
    lengths: tuple[int, ...] = LENGTHS
    scripts: tuple[str, ...] = (
        "two",
        "early leaves",
        "down to one and up again",
        "slots taken again",
        "chunked prefill",
        "prompts of one token",
    )
    has_long_row: bool = True


class Subject:
    """One model under test. Lives on the thread that loaded it."""

    def __init__(
        self,
        engine: Engine,
        extent: Extent,
        *,
        model: Module | None = None,
        plain: Module | None = None,
        watch: Watch = without_end,
    ) -> None:
        """Take over an engine without rows.

        Args:
            engine: What will serve.
            extent: How much to compute.
            model: The engine's model, for checks of its caches.
            plain: The same model as mlx-lm builds it, which no engine has touched.
            watch: Called before each step and each pass; can be exchanged later.
        """
        # No method of this object: a cycle would keep models in memory until the next collection.
        self._watch = ReplaceableWatch(watch)
        self.engine: Engine = WatchedEngine(engine, self._watch)
        self._model = model
        self._plain = plain
        self.extent = extent
        self._known: dict[Join, list[SampledToken]] = {}

    @property
    def description(self) -> ModelDescription:
        """The description of the loaded model."""
        return self.engine.model

    @property
    def window_tokens(self) -> int | None:
        """The smallest window of any cache; None where none has one."""
        return min(_windows(self.description.cache.layers), default=None)

    @property
    def module(self) -> Module:
        """The engine's model. Checks that need it are not among those of a loaded one."""
        assert self._model is not None, "the prober gave a model"
        return self._model

    @property
    def plain(self) -> Module:
        """The model as mlx-lm builds it."""
        assert self._plain is not None, "the prober gave a plain model"
        return self._plain

    @property
    def watch(self) -> Watch:
        """The function called before each step and each pass."""
        return self._watch.watch

    @watch.setter
    def watch(self, watch: Watch) -> None:
        self._watch.watch = watch

    def passes(self, model: Module) -> Passes:
        """Passes over a model, each under watch."""
        return Passes(model, self._watch)

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """One prompt for each length of the extent, the same every time."""
        return [self.prompt(length, number) for number, length in enumerate(self.extent.lengths)]

    def prompt(self, length: int, seed: int) -> tuple[int, ...]:
        """A prompt of random tokens."""
        vocabulary = min(self.description.vocabulary_tokens, 256)
        return random_prompt(length, seed, vocabulary)

    @cached_property
    def noise_floor(self) -> float:
        """The largest change of a log-probability that rounding alone makes, in nats.

        The row alone with its prompt in other chunks, and at least what the dtype resolves. Chunks of
        three tokens round most differently: a BLAS computes so few rows in another way. Where chunks
        change more than rounding could, the answer depends on them and they are no floor.
        """
        least = _LEAST_FLOORS.get(self.description.dtype, 0.0)
        rows = [Join(prompt, self.extent.tokens) for prompt in self.prompts if len(prompt) > 4]
        floors = [
            self.chunking_difference(row, chunk_tokens)
            for row in rows[-2:]
            for chunk_tokens in (len(row.prompt) // 3, 3)
        ]
        return max(least, self.largest_rounding(floors))

    def largest_rounding(self, differences: Iterable[float]) -> float:
        """Return the largest of differences that rounding could make, in nats; 0 without any."""
        # Rounding of float32 is far below what half as many bits make of it.
        is_coarse = self.description.dtype != "float32"
        limit = COARSEST_FLOOR if is_coarse else COARSEST_FLOOR / 100
        return max((one for one in differences if one < limit), default=0.0)

    def beside_plain(self, row: Join) -> tuple[Logprobs, Logprobs]:
        """Return what mlx-lm's own model says where it is given a row's tokens, and what the row says alone."""
        passes = self.passes(self.plain)
        said = self.alone(row)
        caches = passes.new_caches()
        if len(row.prompt) > 1:
            passes.feed(row.prompt[:-1], caches)
        fed = (row.prompt[-1], *(token.token_id for token in said[:-1]))
        expected = passes.continued(fed, caches)
        return expected, _heard(said, expected)

    def chunking_difference(self, row: Join, chunk_tokens: int) -> float:
        """Return the change that other chunks of the prompt make to the row alone, in nats."""
        other = self.forced(replace(row, chunk_tokens=chunk_tokens, lane=Lane.SERIAL))
        return largest_difference(self.alone(row), play(self.engine, [other])[0])

    def alone(self, row: Join) -> list[SampledToken]:
        """Return the tokens of a row alone, in the engine's caches for one row, its prompt cut alike."""
        plain = Join(
            row.prompt,
            tokens=0,
            sampling=self._asking(row.sampling),
            chunk_tokens=min(row.chunk_tokens, len(row.prompt)),
            lane=Lane.SERIAL,
        )
        known = self._known.get(plain, [])
        if len(known) < row.given_tokens:
            # Others may ask for more of it: a row's first tokens are the same however many follow.
            tokens = max(row.given_tokens, self.extent.tokens)
            known = self._known[plain] = play(self.engine, [replace(plain, tokens=tokens)])[0]
        return known[: row.given_tokens]

    def parity(self, script: Script, *, is_forced: bool = True) -> Evidence:
        """Play a script, and compare each of its rows with the same row alone.

        Args:
            script: Rows that join and leave.
            is_forced: Rows say what they said alone; otherwise what they choose is compared.

        Raises:
            Exception: What the engine raises with the rows together.
        """
        rows = script.joins
        if is_forced:
            # What is said does not matter, so all say what is most likely: fewer are computed alone.
            rows = tuple(replace(row, sampling=GREEDY) for row in rows)
        alone = [self.alone(row) for row in rows]
        turn = self.forced if is_forced else self._free
        joins = tuple(turn(row) for row in rows)
        together = replace(script, joins=joins).play(self.engine)
        compare = self._compared if is_forced else self._compared_choices
        return Evidence.together(map(compare, rows, alone, together))

    def found(self, scripts: Mapping[str, Script], *, is_forced: bool = True) -> Finding:
        """Play scripts, and say which of them are not as the rows alone.

        Args:
            scripts: By a name that a person understands.
            is_forced: As of :meth:`parity`.
        """
        parts: list[Evidence] = []
        wrong: list[str] = []
        for name, script in scripts.items():
            try:
                parts.append(self.parity(script, is_forced=is_forced))
            except OutOfTimeError:
                self.engine.reset()
                if wrong:
                    break  # what was found is found
                # A part of a check is no pass: what was left out might have told.
                return no_data(f"there was time for {len(parts)} of {len(scripts)} scripts")
            except MemoryError:
                raise  # says more of the machine than of the model
            except Exception as error:  # noqa: BLE001 - whatever a model raises in company
                self.engine.reset()
                wrong.append(f"{name}: {told(error)}")
            else:
                if not is_equal(parts[-1]):
                    wrong.append(f"{name}: {_figures(parts[-1])}")
        return _finding(parts, wrong)

    def judged_passes(
        self,
        pairs: Sequence[tuple[Logprobs, Logprobs]],
        wrong: str,
        noise_floor: float | None = None,
    ) -> Finding:
        """Compare pairs of passes, the reference first; ``wrong`` says what a difference means.

        The floor of noise is the subject's unless given.
        """
        floor = self.noise_floor if noise_floor is None else noise_floor
        slack = tolerated(floor)
        return self.judged(
            [compared_passes(one, other, floor, slack) for one, other in pairs], wrong
        )

    def judged(self, parts: Sequence[Evidence], wrong: str) -> Finding:
        """Judge comparisons; ``wrong`` says what a difference means."""
        together = Evidence.together(parts)
        return _finding(parts, [] if is_equal(together) else [f"{wrong}: {_figures(together)}"])

    def forced(self, row: Join) -> Join:
        """The row, to say what it says alone."""
        said = tuple(token.token_id for token in self.alone(row))
        sampling = replace(self._asking(row.sampling), forced_token_ids=said)
        return replace(row, sampling=sampling)

    def _compared(
        self, _row: Join, alone: Sequence[SampledToken], together: Sequence[SampledToken]
    ) -> Evidence:
        return compared(alone, together, self.noise_floor)

    def _compared_choices(
        self, row: Join, alone: Sequence[SampledToken], together: Sequence[SampledToken]
    ) -> Evidence:
        """Compare what a row chose: from the first other token on nothing more can be."""
        choices = enumerate(zip(alone, together, strict=True))
        parted = next((at for at, (one, other) in choices if one.token_id != other.token_id), None)
        if parted is None:
            return compared(alone, together, self.noise_floor)
        same = compared(alone[:parted], together[:parted], self.noise_floor)
        could_round = self._could_round(row, alone[: parted + 1], together[parted].token_id)
        return same if could_round else structs.replace(same, token_mismatches=1)

    def _could_round(self, row: Join, alone: Sequence[SampledToken], token_id: int) -> bool:
        """Return whether rounding may choose a token in place of the last one that a row chose alone.

        The row's token, drawn or the most likely one, gives way to one that wins once its logit is raised by the
        tolerated difference.
        """
        biases = dict(row.sampling.logit_bias)
        biases[token_id] = biases.get(token_id, 0.0) + tolerated(self.noise_floor)
        sampling = replace(
            row.sampling,
            logit_bias=tuple(biases.items()),
            forced_token_ids=tuple(token.token_id for token in alone[:-1]),
        )
        again = Join(row.prompt, len(alone), sampling, lane=Lane.SERIAL)
        return play(self.engine, [again])[0][-1].token_id == token_id

    def _free(self, row: Join) -> Join:
        return replace(row, sampling=self._asking(row.sampling))

    def _asking(self, sampling: SamplingParams) -> SamplingParams:
        count = min(self.extent.top_logprobs, self.description.vocabulary_tokens)
        return replace(sampling, top_logprobs=count)


def _heard(said: Sequence[SampledToken], expected: Logprobs) -> Logprobs:
    """Take the row's log-probabilities of its likeliest tokens, and the expected ones of all others."""
    heard = expected.copy()
    for position, token in enumerate(said):
        for top in token.top_logprobs:
            heard[position, top.token_id] = top.logprob
    return heard


def is_equal(evidence: Evidence) -> bool:
    """Return True if all comparisons are equal but for rounding."""
    within = tolerated(evidence.noise_floor)
    return evidence.token_mismatches == 0 and evidence.max_logprob_diff <= within


def _finding(parts: Sequence[Evidence], wrong: Sequence[str]) -> Finding:
    outcome = Outcome.FAILED if wrong else Outcome.PASSED
    return Finding(outcome, "; ".join(wrong), Evidence.together(parts))


def _figures(evidence: Evidence) -> str:
    return (
        f"{evidence.token_mismatches} other tokens, log-probabilities off by up to "
        f"{evidence.max_logprob_diff:.2g} nats (rounding: {evidence.noise_floor:.1g})"
    )


def told(error: BaseException) -> str:
    """The error in a line, without what may be many."""
    lines = str(error).strip().splitlines() or [""]
    return f"raises {type(error).__name__}: {lines[0][:160]}"


def _windows(layers: Iterable[LayerCacheFacts]) -> Iterator[int]:
    for layer in layers:
        if layer.window_tokens:
            yield layer.window_tokens
        yield from _windows(layer.nested)
