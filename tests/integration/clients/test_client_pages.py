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
    client_terminal,
    needs_clients,
    own_programs,
    page_steps,
)
from support.daemon.running_daemon import RunningDaemon
from support.programs.shown_sessions import fenced_blocks, is_as_shown

OWN_PAGES = ("anthropic", "lm-studio", "ollama", "openai")
"""The clients that the tests themselves use; all others have an environment of their own."""

OTHER_PAGES = tuple(
    page.stem for page in CLIENT_PAGES if page_steps(page) and page.stem not in OWN_PAGES
)


def page_of(name: str) -> Path:
    """Return the page of a client."""
    return CLIENT_PAGES[0].with_name(f"{name}.md")


def check_page(name: str, folder: Path, url: str, programs: Path) -> None:
    """Run a page's steps one after the other, and compare what they print with the page."""
    terminal = client_terminal(folder, url, programs)
    for step in page_steps(page_of(name)):
        status, output = terminal.run(step.command)
        where = f"docs/clients/{name}.md\n$ {step.command}\n{output}"
        assert status == 0, where
        assert not step.shown or is_as_shown(step.shown, output), where


@pytest.mark.parametrize("name", OWN_PAGES)
def test_client_page_answers_as_it_shows(name: str, plain_url: str, tmp_path: Path) -> None:
    """An official SDK, set up as its page says, prints what the page shows."""
    if name == "lm-studio":
        pytest.importorskip("lmstudio")
    check_page(name, tmp_path, plain_url, own_programs())


@pytest.mark.long
@needs_clients()
@pytest.mark.parametrize("name", OTHER_PAGES)
def test_third_party_client_page_answers_as_it_shows(
    name: str, plain_url: str, tmp_path: Path
) -> None:
    """A third-party client, set up as its page says, prints what the page shows.

    The daemon has no setting, and the client reaches no other host.
    """
    check_page(name, tmp_path, plain_url, CLIENT_PROGRAMS)


def test_client_pages_that_are_run_say_so() -> None:
    """A page says that a test runs it if and only if one does."""
    said = {page.stem for page in CLIENT_PAGES if "\nRun by a test" in page.read_text("utf-8")}

    assert said == {*OWN_PAGES, *OTHER_PAGES}


def test_every_client_page_is_in_the_overview() -> None:
    """The table of the overview links to each page."""
    overview = page_of("README").read_text("utf-8")
    missing = [one.stem for one in CLIENT_PAGES if f"({one.name})" not in overview]

    assert missing == ["README"]


@pytest.mark.parametrize("page", CLIENT_PAGES, ids=lambda one: one.stem)
def test_configuration_files_on_client_pages_parse(page: Path) -> None:
    """A client's configuration file on a page is valid JSON or TOML."""
    for _line, _before, block in fenced_blocks(page, "json"):
        assert isinstance(json.loads(block), dict)
    for _line, _before, block in fenced_blocks(page, "toml"):
        assert tomllib.loads(block)


def test_open_webui_page_lets_containers_and_browsers_in(tmp_path: Path) -> None:
    """The lines of settings on Open WebUI's page allow the host name and the origin that they name."""
    page = page_of("open-webui")
    text = "\n".join(block for _, _, block in fenced_blocks(page, "toml"))
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
