"""A browser, and pages of it that note whatever they should not do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from support.clocks.polling import CEILING_S

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""With them it asks nothing of any other host."""


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Run the system's Chromium without a window; the test is skipped where there is none, but fails in CI."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium is installed; scripts/setup --dev installs it")
        pytest.skip("no Chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page and what went wrong on it.

    Attributes:
        page: Its own time limits are those of the suite.
        faults: Errors of scripts, what the policy forbade, and requests to other hosts; empty while all is well.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: list[str] = []
        page.set_default_timeout(CEILING_S * 1000)
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("console", lambda line: self._note(line.type, line.text))
        page.on("request", self._check_host)

    def _note(self, kind: str, text: str) -> None:
        # An answer that is an error is a line of the browser's own.
        if kind == "error" and not text.startswith("Failed to load resource"):
            self.faults.append(f"console: {text}")

    def _check_host(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in {"data", "blob"} and url.hostname != "127.0.0.1":
            self.faults.append(f"request to {request.url}")


@contextmanager
def opened_page(
    browser: Browser,
    *,
    width: int = 1280,
    height: int = 800,
    is_dark: bool = False,
    has_scripts: bool = True,
) -> Iterator[WatchedPage]:
    """Open an empty page in a context of its own: no cookie and no storage of another test.

    At its end nothing has gone wrong on it.
    """
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if is_dark else "light",
        java_script_enabled=has_scripts,
    )
    try:
        watched = WatchedPage(context.new_page())
        yield watched
        assert watched.faults == []
    finally:
        context.close()
