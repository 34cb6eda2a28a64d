"""One rank of a group on loopback: computes rows of tiny models, and compares them with one process.

``python -m support.ranks.compared_rows MODE FAULTS WAYS VARIANT...`` prints a JSON line for each variant on rank 0, under each of
the faults, which commas part; WAYS is ``every`` or ``some``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from machd.engine.assembly import make_engine
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.description import describe_model
from machd.engine.loading.loader import LoadedModel
from machd.engine.loading.placing.sharding import Sharding, cut
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import Lane, SampledToken
from machd.engine.ranks.deciding import Following, decider_of
from machd.engine.ranks.following import follow
from machd.engine.ranks.joining import join, rank_place
from machd.engine.ranks.leading_engine import LeadingEngine
from machd.engine.ranks.orders import Run, decoded
from machd.engine.ranks.rank_group import RankGroup
from machd.engine.ranks.sameness import check_same, shard_facts
from machd.engine.step.decode_pass import DecodePass
from machd.engine.step.ports import Decider
from machd.engine.step.row import Decoded
from machd.engine_process.scheduling import prefix_shape
from machd.reading.keyed_prompt import KeyedPrompt
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import SamplingParams
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import PrefixLimits
from machd.settings.cache import CacheSettings
from machd_probes.known_drafts import KnownDrafts
from machd_probes.play import Join, play
from machd_probes.scripts import LENGTHS, MIXED, random_prompt, scripts
from machd_probes.tiny import tiny_configuration, tiny_model
from machd_probes.vision_matrix.rows import AskedRow, Rows
from support.engines.constrained_rows import run_rows

TOKENS = 8
PROMPTS = tuple(random_prompt(length, seed) for seed, length in enumerate(LENGTHS))
_BLOCK_TOKENS = 16
_RANKS_OF_TINY = 2
_HEADS = {
    "num_key_value_heads",
    "num_attention_groups",
    "linear_num_key_heads",
    "o_groups",
    "index_n_heads",
}
_LAYERS = {"num_hidden_layers"}
_DRAFT_TOKENS = 3
_SCRIPTS = (
    "early leaves",
    "down to one and up again",
    "slots taken again",
    "chunked prefill",
)

Tokens = list[list[int]]


class Selfish(Following):
    """A fault: a follower that keeps other tokens than it is told."""

    def agree_on_result(
        self, current: DecodePass, settle: Callable[[DecodePass], Decoded | None]
    ) -> Decoded | None:
        """Return what rank 0 keeps, with tokens of this rank's own."""
        if (told := super().agree_on_result(current, settle)) is not None:
            told.settled = [
                replace(row, last_token_id=1 + (row.last_token_id or 0)) for row in told.settled
            ]
        return told


class DeafGroup(RankGroup):
    """A fault: a follower that misses an order to decode."""

    has_missed = False

    def tell(self, message: bytes) -> bytes:
        """Return the next message."""
        told = super().tell(message)
        if self.leads or self.has_missed or not _is_decode(told):
            return told
        self.has_missed = True
        return super().tell(message)


def _is_decode(message: bytes) -> bool:
    with contextlib.suppress(msgspec.DecodeError):
        order = decoded(message)
        return isinstance(order, Run) and not order.prefill
    return False


class KnownAnswers(dict[tuple[int, ...], list[int]]):
    """Answers by prompt, none for other prompts."""

    def __missing__(self, prompt: tuple[int, ...]) -> list[int]:
        """Return no draft tokens."""
        return []


def divisible(config: Mapping[str, Any], mode: str, ranks: int) -> dict[str, Any]:
    """Return a configuration with as many heads of keys, or layers, as ranks need; two have them as it is."""
    if ranks <= _RANKS_OF_TINY:
        return dict(config)
    names = _LAYERS if mode == "pipeline" else _HEADS
    return {
        name: divisible(value, mode, ranks)
        if isinstance(value, Mapping)
        else max(value, ranks)
        if name in names
        else value
        for name, value in config.items()
    }


def built(variant: str, mode: str, ranks: int, sharding: Sharding | None) -> LoadedModel:
    """Build a tiny model that so many ranks can share, or a rank's shard of it."""
    configuration = tiny_configuration(variant)
    configuration = replace(configuration, config=divisible(configuration.config, mode, ranks))
    model = tiny_model(configuration)
    if sharding is not None:
        model = cut(lambda: tiny_model(configuration), sharding)
    description = describe_model(
        model,
        model_id=f"tiny-{variant}",
        architecture=variant.partition("+")[0],
        context_tokens=1024,
        eos_token_ids=frozenset({2}),
    )
    return LoadedModel(model, FakeTokenizer(), description)


def ids(said: Sequence[Sequence[SampledToken]]) -> Tokens:
    """Return token ids alone."""
    return [[token.token_id for token in row] for row in said]


def answers(engine: Engine, known: KnownAnswers, ways: str) -> dict[str, Tokens]:
    """Return what the rows of each way to compute say; ``known`` learns them for drafts."""
    said = {"alone": _alone(engine, [Join(prompt, TOKENS, lane=Lane.SERIAL) for prompt in PROMPTS])}
    known |= zip(PROMPTS, said["alone"], strict=True)
    if ways == "every":
        seeded = zip(PROMPTS, MIXED, strict=True)
        said["seeded"] = _alone(
            engine,
            [Join(prompt, TOKENS, sampling, lane=Lane.SERIAL) for prompt, sampling in seeded],
        )
    if not all(layer.mergeable for layer in engine.model.cache.layers):
        return said  # such a model is served one row at a time
    every = scripts(PROMPTS, TOKENS)
    for name in _SCRIPTS if ways == "every" else _SCRIPTS[:1]:
        said[f"batch: {name}"] = ids(every[name].play(engine))
    joins = [Join(one, TOKENS) for one in PROMPTS]
    said["drafts"] = ids(play(engine, joins, drafts=lambda _step, _rows: _DRAFT_TOKENS))
    if ways == "some":
        return said
    constraint = Constraint(ConstraintKind.REGEX, "(ab|cd){2}e", "test")
    grammar = SamplingParams(temperature=0.0, grammar=engine.grammars.compile(constraint))
    said["grammar"] = run_rows(engine, PROMPTS[:3], [grammar] * 3, max_tokens=TOKENS).tokens
    return said | after_a_prefix_hit(engine)


def _alone(engine: Engine, joins: Sequence[Join]) -> Tokens:
    return ids(play(engine, joins, slots=1))


def after_a_prefix_hit(engine: Engine) -> dict[str, Tokens]:
    """Return what a row says whose prompt begins with blocks of another one's."""
    shape = prefix_shape(CacheSettings(block_tokens=_BLOCK_TOKENS), engine.model)
    prefixes = PrefixCache(shape, PrefixLimits(max_bytes=1 << 30))
    rows = Rows(engine, prefixes=prefixes, top_logprobs=1)
    said = tuple(range(3, 3 + TOKENS))  # what is compared is the likeliest token after each of them
    prompts = (PROMPTS[5], (*PROMPTS[5][:33], *PROMPTS[2]))
    _, answer = [rows.answers([AskedRow(KeyedPrompt("", one), said)])[0] for one in prompts]
    likeliest = [token.top_logprobs[0].token_id for token in answer.tokens]
    rows.forget()
    return {"prefix hit": [likeliest], "cached tokens": [[answer.cached_tokens]]}


@functools.cache
def _alone_expected(
    variant: str, mode: str, ranks: int, ways: str
) -> tuple[dict[str, Tokens], KnownAnswers]:
    """Compute a variant in this process alone: what its rows say, and the answers for drafts."""
    loaded, known = built(variant, mode, ranks, None), KnownAnswers()
    drafts = KnownDrafts(known, loaded.description.vocabulary_tokens)
    reference = make_engine(loaded, proposer=drafts)
    expected = answers(reference, known, ways)
    reference.close()
    return expected, known


def compared(
    variant: str, group: RankGroup, mode: str, ways: str, decider: Decider
) -> dict[str, object]:
    """Compute a variant on this rank, and compare on rank 0; returns what differs, by way to compute."""
    try:
        loaded = built(variant, mode, group.size, Sharding(group.group, mode))
        check_same(group, shard_facts(loaded.description))
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return {"variant": variant, "refused": f"{type(error).__name__}: {error}"}
    if not group.leads:
        engine = make_engine(loaded, decider=decider)
        follow(engine, group, lambda: None)
        engine.close()
        return {}
    expected, known = _alone_expected(variant, mode, group.size, ways)
    drafts = KnownDrafts(known, loaded.description.vocabulary_tokens)
    shard = make_engine(loaded, decider=decider, proposer=drafts)
    leading = LeadingEngine(shard, group, time.time)
    memory = leading.memory()
    assert len(memory.ranks) == group.size
    said = answers(leading, known, ways)
    leading.close()
    different = {
        name: [said[name], expected[name]] for name in expected if said[name] != expected[name]
    }
    return {
        "variant": variant,
        "ways": len(expected),
        "different": different,
        "hit": said.get("cached tokens", [[0]])[0][0],
    }


def main() -> None:
    """Compare each variant."""
    mode, faults, ways, *variants = sys.argv[1:]
    place = rank_place(os.environ)
    assert place is not None, "mlx.launch starts this"
    import_mlx_lm()
    joined = join(place)
    assert joined is not None, "there are several ranks"
    for fault, variant in itertools.product(faults.split(","), variants):
        group = DeafGroup(joined.group) if fault == "deaf" else joined
        is_selfish = fault == "selfish" and not group.leads
        decider = Selfish(group) if is_selfish else decider_of(group)
        found = compared(variant, group, mode, ways, decider)
        if group.leads:
            print(json.dumps(found), flush=True)  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
