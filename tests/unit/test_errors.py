"""The tree of operating errors: codes, the drawing in the docstring, and the wire form."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from machd import errors
from machd.dialects.wire.errors import ErrorBody, error_body
from machd.errors import (
    ContextLengthExceededError,
    MachdError,
    SettingsError,
    StartupError,
    UnavailableError,
)

_LINE = re.compile(r"^ {4}(?P<indent> *)(?:[+\-.] )?(?P<name>\w+Error)\b(?P<rest>.*)$")

OPENAI_ERROR_TYPES = {
    "authentication_error",
    "invalid_request_error",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "server_error",
}


def _subclasses(base: type[MachdError]) -> Iterator[type[MachdError]]:
    for one in base.__subclasses__():
        yield one
        yield from _subclasses(one)


TREE: list[type[MachdError]] = [
    MachdError,
    *(one for one in _subclasses(MachdError) if one.__module__.split(".")[0].startswith("machd")),
]
each_class = pytest.mark.parametrize("error_class", TREE, ids=[one.__name__ for one in TREE])


@dataclass(frozen=True)
class Drawn:
    """One line of the drawing."""

    name: str
    parent: str | None
    statuses: tuple[str, ...]
    exit_code: int | None


def _drawing() -> dict[str, Drawn]:
    """The tree of the module docstring by class name; indentation makes parents."""
    drawn: dict[str, Drawn] = {}
    open_lines: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        # The root has neither indentation nor a mark, so a mark at column 0 is one level deep.
        depth = len(found["indent"]) + (0 if found["name"] == "MachdError" else 1)
        while open_lines and open_lines[-1][0] >= depth:
            open_lines.pop()
        exit_code = re.search(r"\bexit (\d+)", found["rest"])
        rest = re.sub(r"\bexit \d+", "", found["rest"])
        assert found["name"] not in drawn, "no class is drawn twice"
        drawn[found["name"]] = Drawn(
            name=found["name"],
            parent=open_lines[-1][1] if open_lines else None,
            statuses=tuple(re.findall(r"\b(\d{3}|\dxx)\b", rest)),
            exit_code=int(exit_code[1]) if exit_code else None,
        )
        open_lines.append((depth, found["name"]))
    return drawn


DRAWING = _drawing()


def _line_and_those_above(name: str) -> Iterator[Drawn]:
    above: str | None = name
    while above is not None:
        yield DRAWING[above]
        above = DRAWING[above].parent


def _make(error_class: type[MachdError]) -> MachdError:
    if issubclass(error_class, SettingsError):
        return error_class(["a line"])
    if issubclass(error_class, ContextLengthExceededError):
        return error_class(context_tokens=9, prompt_tokens=8, asked_tokens=2, param="max_tokens")
    return error_class("a line")


@each_class
def test_error_has_a_stable_code_of_its_own(error_class: type[MachdError]) -> None:
    """Each class writes its own snake_case code, so no two classes look alike to a program."""
    assert "code" in vars(error_class)
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", error_class.code)
    assert [one for one in TREE if one.code == error_class.code] == [error_class]


def test_every_error_of_the_module_is_in_the_tree() -> None:
    """Every exception class that errors.py defines is a MachdError."""
    defined = {
        name
        for name, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, BaseException)
    }

    assert defined == {one.__name__ for one in TREE if one.__module__ == errors.__name__}


def test_no_operating_error_is_defined_elsewhere() -> None:
    """Importing the wire layer adds no class to the tree: errors.py is the one tree."""
    assert {one.__module__ for one in TREE} == {errors.__name__}


def test_the_drawing_shows_exactly_the_classes() -> None:
    """A class that is not drawn, or a line without a class, is a mistake in the docstring."""
    assert set(DRAWING) == {one.__name__ for one in TREE}


@each_class
def test_error_is_drawn_under_its_parent(error_class: type[MachdError]) -> None:
    """The drawing's indentation is the inheritance."""
    parent = None if error_class is MachdError else error_class.__base__
    assert DRAWING[error_class.__name__].parent == (parent.__name__ if parent else None)


@each_class
def test_error_is_drawn_with_its_http_status(error_class: type[MachdError]) -> None:
    """The status on the line, or on the nearest line above it, is the class's; without one, 500."""
    lines = _line_and_those_above(error_class.__name__)
    statuses = next((line.statuses for line in lines if line.statuses), ("500",))

    assert any(
        re.fullmatch(status.replace("x", r"\d"), str(error_class.http_status))
        for status in statuses
    ), f"drawn with {statuses}, answers {error_class.http_status}"


@each_class
def test_error_is_drawn_with_its_exit_code(error_class: type[MachdError]) -> None:
    """The exit code on the line, or on the nearest line above it, is the class's; without one, 1."""
    lines = _line_and_those_above(error_class.__name__)
    assert error_class.exit_code == next((one.exit_code for one in lines if one.exit_code), 1)


@each_class
def test_error_encodes_into_the_openai_envelope(error_class: type[MachdError]) -> None:
    """The body is OpenAI's four fields and nothing else, with a status and a type clients know."""
    error = _make(error_class)
    wire = msgspec.json.encode(error_body(error))

    assert msgspec.json.decode(wire) == {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error_class.code,
        }
    }
    assert msgspec.json.decode(wire, type=ErrorBody) == error_body(error)
    assert 400 <= error.http_status < 600
    assert error.error_type in OPENAI_ERROR_TYPES


@each_class
def test_a_client_is_blamed_only_for_its_own_mistakes(error_class: type[MachdError]) -> None:
    """``invalid_request_error`` comes with a 4xx, and a 5xx never says that the request is wrong."""
    is_blame = error_class.error_type in {
        "authentication_error",
        "invalid_request_error",
        "permission_error",
    }
    assert not is_blame or 400 <= error_class.http_status < 500


def test_param_reaches_the_wire() -> None:
    """The request field that an error is about is told."""
    error = errors.InvalidRequestError("too big", param="max_tokens")
    assert error_body(error).error.param == "max_tokens"


@pytest.mark.parametrize(
    "error_class",
    [one for one in TREE if issubclass(one, UnavailableError)],
    ids=lambda one: str(one.__name__),
)
def test_an_error_of_the_moment_says_when_to_come_back(
    error_class: type[UnavailableError],
) -> None:
    """Every error that waiting cures carries whole seconds of at least one for Retry-After."""
    assert error_class("later").retry_after_s >= 1
    assert error_class("later", retry_after_s=7).retry_after_s == 7


def test_settings_error_shows_every_problem_at_once() -> None:
    """One run tells all that is wrong, a line each."""
    error = SettingsError(["first", "second"])
    assert (str(error), error.problems) == ("first\nsecond", ["first", "second"])


def test_exit_codes_are_the_promised_ones() -> None:
    """Only the contract's exit codes are in use, and a start that fails is bad usage."""
    assert {one.exit_code for one in TREE} == {1, 2, 69, 70}
    assert {one.exit_code for one in TREE if issubclass(one, StartupError)} == {2}
