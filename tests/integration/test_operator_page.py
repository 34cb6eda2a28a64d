"""The operators' page in a real browser, before a daemon at work."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from structlog.testing import capture_logs
from support.browser.axe import violations
from support.browser.browser import WatchedPage, opened_browser, opened_page
from support.clocks.polling import CEILING_S
from support.daemon.operated_process import operated_process
from support.daemon.several_models import several_models
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat
from unit.engine.tiny_llama import TinyLlama

_SECRET = "heliotrope"
"""Stands in every prompt, and nowhere on the page."""

_LONG = f"tell {_SECRET}"
"""Its answer takes longer than what a test does meanwhile, unless it is ended."""

_SHORT = f"say {_SECRET}"
_MARKUP = "<img src=x onerror=alert(1)>"
_VIEWS = ("now", "models", "memory", "requests", "settings", "log")
_LOAD_S = 3.0


class _Operated:
    """One daemon and its clients.

    Attributes:
        daemon: Serves ``alpha``, and ``org/beta``, which takes some seconds to load.
        token: Of the admin listener.
    """

    def __init__(self, daemon: SupervisedDaemon, directory: Path, stack: ExitStack) -> None:
        self.daemon = daemon
        assert daemon.admin_url is not None
        self.admin_url = daemon.admin_url
        port = daemon.admin_url.rpartition(":")[2]
        self.token = (directory / "machd" / f"admin-{port}.token").read_text().strip()
        self._client = stack.enter_context(httpx.Client(base_url=daemon.url, timeout=CEILING_S))
        self._pool = stack.enter_context(ThreadPoolExecutor(16))

        assert self.ask("alpha", _SHORT).result(CEILING_S).startswith("200 ")

    def ask(self, model: str, text: str = _LONG, *, max_tokens: int = 4000) -> Future[str]:
        """Ask for an answer; its status code and body come later."""

        def answer() -> str:
            body = chat(text) | {"model": model, "max_tokens": max_tokens}
            found = self._client.post("/v1/chat/completions", json=body)
            return f"{found.status_code} {found.text}"

        return self._pool.submit(answer)

    def end_requests(self) -> None:
        """End what is open, as an operator does."""
        headers = {"Authorization": f"Bearer {self.token}"}
        with httpx.Client(base_url=self.admin_url, headers=headers) as admin:
            for one in admin.get("/admin/requests").json()["requests"]:
                admin.delete(f"/admin/requests/{one['id']}")


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Browser]:
    expect.set_options(timeout=CEILING_S * 1000)
    with opened_browser() as browser:
        yield browser


@pytest.fixture(name="operated")
def _operated(tmp_path: Path) -> Iterator[_Operated]:
    models = {"alpha": "size=3000", "org/beta": f"size=5000&load_s={_LOAD_S}", _MARKUP: "fails=1"}
    daemon = several_models(
        tmp_path,
        models,
        flags={
            "admin.listen": "127.0.0.1:0",
            "continuous_batching.max_b": 2,
            "speculation.mode": "off",
        },
        environ={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    with capture_logs(), ExitStack() as stack:
        stack.enter_context(daemon)
        yield _Operated(daemon, tmp_path, stack)


Open = Callable[..., Page]


@pytest.fixture(name="open_page")
def _open_page(operated: _Operated, browser: Browser) -> Iterator[Open]:
    """Opens the page at a view, with the token in its address; at the end nothing went wrong on it, and it shows no text."""
    opened: list[WatchedPage] = []

    def open_one(view: str = "now", *, is_dark: bool = False, width: int = 1280) -> Page:
        watched = stack.enter_context(opened_page(browser, is_dark=is_dark, width=width))
        opened.append(watched)
        watched.page.goto(f"{operated.admin_url}/#token={operated.token}")
        expect(watched.page.get_by_text("connected", exact=True)).to_be_visible()
        watched.page.evaluate("name => { location.hash = name; }", view)
        return watched.page

    with ExitStack() as stack:
        yield open_one
        for one in opened:
            assert _SECRET not in one.page.content()


def _rows(page: Page, table: str) -> Locator:
    """Return the rows of a table that are no heading, and do not say that there are none."""
    return page.get_by_role("table", name=table).locator("tbody tr:not(.empty)")


def _tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def test_cancelled_request_leaves_the_page_and_its_slot(
    operated: _Operated, open_page: Open
) -> None:
    """Its client gets the operator's error, the next one in the queue gets its slot, and it is among the finished ones."""
    page = open_page()
    answers = [operated.ask("alpha") for _ in range(3)]
    expect(_rows(page, "Running requests")).to_have_count(2)
    waiting = _rows(page, "Waiting requests")
    expect(waiting).to_have_count(1)
    expect(waiting).to_contain_text("a free slot")

    first = _rows(page, "Running requests").first
    cancelled_id = str(first.locator("code").get_attribute("title")).partition(",")[0]
    first.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the request").click()

    expect(page.get_by_title(cancelled_id)).to_have_count(0)
    expect(waiting).to_have_count(0)
    assert sum(one.done() for one in answers) == 1
    operated.end_requests()
    _tab(page, "Requests")
    expect(
        _rows(page, "Finished requests").filter(has=page.get_by_title(cancelled_id))
    ).to_have_count(1)
    expect(_rows(page, "Finished requests")).to_have_count(4)


def test_question_that_is_refused_cancels_nothing(operated: _Operated, open_page: Open) -> None:
    """Escape, and the button that keeps it, leave the request alone."""
    page = open_page()
    answer = operated.ask("alpha")
    row = _rows(page, "Running requests")
    row.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.wait_for_timeout(500)
    assert not answer.done()
    operated.end_requests()


def test_request_waits_for_its_cold_model_with_the_load_in_view(
    operated: _Operated, open_page: Open
) -> None:
    """The queue says what is loaded and how far it is, the models' view too, and then the answer comes."""
    page = open_page()
    answer = operated.ask("org/beta", _SHORT)
    expect(_rows(page, "Waiting requests")).to_contain_text(
        re.compile(r"its model, which is loading: loading the weights, (25|50|75) %")
    )
    _tab(page, "Models")
    row = _rows(page, "Models").filter(has_text="org/beta")
    expect(row.get_by_role("progressbar")).to_be_visible()
    expect(row.get_by_text("ready", exact=True)).to_be_visible()
    assert answer.result(CEILING_S).startswith("200 ")


def test_page_says_that_an_engine_process_was_killed_and_comes_back(
    operated: _Operated, open_page: Open
) -> None:
    """While it is replaced its requests wait, and go on afterwards."""
    assert operated.ask("org/beta", _SHORT).result(CEILING_S).startswith("200 ")
    page = open_page()
    answer = operated.ask("org/beta", max_tokens=1000)
    expect(_rows(page, "Running requests")).to_have_count(1)

    os.kill(operated.daemon.processes[-1].pid, signal.SIGKILL)

    trouble = page.get_by_text("org/beta: its engine process has ended and is being replaced")
    expect(trouble).to_be_visible()
    expect(_rows(page, "Waiting requests")).to_contain_text("its model")
    expect(trouble).to_be_hidden()
    expect(_rows(page, "Running requests")).to_have_count(1)
    assert answer.result(CEILING_S).startswith("200 ")


def test_page_comes_back_when_the_daemon_does(tmp_path: Path, browser: Browser) -> None:
    """While it is away the page says so and keeps what it knew; with the same token it goes on by itself."""
    token_file = tmp_path / "token"
    token_file.write_text("a token of the operator's")
    token_file.chmod(0o600)

    def daemon(port: int) -> SupervisedDaemon:
        address = {"admin.listen": f"127.0.0.1:{port}", "auth.admin_token_file": str(token_file)}
        return several_models(tmp_path, {"alpha": "size=3000"}, flags=address)

    with capture_logs(), opened_page(browser) as watched:
        with daemon(0) as first:
            assert first.admin_url is not None
            watched.page.goto(f"{first.admin_url}/#token={token_file.read_text()}")
            expect(watched.page.get_by_text("connected", exact=True)).to_be_visible()
        lost = watched.page.get_by_text("machd cannot be reached")
        expect(lost).to_contain_text("trying again")
        with daemon(int(first.admin_url.rpartition(":")[2])):
            expect(watched.page.get_by_text("connected", exact=True)).to_be_visible()
            expect(lost).to_have_count(0)
        # What the browser itself says of a daemon that is away.
        watched.faults[:] = [one for one in watched.faults if "net::ERR" not in one]


def test_keyboard_alone_signs_in_moves_between_views_and_cancels(
    operated: _Operated, browser: Browser
) -> None:
    """A wrong token is refused; every view is reached by arrows; a request is ended without a pointer."""
    with opened_page(browser) as watched:
        page, keyboard = watched.page, watched.page.keyboard
        page.goto(operated.admin_url)
        expect(page.get_by_label("Admin token")).to_be_focused()
        keyboard.type("not the token")
        keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not the token of the daemon")
        page.get_by_label("Admin token").fill("")
        keyboard.type(operated.token)
        keyboard.press("Enter")
        expect(page.get_by_text("connected", exact=True)).to_be_visible()

        _focus(page, "tab", "Now")
        for view in (*_VIEWS[1:], _VIEWS[0]):
            keyboard.press("ArrowRight")
            expect(page.get_by_role("tab", selected=True)).to_be_focused()
            assert page.evaluate("location.hash") == f"#{view}"
        answer = operated.ask("alpha")
        expect(_rows(page, "Running requests")).to_have_count(1)
        _focus(page, "button", "Cancel chatcmpl")
        keyboard.press("Enter")
        expect(page.get_by_role("button", name="Keep as it is")).to_be_focused()
        keyboard.press("Tab")
        keyboard.press("Enter")
        assert "error" in answer.result(CEILING_S)
        expect(_rows(page, "Running requests")).to_have_count(0)
        expect(page.locator("#view")).to_be_focused()


def _focus(page: Page, role: Any, name: str) -> None:
    """Press Tab until an element has the focus."""
    wanted = page.get_by_role(role, name=name)
    for _ in range(30):
        if wanted.evaluate("one => one === document.activeElement"):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"Tab does not reach {name}")


_WINDOWS = (("light", 400), ("dark", 1280))
"""One of each scheme and of each width; the others are long."""


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        pytest.param(*window, marks=[] if window in _WINDOWS else pytest.mark.long)
        for window in product(("light", "dark"), (400, 1280))
    ],
)
def test_every_view_is_accessible(
    operated: _Operated, open_page: Open, scheme: str, width: int
) -> None:
    """axe-core finds nothing, at work and with a question open; a narrow page is no wider than its window."""
    answers = [operated.ask("alpha") for _ in range(3)]
    page = open_page(is_dark=scheme == "dark")
    page.get_by_role("button", name="Cancel").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": width, "height": 800})
    for view in _VIEWS:
        _tab(page, view.title())
        expect(page.get_by_role("heading", level=2).first).to_be_visible()
        assert violations(page) == [], view
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
    assert not all(one.done() for one in answers)
    operated.end_requests()


def test_token_form_is_accessible(operated: _Operated, browser: Browser) -> None:
    """Before anything is known of the daemon."""
    with opened_page(browser) as watched:
        watched.page.goto(operated.admin_url)
        expect(watched.page.get_by_label("Admin token")).to_be_visible()
        assert violations(watched.page) == []


def test_live_setting_is_changed_refused_and_taken_back(
    operated: _Operated, open_page: Open
) -> None:
    """A bad value stays in its field with the reason; a change of others in between is not overwritten unseen."""
    page = open_page("settings")
    page.get_by_label("Filter").fill("limits.max_n")
    row = page.get_by_role("row").filter(has_text="limits.max_n")
    change = row.get_by_role("button", name="Change limits.max_n")
    field = row.get_by_label("New value of limits.max_n")

    change.click()
    field.fill("-1")
    field.press("Enter")
    expect(row.get_by_role("alert")).to_contain_text("limits.max_n")
    field.fill("5")
    field.press("Enter")
    expect(row.get_by_role("cell").nth(0)).to_have_text("5")
    expect(row).to_contain_text("the admin API")

    change.click()
    field.fill("6")
    headers = {"Authorization": f"Bearer {operated.token}"}
    other = httpx.patch(
        f"{operated.admin_url}/admin/config", json={"limits": {"max_n": 7}}, headers=headers
    )
    assert other.status_code == 200
    field.press("Enter")
    expect(row.get_by_role("alert")).to_contain_text("changed since this page read them")
    field.press("Escape")
    expect(row.get_by_role("cell").nth(0)).to_have_text("7")
    row.get_by_role("button", name="Take back limits.max_n").click()
    expect(row.get_by_role("cell").nth(0)).to_have_text("8")
    expect(page.get_by_role("button", name="Change server.port")).to_have_count(0)


def test_names_are_text(open_page: Open) -> None:
    """A model whose name is markup is shown by its name; what its failed load says is text as well."""
    page = open_page("models")
    row = _rows(page, "Models").filter(has_text=_MARKUP)
    row.get_by_role("button", name="Load").click()
    expect(row).to_contain_text("failed")
    for view in _VIEWS:
        _tab(page, view.title())
        expect(page.locator("#page img")).to_have_count(0)


def test_memory_has_a_verdict_in_words(open_page: Open) -> None:
    """By the pressure where the system tells it, and by what is left of the machine's memory."""
    verdict = """([free, pressure]) => import("/console/operator/memory_verdict.js").then(({ memoryVerdict }) => {
      const { text, className } = memoryVerdict({ available_bytes: free, total_bytes: 16e9, pressure });
      return `${text}: ${className}`;
    })"""
    page = open_page()
    expect(page.locator(".facts")).to_contain_text(" free")
    for found, expected in (
        ((3.1e9, 0.2), "3.10 GB free, no pressure: "),
        ((3.1e9, 4.2), "3.10 GB free, some pressure (4 %): warning"),
        ((3.1e9, 23), "3.10 GB free, high pressure (23 %): bad"),
        ((0.2e9, 0), "200 MB free, almost full, no pressure: warning"),
        ((3.1e9, None), "3.10 GB free: "),
    ):
        assert page.evaluate(verdict, found) == expected


def test_request_list_is_filtered_and_sorted(operated: _Operated, open_page: Open) -> None:
    """By words and by errors; a heading sorts one way, and then the other. All columns are in view at 1280 pixels."""
    for text in ("a", "a much longer one than that"):
        assert operated.ask("alpha", f"say {text}").result(CEILING_S).startswith("200 ")
    page = open_page("requests")
    rows = _rows(page, "Finished requests")
    expect(rows).to_have_count(3)
    assert page.locator(".scrolled").evaluate("one => one.scrollWidth <= one.clientWidth")
    by_tokens = page.get_by_role("columnheader", name="Tokens", exact=True)
    by_tokens.get_by_role("button").click()
    expect(by_tokens).to_have_attribute("aria-sort", "descending")
    most = rows.first.inner_text()
    by_tokens.get_by_role("button").click()
    expect(by_tokens).to_have_attribute("aria-sort", "ascending")
    assert rows.last.inner_text() == most
    page.get_by_label("Show").select_option("errors")
    expect(rows).to_have_count(0)
    page.get_by_label("Show").select_option("all")
    page.get_by_label("Filter").fill("no such model")
    expect(rows).to_have_count(0)


def test_log_follows_what_happens_and_is_filtered_by_level(
    tmp_path: Path, browser: Browser
) -> None:
    """A refused change of the settings is the last line, and the only error."""
    config = tmp_path / "machd.toml"
    config.write_text(f'[model]\npath = "{TinyLlama.save(tmp_path / "tiny").path}"\n')
    with operated_process(config) as operated, opened_page(browser) as watched:
        page = watched.page
        token = operated.admin.headers["Authorization"].removeprefix("Bearer ")
        page.goto(f"{operated.server.admin_url}/#token={token}")
        _tab(page, "Log")
        lines = page.get_by_label("Log events").get_by_role("listitem")
        expect(lines.filter(has_text="daemon.ready")).to_have_count(1)
        refused = operated.admin.patch("/admin/config", json={"limits": {"max_n": 0}})
        assert refused.status_code == 400
        expect(lines.last).to_contain_text("settings.refused")
        expect(lines.last).to_be_in_viewport()
        page.get_by_label("From level").select_option("error")
        expect(lines).to_have_count(1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("watched_s", [2, pytest.param(600, marks=pytest.mark.longest)])
def test_page_that_is_watched_holds_no_more_than_at_first(
    operated: _Operated, open_page: Open, watched_s: int
) -> None:
    """Requests come and go, and every view is looked at again and again: scripts and elements take what they took."""
    # As many as are kept, so that what comes takes the place of what was there.
    kept = [operated.ask("alpha", _SHORT, max_tokens=1) for _ in range(240)]
    assert all(one.result(CEILING_S).startswith("200 ") for one in kept)
    page = open_page()
    tools = page.context.new_cdp_session(page)
    tools.send("Performance.enable")

    def work(requests: int) -> tuple[float, float]:
        """Return the bytes of scripts, and the elements, after so many requests."""
        answers = [operated.ask("alpha", _SHORT) for _ in range(requests)]
        for view in (*_VIEWS[1:], _VIEWS[0]):
            _tab(page, view.title())
            expect(page.get_by_role("heading", level=2).first).to_be_visible()
        assert all(one.result(CEILING_S).startswith("200 ") for one in answers)
        tools.send("HeapProfiler.collectGarbage")
        found = tools.send("Performance.getMetrics")["metrics"]
        metrics = {one["name"]: float(one["value"]) for one in found}
        return metrics["JSHeapUsedSize"], metrics["Nodes"]

    work(10)
    first_bytes, first_nodes = last_bytes, last_nodes = work(10)
    watched_until_s = time.monotonic() + watched_s
    while time.monotonic() < watched_until_s:
        last_bytes, last_nodes = work(10)
        page.wait_for_timeout(500)
    assert last_bytes < 1.1 * first_bytes + 500_000
    assert last_nodes < 1.1 * first_nodes + 200
