"""Every feature's verdict on one model: its rule, and what probes measured of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from machd.capabilities.batching_rules import batched_specdec, continuous_batching
from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts
from machd.capabilities.rules import (
    PrefixExtent,
    PrefixVerdict,
    batched_adapters,
    chunked_prefill,
    expert_streaming,
    kv_quantization,
    prefix_cache,
    speculation,
)
from machd.capabilities.verdict import Source, Support, Verdict, measured


@dataclass(frozen=True, slots=True)
class ModelVerdicts:
    """One verdict a feature; the names are those of ``/v1/capabilities`` and of the metrics."""

    continuous_batching: Verdict
    batched_specdec: Verdict
    speculation: Verdict
    prefix_cache: PrefixVerdict
    kv_quantization: Verdict
    chunked_prefill: Verdict
    expert_streaming: Verdict
    batched_adapters: Verdict

    def by_feature(self) -> dict[str, Verdict]:
        """Verdicts by the feature's name."""
        return {
            "continuous_batching": self.continuous_batching,
            "batched_specdec": self.batched_specdec,
            "speculation": self.speculation,
            "prefix_cache": self.prefix_cache,
            "kv_quantization": self.kv_quantization,
            "chunked_prefill": self.chunked_prefill,
            "expert_streaming": self.expert_streaming,
            "batched_adapters": self.batched_adapters,
        }

    def changed_since(self, before: ModelVerdicts) -> frozenset[str]:
        """Features whose verdict is another one than before, whatever it stands on."""
        old, new = before.by_feature(), self.by_feature()
        return frozenset(name for name in new if new[name].support is not old[name].support)


def not_generating(what: str) -> ModelVerdicts:
    """Return the verdicts on a model that generates no text, and ``what`` it makes of texts instead."""
    no = Verdict(Support.BLOCKED, f"the model makes {what} of texts, and generates none")
    return ModelVerdicts(
        continuous_batching=no,
        batched_specdec=no,
        speculation=no,
        prefix_cache=PrefixVerdict(no.support, no.reason, extent=PrefixExtent.NONE),
        kv_quantization=no,
        chunked_prefill=no,
        expert_streaming=no,
        batched_adapters=no,
    )


def judge(facts: CacheFacts, results: Sequence[ProbeResult] | None = None) -> ModelVerdicts:
    """Ask every rule, and weigh what was measured against each.

    Results that no feature depends on change nothing. None lets the rules decide alone; otherwise a rule's
    word is not enough to batch a model.
    """
    is_rule_enough = results is None
    results = results or ()
    batching = _batching(facts, results)
    if not is_rule_enough:
        batching = _unless_unmeasured(batching, results)
    speculation = _speculation(facts, results)
    return ModelVerdicts(
        continuous_batching=batching,
        batched_specdec=_both(
            measured(
                batched_specdec(facts),
                _fed(results, "batched_drafts"),
                consequence="rows verify drafts alone",
            ),
            batching,
            speculation,
        ),
        speculation=speculation,
        prefix_cache=_prefix(facts, results),
        kv_quantization=measured(
            kv_quantization(facts),
            _fed(results, "quantized_kv"),
            consequence="keys and values are kept as they are",
        ),
        chunked_prefill=measured(
            chunked_prefill(facts),
            _fed(results, "chunked_prefill"),
            consequence="the answer depends on how the prompt is cut",
        ),
        expert_streaming=measured(
            expert_streaming(results),
            _fed(results, "expert_streaming"),
            consequence="serve the model from memory",
        ),
        batched_adapters=_adapters(results),
    )


def _batching(facts: CacheFacts, results: Sequence[ProbeResult]) -> Verdict:
    """Judge batching; a window needs evidence of a full one, as what it forgets shows only then."""
    fed = _fed(
        results,
        "batch_parity",
        "window_overflow",
        "rope_positions",
        "sampling_isolation",
        is_enough=lambda done: (
            not facts.window_tokens
            or done.get("window_overflow") in {Outcome.PASSED, Outcome.UNSUPPORTED}
        ),
    )
    return measured(
        continuous_batching(facts), fed, consequence="requests are served one at a time"
    )


def _unless_unmeasured(batching: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """A rule knows caches, not the code that fills them: a class may be wrong for rows in a batch."""
    if batching.source is Source.MEASURED or batching.support is Support.BLOCKED:
        return batching
    measuring = next((one.detail for one in results if one.outcome is Outcome.MEASURING), None)
    if batching.support is Support.UNKNOWN:
        # Its reason ends by saying what holds until the model has been measured.
        reason = batching.reason if measuring is None else f"{batching.reason} ({measuring})"
    elif measuring is not None:
        reason = (
            f"{batching.reason}; but requests are served one at a time until the code of this model "
            f"has been measured ({measuring})"
        )
    else:
        reason = (
            f"{batching.reason}; but the code of this model has not been measured here, and requests "
            "are served one at a time until it has been: serve does that at its start "
            "(probe.on_start), machd check MODEL --measure at once"
        )
    return replace(batching, support=Support.UNKNOWN, reason=reason)


def _speculation(facts: CacheFacts, results: Sequence[ProbeResult]) -> Verdict:
    fed = _fed(results, "trim" if facts.can_be_cut else "state_snapshot")
    return measured(speculation(facts), fed, consequence="decode without speculation")


def _prefix(facts: CacheFacts, results: Sequence[ProbeResult]) -> PrefixVerdict:
    rule = prefix_cache(facts)
    probes = (
        ("state_snapshot",) if rule.extent is PrefixExtent.SNAPSHOT else ("cache_reuse", "trim")
    )
    verdict = measured(rule, _fed(results, *probes), consequence="every prompt is computed anew")
    is_blocked = verdict.support is Support.BLOCKED
    return replace(verdict, extent=PrefixExtent.NONE) if is_blocked else verdict


def _adapters(results: Sequence[ProbeResult]) -> Verdict:
    """Judge adapters; the reason of a supported verdict says what they leave as it is."""
    fed = _fed(results, "adapters")
    verdict = measured(batched_adapters(results), fed, consequence="serve it without adapters")
    left_out = next((one.detail for one in fed if one.detail), "")
    if verdict.support is Support.SUPPORTED and left_out:
        return replace(verdict, reason=f"{verdict.reason}; {left_out}")
    return verdict


def _both(together: Verdict, batching: Verdict, speculation: Verdict) -> Verdict:
    """The verdict on the two together; blocked is also what one of the halves is."""
    if together.support is Support.BLOCKED:
        return together
    for half in (batching, speculation):
        if half.support is Support.BLOCKED:
            return replace(half, reason=f"{half.reason}; rows verify no drafts together")
    return together


def _fed(
    results: Sequence[ProbeResult],
    needed: str,
    *others: str,
    is_enough: Callable[[dict[str, Outcome]], bool] = lambda _done: True,
) -> list[ProbeResult]:
    """The results that a feature depends on.

    What passed counts only where ``needed`` passed and the rest ``is_enough``: probes of details
    prove nothing where the main one saw nothing.
    """
    fed = [result for result in results if result.probe in {needed, *others}]
    done = {result.probe: result.outcome for result in fed}
    if done.get(needed) is Outcome.PASSED and is_enough(done):
        return fed
    return [result for result in fed if result.outcome is not Outcome.PASSED]
