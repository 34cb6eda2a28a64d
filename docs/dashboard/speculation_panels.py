"""The panels about draft tokens: how many, how many were accepted, which proposer when."""

from __future__ import annotations

from dashboard.grafana import PanelKind, PanelRow, Query
from dashboard.promql import by_mode, panel, rate, rates_by, share_of_rates, total_rate

_DRAFTED = "machd_speculation_draft_tokens_total"
_ACCEPTED = "machd_speculation_accepted_tokens_total"
_CYCLES = "machd_speculation_cycles_total"
_DRAFTED_BY_POSITION = "machd_speculation_draft_by_position_tokens_total"
_ACCEPTED_BY_POSITION = "machd_speculation_accepted_by_position_tokens_total"

SPECULATION = PanelRow(
    "Speculation",
    (
        panel(
            "Draft tokens",
            "Tokens a second that were drafted and verified, and those that were accepted. Both "
            "are low where drafting does not pay: then fewer are made.",
            "short",
            total_rate(_DRAFTED, "drafted"),
            total_rate(_ACCEPTED, "right"),
        ),
        panel(
            "Acceptance",
            "The share of drafts that became part of an answer. It depends on the texts: high "
            "where answers repeat what was there before, low in free prose.",
            "percentunit",
            share_of_rates("right", _ACCEPTED, _DRAFTED),
            maximum=1,
        ),
        panel(
            "Acceptance by position",
            "The same by how far ahead the draft was; 1 is the next token. Lines that are near 0 "
            "from some position on say that a smaller speculation.max_draft_tokens would do.",
            "percentunit",
            Query(
                f"sum by (position, model) ({rate(_ACCEPTED_BY_POSITION)}) / "
                f"sum by (position, model) ({rate(_DRAFTED_BY_POSITION)})",
                "{{position}} {{model}}",
            ),
            maximum=1,
        ),
        panel(
            "Tokens of a verifying pass",
            "Tokens that a pass with drafts yields for its row, on average; without drafts it "
            "would be 1.",
            "short",
            Query(
                f"1 + sum by (model) ({rate(_ACCEPTED)}) / sum by (model) ({rate(_CYCLES)})",
                "tokens {{model}}",
            ),
        ),
        panel(
            "Changes of the decode mode",
            "Hand-overs a second, by the mode that began: to batched when others come, back to "
            "speculative when one is alone again.",
            "cps",
            rates_by("mode", "machd_decode_mode_changes_total"),
            is_stacked=True,
        ),
        panel(
            "Drafting that failed",
            "Sequences a second that went on without drafts. Their answers are right, and slower; "
            "speculation.failed in the log says why.",
            "cps",
            total_rate("machd_speculation_fallbacks_total", "failed"),
        ),
        panel(
            "Proposer",
            "What speculation.mode has come to. Where it is off, speculation in /v1/capabilities "
            "says why.",
            "none",
            by_mode("machd_speculation_mode"),
            kind=PanelKind.STATES,
            width=24,
        ),
    ),
)
