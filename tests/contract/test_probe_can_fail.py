"""The probe notices faults: each is planted where it could be, for every kind of cache it can touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from support.engines.faults_in_caches import (
    Plant,
    a_former_rows_token_stays,
    a_left_batch_is_not_dropped,
    a_lists_states_are_in_reverse,
    a_neighbours_place_is_written,
    a_new_row_begins_in_an_old_state,
    a_trim_is_a_token_short,
    joining_rows_lose_their_last_scales,
    late_rows_are_a_position_ahead,
    one_operation_has_the_longest_rows_starts,
    one_operation_writes_a_neighbours_place,
    one_window_for_all,
    positions_are_the_longest_rows,
    scales_are_dropped,
    scales_are_the_next_rows,
    sinks_are_kept,
    the_last_column_is_lost_when_rows_move,
    the_last_quantized_column_is_lost_when_rows_move,
    the_wrong_row_moves,
    two_rows_exchange_their_states,
    what_lies_behind_a_row_is_seen,
    what_lies_in_front_of_a_row_is_seen,
    windows_are_a_token_short,
    windows_are_taken_for_whole_texts,
)
from support.engines.faults_in_rows import (
    a_chunk_beside_rows_begins_anew,
    a_chunk_loses_its_last_token,
    a_finished_prompt_is_held,
    a_moved_rows_history_stays,
    a_slots_history_stays,
    one_generator_for_all,
    one_sampler_for_all,
    padding_is_remembered,
    snapshots_share_their_arrays,
    unmended,
)
from support.engines.probing import Probed, probed, probed_a_little, without_compilation

from machd.capabilities import batching_rules
from machd.capabilities.batching_rules import continuous_batching
from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import KvCacheKind
from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import judge
from machd.engine.backend.native_kernels import native_kernels

_STANDARD = frozenset({KvCacheKind.STANDARD})
_NESTED = frozenset({KvCacheKind.NESTED})
_WITH_STATES = frozenset(
    {KvCacheKind.HYBRID_GDN, KvCacheKind.HYBRID, KvCacheKind.RECURRENT, KvCacheKind.NESTED}
)
_EVERY = _WITH_STATES | {KvCacheKind.STANDARD, KvCacheKind.ROTATING}
_WITH_KEYS = _EVERY - {KvCacheKind.RECURRENT}
_WITH_WINDOWS = frozenset({KvCacheKind.ROTATING, KvCacheKind.HYBRID, KvCacheKind.NESTED})
_QUANTISABLE = _WITH_KEYS - _NESTED

_KEYS = ("qwen3", "cohere2", "qwen3_5", "lfm2", "baichuan_m1+full")
_SEVERAL_OPERATIONS = ("llama", *_KEYS[1:])
_ONE_OPERATION = ("qwen3", "gemma3_text")
"""Models whose layers are one operation on the CPU run past the masks, offsets and writes in which some faults are planted."""

_STATES = ("qwen3_5", "lfm2", "mamba", "falcon_h1")
_WINDOWS = ("cohere2", "recurrent_gemma", "baichuan_m1")
_ALL = ("llama", "cohere2", *_STATES)

_KINDS = {
    "llama": KvCacheKind.STANDARD,
    "qwen3": KvCacheKind.STANDARD,
    "smollm3": KvCacheKind.STANDARD,
    "afm7": KvCacheKind.STANDARD,
    "gemma": KvCacheKind.STANDARD,
    "gemma2": KvCacheKind.STANDARD,
    "lille-130m": KvCacheKind.STANDARD,
    "gpt_bigcode": KvCacheKind.STANDARD,
    "internlm2+dynamic": KvCacheKind.STANDARD,
    "internlm3+dynamic": KvCacheKind.STANDARD,
    "phi3small": KvCacheKind.STANDARD,
    "gemma3_text": KvCacheKind.ROTATING,
    "cohere2": KvCacheKind.ROTATING,
    "plamo3": KvCacheKind.ROTATING,
    "qwen3_5": KvCacheKind.HYBRID_GDN,
    "qwen3_next": KvCacheKind.HYBRID_GDN,
    "jamba": KvCacheKind.HYBRID,
    "lfm2": KvCacheKind.HYBRID,
    "recurrent_gemma": KvCacheKind.HYBRID,
    "mamba": KvCacheKind.RECURRENT,
    "baichuan_m1": KvCacheKind.NESTED,
    "baichuan_m1+full": KvCacheKind.NESTED,
    "deepseek_v32": KvCacheKind.NESTED,
    "falcon_h1": KvCacheKind.NESTED,
    "minimax_m3_vl": KvCacheKind.NESTED,
}

_MENDED_EVERY_RUN = ("gpt_bigcode", "plamo3")
"""Models whose layers machd mends, those with the faults that every run plants."""

_SEEN_NATS = 0.01
"""What faults change is more than that; rounding was measured at 5e-5 and less."""


@dataclass(frozen=True)
class _Fault:
    """A fault, and what has to notice it.

    Attributes:
        touches: The kinds of cache in which it changes what a row says, or holds.
        variants: Tiny models, one at least of each of these kinds.
        checks: All of them fail.
        raises: What the model raises, where that is the fault's nature.
        is_long: Whether the long suite alone plants it, because a like fault is planted in every run.
    """

    plant: Plant
    touches: frozenset[KvCacheKind]
    variants: tuple[str, ...]
    checks: tuple[str, ...]
    raises: str = ""
    is_long: bool = False


_FAULTS = (
    # What a row sees.
    _Fault(
        what_lies_behind_a_row_is_seen,
        _WITH_KEYS,
        (*_SEVERAL_OPERATIONS, "deepseek_v32"),
        ("rope_positions",),
    ),
    _Fault(what_lies_behind_a_row_is_seen, _STANDARD, ("llama",), ("batch_parity",), is_long=True),
    _Fault(
        what_lies_in_front_of_a_row_is_seen,
        _WITH_WINDOWS,
        _WINDOWS,
        ("window_overflow",),
        is_long=True,
    ),
    _Fault(one_window_for_all, _WITH_WINDOWS, _WINDOWS, ("window_overflow",)),
    _Fault(windows_are_a_token_short, _WITH_WINDOWS, _WINDOWS, ("window_overflow",), is_long=True),
    _Fault(
        windows_are_a_token_short,
        _STANDARD,
        ("smollm3",),
        ("batch_parity", "rope_positions"),
        is_long=True,
    ),
    _Fault(
        windows_are_taken_for_whole_texts,
        _STANDARD,
        ("smollm3",),
        ("batch_parity", "rope_positions"),
    ),
    # Where a row is.
    _Fault(
        positions_are_the_longest_rows,
        _WITH_KEYS,
        (*_SEVERAL_OPERATIONS, "deepseek_v32"),
        ("rope_positions",),
    ),
    _Fault(late_rows_are_a_position_ahead, _WITH_KEYS, _SEVERAL_OPERATIONS, ("rope_positions",)),
    _Fault(a_neighbours_place_is_written, _WITH_KEYS, _SEVERAL_OPERATIONS, ("rope_positions",)),
    _Fault(
        one_operation_has_the_longest_rows_starts,
        _STANDARD | {KvCacheKind.ROTATING},
        _ONE_OPERATION,
        ("rope_positions",),
    ),
    _Fault(
        one_operation_writes_a_neighbours_place,
        _STANDARD | {KvCacheKind.ROTATING},
        _ONE_OPERATION,
        ("rope_positions",),
    ),
    _Fault(
        a_neighbours_place_is_written, _NESTED, ("baichuan_m1",), ("window_overflow",), is_long=True
    ),
    _Fault(the_wrong_row_moves, _EVERY, _ALL, ("rope_positions", "sampling_isolation")),
    _Fault(
        a_lists_states_are_in_reverse,
        _NESTED,
        ("falcon_h1",),
        ("sampling_isolation",),
        is_long=True,
    ),
    _Fault(a_former_rows_token_stays, _WITH_KEYS, _KEYS, ("batch_parity",)),
    _Fault(
        the_last_column_is_lost_when_rows_move, _WITH_KEYS, _KEYS, ("batch_parity",), is_long=True
    ),
    # What a row remembers beside keys and values.
    _Fault(two_rows_exchange_their_states, _WITH_STATES, _STATES, ("sampling_isolation",)),
    _Fault(a_new_row_begins_in_an_old_state, _WITH_STATES, _STATES, ("rope_positions",)),
    _Fault(padding_is_remembered, _WITH_STATES, _STATES, ("rope_positions",)),
    # How a prompt is computed.
    _Fault(a_chunk_loses_its_last_token, _EVERY, _ALL, ("chunked_prefill",)),
    _Fault(a_chunk_beside_rows_begins_anew, _STANDARD, ("llama",), ("batch_parity",)),
    # How a row's tokens are chosen.
    _Fault(one_sampler_for_all, _EVERY, _ALL, ("sampling_isolation",)),
    _Fault(one_generator_for_all, _EVERY, _ALL, ("sampling_isolation",), is_long=True),
    _Fault(
        a_moved_rows_history_stays,
        _EVERY,
        ("llama", "cohere2", "qwen3_next", "jamba", "mamba", "deepseek_v32"),
        ("sampling_isolation",),
    ),
    _Fault(
        a_slots_history_stays,
        _EVERY,
        _ALL,
        ("sampling_isolation",),
        is_long=True,
    ),
    # What is taken out of caches, and cut off, and kept small, and given back.
    _Fault(
        snapshots_share_their_arrays,
        _WITH_STATES | {KvCacheKind.ROTATING},
        ("cohere2", *_STATES),
        ("state_snapshot",),
        is_long=True,
    ),
    _Fault(
        snapshots_share_their_arrays,
        _EVERY,
        _ALL,
        ("cache_reuse",),
    ),
    _Fault(a_trim_is_a_token_short, _STANDARD | _NESTED, ("qwen3", "deepseek_v32"), ("trim",)),
    _Fault(
        scales_are_dropped,
        _QUANTISABLE,
        ("llama", "qwen3", "gemma3_text", "qwen3_5", "lfm2"),
        ("quantized_kv",),
    ),
    # What a batch in 8 bits alone does, in models of the widest allowance too.
    _Fault(
        joining_rows_lose_their_last_scales,
        _QUANTISABLE,
        ("gemma", "lille-130m", "gemma3_text", "qwen3_5", "lfm2"),
        ("quantized_kv",),
        is_long=True,
    ),
    _Fault(
        scales_are_the_next_rows,
        _QUANTISABLE,
        ("lille-130m", "gemma", "gemma3_text", "qwen3_5", "lfm2"),
        ("quantized_kv",),
        is_long=True,
    ),
    _Fault(
        the_last_quantized_column_is_lost_when_rows_move,
        _STANDARD,
        ("llama",),
        ("quantized_kv",),
        is_long=True,
    ),
    _Fault(a_left_batch_is_not_dropped, _EVERY, _ALL, ("memory_baseline",)),
    _Fault(a_finished_prompt_is_held, _EVERY, _ALL, ("memory_baseline",)),
    # What machd mends of mlx-lm's.
    _Fault(
        unmended("afm7", "AFMModel"),
        _STANDARD,
        ("afm7",),
        ("batch_parity", "rope_positions"),
        is_long=True,
    ),
    _Fault(
        unmended("gemma2", "Attention"),
        _STANDARD,
        ("gemma2",),
        ("batch_parity", "rope_positions"),
        raises="ValueError: [broadcast_shapes]",
        is_long=True,
    ),
    _Fault(
        unmended("gpt_bigcode", "GPTBigCodeModel"),
        _STANDARD,
        ("gpt_bigcode",),
        ("batch_parity", "rope_positions"),
        raises="ValueError: [convert]",
    ),
    _Fault(
        unmended("phi3small", "Attention"),
        _STANDARD,
        ("phi3small",),
        ("batch_parity", "rope_positions"),
        raises="ValueError: [broadcast_shapes]",
        is_long=True,
    ),
    _Fault(
        unmended("minimax_m3_vl", "Attention"),
        _NESTED,
        ("minimax_m3_vl",),
        ("rope_positions",),
        is_long=True,
    ),
    _Fault(
        unmended("plamo3", "Model"),
        frozenset({KvCacheKind.ROTATING}),
        ("plamo3",),
        ("chunked_prefill",),
    ),
    _Fault(
        unmended("recurrent_gemma", "RGLRU"),
        frozenset({KvCacheKind.HYBRID}),
        ("recurrent_gemma",),
        ("batch_parity",),
        is_long=True,
    ),
    _Fault(
        unmended("rope_utils", "DynamicNTKScalingRoPE"),
        _STANDARD,
        ("internlm2+dynamic", "internlm3+dynamic"),
        ("batch_parity", "rope_positions"),
        raises="ValueError: [convert]",
        is_long=True,
    ),
)


_Probing = Callable[[str, Sequence[str]], Probed]


def _cases() -> list[object]:
    """As the prober does, each fault on each variant; to a small extent, which every run does, most faults on one of theirs."""
    return [
        pytest.param(
            fault,
            variant,
            probing,
            id=f"{fault.plant.__name__}-{variant}-{'-'.join(fault.checks)}-{probing.__name__}",
            marks=pytest.mark.long if probing is probed else (),
        )
        for number, fault in enumerate(_FAULTS)
        for place, variant in enumerate(fault.variants)
        for probing in (probed, probed_a_little)
        if probing is probed or (place == number % len(fault.variants) and not fault.is_long)
    ]


@pytest.fixture(autouse=True, scope="module")
def _no_compilation() -> Iterator[None]:
    with without_compilation():
        yield


@pytest.mark.parametrize(("fault", "variant", "probing"), _cases())
def test_a_planted_fault_is_noticed(
    fault: _Fault, variant: str, probing: _Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check that could see the fault fails, and says in figures what rows said instead."""
    if fault.variants == _ONE_OPERATION and native_kernels() is None:
        pytest.skip("make setup has found no compiler: mlx computes")
    fault.plant(monkeypatch)

    found = probing(variant, fault.checks)

    assert found.facts.kind is _KINDS[variant]
    for result in found.results:
        _assert_noticed(result, fault.raises)


def _assert_noticed(result: ProbeResult, raises: str) -> None:
    """Failed for what rows said: an exception counts where the fault's nature is to raise it."""
    assert result.outcome is Outcome.FAILED, f"{result.probe} {result.outcome}"
    if raises:
        assert f"raises {raises}" in result.detail
        return
    assert "raises" not in result.detail
    if result.probe == "memory_baseline":
        assert "bytes" in result.detail
        return
    assert "nats" in result.detail
    assert result.evidence.token_mismatches or result.evidence.max_logprob_diff > _SEEN_NATS


@pytest.mark.parametrize(
    ("variant", "probing"),
    [
        # test_architectures.py has every check pass on models of most kinds of cache.
        *((variant, probed_a_little) for variant in _MENDED_EVERY_RUN),
        *(pytest.param(variant, probed, marks=pytest.mark.long) for variant in _KINDS),
    ],
)
def test_without_a_fault_the_same_checks_pass(variant: str, probing: _Probing) -> None:
    """The checks that notice the faults above find none in the unchanged model."""
    checks = {check for fault in _FAULTS if variant in fault.variants for check in fault.checks}

    found = probing(variant, sorted(checks))

    assert {(one.probe, one.outcome, one.detail) for one in found.results} == {
        (check, Outcome.PASSED, "") for check in checks
    }


def test_every_kind_that_a_fault_touches_has_a_model() -> None:
    """No row of the table leaves a kind out, or claims one that it does not try."""
    for fault in _FAULTS:
        assert {_KINDS[variant] for variant in fault.variants} == fault.touches, fault.plant


@pytest.mark.parametrize(
    ("variant", "probing"),
    [
        ("cohere2", probed_a_little),
        *(pytest.param(one, probed, marks=pytest.mark.long) for one in _WINDOWS),
    ],
)
def test_sinks_are_blocked_by_the_rule_and_without_it_by_measurement(
    variant: str, probing: _Probing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotating cache that keeps four sinks: the rule says so, and the checks see what it loses."""
    sinks_are_kept(monkeypatch)
    found = probing(variant, ("batch_parity", "window_overflow"))

    assert found.facts.kind is _KINDS[variant]
    assert found.facts.keep_tokens == (4,)
    rule = continuous_batching(found.facts)
    assert rule.support is Support.BLOCKED
    assert "attention sinks" in rule.reason
    for result in found.results:
        _assert_noticed(result, raises="")

    monkeypatch.setattr(batching_rules, "_batch_obstacle", lambda _: None)

    assert continuous_batching(found.facts).support is Support.UNKNOWN
    verdict = judge(found.facts, found.results).continuous_batching
    assert verdict.support is Support.BLOCKED
    assert "other tokens" in verdict.reason
