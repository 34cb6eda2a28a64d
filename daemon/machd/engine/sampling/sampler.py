"""Choose one token for each row of a batch in a few vectorised operations.

A row's token depends on its own logits, parameters, seed and position, never on its neighbours:
every operation works along the vocabulary axis, and the noise of a row's draw is a hash of (seed, position,
token) instead of numbers from a shared generator.

Rows that ask for less cost less: greedy rows are one argmax, penalties and biases touch only rows
that have them, and log-probabilities are computed only for rows that asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from msgspec import structs

from machd.engine.protocol.step import SampledToken, TokenLogprob
from machd.engine.sampling.filters import Filters, filters_of
from machd.engine.sampling.gumbel_noise import gumbel_noise
from machd.engine.sampling.logprobs import likeliest, named_logprobs
from machd.engine.sampling.sampling_state import Matcher, SamplingState, has_penalty
from machd.request.generation import SamplingParams


class Masks(Protocol):
    """Masks of the tokens that matchers allow."""

    def fill(self, matchers: Sequence[Any]) -> mx.array:
        """Return bool [matchers, vocabulary], true for allowed tokens.

        Args:
            matchers: Matchers that need a mask, all made by the same grammar room.

        Raises:
            GrammarError: One row's grammar became too complex.
        """
        ...


@dataclass(slots=True)
class Selection:
    """Tokens chosen by one sampling call, lazy until evaluated.

    Attributes:
        token_ids: int32 [rows].
        usable: bool [rows]; false where a logit is NaN, so that no token means
            anything. Judged by the numbers that choose the token, not by the whole vocabulary:
            what goes wrong in a model reaches every logit of the row.
        logprob_rows: Batch rows that asked for log-probabilities, each with the number of tokens that it asked for.
        chosen: float32 [logprob_rows], of the chosen tokens.
        top_ids: int32 [logprob_rows, k], best first; k is the most that any row asked for.
        top_values: float32 [logprob_rows, k].
        named_rows: Batch rows that named tokens, each with their number.
        named_values: float32 [named_rows, m], log-probabilities of the named tokens; m is the most that any row named.
    """

    token_ids: mx.array
    usable: mx.array
    logprob_rows: tuple[tuple[int, int], ...] = ()
    chosen: mx.array | None = None
    top_ids: mx.array | None = None
    top_values: mx.array | None = None
    named_rows: tuple[tuple[int, int], ...] = ()
    named_values: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that has to be computed before :meth:`read`."""
        optional = (self.chosen, self.top_ids, self.top_values, self.named_values)
        return [self.token_ids, self.usable, *(array for array in optional if array is not None)]

    def read(self, slot_indices: Sequence[int]) -> list[SampledToken | None]:
        """Wait for the values and return one token for each row, whose slots are given.

        Returns:
            One entry for each row; None where a logit that chooses the token is NaN.
        """
        tokens = {
            row: SampledToken(slot_indices[row], token_id)
            for row, (token_id, is_usable) in enumerate(
                zip(_values(self.token_ids), _values(self.usable), strict=True)
            )
            if is_usable
        }
        if self.chosen is not None and self.top_ids is not None and self.top_values is not None:
            columns = [_values(array) for array in (self.chosen, self.top_ids, self.top_values)]
            for (row, asked), logprob, top_ids, top_values in zip(
                self.logprob_rows, *columns, strict=True
            ):
                if row in tokens:
                    pairs = zip(top_ids[:asked], top_values[:asked], strict=True)
                    top = tuple(TokenLogprob(token_id, value) for token_id, value in pairs)
                    tokens[row] = structs.replace(tokens[row], logprob=logprob, top_logprobs=top)
        if self.named_values is not None:
            for (row, named), values in zip(
                self.named_rows, _values(self.named_values), strict=True
            ):
                if row in tokens:
                    named_logprobs = tuple(values[:named])
                    tokens[row] = structs.replace(tokens[row], named_logprobs=named_logprobs)
        return [tokens.get(row) for row in range(len(slot_indices))]


class Sampler:
    """The rows of one batch: their parameters as columns, made once and not once a step."""

    def __init__(
        self, rows: Sequence[SamplingParams], vocabulary_tokens: int, masks: Masks | None = None
    ) -> None:
        """Take the rows' parameters.

        Args:
            rows: In the order of the logits.
            vocabulary_tokens: Width of the logits.
            masks: Fills the masks of rows with a grammar; None where there are none.
        """
        assert rows, "a batch has at least one row"
        self._rows = len(rows)
        self._vocabulary_tokens = vocabulary_tokens
        self._masks = masks
        self._biases = _bias_matrix(rows, vocabulary_tokens)
        self._filters = filters_of(rows)
        self._penalised = [i for i, row in enumerate(rows) if has_penalty(row)]
        self._held_open = [i for i, row in enumerate(rows) if row.min_tokens]
        self._scripted = [i for i, row in enumerate(rows) if row.forced_token_ids]
        self._logprob_rows = tuple(
            (i, row.top_logprobs) for i, row in enumerate(rows) if row.top_logprobs is not None
        )
        self._named_rows = tuple(
            (i, len(row.logprob_token_ids)) for i, row in enumerate(rows) if row.logprob_token_ids
        )
        self._named_ids = _named_ids([rows[i].logprob_token_ids for i, _ in self._named_rows])

    def sample(self, states: Sequence[SamplingState], logits: mx.array) -> Selection:
        """Choose the next token of every row; nothing of the rows changes.

        Args:
            states: Each row's state, with the parameters that the sampler was made of.
            logits: [rows, vocabulary], any float dtype.

        Returns:
            Lazy arrays; nothing has been computed yet.
        """
        adjusted = logits
        if self._biases is not None:
            adjusted = adjusted.astype(mx.float32) + self._biases
        if self._penalised:
            adjusted = self._penalise(states, adjusted.astype(mx.float32))
        if self._held_open:
            adjusted = self._hold_open(states, adjusted)
        matchers = {i: one.matcher for i, one in enumerate(states) if one.matcher is not None}
        if matchers:
            adjusted = self._mask(matchers, adjusted)
        token_ids = mx.argmax(adjusted, axis=-1).astype(mx.int32)
        chosen = mx.take_along_axis(adjusted, token_ids[:, None], axis=-1)[:, 0]
        usable = ~mx.isnan(chosen)
        if self._filters is not None:
            token_ids, usable = self._draw(states, adjusted, token_ids, usable, self._filters)
        if forced := self._forced(states, matchers):
            token_ids[mx.array(list(forced))] = mx.array(list(forced.values()))
        selection = Selection(token_ids, usable)
        if self._logprob_rows or self._named_rows:
            self._add_logprobs(selection, logits)
        return selection

    def _penalise(self, states: Sequence[SamplingState], logits: mx.array) -> mx.array:
        """Push down tokens that were there already.

        Repetition penalty over prompt and completion (Keskar et al. 2019, arXiv:1909.05858,
        section 4.1); presence and frequency penalties over the completion, as OpenAI defines them.
        """
        rows = [states[i] for i in self._penalised]
        index = mx.array(self._penalised, dtype=mx.int32)
        counts = mx.stack([_present(row.counts) for row in rows])
        seen = mx.stack([_present(row.prompt_mask) for row in rows]) | (counts > 0)
        params = [row.params for row in rows]
        repetition = mx.array([[float(one.repetition_penalty)] for one in params])  # [rows, 1]
        presence = mx.array([[float(one.presence_penalty)] for one in params])
        frequency = mx.array([[float(one.frequency_penalty)] for one in params])
        chosen = logits[index]
        repeated = mx.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = mx.where(seen, repeated, chosen)
        chosen = chosen - frequency * counts - presence * (counts > 0)
        logits[index] = chosen
        return logits

    def _draw(
        self,
        states: Sequence[SamplingState],
        logits: mx.array,
        greedy_ids: mx.array,
        usable: mx.array,
        filters: Filters,
    ) -> tuple[mx.array, mx.array]:
        """Sample the rows with a temperature: the largest sum of scaled logit and noise wins."""
        rows = mx.array(filters.rows, dtype=mx.int32)
        draws = [(states[i].params.seed, states[i].position) for i in filters.rows]
        scores = filters.scaled(logits[rows]) + gumbel_noise(draws, self._vocabulary_tokens)
        drawn = mx.argmax(scores, axis=-1).astype(mx.int32)
        # False for NaN, which argmax prefers to numbers, and where no token is left.
        is_drawn = mx.take_along_axis(scores, drawn[:, None], axis=-1)[:, 0] > -mx.inf
        if len(draws) == self._rows:
            return drawn, is_drawn
        greedy_ids[rows] = drawn
        usable[rows] = is_drawn
        return greedy_ids, usable

    def _hold_open(self, states: Sequence[SamplingState], logits: mx.array) -> mx.array:
        """Rule out the end of rows that have to go on."""
        held = [i for i in self._held_open if states[i].position < states[i].params.min_tokens]
        if held:
            # A copy: log-probabilities are of the logits as they are.
            logits = logits.astype(mx.float32)
        for i in held:
            logits[i, mx.array(states[i].params.end_token_ids, dtype=mx.int32)] = -mx.inf
        return logits

    def _mask(self, matchers: Mapping[int, Matcher], logits: mx.array) -> mx.array:
        """Rule out tokens that the rows' grammars do not allow."""
        assert self._masks is not None, "rows with a grammar come with masks"
        masked = [i for i, matcher in matchers.items() if matcher.needs_mask]
        if not masked:
            return logits
        allowed = self._masks.fill([matchers[i] for i in masked])
        if len(masked) == self._rows:
            return mx.where(allowed, logits, -mx.inf)
        index = mx.array(masked, dtype=mx.int32)
        # Another array, even if of the same numbers: log-probabilities are of the logits as they are.
        logits = logits.astype(logits.dtype)
        logits[index] = mx.where(allowed, logits[index], -mx.inf)
        return logits

    def _forced(
        self, states: Sequence[SamplingState], matchers: Mapping[int, Matcher]
    ) -> dict[int, int]:
        """Map rows to next tokens set by their parameters or, which takes precedence, by their grammar."""
        forced: dict[int, int] = {}
        for i in self._scripted:
            script = states[i].params.forced_token_ids
            if states[i].position < len(script):
                forced[i] = script[states[i].position]
        return forced | {i: one.forced[0] for i, one in matchers.items() if one.forced}

    def _add_logprobs(self, selection: Selection, logits: mx.array) -> None:
        """Log-probabilities under the model's own distribution, for the rows that asked."""
        if self._named_ids is not None:
            selection.named_rows = self._named_rows
            rows = logits[mx.array([row for row, _ in self._named_rows], dtype=mx.int32)]
            selection.named_values = named_logprobs(rows.astype(mx.float32), self._named_ids)
        if not self._logprob_rows:
            return
        index = mx.array([row for row, _ in self._logprob_rows], dtype=mx.int32)
        rows = logits[index].astype(mx.float32)
        normaliser = mx.logsumexp(rows, axis=-1, keepdims=True)
        ids = selection.token_ids[index][:, None]
        selection.logprob_rows = self._logprob_rows
        selection.chosen = (mx.take_along_axis(rows, ids, axis=-1) - normaliser)[:, 0]
        count = max(1, *(asked for _, asked in self._logprob_rows))
        selection.top_ids, top_logits = likeliest(rows, min(count, self._vocabulary_tokens))
        selection.top_values = top_logits - normaliser


def _named_ids(rows: Sequence[Sequence[int]]) -> mx.array | None:
    """Return the ids that rows name, int32 [rows, m]; shorter rows are filled up with token 0. None without rows."""
    if not rows:
        return None
    widest = max(map(len, rows))
    return mx.array([[*row, *[0] * (widest - len(row))] for row in rows], dtype=mx.int32)


def _present(array: mx.array | None) -> mx.array:
    assert array is not None, "penalised rows carry their history"
    return array


def _values(array: mx.array) -> list[Any]:
    """The array as nested lists of Python numbers; waits for it to be computed."""
    values = array.tolist()
    assert isinstance(values, list), "arrays of rows have at least one dimension"
    return values


def _bias_matrix(rows: Sequence[SamplingParams], vocabulary_tokens: int) -> mx.array | None:
    """Return the addends of all rows' logits, float32 [rows, vocabulary]; None for none.

    ``logit_bias``, and minus infinity for what ``allowed_token_ids`` leaves out.
    """
    if not any(row.logit_bias or row.allowed_token_ids for row in rows):
        return None
    matrix = mx.zeros((len(rows), vocabulary_tokens), dtype=mx.float32)
    for i, row in enumerate(rows):
        if row.allowed_token_ids:
            matrix[i] = -mx.inf
            matrix[i, mx.array(row.allowed_token_ids, dtype=mx.int32)] = 0.0
        if row.logit_bias:
            ids, addends = zip(*row.logit_bias, strict=True)
            columns = mx.array(ids, dtype=mx.int32)
            matrix = matrix.at[i, columns].add(mx.array(addends, dtype=mx.float32))
    return matrix
