"""The start-up screen of ``machd serve``."""

from __future__ import annotations

import pytest
from support.engines.fake_engine import FakeEngine

from machd.cli.serve import welcome
from machd.installed import command_name


def test_operators_are_told_where_they_are_answered() -> None:
    """The admin address in a line of its own, and none where the admin API is off."""
    line = f"  operators        http://127.0.0.1:8081 ({command_name()} ctl page)\n"
    told = welcome("http://127.0.0.1:8080", "http://127.0.0.1:8081", FakeEngine(), None)
    assert line in told
    assert welcome("http://127.0.0.1:8080", None, FakeEngine(), None) == told.replace(line, "")


def test_operators_are_given_the_address_that_ctl_would_not_find() -> None:
    """An address that stands in a flag alone has to be given to ctl as well."""
    told = welcome("http://h:1", "http://127.0.0.1:9", FakeEngine(), None, names_admin=True)
    assert f"({command_name()} ctl --address 127.0.0.1:9 page)\n" in told
    told = welcome("http://h:1", "unix:/run/a b", FakeEngine(), None, names_admin=True)
    assert f"({command_name()} ctl --address 'unix:/run/a b' status)\n" in told


@pytest.mark.parametrize(
    ("url", "curl"),
    [
        ("unix:/run/machd.sock", "curl --unix-socket /run/machd.sock http://localhost/v1/models"),
        ("unix:@machd", "curl --abstract-unix-socket machd http://localhost/v1/models"),
    ],
)
def test_a_socket_is_shown_with_a_command_that_reaches_it(url: str, curl: str) -> None:
    """A socket has no URL that a client could be given."""
    told = welcome(url, None, FakeEngine(), None)
    assert f"{curl}\n" in told
    assert f"{url}/v1" not in told
