"""The documentation builds as a self-contained site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from playwright.sync_api import expect
from support.browser.browser import WatchedPage, opened_browser, opened_page
from support.clocks.polling import CEILING_S

ROOT = Path(__file__).resolve().parents[2]

_LOADS = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc\s*=\s*[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon|modulepreload))"
    r"[^>]*\bhref\s*=\s*[\"']?((?:https?:)?//[^\"'\s>]+)",
    re.IGNORECASE,
)
_STYLE_LOADS = re.compile(r"(?:@import\s*(?:url\()?|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")
_HIDDEN_LOADS = re.compile(r'class="[^"]*\b(?:mermaid|md-source)\b')
"""Blocks for which the theme's own script would fetch a renderer, or a repository's figures."""


@pytest.fixture(name="site", scope="module")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=CEILING_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr, result.stderr
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback, and yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def texts(site: Path, suffix: str) -> dict[str, str]:
    """The built files of a kind, by name."""
    return {str(p.relative_to(site)): p.read_text("utf-8") for p in site.rglob(f"*{suffix}")}


def test_every_page_is_in_the_site(site: Path) -> None:
    """Each page of docs/ is built, and those of the repository's root that it links to."""
    built = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if path.name not in {"README.md", "index.md"}
    }

    assert pages - built == set()
    assert {"project/changelog", "project/security", "project/contributing"} <= built


def test_it_loads_nothing_from_other_hosts(site: Path) -> None:
    """No script, style, font or picture comes from elsewhere."""
    pages, styles = texts(site, ".html"), texts(site, ".css")
    found = {name: _LOADS.findall(text) for name, text in pages.items()}
    found |= {name: _STYLE_LOADS.findall(text) for name, text in {**pages, **styles}.items()}
    hidden = [name for name, text in pages.items() if _HIDDEN_LOADS.search(text)]

    assert len(pages) > 40
    assert {name: loads for name, loads in found.items() if loads} == {}
    assert hidden == []


def test_a_load_from_elsewhere_is_noticed() -> None:
    """The patterns see what browsers would fetch, and pass over plain links."""
    assert _LOADS.search('<script src="https://cdn.example.org/x.js">')
    assert _LOADS.search('<link rel="stylesheet" href="//fonts.example.org/css">')
    assert _STYLE_LOADS.search("src: url(https://fonts.example.org/x.woff2)")
    assert not _LOADS.search('<a href="https://example.org">')
    assert not _LOADS.search('<link rel="stylesheet" href="../assets/main.css">')


@pytest.fixture(name="watched", scope="module")
def _watched(site: Path) -> Iterator[tuple[str, WatchedPage]]:
    """The address of the site, and a page of a browser that reaches nothing else."""
    with served(site) as url, opened_browser() as browser, opened_page(browser) as watched:
        yield url, watched


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("machd_engine_restarts_total", '[href*="operating/metrics/"][href$="#every-metric"]'),
        ("Claude Code", '[href*="clients/agents/"][href$="#claude-code"]'),
        ("Gumbel", '[href*="decisions/sampling/"]'),
    ],
)
def test_search_finds_a_section_without_another_host(
    watched: tuple[str, WatchedPage], words: str, link: str
) -> None:
    """A browser that reaches nothing but the site finds a metric, a client and a decision by their words."""
    url, browsed = watched
    browsed.page.goto(url)
    # Key by key: once the index is read, it is a key that has the page look for what stands there.
    browsed.page.get_by_role("textbox", name="Search").press_sequentially(words)
    found = browsed.page.locator(f"a.md-search-result__link{link}")
    expect(found.first).to_be_attached(timeout=CEILING_S * 1000)


def test_links_to_the_repository_lead_to_pages(site: Path) -> None:
    """A link that leaves docs/ on disk stays in the site, or is its text alone."""
    leaving = {
        name: found
        for name, text in texts(site, ".html").items()
        if (found := re.findall(r'href="(?![a-z]+:)[^"]*(?:\.md|\.toml|\.py)(?:#[^"]*)?"', text))
    }

    assert leaving == {}
