"""What is asked of the model's thoughts, in every spelling."""

from __future__ import annotations

from typing import Any

import pytest

from machd.dialects.wire.reasoning import ReasoningOptions, reasoning_options
from machd.errors import InvalidRequestError, UnsupportedParameterError


def _options(effort: Any = None, variables: Any = None, budgets: Any = None) -> ReasoningOptions:
    return reasoning_options(effort=effort, variables=variables, budgets=budgets or {})


@pytest.mark.parametrize(
    ("effort", "variables", "thinks", "passed"),
    [
        (None, None, None, {}),
        (None, {}, None, {}),
        ("none", None, False, {}),
        ("minimal", None, True, {"reasoning_effort": "minimal"}),
        ("xhigh", None, True, {"reasoning_effort": "xhigh"}),
        ("max", None, True, {"reasoning_effort": "max"}),
        (None, {"enable_thinking": False}, False, {"enable_thinking": False}),
        (None, {"thinking": True}, True, {"thinking": True}),
        ("none", {"enable_thinking": False}, False, {"enable_thinking": False}),
        (None, {"reasoning_effort": "low"}, None, {"reasoning_effort": "low"}),
        ("low", {"reasoning_effort": "low"}, True, {"reasoning_effort": "low"}),
        (None, {"preserve_thinking": True}, None, {"preserve_thinking": True}),
    ],
)
def test_effort_and_variables_switch_thoughts(
    effort: str | None,
    variables: object,
    thinks: bool | None,  # noqa: FBT001
    passed: dict[str, object],
) -> None:
    """Effort turns thoughts on and off, and variables reach the template as they are."""
    assert _options(effort, variables) == ReasoningOptions(thinks, None, passed)


@pytest.mark.parametrize(
    ("effort", "variables", "param"),
    [
        ("none", {"enable_thinking": True}, "chat_template_kwargs.enable_thinking"),
        ("low", {"thinking": False}, "chat_template_kwargs.thinking"),
        (None, {"enable_thinking": True, "thinking": False}, "chat_template_kwargs.thinking"),
        ("low", {"reasoning_effort": "high"}, "chat_template_kwargs.reasoning_effort"),
        (None, {"enable_thinking": "yes"}, "chat_template_kwargs.enable_thinking"),
        (None, {"thinking": 0}, "chat_template_kwargs.thinking"),
    ],
)
def test_contradictions_are_refused(effort: str | None, variables: object, param: str) -> None:
    """Two answers to one question, or a switch that is no boolean, are a 400."""
    with pytest.raises(InvalidRequestError) as caught:
        _options(effort, variables)
    assert caught.value.param == param


def test_no_other_variable_reaches_a_template() -> None:
    """A template is code, and what it is given is a list that we know."""
    with pytest.raises(UnsupportedParameterError) as caught:
        _options(variables={"enable_thinking": True, "secret_switch": 1})
    assert caught.value.param == "chat_template_kwargs"
    assert "enable_thinking" in caught.value.message
    assert "secret_switch" not in caught.value.message


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ({"a": None, "b": None}, None),
        ({"a": 0, "b": None}, 0),
        ({"a": None, "b": 7}, 7),
        ({"a": 7, "b": 7}, 7),
    ],
)
def test_a_budget_has_several_names(budgets: dict[str, int | None], expected: int | None) -> None:
    """Whichever field has it, it is the same budget."""
    assert _options(budgets=budgets).budget_tokens == expected


def test_two_budgets_are_refused() -> None:
    """Different budgets are a 400 about the second."""
    with pytest.raises(InvalidRequestError) as caught:
        _options(budgets={"a": 1, "b": 2})
    assert caught.value.param == "b"
