"""Errors as data: every class of the tree comes back as it was sent."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.link.typed_values import ERROR_CLASSES, comparable, errors_of

from machd.errors import DrainingError, MachdError, ModelFormatError, SettingsError
from machd.link.error_form import error_as_data, error_from_data


def _sent(error: MachdError) -> MachdError:
    data = msgspec.msgpack.encode(error_as_data(error))
    return error_from_data(msgspec.msgpack.decode(data))


def _below(error_class: type[MachdError]) -> Iterator[type[MachdError]]:
    for one in error_class.__subclasses__():
        yield one
        yield from _below(one)


def test_every_class_of_errors_is_sampled() -> None:
    """The classes that are tested here are MachdError and all of machd's subclasses."""
    mine = {one for one in _below(MachdError) if one.__module__.startswith("machd")}
    assert {MachdError, *mine} == set(ERROR_CLASSES)


@pytest.mark.parametrize("error_class", ERROR_CLASSES, ids=lambda one: str(one.__name__))
@settings(max_examples=20)
@given(data=st.data())
def test_error_is_the_same_behind_the_link(
    error_class: type[MachdError], data: st.DataObject
) -> None:
    """Class, text, arguments, code, status and every attribute survive, with their types."""
    error = data.draw(errors_of(error_class))

    sent = _sent(error)

    assert comparable(sent) == comparable(error)
    assert str(sent) == str(error)
    assert (sent.code, sent.http_status, sent.error_type, sent.exit_code) == (
        error.code,
        error.http_status,
        error.error_type,
        error.exit_code,
    )


def test_a_cause_is_not_sent() -> None:
    """The cause stays in the process that caught it."""
    error = SettingsError(["a", "b"])
    error.__cause__ = OSError("secret")

    assert _sent(error).__cause__ is None


def test_a_param_that_was_set_later_is_sent() -> None:
    """An attribute has its value of the moment at which the error is sent."""
    error = DrainingError("later")
    error.param = "messages"

    assert _sent(error).param == "messages"


def test_a_message_that_is_no_text_is_sent_readably() -> None:
    """A file's name with bytes that are no Unicode does not keep the error from being told."""
    assert _sent(ModelFormatError("a\udcff.gguf: corrupt")).message == "a\\udcff.gguf: corrupt"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (("NoSuchError", {"message": "a", "param": None}), "machd has no error NoSuchError"),
        (("ValueError", {"message": "a", "param": None}), "machd has no error ValueError"),
        (("MachdError", {"message": "a"}), "MachdError has the attributes message, param"),
        (("MachdError", {"message": "a", "param": None, "x": 1}), "has the attributes"),
        (("MachdError", {"message": 7, "param": None}), "Expected `str`, got `int`"),
        (("SettingsError", {"message": "a", "param": None, "problems": "a"}), "Expected `array`"),
        ("MachdError", "Expected `array`"),
    ],
)
def test_what_is_no_error_is_refused(data: object, reason: str) -> None:
    """An unknown class, and attributes too few, too many or of another type, are named."""
    with pytest.raises(msgspec.ValidationError, match=reason):
        error_from_data(data)
