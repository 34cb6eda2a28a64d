"""Pages for browsers: who gets them, what they may do, and that they come from nowhere else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import httpx
import pytest
from support.browser.browser import opened_browser, opened_page
from support.daemon.operated_process import OperatedProcess, operated_process
from support.daemon.running_daemon import RunningDaemon
from support.daemon.serve_process import ServeProcess
from unit.engine.tiny_llama import TinyLlama

from machd.console.files import FILES, read_files

_BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
_MAX_BYTES = 250_000


@pytest.fixture(name="operated", scope="module")
def _operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedProcess]:
    folder = tmp_path_factory.mktemp("pages")
    config = folder / "machd.toml"
    config.write_text(f'[model]\npath = "{TinyLlama.save(folder / "model-of-pages").path}"\n')
    with operated_process(config) as operated:
        yield operated


@pytest.fixture(name="server")
def _server(operated: OperatedProcess) -> ServeProcess:
    return operated.server


def _both(server: ServeProcess) -> tuple[str, str]:
    return server.url, server.admin_url


def test_browsers_get_a_page_and_programs_what_they_had(server: ServeProcess) -> None:
    """Whoever names HTML gets it; curl and clients get JSON."""
    page = httpx.get(server.url, headers=_BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "Accept" in page.headers["vary"].title()
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        assert httpx.get(server.url, headers=headers).json()["server"] == "machd"
    assert (
        httpx.get(server.admin_url, headers=_BROWSER)
        .headers["content-type"]
        .startswith("text/html")
    )


def test_every_file_comes_with_the_policy_and_is_sent_once(server: ServeProcess) -> None:
    """No inline code, no frame, nothing from elsewhere; a file that has not changed is not sent again."""
    for url, folder in zip(_both(server), ("playground", "operator"), strict=True):
        for name, file in read_files(folder, "shared", "vendor").items():
            answer = httpx.get(f"{url}/console/{name}")
            assert answer.content == file.content
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            again = httpx.get(
                f"{url}/console/{name}", headers={"If-None-Match": answer.headers["etag"]}
            )
            assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("page", ["operator", "playground"])
def test_modules_come_without_waiting_for_each_other(page: str) -> None:
    """The page names every module of its own and of both pages, so that the browser asks for all of them at once."""
    named = (FILES / page / "index.html").read_text()
    for folder in (page, "shared"):
        for module in (FILES / folder).glob("*.js"):
            assert f'"/console/{folder}/{module.name}"' in named, module.name
    assert '"/console/vendor/htm-preact.js"' in named


def test_files_of_the_other_page_and_outside_are_not_served(server: ServeProcess) -> None:
    """Each listener has its own page, and a path leads nowhere else."""
    for path in (
        "operator/page.js", "../pages.py", "..%2fpages.py", "vendor/versions.json", "shared/", "",
    ):  # fmt: skip
        assert httpx.get(f"{server.url}/console/{path}").status_code == 404
    assert httpx.get(f"{server.admin_url}/console/playground/page.js").status_code in {401, 404}


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_other_pages_may_call_nothing(server: ServeProcess, origin: str) -> None:
    """A page of another origin is refused, on both listeners; machd's own is not."""
    for url, path in zip(_both(server), ("/v1/models", "/health"), strict=True):
        assert httpx.get(url + path, headers={"Origin": origin}).status_code == 403
        assert httpx.get(url + path, headers={"Origin": url}).status_code == 200


def test_a_foreign_name_that_points_here_gets_nothing(server: ServeProcess) -> None:
    """A page whose host was made to point here (DNS rebinding) has its own origin, and an unknown host."""
    for url in _both(server):
        headers = {"Host": "evil.example", "Origin": "http://evil.example", **_BROWSER}
        assert httpx.get(url, headers=headers).status_code == 421


def test_a_foreign_name_is_not_trusted_where_every_host_is_allowed() -> None:
    """``*`` takes any host, but makes none of them machd's own page."""
    with RunningDaemon(flags={"http.allowed_hosts": ["*"]}) as server:
        headers = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 403


def test_the_public_page_can_be_left_out() -> None:
    """Then browsers get what programs get, and pages of the same host are refused as all others."""
    with RunningDaemon(flags={"console.public": False}) as server:
        assert httpx.get(server.url, headers=_BROWSER).json()["server"] == "machd"
        assert httpx.get(f"{server.url}/console/shared/base.css").status_code == 404
        own = {"Origin": server.url}
        assert httpx.get(f"{server.url}/v1/models", headers=own).status_code == 403


def test_libraries_are_those_that_were_pinned() -> None:
    """Each has its licence beside it, and all pages together are small."""
    versions = json.loads((FILES / "vendor/versions.json").read_text())
    libraries = {one.name for one in (FILES / "vendor").iterdir() if one.suffix in {".js", ".css"}}
    assert set(versions) == libraries
    for name, known in versions.items():
        content = (FILES / "vendor" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == known["sha256"], name
        assert all((FILES / "vendor" / one).read_text() for one in known["licences"])
    served = read_files("operator", "playground", "shared", "vendor")
    assert sum(len(one.content) for one in served.values()) < _MAX_BYTES


def test_an_operator_without_scripts_gets_tables(operated: OperatedProcess) -> None:
    """The token goes in a form; another one is refused."""
    with opened_browser() as browser, opened_page(browser, has_scripts=False) as watched:
        page, url = watched.page, operated.server.admin_url
        page.goto(url)
        page.get_by_label("Admin token").fill("x" * 20)
        page.get_by_role("button", name="Show").click()
        assert "send the admin token" in page.content()
        page.goto(url)
        page.get_by_label("Admin token").fill(
            operated.admin.headers["Authorization"].removeprefix("Bearer ")
        )
        page.get_by_role("button", name="Show").click()
        assert page.get_by_role("heading", name="Open requests").is_visible()
        assert "model-of-pages" in page.content()
