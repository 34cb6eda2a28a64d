"""A scripted engine: no model, no tensors, the same answer every time, faults on request.

It keeps the rules of :mod:`machd.engine.protocol.engine`: the contract suite runs the same tests on
it and on MLX. Its tokens depend on the row's prompt, parameters and position alone, so isolation can
be checked without a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.engine.fake.tokenizer import END_OF_TEXT, VOCABULARY_TOKENS, FakeTokenizer
from machd.engine.grammar.grammar import LlguidanceCompiler
from machd.engine.grammar.grammar_processes import GrammarBounds
from machd.engine.grammar.matcher import Matcher, matcher_for
from machd.engine.protocol.adapters import AdapterRoom
from machd.engine.protocol.blocks import SavedBlock
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.memory import MemoryReading, StepMemoryError
from machd.engine.protocol.step import (
    DecodeRow,
    DraftFault,
    DraftOutcome,
    PrefillChunk,
    PromptLogprob,
    ProposerKind,
    RowFault,
    RowOutput,
    SampledToken,
    ScoredPrompt,
    StepPlan,
    StepResult,
    TokenLogprob,
)
from machd.request.adapter import Adapter
from machd.request.generation import SamplingParams
from support.engines.fake_adapters import FakeAdapterRoom
from support.engines.fake_blocks import (
    BYTES_PER_STATE,
    BYTES_PER_TOKEN,
    FakeBlocks,
    FakeDisk,
    FakeDiskFaults,
)

_PREFERRED: tuple[int, ...] = (END_OF_TEXT, *b'"}]0a')
"""Tokens to try where a row's grammar does not allow the script's token."""

Script = Callable[[tuple[int, ...], SamplingParams, int], int]
"""Prompt, parameters and position to the token id there."""

DraftScript = Callable[[int, int], tuple[int, int]]
"""A row's position and the limit on draft tokens there to the counts of drafted and accepted ones."""


def lettered(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """Say lower-case letters that look random, without an end, and others with each adapter: the default script."""
    seed = sampling.seed if sampling.temperature > 0 else 0
    known = (prompt, seed, position, *((one.digest, one.scale) for one in sampling.adapters))
    digest = hashlib.blake2b(repr(known).encode(), digest_size=2).digest()
    return ord("a") + int.from_bytes(digest, "little") % 26


def spelled(text: str) -> Script:
    """Make a script that says ``text`` and ends."""
    data = text.encode()
    return lambda _prompt, _sampling, position: (*data, END_OF_TEXT)[min(position, len(data))]


@dataclass(slots=True)
class FakeFaults:
    """Faults to inject; steps are counted from 0, release-only steps left out.

    Attributes:
        step_errors: Step number to the error that ``run`` raises there.
        row_errors: (slot index, position) to the row's fault there.
        draft_errors: (slot index, position) to the draft fault there; the row has no drafts after it.
        reset_error: The error that ``reset`` raises.
        memory_error: The error that ``memory`` raises.
        lost_loads: Digests of blocks that the disk tier has and cannot read.
        dropped_saves: Digests of blocks that it does not write; the next step's result names them.
    """

    step_errors: dict[int, Exception] = field(default_factory=dict)
    row_errors: dict[tuple[int, int], Exception] = field(default_factory=dict)
    draft_errors: dict[tuple[int, int], Exception] = field(default_factory=dict)
    reset_error: Exception | None = None
    memory_error: Exception | None = None
    lost_loads: set[bytes] = field(default_factory=set)
    dropped_saves: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Row:
    sampling: SamplingParams
    matcher: Matcher | None
    reserved_tokens: int
    prompt: tuple[int, ...] = ()
    completion: list[int] = field(default_factory=list)
    position: int = 0
    computed_tokens: int = 0
    is_drafted: bool = True
    resumed_tokens: int = 0
    prompt_tokens: int = 0

    def resume(self) -> None:
        """Take the last tokens of the prompt as the completion that they are, once."""
        if not self.resumed_tokens or self.position:
            return
        prompt_tokens = len(self.prompt) - self.resumed_tokens
        self.prompt, self.completion = self.prompt[:prompt_tokens], [*self.prompt[prompt_tokens:]]
        self.position = self.resumed_tokens
        matcher = self.matcher
        for token_id in self.completion if matcher is not None else ():
            if matcher is not None and not matcher.take_forced(1):
                matcher.accept(token_id)

    @property
    def computed(self) -> tuple[int, ...]:
        """The tokens whose KV a model would hold: all but the last one."""
        return (*self.prompt, *self.completion)[: self.computed_tokens]

    @property
    def room_tokens(self) -> int:
        return self.reserved_tokens - len(self.prompt) - self.position


class FakeEngine:
    """Rows that follow a script.

    Attributes:
        draft_script: Drafts for the rows of plans that allow them; None for no drafts.
        memory_bytes: Memory for rows, blocks and adapters together; None for no limit. A step that does not fit
            raises StepMemoryError.
        adapter_room: Adapters in memory; what a row with any says is for its script, which gets them with the parameters.
    """

    def __init__(
        self,
        script: Script = lettered,
        *,
        faults: FakeFaults | None = None,
        before_step: Callable[[StepPlan], None] = lambda _plan: None,
        model_id: str = "fake",
        context_tokens: int = 4096,
        is_stateful: bool = False,
        disk: FakeDisk | None = None,
        grammar_bounds: GrammarBounds | None = None,
    ) -> None:
        """Start with no rows.

        Args:
            script: The tokens of rows.
            faults: Faults to inject.
            before_step: Called at the start of every ``run``; it sleeps for a slow model.
            model_id: The model's name.
            context_tokens: Positions that prompt and completion share.
            is_stateful: Whether the model has recurrent state, so that a row can only be opened where
                a block holds it.
            disk: The disk tier of blocks, which several engines may use in turn.
            grammar_bounds: Of grammars in processes of their own.
        """
        self._script = script
        self.draft_script: DraftScript | None = None
        self._verified: list[DraftOutcome] = []
        self._draft_faults: list[DraftFault] = []
        self._faults = faults or FakeFaults()
        self._before_step = before_step
        self.memory_bytes: int | None = None
        self.adapter_room: AdapterRoom = FakeAdapterRoom()
        self._rows: dict[int, _Row] = {}
        self._step = 0
        self._tokenizer = FakeTokenizer()
        self._model = _description(model_id, context_tokens, is_stateful=is_stateful)
        disk_faults = FakeDiskFaults(self._faults.lost_loads, self._faults.dropped_saves)
        self._blocks = FakeBlocks(is_stateful=is_stateful, disk=disk, faults=disk_faults)
        self._grammars = LlguidanceCompiler(
            self._tokenizer,
            self._model.vocabulary_tokens,
            self._model.eos_token_ids,
            grammar_bounds,
        )

    @property
    def model(self) -> ModelDescription:
        """A made-up model of 257 tokens: the bytes and an end."""
        if self.draft_script is None:
            return self._model
        reason = "there is a script of drafts"
        return replace(self._model, proposer=ProposerKind.NGRAM, proposer_reason=reason)

    @property
    def tokenizer(self) -> FakeTokenizer:
        """One token a byte."""
        return self._tokenizer

    @property
    def media(self) -> None:
        """None: it takes text only."""
        return

    @property
    def inputs(self) -> None:
        """None: the model generates."""
        return

    @property
    def adapters(self) -> AdapterRoom:
        """Those of :attr:`adapter_room`."""
        return self.adapter_room

    @property
    def grammars(self) -> LlguidanceCompiler:
        """Llguidance's compiler, for a vocabulary of bytes."""
        return self._grammars

    def run(self, plan: StepPlan) -> StepResult:
        """Apply block changes, release, prefill and decode, with the script's tokens under grammars.

        Raises:
            StepMemoryError: There is a limit, and the plan does not fit.
        """
        self._check_memory(plan)
        blocks = self._blocks.apply(plan.blocks, self._computed, self._adapters_of)
        for slot_index in plan.release:
            self._rows.pop(slot_index, None)
        if not (plan.prefill or plan.decode):
            return StepResult(
                held_blocks=blocks.held, lost_blocks=blocks.lost, unsaved_blocks=blocks.unsaved
            )
        self._before_step(plan)
        step, self._step = self._step, self._step + 1
        if step in self._faults.step_errors:
            raise self._faults.step_errors[step]
        self._verified, self._draft_faults = [], []
        outcomes = [one for chunk in plan.prefill for one in self._prefill(chunk)]
        outcomes += [one for row in plan.decode for one in self._decode(row)]
        failed = {one.slot_index for one in outcomes if isinstance(one, RowFault)}
        outputs = [one for chunk in plan.prefill for one in self._scored(chunk)]
        outputs += [one for one in outcomes if isinstance(one, SampledToken)]
        return StepResult(
            tuple(one for one in outputs if one.slot_index not in failed),
            tuple(one for one in outcomes if isinstance(one, RowFault)),
            blocks.held,
            blocks.lost,
            blocks.unsaved,
            tuple(self._verified),
            tuple(self._draft_faults),
        )

    def memory(self) -> MemoryReading:
        """Count a kibibyte a token."""
        if self._faults.memory_error is not None:
            raise self._faults.memory_error
        left_bytes = self._left_bytes
        return MemoryReading(
            self._used_bytes,
            self._used_bytes,
            0,
            0,
            available_bytes=left_bytes,
            step_bytes=left_bytes,
            disk=self._blocks.reading(),
        )

    def saved_blocks(self) -> tuple[SavedBlock, ...]:
        """List the blocks of the disk tier."""
        return self._blocks.saved()

    def reset(self, *, max_rows: int | None = None) -> None:
        """Drop every row; blocks stay."""
        del max_rows  # its rows take no room
        if self._faults.reset_error is not None:
            raise self._faults.reset_error
        self._rows.clear()

    def close(self) -> None:
        """Drop every row, and every block in memory."""
        self._rows.clear()
        self._blocks.close()

    @property
    def _used_bytes(self) -> int:
        """Bytes that rows hold."""
        used = sum(len(row.prompt) + row.position for row in self._rows.values())
        return used * BYTES_PER_TOKEN

    @property
    def _left_bytes(self) -> int | None:
        """Bytes that neither rows, blocks nor adapters hold; None without a limit."""
        if self.memory_bytes is None:
            return None
        adapter_bytes = self.adapter_room.reading().used_bytes
        return max(0, self.memory_bytes - self._used_bytes - self._blocks.nbytes - adapter_bytes)

    def _check_memory(self, plan: StepPlan) -> None:
        left_bytes = self._left_bytes
        if left_bytes is None or not (plan.prefill or plan.decode):
            return
        reused = [chunk.reused for chunk in plan.prefill if chunk.reused is not None]
        tokens = plan.prefill_tokens + len(plan.decode) + sum(len(one.token_ids) for one in reused)
        if tokens * BYTES_PER_TOKEN > left_bytes:
            raise StepMemoryError(needed_bytes=tokens * BYTES_PER_TOKEN, left_bytes=left_bytes)

    def _computed(self, slot_index: int) -> tuple[int, ...]:
        return self._rows[slot_index].computed if slot_index in self._rows else ()

    def _adapters_of(self, slot_index: int) -> tuple[Adapter, ...]:
        return self._rows[slot_index].sampling.adapters if slot_index in self._rows else ()

    def _prefill(self, chunk: PrefillChunk) -> list[SampledToken | RowFault]:
        if chunk.opens:
            assert chunk.slot_index not in self._rows, "a slot is freed before it is taken again"
            matcher = matcher_for(chunk.sampling)
            adapters = chunk.sampling.adapters
            prompt = () if chunk.reused is None else self._blocks.open(chunk.reused, adapters)
            self._rows[chunk.slot_index] = _Row(
                chunk.sampling,
                matcher,
                chunk.reserved_tokens,
                prompt,
                resumed_tokens=chunk.resumed_tokens,
                prompt_tokens=chunk.start + chunk.opened_tokens,
            )
        row = self._rows[chunk.slot_index]
        assert chunk.start == len(row.prompt), "chunks come in order, without gaps"
        row.prompt += chunk.token_ids
        row.computed_tokens = len(row.prompt)
        return self._next(chunk.slot_index, row) if chunk.is_last else []

    def _scored(self, chunk: PrefillChunk) -> list[RowOutput]:
        """Return the scores of a prompt that ends with a chunk, if they were asked for."""
        row, asked = self._rows[chunk.slot_index], chunk.sampling.prompt_logprobs
        if asked is None or len(row.prompt) < row.prompt_tokens:
            return []
        assert chunk.reused is None, "a scored prompt is computed whole"
        return [ScoredPrompt(chunk.slot_index, made_up_scores(row.prompt, asked))]

    def _decode(self, decode: DecodeRow) -> list[SampledToken | RowFault]:
        slot_index, row = decode.slot_index, self._rows[decode.slot_index]
        row.resume()
        drafted, accepted = self._draft(slot_index, row, decode.max_draft_tokens)
        said = self._next(slot_index, row, accepted)
        if drafted and not isinstance(said[0], RowFault):
            self._verified.append(DraftOutcome(slot_index, drafted, accepted))
        return said

    def _draft(self, slot_index: int, row: _Row, max_tokens: int) -> tuple[int, int]:
        """Count drafted and accepted tokens; a position with a fault to inject is not accepted."""
        # One more token follows the drafts.
        max_tokens = min(max_tokens, row.room_tokens - 1)
        if self.draft_script is None or not row.is_drafted or max_tokens < 1:
            return 0, 0
        fault = self._faults.draft_errors.get((slot_index, row.position))
        if fault is not None:
            row.is_drafted = False
            self._draft_faults.append(DraftFault(slot_index, fault))
            return 0, 0
        drafted, accepted = self.draft_script(row.position, max_tokens)
        assert 0 <= accepted <= drafted <= max_tokens, "a script of drafts keeps to its bounds"
        start = row.position + 1
        failing = (n for n in range(accepted) if (slot_index, start + n) in self._faults.row_errors)
        return drafted, next(failing, accepted)

    def _next(
        self, slot_index: int, row: _Row, accepted_tokens: int = 0
    ) -> list[SampledToken | RowFault]:
        """Choose the tokens of a step: accepted drafts, forced tokens, and one token more."""
        row.resume()
        fault = self._faults.row_errors.get((slot_index, row.position))
        row.computed_tokens = 0
        if fault is not None:
            return [RowFault(slot_index, fault)]
        tokens: list[SampledToken | RowFault] = []
        try:
            tokens += [
                self._token(slot_index, row, self._choose(row)) for _ in range(accepted_tokens)
            ]
            matcher, room_tokens = row.matcher, row.room_tokens - 1
            forced = [] if matcher is None else matcher.take_forced(room_tokens)
            tokens += [self._token(slot_index, row, one) for one in forced]
            tokens.append(self._token(slot_index, row, self._choose(row)))
        except BaseException as cause:  # noqa: BLE001 - a row's fault, a panic in llguidance included
            return [RowFault(slot_index, cause)]
        row.computed_tokens = len(row.prompt) + row.position - 1
        return tokens

    def _choose(self, row: _Row) -> int:
        """Take the forced token, or the script's, or one that the grammar allows."""
        matcher = row.matcher
        if matcher is not None and matcher.forced:
            return matcher.take_forced(1)[0]
        wanted = self._script(row.prompt, row.sampling, row.position)
        if matcher is None:
            return wanted
        chosen = wanted if not matcher.needs_mask else _nearest(wanted, matcher)
        matcher.accept(chosen)
        return chosen

    def _token(self, slot_index: int, row: _Row, token_id: int) -> SampledToken:
        row.position += 1
        row.completion.append(token_id)
        asked = row.sampling.top_logprobs
        named = tuple(map(made_up_logprob, row.sampling.logprob_token_ids))
        if asked is None:
            return SampledToken(slot_index, token_id, named_logprobs=named)
        top = tuple(
            TokenLogprob((token_id + i) % VOCABULARY_TOKENS, -0.5 - i) for i in range(asked)
        )
        return SampledToken(slot_index, token_id, -0.5, top, named)


def made_up_logprob(token_id: int) -> float:
    """Make up the log-probability of a token that is named, by its id alone."""
    return -1.0 - token_id % 11 / 4


def made_up_scores(prompt: tuple[int, ...], asked: int) -> tuple[PromptLogprob, ...]:
    """Make up log-probabilities of a prompt's tokens, by position alone; the first has none."""
    return tuple(
        PromptLogprob(
            position,
            token_id,
            -0.25 * (position % 7 + 1),
            rank=1,
            top_logprobs=tuple(
                TokenLogprob((token_id + i) % VOCABULARY_TOKENS, -0.25 * (position % 7 + 1) - i)
                for i in range(asked)
            ),
        )
        for position, token_id in enumerate(prompt[1:], start=1)
    )


def _nearest(wanted: int, matcher: Matcher) -> int:
    """Choose the wanted token, else one that ends a text soon, else one that opens no thoughts."""
    allowed = matcher.allowed()
    others = sorted(allowed - {matcher.thought_opening}) or sorted(allowed)
    return next(one for one in (wanted, *_PREFERRED, *others) if one in allowed)


def _description(model_id: str, context_tokens: int, *, is_stateful: bool) -> ModelDescription:
    layers: tuple[LayerCacheFacts, ...] = (LayerCacheFacts("KVCache"),)
    if is_stateful:
        layers += (LayerCacheFacts("ArraysCache", trimmable=False),)
    return ModelDescription(
        model_id=model_id,
        architecture="fake",
        context_tokens=context_tokens,
        vocabulary_tokens=VOCABULARY_TOKENS,
        parameters=0,
        weights_bytes=0,
        dtype="none",
        quantization=None,
        backend="cpu",
        blas=None,
        eos_token_ids=frozenset({END_OF_TEXT}),
        cache=CacheFacts(layers, BYTES_PER_TOKEN, BYTES_PER_STATE if is_stateful else 0),
        created_unix_s=0,
        block_key=b"fake, stateful" if is_stateful else b"fake",
    )
