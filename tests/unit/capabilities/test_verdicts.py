"""Rules against measurements: evidence overrides in one direction only, and only where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, combinations_with_replacement, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, structs

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.rules import PrefixExtent, PrefixVerdict
from machd.capabilities.verdict import Source, Support, Verdict, measured
from machd.capabilities.verdicts import ModelVerdicts, judge

KV = LayerCacheFacts("KVCache")
ROTATING = LayerCacheFacts("RotatingKVCache", window_tokens=8)
GATED_DELTA = LayerCacheFacts("ArraysCache", owner="GatedDeltaNet", trimmable=False)
MAMBA = LayerCacheFacts("ArraysCache", owner="Mamba", trimmable=False)
CHUNKED = LayerCacheFacts("ChunkedKVCache", mergeable=False)
PRIVATE = LayerCacheFacts("LayerCache", trimmable=False, mergeable=False)
LIST = LayerCacheFacts("CacheList", trimmable=False, nested=(MAMBA, KV))

_PROBES = (
    "batch_parity",
    "window_overflow",
    "rope_positions",
    "sampling_isolation",
    "chunked_prefill",
    "cache_reuse",
    "trim",
    "state_snapshot",
    "quantized_kv",
    "memory_baseline",
    "mlx_lm_batch",
)
_FEATURES = (
    "continuous_batching",
    "batched_specdec",
    "speculation",
    "prefix_cache",
    "kv_quantization",
    "chunked_prefill",
    "expert_streaming",
    "batched_adapters",
)
_SILENT = (Outcome.UNSUPPORTED, Outcome.NO_DATA, Outcome.ERRORED)


def _facts(*layers: LayerCacheFacts) -> CacheFacts:
    return CacheFacts(layers, bytes_per_token=1, bytes_per_sequence=0)


def _result(probe: str, outcome: Outcome, detail: str = "") -> ProbeResult:
    return ProbeResult(probe, outcome, detail, Evidence(0, 1e-6, 2e-6, 3))


_results = st.lists(
    st.builds(_result, st.sampled_from(_PROBES), st.sampled_from(Outcome)), max_size=8
)
_layers = st.lists(
    st.sampled_from([KV, ROTATING, GATED_DELTA, MAMBA, CHUNKED, PRIVATE, LIST]), max_size=3
)


# --- one rule, any results ----------------------------------------------------------------------


Override = Callable[[Verdict, Sequence[ProbeResult]], Verdict]


def _allowed(rule: Support, outcomes: Sequence[Outcome]) -> Support:
    """Return what the docs' table says, written down a second time."""
    if rule is Support.BLOCKED or Outcome.FAILED in outcomes:
        return Support.BLOCKED
    has_answer = Outcome.PASSED in outcomes and Outcome.ERRORED not in outcomes
    return Support.SUPPORTED if has_answer else rule


def _is_right(override: Override) -> bool:
    """Return whether an override does what it may on every rule with every set of up to five outcomes."""
    every = (combinations_with_replacement(Outcome, size) for size in range(6))
    for support, outcomes in product(Support, chain.from_iterable(every)):
        rule = Verdict(support, "because")
        verdict = override(rule, [_result("trim", outcome) for outcome in outcomes])
        has_counted = bool({Outcome.PASSED, Outcome.FAILED} & set(outcomes))
        may_count = has_counted and support is not Support.BLOCKED
        is_measured = may_count and (Outcome.FAILED in outcomes or Outcome.ERRORED not in outcomes)
        if verdict.support is not _allowed(support, outcomes):
            return False
        if (verdict.source is Source.MEASURED) != is_measured:
            return False
        if (verdict.evidence is not UNSET) != is_measured:
            return False
        if not is_measured and verdict != rule:
            return False
    return True


def test_evidence_overrides_in_one_direction_only() -> None:
    """A measured answer changes with its source and figures, and all else is the rule's own."""
    assert _is_right(measured)


def _lifts(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Takes success for an answer to a block."""
    is_passed = results and all(one.outcome is Outcome.PASSED for one in results)
    return (
        structs.replace(rule, support=Support.SUPPORTED) if is_passed else measured(rule, results)
    )


def _forgives(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Lets one success outweigh failures."""
    passed = [one for one in results if one.outcome is Outcome.PASSED]
    return measured(rule, passed or results)


def _overlooks_errors(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Takes what crashed for what was never tried."""
    return measured(rule, [one for one in results if one.outcome is not Outcome.ERRORED])


def _blames_errors(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Takes what crashed for what is wrong."""
    failed = [
        replace(one, outcome=Outcome.FAILED) if one.outcome is Outcome.ERRORED else one
        for one in results
    ]
    return measured(rule, failed)


def _is_easily_pleased(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Takes having seen nothing for success."""
    seen = [
        replace(one, outcome=Outcome.PASSED) if one.outcome is Outcome.NO_DATA else one
        for one in results
    ]
    return measured(rule, seen)


def _trusts_the_rule(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Asks evidence only where the rule does not know."""
    return measured(rule, results) if rule.support is Support.UNKNOWN else rule


def _hides_its_source(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Passes a measurement off as the rule's."""
    return structs.replace(measured(rule, results), source=Source.RULE)


def _loses_its_figures(rule: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Answers without evidence."""
    return structs.replace(measured(rule, results), evidence=UNSET)


@pytest.mark.parametrize(
    "fault",
    [
        _lifts,
        _forgives,
        _overlooks_errors,
        _blames_errors,
        _is_easily_pleased,
        _trusts_the_rule,
        _hides_its_source,
        _loses_its_figures,
    ],
)
def test_every_wrong_override_is_noticed(fault: Override) -> None:
    """The property can fail: each planted fault breaks it."""
    assert not _is_right(fault)


@given(st.sampled_from(Support), _results, st.randoms(use_true_random=False))
def test_the_order_of_results_decides_nothing(
    support: Support, results: list[ProbeResult], random: Random
) -> None:
    """The same results in another order give the same answer with the same figures."""
    rule = Verdict(support, "because")
    other = list(results)
    random.shuffle(other)

    one, another = measured(rule, results), measured(rule, other)

    assert (one.support, one.source) == (another.support, another.source)
    assert one.evidence == another.evidence


@given(_results)
def test_an_error_never_leaves_support_that_was_measured(results: list[ProbeResult]) -> None:
    """Whatever passed beside it, what ended in an error keeps the measurement from supporting."""
    broken = [*results, _result("trim", Outcome.ERRORED)]
    for support in Support:
        verdict = measured(Verdict(support, "because"), broken)

        assert (verdict.support, verdict.source) != (Support.SUPPORTED, Source.MEASURED)


def test_what_says_nothing_changes_nothing() -> None:
    """Probes that did not apply, saw nothing or crashed leave rule, source and reason."""
    for support, outcomes in product(Support, [(), *((one,) for one in _SILENT), _SILENT]):
        rule = Verdict(support, "because")
        assert measured(rule, [_result("trim", one) for one in outcomes]) is rule


def test_a_reason_tells_who_found_what_and_what_follows() -> None:
    """A failure names its probe, what it saw and the consequence; a success names its figures."""
    failures = [_result("trim", Outcome.FAILED, "3 tokens differ"), _result("x", Outcome.FAILED)]
    failed = measured(Verdict(Support.UNKNOWN, ""), failures, consequence="so it is off")
    passed = measured(Verdict(Support.UNKNOWN, ""), [_result("trim", Outcome.PASSED)] * 2)

    assert "trim failed: 3 tokens differ" in failed.reason
    assert "x failed: 0 tokens differ in 3 cases" in failed.reason
    assert failed.reason.endswith("; so it is off")
    assert "trim passed" in passed.reason
    assert "6 cases" in passed.reason
    assert passed.evidence == Evidence(0, 1e-6, 2e-6, 6)


def test_what_was_measured_is_not_weighed_again() -> None:
    """Evidence is held against a rule, all at once, so that an early success cannot hide a crash."""
    once = measured(Verdict(Support.UNKNOWN, ""), [_result("trim", Outcome.PASSED)])
    with pytest.raises(AssertionError):
        measured(once, [_result("trim", Outcome.ERRORED)])


def test_a_prefix_verdict_stays_one() -> None:
    """A verdict's other parts are kept through a measurement."""
    rule = PrefixVerdict(Support.UNKNOWN, "", extent=PrefixExtent.SNAPSHOT)
    verdict = measured(rule, [_result("trim", Outcome.PASSED)])

    assert verdict.extent is PrefixExtent.SNAPSHOT


# --- a model, all results -----------------------------------------------------------------------


@given(_layers, _results)
def test_no_measurement_lifts_a_rule_s_block(
    layers: list[LayerCacheFacts], results: list[ProbeResult]
) -> None:
    """On any model, with any results: blocked stays, supported and unknown move as they may."""
    facts = _facts(*layers)
    before, after = judge(facts, ()).by_feature(), judge(facts, results).by_feature()
    for feature, rule in before.items():
        verdict = after[feature]
        if rule.support is Support.BLOCKED:
            assert verdict == rule
        if verdict.support is not rule.support:
            assert verdict.source is Source.MEASURED
            assert verdict.evidence is not UNSET
        if verdict.support is Support.BLOCKED and rule.support is not Support.BLOCKED:
            assert any(one.outcome is Outcome.FAILED for one in results)
        if verdict.support is Support.UNKNOWN:
            assert rule.support is Support.UNKNOWN


@given(_layers, st.lists(st.builds(_result, st.sampled_from(_PROBES), st.sampled_from(_SILENT))))
def test_nothing_seen_is_nothing_known(
    layers: list[LayerCacheFacts], results: list[ProbeResult]
) -> None:
    """Without a probe that passed or failed, every verdict is what it is without any probe."""
    assert judge(_facts(*layers), results) == judge(_facts(*layers), ())


@given(_layers)
def test_rules_alone_batch_nothing_that_was_not_measured(layers: list[LayerCacheFacts]) -> None:
    """Where evidence is asked for and there is none, supported becomes unknown, and says so."""
    rule, verdict = (judge(_facts(*layers), known).continuous_batching for known in (None, ()))
    if rule.support is Support.SUPPORTED:
        assert verdict.support is Support.UNKNOWN
        assert verdict.reason.startswith(rule.reason)
        assert "has not been measured" in verdict.reason
    else:
        assert verdict == rule


def _changed(before: ModelVerdicts, after: ModelVerdicts) -> set[str]:
    rules, verdicts = before.by_feature(), after.by_feature()
    return {name for name in rules if rules[name].support is not verdicts[name].support}


_BATCHING = {"continuous_batching", "batched_specdec"}


@pytest.mark.parametrize(
    ("probe", "standard", "state"),
    [
        ("batch_parity", _BATCHING, _BATCHING),
        ("window_overflow", _BATCHING, _BATCHING),
        ("rope_positions", _BATCHING, _BATCHING),
        ("sampling_isolation", _BATCHING, _BATCHING),
        ("chunked_prefill", {"chunked_prefill"}, {"chunked_prefill"}),
        ("cache_reuse", {"prefix_cache"}, set()),
        ("trim", {"prefix_cache", "speculation", "batched_specdec"}, set()),
        ("state_snapshot", set(), {"prefix_cache", "speculation", "batched_specdec"}),
        ("quantized_kv", {"kv_quantization"}, {"kv_quantization"}),
        ("memory_baseline", set(), set()),
        ("batched_drafts", {"batched_specdec"}, {"batched_specdec"}),
        ("mlx_lm_batch", set(), set()),
        ("no_such_probe", set(), set()),
    ],
)
def test_a_probe_that_fails_blocks_its_features_and_no_others(
    probe: str, standard: set[str], state: set[str]
) -> None:
    """On caches that can be cut and on ones with state, each probe decides what depends on it."""
    failed = [_result(probe, Outcome.FAILED)]
    for layers, features in (([KV], standard), ([GATED_DELTA, KV], state)):
        rules, verdicts = judge(_facts(*layers), ()), judge(_facts(*layers), failed)

        assert _changed(rules, verdicts) == features
        for feature in features:
            assert verdicts.by_feature()[feature].support is Support.BLOCKED


@pytest.mark.parametrize(
    ("probe", "features"),
    [
        ("batch_parity", {"continuous_batching"}),
        ("chunked_prefill", {"chunked_prefill"}),
        ("cache_reuse", set()),
        ("state_snapshot", {"prefix_cache"}),
        ("quantized_kv", {"kv_quantization"}),
        ("rope_positions", set()),
        ("sampling_isolation", set()),
        ("window_overflow", set()),
        ("trim", set()),
        ("batched_drafts", {"batched_specdec"}),
        ("mlx_lm_batch", set()),
        ("memory_baseline", set()),
    ],
)
def test_a_probe_that_passes_answers_for_its_features(probe: str, features: set[str]) -> None:
    """On a model of which nothing is known, only a feature's main probe gives an answer."""
    facts = _facts(LIST)
    rules, verdicts = judge(facts, ()), judge(facts, [_result(probe, Outcome.PASSED)])

    assert _changed(rules, verdicts) == features
    for feature in features:
        assert verdicts.by_feature()[feature].support is Support.SUPPORTED


@pytest.mark.parametrize("overflow", [None, *Outcome])
def test_a_window_is_known_once_it_was_full(overflow: Outcome | None) -> None:
    """With windows, equal short rows prove nothing: they must have overflowed, or never can."""
    results = [_result("batch_parity", Outcome.PASSED)]
    if overflow is not None:
        results.append(_result("window_overflow", overflow))
    verdict = judge(_facts(ROTATING, KV), results).continuous_batching

    expected = {
        Outcome.PASSED: Support.SUPPORTED,
        Outcome.UNSUPPORTED: Support.SUPPORTED,
        Outcome.FAILED: Support.BLOCKED,
    }
    known = Support.UNKNOWN if overflow is None else expected.get(overflow, Support.UNKNOWN)
    assert verdict.support is known


def test_a_failed_detail_blocks_whatever_else_passed() -> None:
    """One probe's failure outweighs the success of all others, and its figures are the evidence."""
    results = [_result("batch_parity", Outcome.PASSED)] * 3
    results.append(ProbeResult("rope_positions", Outcome.FAILED, "late", Evidence(2, 3.0, 1e-6, 1)))
    verdict = judge(_facts(KV), results).continuous_batching

    assert verdict.support is Support.BLOCKED
    assert verdict.evidence == Evidence(2, 3.0, 1e-6, 1)
    assert verdict.reason.endswith("requests are served one at a time")


def test_a_blocked_prefix_keeps_nothing() -> None:
    """What reuse is measured to be wrong has no extent left."""
    verdict = judge(_facts(KV), [_result("cache_reuse", Outcome.FAILED)]).prefix_cache

    assert (verdict.support, verdict.extent) == (Support.BLOCKED, PrefixExtent.NONE)


@pytest.mark.parametrize(
    ("outcome", "support"),
    [
        (Outcome.PASSED, Support.SUPPORTED),
        (Outcome.FAILED, Support.BLOCKED),
        (Outcome.NO_DATA, Support.UNKNOWN),
        (Outcome.UNSUPPORTED, Support.UNKNOWN),
    ],
)
def test_state_of_a_batch_is_put_back_where_that_was_measured(
    outcome: Outcome, support: Support
) -> None:
    """Whether recurrent state and drafts go together depends on the model's code, so a probe decides."""
    verdict = judge(_facts(GATED_DELTA, KV), [_result("batched_drafts", outcome)]).batched_specdec
    assert verdict.support is support


@pytest.mark.parametrize("half", ["batch_parity", "state_snapshot"])
def test_rows_verify_nothing_together_where_one_half_is_wrong(half: str) -> None:
    """If batches or drafts fail alone, drafts in a batch fail."""
    results = [_result("batched_drafts", Outcome.PASSED), _result(half, Outcome.FAILED)]
    verdict = judge(_facts(GATED_DELTA, KV), results).batched_specdec
    assert verdict.support is Support.BLOCKED
    assert verdict.reason.endswith("rows verify no drafts together")


def test_seven_features_are_judged() -> None:
    """Every verdict is found under its feature's name."""
    verdicts = judge(_facts(KV))

    assert tuple(verdicts.by_feature()) == _FEATURES
    assert all(getattr(verdicts, name) is one for name, one in verdicts.by_feature().items())
