"""The ways to say whether, how much and how long the model is to think."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from machd.dialects.wire.bounds import TemplateVariable
from machd.dialects.wire.generation_request import agreed
from machd.errors import InvalidRequestError, UnsupportedParameterError

ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""``reasoning_effort``. What a model makes of the word is its template's."""

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_ALLOWED = (*_SWITCHES, _EFFORT, "preserve_thinking")
_MAX_VARIABLES = 16
_NO_LIMIT = -1

TemplateVariables: TypeAlias = Annotated[
    dict[
        Annotated[str, Meta(max_length=64, extra_json_schema={"enum": list(_ALLOWED)})],
        TemplateVariable,
    ],
    Meta(max_length=_MAX_VARIABLES),
]
"""``chat_template_kwargs``. A template is code, so these few variables are all that it is given."""


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Reasoning options; as in :class:`machd.request.conversation.Conversation`."""

    thinks: bool | None
    budget_tokens: int | None
    template_variables: Mapping[str, object]


def reasoning_options(
    *,
    effort: ReasoningEffort | None,
    variables: Mapping[str, bool | int | str] | None,
    budgets: Mapping[str, int | None],
) -> ReasoningOptions:
    """One answer out of every spelling; ``budgets`` maps fields to the tokens of thought that they allow.

    Raises:
        UnsupportedParameterError: A template variable that machd does not pass on.
        InvalidRequestError: Two spellings differ.
    """
    passed = dict(variables or {})
    _check_names(passed)
    _check_switches(passed)
    thinks = {_EFFORT: None if effort is None else effort != "none"}
    thinks |= {_place(name): bool(passed[name]) for name in _SWITCHES if name in passed}
    if effort not in (None, "none") and passed.setdefault(_EFFORT, effort) != effort:
        raise _differ(_EFFORT, _place(_EFFORT))
    limits = {name: None if tokens == _NO_LIMIT else tokens for name, tokens in budgets.items()}
    return ReasoningOptions(
        thinks=agreed(thinks), budget_tokens=agreed(limits), template_variables=passed
    )


def _check_names(variables: Mapping[str, object]) -> None:
    if not variables.keys() <= set(_ALLOWED):
        raise UnsupportedParameterError.at(
            "chat_template_kwargs", f"only {', '.join(_ALLOWED)} are passed on to the template"
        )


def _check_switches(variables: Mapping[str, object]) -> None:
    for name in _SWITCHES:
        if not isinstance(variables.get(name, False), bool):
            raise InvalidRequestError.at(_place(name), "expected `boolean`")


def _differ(one: str, other: str) -> InvalidRequestError:
    return InvalidRequestError(f"{one} and {other} contradict each other", param=other)


def _place(name: str) -> str:
    return f"chat_template_kwargs.{name}"
