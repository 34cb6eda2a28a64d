"""The code on a client's page works, as it stands there, against a plain daemon."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import httpx
import pytest
from support.clients.client_pages import (
    CLIENT_PAGES,
    CLIENT_PROGRAMS,
    PAGES_OF_SEVERAL,
    Client,
    client_steps,
    client_terminal,
    clients,
    needs_clients,
    own_programs,
)
from support.daemon.running_daemon import RunningDaemon
from support.programs.shown_sessions import fenced_blocks, is_as_shown

OWN_NAMES = ("anthropic", "lm-studio", "ollama", "openai")
"""The clients that the tests themselves use; all others have an environment of their own."""

OWN_CLIENTS = [one for one in clients() if one.name in OWN_NAMES]
OTHER_CLIENTS = [one for one in clients() if client_steps(one) and one.name not in OWN_NAMES]


def name_of(client: Client) -> str:
    """A client as a failing test names it."""
    return client.name


def page_of(name: str) -> Path:
    """Return a page of clients."""
    return CLIENT_PAGES[0].with_name(f"{name}.md")


def check_client(client: Client, folder: Path, url: str, programs: Path) -> None:
    """Run a client's steps one after the other, and compare what they print with its page."""
    terminal = client_terminal(folder, url, programs)
    for step in client_steps(client):
        status, output = terminal.run(step.command)
        where = f"docs/clients/{client.target}\n$ {step.command}\n{output}"
        assert status == 0, where
        assert not step.shown or is_as_shown(step.shown, output), where


@pytest.mark.parametrize("client", OWN_CLIENTS, ids=name_of)
def test_client_page_answers_as_it_shows(client: Client, plain_url: str, tmp_path: Path) -> None:
    """An official SDK, set up as its page says, prints what the page shows."""
    if client.name == "lm-studio":
        pytest.importorskip("lmstudio")
    check_client(client, tmp_path, plain_url, own_programs())


@pytest.mark.long
@needs_clients()
@pytest.mark.parametrize("client", OTHER_CLIENTS, ids=name_of)
def test_third_party_client_page_answers_as_it_shows(
    client: Client, plain_url: str, tmp_path: Path
) -> None:
    """A third-party client, set up as its section says, prints what the section shows.

    The daemon has no setting, and the client reaches no other host.
    """
    check_client(client, tmp_path, plain_url, CLIENT_PROGRAMS)


def test_pages_of_several_clients_are_read_by_section() -> None:
    """Each page of several clients has two sections at least, and every client that is run has steps."""
    of_page = {
        name: [one for one in clients() if one.page.stem == name] for name in PAGES_OF_SEVERAL
    }

    assert [name for name, found in of_page.items() if len(found) < 2] == []
    assert {one.name for one in OWN_CLIENTS} == set(OWN_NAMES)
    assert [one.name for one in OWN_CLIENTS if not client_steps(one)] == []


def test_client_pages_that_are_run_say_so() -> None:
    """A client's section says that a test runs it if and only if one does."""
    said = {one.name for one in clients() if "\nRun by a test" in one.text}

    assert said == {one.name for one in (*OWN_CLIENTS, *OTHER_CLIENTS)}


def test_every_client_is_in_the_overview() -> None:
    """The table of the overview links to each client."""
    overview = page_of("README").read_text("utf-8")

    assert [one.name for one in clients() if f"({one.target})" not in overview] == []


@pytest.mark.parametrize("page", CLIENT_PAGES, ids=lambda one: one.stem)
def test_configuration_files_on_client_pages_parse(page: Path) -> None:
    """A client's configuration file on a page is valid JSON or TOML."""
    for _line, _before, block in fenced_blocks(page, "json"):
        assert isinstance(json.loads(block), dict)
    for _line, _before, block in fenced_blocks(page, "toml"):
        assert tomllib.loads(block)


def test_open_webui_page_lets_containers_and_browsers_in(tmp_path: Path) -> None:
    """The lines of settings in Open WebUI's section allow the host name and the origin that they name."""
    client = next(one for one in clients() if one.name == "open-webui")
    blocks = fenced_blocks(client.page, "toml")
    text = "\n".join(block for line, _, block in blocks if line in client.lines)
    config_path = tmp_path / "machd.toml"
    config_path.write_text(re.sub(r"(?<=\n)\n?\[http\]\n", "", text), "utf-8")
    host = {"Host": "host.docker.internal:8080"}
    origin = {"Origin": "http://localhost:3000"}
    with RunningDaemon() as daemon:
        refused = [
            httpx.get(f"{daemon.url}/v1/models", headers=one).status_code for one in (host, origin)
        ]
    with RunningDaemon(config_path=config_path) as daemon:
        answered = [
            httpx.get(f"{daemon.url}/v1/models", headers=one).status_code for one in (host, origin)
        ]

    assert refused == [421, 403]
    assert answered == [200, 200]
