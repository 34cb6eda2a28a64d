"""What an operator has the daemon do from the page in a browser: cancelling, loading and pulling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants
from playwright.sync_api import Browser, Locator, Page, expect
from structlog.testing import capture_logs
from support.browser.browser import opened_browser, opened_page
from support.clocks.polling import CEILING_S
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.loopback_hub import LoopbackHub
from support.daemon.several_models import several_models
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate

from machd.engine.protocol.step import StepPlan

_SMALL, _LARGE = "org/small", "org/large"
_LARGE_BYTES = 3_000_000
_FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1000)}


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Browser]:
    expect.set_options(timeout=CEILING_S * 1000)
    with opened_browser() as browser:
        yield browser


@pytest.fixture(name="hub")
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    cache = tmp_path / "hf" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    large = _FILES | {"model.safetensors": bytes(_LARGE_BYTES)}
    with LoopbackHub({_SMALL: _FILES, _LARGE: large}) as hub:
        for name, value in hub.environ(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield hub


Operate = Callable[[SupervisedDaemon], Page]


@pytest.fixture(name="operate")
def _operate(browser: Browser, tmp_path: Path) -> Iterator[Operate]:
    """Starts a daemon and opens the page's view of its models."""

    def operate(daemon: SupervisedDaemon) -> Page:
        stack.enter_context(daemon)
        assert daemon.admin_url is not None
        port = daemon.admin_url.rpartition(":")[2]
        token = (tmp_path / "machd" / f"admin-{port}.token").read_text().strip()
        page = stack.enter_context(opened_page(browser)).page
        page.goto(f"{daemon.admin_url}/#token={token}")
        page.get_by_role("tab", name="Models").click()
        return page

    with capture_logs(), ExitStack() as stack:
        yield operate


@pytest.fixture(name="models")
def _models(hub: LoopbackHub, tmp_path: Path, operate: Operate) -> Page:
    """The models of a daemon that asks the hub, and serves what it has fetched."""
    assert hub.bytes_per_s is None
    config = tmp_path / "machd.toml"
    config.write_text(
        "[model]\noffline = false\n[models]\nhub_cache = true\n"
        '[models.alpha]\npath = "fake?size=1000"\n'
    )
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    flags = {"admin.listen": "127.0.0.1:0"}
    return operate(SupervisedDaemon(flags, config_path=config, environ=environ))


def _row(page: Page, text: str) -> Locator:
    return page.get_by_role("table", name="Models").locator("tbody tr").filter(has_text=text)


def _pull(page: Page, model: str) -> Locator:
    """Order a model, and return what the page says of it."""
    page.get_by_label("Model", exact=True).fill(model)
    page.get_by_role("button", name="Pull", exact=True).click()
    return page.get_by_label("Pull a model").get_by_role("status")


def test_cancel_frees_the_row_within_two_steps(tmp_path: Path, browser: Browser) -> None:
    """Of the step that runs when the daemon gets the cancel, the next but one at the latest computes another request there."""
    gate = StepGate()
    flags = {
        "continuous_batching.enabled": True,
        "continuous_batching.max_b": 2,
        "speculation.mode": "off",
    }
    made = AdminDaemon(tmp_path, lambda: FakeEngine(told, before_step=gate), flags)

    def ask(words: str) -> int:
        body = chat(f"tell {words}", max_tokens=100)
        url = f"{made.daemon.url}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=CEILING_S).status_code

    def next_step() -> StepPlan:
        gate.let()
        return gate.wait_until_held()

    with (
        capture_logs(),
        ThreadPoolExecutor(3) as pool,
        made,
        gate,
        opened_page(browser) as watched,
    ):
        page = watched.page
        page.goto(f"{made.admin_url}/#token={made.token}")
        answers = [pool.submit(ask, words) for words in ("one", "another", "a third")]
        plan = gate.wait_until_held()
        while len(plan.decode) < 2:
            plan = next_step()
        running = page.get_by_role("table", name="Running requests")
        waiting = page.get_by_role("table", name="Waiting requests")
        expect(waiting).to_contain_text("a free slot")
        for _ in range(4):
            assert not next_step().prefill, "the third request has no slot before"

        running.get_by_role("button", name="Cancel").first.click()
        with page.expect_response(lambda one: one.request.method == "DELETE") as cancelled:
            page.get_by_role("button", name="Cancel the request").click()
        assert cancelled.value.ok
        rows = {one.slot_index for one in plan.decode}
        begun = [one.slot_index for _ in range(2) for one in next_step().prefill]
        assert len(begun) == 1
        assert set(begun) < rows
        gate.open()
        assert sorted(one.result(CEILING_S) for one in answers)[:2] == [200, 200]
        expect(running).to_contain_text("Nothing runs.")


def test_model_is_pulled_with_its_progress_and_served(models: Page, hub: LoopbackHub) -> None:
    """Bytes of all bytes while they come, where it lies at the end, and a row of its own without a reload."""
    hub.bytes_per_s = 1_000_000
    said = _pull(models, _LARGE)
    bar = said.get_by_role("progressbar", name="Bytes fetched")
    expect(bar).to_have_attribute("max", str(_LARGE_BYTES + 4))
    expect(said).to_contain_text("of 3.00 MB")
    seen: set[float] = set()
    while "complete: " not in said.inner_text():
        seen.add(float(bar.get_attribute("value") or 0))
        models.wait_for_timeout(50)
    assert any(0 < one < _LARGE_BYTES for one in seen), "it came in parts"
    assert bar.get_attribute("value") == str(_LARGE_BYTES + 4)
    row = _row(models, _LARGE)
    row.get_by_role("button", name="Load").click()
    expect(row.get_by_text("ready", exact=True)).to_be_visible()


def test_pull_that_is_stopped_or_refused_says_so(models: Page, hub: LoopbackHub) -> None:
    """The page can order again at once, and what has come is not fetched twice."""
    hub.bytes_per_s = 200_000
    said = _pull(models, _LARGE)
    expect(said).to_contain_text("model.safetensors")
    models.get_by_role("button", name="Stop").click()
    expect(said.locator(".bad")).to_contain_text("stopped")
    expect(_row(models, _LARGE)).to_have_count(0)
    hub.bytes_per_s = None
    expect(_pull(models, "org/unknown").locator(".bad")).to_contain_text("org/unknown")
    expect(_pull(models, _LARGE)).to_contain_text("complete: ")
    expect(_row(models, _LARGE)).to_have_count(1)


def test_model_shows_the_memory_that_it_takes(tmp_path: Path, operate: Operate) -> None:
    """Nothing before it is loaded, then what its engine process holds; a load is not broken off."""
    page = operate(
        several_models(
            tmp_path,
            {"alpha": "size=1000&load_s=2"},
            flags={"admin.listen": "127.0.0.1:0"},
            environ={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
        )
    )
    row = _row(page, "alpha")
    measured = row.locator(".of-measured")
    expect(measured).not_to_contain_text("B")
    row.get_by_role("button", name="Load").click()
    expect(row.get_by_role("progressbar")).to_be_visible()
    row.get_by_role("button", name="Unload").click()
    expect(page.get_by_text("is unloaded once it is loaded")).to_be_visible()
    expect(row.get_by_text("unloaded", exact=True)).to_be_visible()
    row.get_by_role("button", name="Load").click()
    expect(measured).to_contain_text(" MB")
    row.get_by_role("button", name="Unload").click()
    expect(row.get_by_text("unloaded", exact=True)).to_be_visible()
    expect(measured).not_to_contain_text("B")
