"""A draft model drafts what a model with its weights generates, and rolls rejected drafts back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from support.engines.oracle import open_draws
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import (
    EVERY_RUN,
    VOCABULARY_TOKENS,
    TinyKind,
    each_kind,
    tiny_model,
)
from support.every_run import sampled

from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import ProposerKind
from machd.engine.speculation.draft_model import DraftModelProposer
from machd.engine.step.ports import Proposer, RowProposer
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY, Join, play

PROMPT = tuple((7 * i * i + 3 * i + 11) % 120 + 1 for i in range(40))
SAMPLED = SamplingParams(temperature=0.9, seed=4711)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "filtered": replace(SAMPLED, top_p=0.9, top_k=30, min_p=0.01),
    "penalised": replace(
        SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "greedy and penalised": replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.7),
    "biased": replace(SAMPLED, logit_bias=((5, 4.0), (9, -100.0), (77, 2.5))),
    "forced": replace(SAMPLED, forced_token_ids=(4, 5, 6)),
}
"""What they change of a token is the same whatever its caches are."""
SAID_TOKENS = 24


def _proposer(
    model: LoadedModel,
    vocabulary_tokens: int = VOCABULARY_TOKENS,
    end_token_ids: Iterable[int] = (),
) -> DraftModelProposer:
    draws = open_draws(vocabulary_tokens)
    return DraftModelProposer(model, open_draws=draws, end_token_ids=end_token_ids)


def _propose(row: RowProposer, count: int) -> tuple[int, ...]:
    """Return its drafts as soon as it has read the row's tokens."""
    return row.propose(count) or row.propose(count)


def _said(kind: TinyKind, params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """Return a row's tokens without drafts."""
    tokens = alone(kind).tokens(Join(prompt, SAID_TOKENS, params))
    return [token.token_id for token in tokens]


def _follow(row: RowProposer, said: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Propose before each step of the answer; return the accepted drafts of each proposal."""
    right: list[int] = []
    place = turn = 0
    while place < len(said):
        proposed = _propose(row, counts[turn % len(counts)])
        rest = said[place:]
        pairs = zip(proposed, rest, strict=False)
        accepted = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(proposed), len(rest))
        )
        right.append(accepted)
        assert accepted == min(len(proposed), len(rest)), f"{proposed} at {place} of {said}"
        step = rest[: accepted + 1]
        row.extend(step)
        place += len(step)
        turn += 1
    return right


def _is_proposer(proposer: Proposer) -> ProposerKind:
    return proposer.kind


@pytest.mark.parametrize(
    ("kind", "name"),
    sampled(
        list(itertools.product(TinyKind, PARAMS)),
        [
            *itertools.product(EVERY_RUN, ("greedy", "sampled")),
            *((TinyKind.STANDARD, name) for name in PARAMS),
        ],
    ),
)
def test_a_draft_of_the_same_weights_drafts_what_the_row_generates(
    kind: TinyKind, name: str
) -> None:
    """Every draft is right, whatever the caches are and however tokens are chosen."""
    params = PARAMS[name]
    said = _said(kind, params)
    assert len(set(said)) > SAID_TOKENS // 4, "a row that repeats itself would prove nothing"
    proposer = _proposer(loaded(kind))
    assert _is_proposer(proposer) is ProposerKind.DRAFT
    row = proposer.open(PROMPT, params)
    accepted = _follow(row, said, [5, 1, 8, 3])
    assert sum(accepted) + len(accepted) >= SAID_TOKENS


@each_kind()
@pytest.mark.parametrize("params", [GREEDY, PARAMS["penalised"]], ids=["greedy", "penalised"])
def test_what_the_row_did_not_say_is_forgotten(kind: TinyKind, params: SamplingParams) -> None:
    """After drafts that were rejected at any place, the next are those of a row that never drafted."""
    proposer = _proposer(loaded(kind))
    row = proposer.open(PROMPT, params)
    said: list[int] = []
    for right in (0, 1, 2, 3, 4, 0, 0, 2):
        proposed = _propose(row, 5)
        assert len(proposed) == 5
        other = (proposed[min(right, 4)] + 1 + right) % VOCABULARY_TOKENS
        step = [*proposed[:right], other]
        row.extend(step)
        said += step
        fresh = proposer.open(PROMPT, params)
        fresh.extend(said)
        assert _propose(row, 6) == _propose(fresh, 6), f"after {right} right ones, {len(said)} said"


@each_kind()
def test_unverified_drafts_change_no_later_draft(kind: TinyKind) -> None:
    """Asking twice gives the same; a row may also generate more tokens than were drafted, or as many."""
    said = _said(kind, SAMPLED)
    row = _proposer(loaded(kind)).open(PROMPT, SAMPLED)
    assert _propose(row, 8) == _propose(row, 8) == tuple(said[:8])
    assert _propose(row, 3) == tuple(said[:3])
    row.extend(said[:6])
    assert _propose(row, 4) == tuple(said[6:10])
    row.extend(said[6:8])
    row.extend(said[8:16])
    assert _propose(row, 8) == tuple(said[16:24])


@pytest.mark.parametrize("kind", [TinyKind.STANDARD, TinyKind.HYBRID_GDN, TinyKind.ROTATING])
def test_a_long_prompt_is_read_a_part_each_time(kind: TinyKind) -> None:
    """There are no drafts until the prompt is read; the row generates tokens meanwhile."""
    prompt = PROMPT * 17
    said = _said(kind, SAMPLED, prompt)
    row = _proposer(loaded(kind)).open(prompt, SAMPLED)
    held = [row.kv_bytes]
    waits = 0
    while not row.propose(2):
        held.append(row.kv_bytes)
        row.extend(said[waits : waits + 1])
        waits += 1
    assert waits == len(prompt) // 256 + 1
    assert held[0] == 0
    assert sorted(held) == held
    assert _propose(row, 4) == tuple(said[waits : waits + 4])


def test_drafts_stay_within_the_served_vocabulary() -> None:
    """A draft may have logits for ids that the served model lacks, or lack some: neither is drafted."""
    model = tiny_model(TinyKind.STANDARD, seed=5)
    wide = _proposer(model, vocabulary_tokens=40)
    drafted = {
        token
        for seed in range(8)
        for token in _propose(wide.open((1, 2, 3), replace(SAMPLED, seed=seed)), 16)
    }
    assert max(drafted) < 40
    narrow = _proposer(model, vocabulary_tokens=VOCABULARY_TOKENS + 64)
    same = _proposer(model)
    params = replace(SAMPLED, logit_bias=((VOCABULARY_TOKENS + 3, 100.0),))
    assert _propose(narrow.open(PROMPT, params), 8) == _propose(same.open(PROMPT, SAMPLED), 8)


def test_tokens_that_the_draft_cannot_read_end_its_drafts() -> None:
    """The served model may have more token ids than the draft has embeddings."""
    proposer = _proposer(loaded(TinyKind.STANDARD), vocabulary_tokens=VOCABULARY_TOKENS + 2)
    assert _propose(proposer.open((1, VOCABULARY_TOKENS), GREEDY), 4) == ()
    row = proposer.open((1, 2), GREEDY)
    assert len(_propose(row, 4)) == 4
    row.extend([VOCABULARY_TOKENS + 1])
    assert _propose(row, 4) == ()
    assert row.kv_bytes == 0


def test_nothing_is_drafted_after_the_end_or_beyond_the_context() -> None:
    """An end-of-text token ends the drafts; the draft may have a shorter context than the model."""
    said = _said(TinyKind.STANDARD, SAMPLED)
    ends = _proposer(loaded(TinyKind.STANDARD), end_token_ids=[said[3]])
    assert _propose(ends.open(PROMPT, SAMPLED), 8) == tuple(said[: said.index(said[3]) + 1])
    model = loaded(TinyKind.STANDARD)
    short = replace(model, description=replace(model.description, context_tokens=len(PROMPT) + 3))
    row = _proposer(short).open(PROMPT, SAMPLED)
    assert _propose(row, 8) == tuple(said[:3])
    row.extend(said[:3])
    assert _propose(row, 8) == ()
    assert row.kv_bytes == 0


@pytest.mark.parametrize("kind", [TinyKind.STANDARD, TinyKind.HYBRID])
def test_caches_are_held_only_while_drafts_are_asked_for(kind: TinyKind) -> None:
    """None before the first proposal, none after the row was closed or had no proposal for long."""
    row = _proposer(loaded(kind)).open(PROMPT, SAMPLED)
    assert row.kv_bytes == 0
    before = _propose(row, 4)
    assert row.kv_bytes > 0
    row.close()
    assert row.kv_bytes == 0
    assert _propose(row, 4) == before
    for token_id in range(1, 100):
        row.extend([token_id] * 2)
        assert row.kv_bytes > 0
    row.extend([3] * 100)
    assert row.kv_bytes == 0
    assert len(_propose(row, 4)) in {0, 4}


def test_logits_that_are_not_numbers_are_a_fault() -> None:
    """The error reaches the caller, which decodes without drafts."""
    model = tiny_model(TinyKind.STANDARD)
    model.model.load_weights(
        [("lm_head.weight", mx.full((VOCABULARY_TOKENS, 64), mx.nan))], strict=False
    )
    with pytest.raises(FloatingPointError):
        _propose(_proposer(model).open(PROMPT, SAMPLED), 4)


# Not all tokens: many of the unlikely ones are nearer to one another than the noise between a pass over
# one token and a pass over several.
@pytest.mark.long
@pytest.mark.parametrize("name", ["greedy", "filtered"])
def test_the_embedded_model_is_its_own_draft(
    embedded_engine: Engine, embedded_model: LoadedModel, name: str
) -> None:
    """The served model's answer is drafted token for token, also through its fused layers."""
    params = PARAMS[name]
    prompt = embedded_engine.tokenizer.encode(
        "Write a short story about a lighthouse keeper who finds a letter.", add_special_tokens=True
    )
    (tokens,) = play(embedded_engine, [Join(tuple(prompt), 32, params)])
    said = [token.token_id for token in tokens]
    proposer = DraftModelProposer(
        embedded_model,
        open_draws=open_draws(embedded_engine.model.vocabulary_tokens),
        end_token_ids=embedded_engine.model.eos_token_ids,
    )
    accepted = _follow(proposer.open(prompt, params), said, [8, 3])
    assert sum(accepted) + len(accepted) >= len(said)
