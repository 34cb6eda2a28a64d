"""The page on which to try the models, in a real browser, in front of a daemon."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect
from support.browser.axe import violations
from support.browser.browser import opened_browser, opened_page
from support.browser.playground import Playground
from support.checkpoints.served_adapters import said, write_adapter
from support.clocks.polling import wait_until
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import says_its_adapters
from support.engines.fake_engine import FakeEngine, Script, spelled
from support.engines.step_gate import StepGate, at_prefill

from machd.engine.protocol.step import StepPlan
from machd.request.generation import SamplingParams
from machd_probes.vision_matrix.turns import ImagePart

_CHAT = "/v1/chat/completions"
_KEY = "k" * 32
_HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
_CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
_SENT_S = 60
_FILL_STORAGE = """
for (let size = 2 ** 22, n = 0; size >= 1; n++) {
  try { localStorage.setItem(`x${n}`, "x".repeat(size)) } catch { size /= 2 }
}
"""


@lru_cache(maxsize=64)
def _script(prompt: tuple[int, ...]) -> Script:
    asked = bytes(prompt).decode().rpartition("user: say ")[2]
    return spelled(asked.removesuffix("\nassistant: "))


def _told(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """A script that obeys: to the last ``say TEXT`` of a chat it answers TEXT."""
    return _script(prompt)(prompt, sampling, position)


def _slowly(_plan: StepPlan) -> None:
    time.sleep(0.002)


@pytest.fixture(name="browser", scope="module")
def _browser() -> Iterator[Browser]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture(name="daemon", scope="module")
def _daemon() -> Iterator[RunningDaemon]:
    """One whose model says what it is told."""
    flags = {"limits.max_tokens_default": 400, "continuous_batching.enabled": True}
    with RunningDaemon(lambda: FakeEngine(_told, before_step=_slowly), flags) as daemon:
        yield daemon


@pytest.fixture(name="page")
def _page(browser: Browser) -> Iterator[Page]:
    with opened_page(browser) as watched:
        yield watched.page


@pytest.fixture(name="playground")
def _playground(page: Page, daemon: RunningDaemon) -> Playground:
    return Playground(page, daemon.url)


def _sent(page: Page, send: Any) -> dict[str, Any]:
    """The body of the request that ``send()`` makes."""
    with page.expect_request(f"**{_CHAT}") as request:
        send()
    body: Any = request.value.post_data_json
    assert isinstance(body, dict)
    return body


def test_answer_streams_with_its_figures(playground: Playground, daemon: RunningDaemon) -> None:
    """Text comes piece by piece; at its end there are rates, times and counts of tokens, and nothing still generates."""
    answer = playground.ask("say two words")
    assert playground.text_of(answer) == "two words"
    figures = answer.locator(".figures").inner_text()
    assert figures.startswith("finished · first token ")
    for unit in (" tokens/s", "10 tokens", " cached)", "total "):
        assert unit in figures
    assert "generating" not in playground.page.content()
    again = playground.ask("say more")
    assert playground.text_of(again) == "more"
    del daemon


def test_only_changed_settings_are_sent(playground: Playground) -> None:
    """A request has its model and messages, and what was typed in; what cannot be sent is not."""
    page = playground.page
    body = _sent(page, lambda: playground.send("say a"))
    assert set(body) == {"model", "messages", "stream", "stream_options", "return_progress"}
    playground.wait_for_end(playground.answers.last)
    page.get_by_label("System message").fill("be brief")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top k").fill("20")
    page.get_by_label("Stop, one text").fill("END\n\nSTOP")
    page.get_by_label("Reasoning").select_option("low")
    body = _sent(page, lambda: playground.send("say b"))
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    fields = {"temperature": 0.5, "top_k": 20, "stop": ["END", "STOP"], "reasoning_effort": "low"}
    assert {name: body[name] for name in fields} == fields
    playground.wait_for_end(playground.answers.last)
    page.get_by_label("Temperature").fill("9")
    playground.send("say c")
    page.get_by_text("Not sent. Settings: temperature: At most 2").wait_for()
    assert playground.answers.count() == 2


def test_stop_ends_the_answer_here_and_at_the_daemon(browser: Browser) -> None:
    """The text up to there stays, and the daemon computes no more of it."""
    with (
        RunningDaemon(lambda: FakeEngine(before_step=_slowly)) as daemon,
        opened_page(browser) as watched,
    ):
        playground = Playground(watched.page, daemon.url)
        watched.page.get_by_label("Max tokens").fill("3900")
        playground.send("go on and on")
        playground.answers.get_by_text("generating").wait_for()
        watched.page.get_by_role("button", name="Stop").click()
        playground.wait_for_end(playground.answers.first)
        assert "stopped" in playground.answers.locator(".figures").inner_text()
        assert len(playground.text_of(playground.answers.first)) > 0
        aborted = 'machd_aborts_total{model="fake",reason="client_disconnected"} 1.0'
        wait_until(
            lambda: aborted in httpx.get(f"{daemon.url}/metrics").text, "the daemon ends it, too"
        )


def test_time_is_shown_while_nothing_has_come(browser: Browser) -> None:
    """Until the first token the page says how long it waits; then it says that it generates."""
    gate = StepGate(at_prefill)
    with (
        RunningDaemon(lambda: FakeEngine(_told, before_step=gate)) as daemon,
        gate,
        opened_page(browser) as watched,
    ):
        playground = Playground(watched.page, daemon.url)
        playground.send("say so")
        gate.wait_until_held()
        playground.answers.get_by_text(re.compile(r"Waiting [1-9]\d*\.\d s")).wait_for()
        assert watched.page.get_by_text("generating").count() == 0
        gate.open()
        playground.wait_for_end(playground.answers.first)
        assert playground.text_of(playground.answers.first) == "so"


def test_progress_of_a_long_prompt_is_shown(browser: Browser) -> None:
    """While it is computed: tokens of how many, the rate and the time left; then the answer."""

    def slowly(plan: StepPlan) -> None:
        time.sleep(0.1 if plan.prefill else 0.0)

    with (
        RunningDaemon(
            lambda: FakeEngine(_told, before_step=slowly, context_tokens=100_000)
        ) as daemon,
        opened_page(browser) as watched,
    ):
        playground = Playground(watched.page, daemon.url)
        playground.send(f"{'x' * 20_000} user: say so")
        shown = r"prompt \d+ of 200\d\d tokens · \d+\.\d tokens/s · \d+ s left"
        playground.answers.get_by_text(re.compile(shown)).wait_for()
        playground.wait_for_end(playground.answers.first)
        assert playground.text_of(playground.answers.first) == "so"
        assert "of 200" not in playground.answers.first.inner_text()


def test_model_and_its_adapter_answer_the_same_side_by_side(
    browser: Browser, tmp_path: Path
) -> None:
    """Both get the same prompt, and each message after it continues its own side."""
    write_adapter(tmp_path / "support", 1)
    flags = {"adapters.directory": str(tmp_path)}
    with (
        RunningDaemon(lambda: FakeEngine(says_its_adapters), flags) as daemon,
        opened_page(browser) as watched,
    ):
        playground = Playground(watched.page, daemon.url)
        watched.page.get_by_role("button", name="Compare").click()
        assert watched.page.locator("optgroup").nth(1).get_attribute("label") == "Adapters of fake"
        watched.page.get_by_label("Model 2").select_option("support")
        playground.send("hello")
        for answer, text in zip(
            (playground.answers.nth(0), playground.answers.nth(1)),
            ("base", said(tmp_path / "support")),
            strict=True,
        ):
            playground.wait_for_end(answer)
            assert playground.text_of(answer) == text
        bodies: list[Any] = []
        watched.page.on("request", lambda one: bodies.append(one.post_data_json))
        playground.send("and now")
        playground.wait_for_end(playground.answers.nth(3))
        spoken = {one["model"]: one["messages"][1]["content"] for one in bodies if one}
        assert spoken == {"fake": "base", "support": said(tmp_path / "support")}


def test_images_are_sent_as_they_are(playground: Playground) -> None:
    """A chosen image is shown, can be taken away again, and goes in front of the text; the API's refusal is shown."""
    page = playground.page
    content = ImagePart(1).content()
    file = FilePayload(name="one.png", mimeType="image/png", buffer=content)
    page.get_by_label("Images").set_input_files([file, file])
    page.get_by_role("button", name="Remove image 2").click()
    expect(page.get_by_role("img")).to_have_count(1)
    body = _sent(page, lambda: playground.send("What is this?"))
    image, text = body["messages"][0]["content"]
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == content
    assert text == {"type": "text", "text": "What is this?"}
    playground.wait_for_end(playground.answers.last)
    assert "image" in playground.answers.last.get_by_role("alert").inner_text()


def test_answer_follows_a_schema(playground: Playground) -> None:
    """What was typed in as a schema is held; text that is no JSON object is told and not sent."""
    page = playground.page
    page.get_by_label("JSON schema of the answer").check()
    field = page.get_by_role("textbox", name="JSON schema of the answer")
    field.fill("{")
    playground.send("hello")
    page.get_by_text("Not sent. Settings: schema").wait_for()
    field.fill('{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')
    playground.message.press("Enter")
    playground.wait_for_end(playground.answers.last)
    assert json.loads(playground.text_of(playground.answers.last))["a"] == 1


def test_log_probabilities_are_shown_by_pointer_and_by_keys(playground: Playground) -> None:
    """The token under the pointer, or the one that arrow keys reach, is shown with the likeliest others."""
    page = playground.page
    page.get_by_label("Log-probabilities").check()
    playground.send("say abc")
    answer = playground.answers.last
    playground.wait_for_end(answer)
    tokens = answer.get_by_role("listbox", name="Tokens of the answer")
    assert "".join(tokens.get_by_role("option").all_inner_texts()).startswith("abc")
    own = answer.locator("tr.own td").first
    tokens.get_by_role("option").nth(2).hover()
    expect(own).to_have_text("c")
    tokens.focus()
    page.keyboard.press("ArrowLeft")
    expect(own).to_have_text("b")
    page.keyboard.press("Home")
    expect(own).to_have_text("a")
    assert answer.locator("tbody tr").count() >= 5


def test_thoughts_are_folded_and_calls_are_answered(playground: Playground) -> None:
    """Thoughts stand folded above the text; a call is shown as text with a field for its result, which goes back."""
    page = playground.page
    page.get_by_label("Tools").check()
    answer = playground.ask(f"say <think>which city</think>{_CALL}")
    assert not answer.get_by_text("which city").is_visible()
    answer.locator("summary").click()
    assert answer.get_by_text("which city").is_visible()
    assert '"city": "Oslo"' in answer.get_by_label("Arguments of get_weather").inner_text()
    answer.get_by_label("Result").fill("rain")
    body = _sent(page, answer.get_by_role("button", name="Go on with this result").click)
    call, result = body["messages"][-2:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": "rain",
    }
    playground.wait_for_end(playground.answers.nth(1))


def test_copied_requests_run(playground: Playground, page: Page) -> None:
    """A shell runs the one, Python with OpenAI's own client the other, whatever quotes a message has."""
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Min p").fill("0.1")
    text = "it's \"$HOME\" `id` \\ JSON\nJSON\n'''é😀"
    playground.message.fill(f"say {text}")
    playground.message.press("Enter")
    answer = playground.answers.last
    playground.wait_for_end(answer)
    command = ["sh", "-c", playground.copied(answer, "Copy as curl")]
    streamed = _run(command)
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    pieces = [one["delta"].get("content", "") for event in events for one in event["choices"]]
    assert "".join(pieces) == text
    program = playground.copied(answer, "Copy as Python")
    assert "min_p" in program
    assert _said_by(program) == text + "\n"


def _run(command: list[str], **variables: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=_SENT_S,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **variables},
    )
    return done.stdout


def _said_by(program: str) -> str:
    # A process that runs such a program imports OpenAI's client, which this one has long done. The daemon's log is none of it.
    said_by_program = io.StringIO()
    names = {"__name__": "__main__", "print": partial(print, file=said_by_program)}
    exec(program, names)  # noqa: S102 - as a reader of the page does
    return said_by_program.getvalue()


def test_what_models_say_and_are_called_is_text(browser: Browser) -> None:
    """Nothing of a name, a message, an answer or a call becomes a part of the page."""
    hostile = FakeEngine(_told, model_id=_HOSTILE)
    with RunningDaemon(lambda: hostile) as daemon, opened_page(browser) as watched:
        playground = Playground(watched.page, daemon.url)
        answer = playground.ask(f"say {_HOSTILE}\n```{_HOSTILE}\n{_HOSTILE}\n```")
        assert playground.text_of(answer).count(_HOSTILE) == 2
        watched.page.get_by_label("Tools").check()
        call = json.dumps({"name": "get_weather", "arguments": {"city": _HOSTILE}})
        answer = playground.ask(f"say <tool_call>{call}</tool_call>")
        assert "onerror" in answer.inner_text()
        assert watched.page.title() == "machd playground"
        assert watched.page.locator("img, body script").count() == 0


def test_key_is_asked_for_and_kept_in_memory_alone(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the page itself comes without one; no storage and no copied text has it."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{_KEY}\n")
    keys.chmod(0o600)
    flags = {"auth.api_keys_file": str(keys)}
    with (
        RunningDaemon(lambda: FakeEngine(_told), flags) as daemon,
        opened_page(browser) as watched,
    ):
        page = watched.page
        playground = Playground(page, daemon.url)
        page.get_by_label("Key").fill("wrong" * 8)
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).not_to_have_text("")
        page.get_by_label("Key").fill(_KEY)
        page.keyboard.press("Enter")
        answer = playground.ask("say so")
        assert playground.text_of(answer) == "so"
        for label in ("curl", "Python"):
            code = playground.copied(answer, f"Copy as {label}")
            assert _KEY not in code
            assert "MACHD_API_KEY" in code
            if label == "curl":
                assert "so" in _run(["sh", "-c", code], MACHD_API_KEY=_KEY)
                continue
            monkeypatch.setenv("MACHD_API_KEY", _KEY)
            assert "so" in _said_by(code)
        assert _KEY not in json.dumps(page.context.storage_state())
        page.reload()
        page.get_by_label("Key").wait_for()


def test_errors_are_shown_with_the_time_to_wait(playground: Playground) -> None:
    """The API's message is shown, and asking again is possible once Retry-After has passed."""
    page = playground.page
    error = {
        "error": {"message": "the queue is full", "code": "queue_full", "type": "", "param": None}
    }
    page.route(
        f"**{_CHAT}",
        lambda route: route.fulfill(status=429, json=error, headers={"Retry-After": "2"}),
    )
    answer = playground.ask("say so")
    answer.get_by_text("the queue is full").wait_for()
    again = answer.get_by_role("button", name="Ask again")
    assert again.is_disabled()
    assert " in " in again.inner_text()
    page.unroute(f"**{_CHAT}")
    again.click()
    playground.wait_for_end(playground.answers.last)
    assert playground.text_of(playground.answers.last) == "so"


def test_answer_that_is_cut_off_says_so(playground: Playground) -> None:
    """A stream that ends without its end leaves the text and a reason."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "so mu"}, "finish_reason": None}]}
    playground.page.route(
        f"**{_CHAT}",
        lambda route: route.fulfill(
            body=f"data: {json.dumps(chunk)}\n\n", content_type="text/event-stream"
        ),
    )
    answer = playground.ask("say so much")
    assert playground.text_of(answer) == "so mu"
    answer.get_by_text("The connection ended before the answer did").wait_for()
    assert answer.locator(".figures").inner_text().startswith("failed")


def test_chats_are_kept_exported_imported_and_deleted(playground: Playground) -> None:
    """They outlast a reload; a file of them brings them back after all were deleted; any other file is refused."""
    page = playground.page
    page.on("dialog", lambda dialog: dialog.accept())
    playground.ask("say one")
    page.get_by_role("button", name="New chat").click()
    playground.ask("say two")
    page.reload()
    titles = page.locator(".chats .title")
    expect(titles).to_have_text(["say two", "say one"])
    titles.nth(1).click()
    expect(playground.answers.locator(".text")).to_have_text("one")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = Path(download.value.path())
    page.get_by_role("button", name="Delete all").click()
    expect(titles).to_have_text(["Untitled"])
    assert page.evaluate("localStorage.length") == 0
    page.get_by_label("File of exported chats").set_input_files(file)
    expect(titles).to_have_text(["say two", "say one", "Untitled"])
    wrong = FilePayload(name="a.json", mimeType="application/json", buffer=b'{"chats": [null]}')
    page.get_by_label("File of exported chats").set_input_files(wrong)
    page.get_by_text("Not a file of exported chats").wait_for()


def test_messages_are_edited_deleted_and_asked_again(playground: Playground) -> None:
    """A changed message is what the next request has; a deleted one is gone."""
    page = playground.page
    playground.ask("say one")
    page.get_by_label("You").get_by_role("button", name="Edit").click()
    page.get_by_label("Your message").fill("say other")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Ask again").click()
    expect(playground.answers.locator(".text")).to_have_text("other")
    playground.wait_for_end(playground.answers.last)
    playground.answers.first.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Answer").fill("mine")
    page.get_by_role("button", name="Save").click()
    body = _sent(page, lambda: playground.send("say so"))
    assert [one["content"] for one in body["messages"]] == ["say other", "mine", "say so"]
    playground.wait_for_end(playground.answers.last)
    page.get_by_label("You").first.get_by_role("button", name="Delete").click()
    expect(page.get_by_label("You")).to_have_count(1)


def test_full_storage_is_told(playground: Playground) -> None:
    """A chat that does not fit is answered all the same, and the page says that it is not kept."""
    page = playground.page
    page.evaluate(_FILL_STORAGE)
    assert playground.text_of(playground.ask("say so")) == "so"
    page.get_by_text("storage is full").wait_for()


def test_everything_is_reached_by_keyboard(playground: Playground) -> None:
    """From the message on, Tab reaches each control in order, and Escape and Enter do what buttons do."""
    page = playground.page
    expect(playground.message).to_be_focused()
    page.keyboard.type("say so")
    page.keyboard.press("Enter")
    playground.wait_for_end(playground.answers.last)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Message"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.innerText || document.activeElement.id"))
    for name in (
        "New chat",
        "Compare",
        "Edit",
        "Ask again",
        "Copy as curl",
        "Export",
        "temperature",
    ):
        assert any(name in one for one in reached), name


_SCREENS = ((400, False), (1280, True))
"""One of each layout and of each scheme; the others are long."""


@pytest.mark.parametrize(
    ("width", "is_dark"),
    [
        pytest.param(*screen, marks=[] if screen in _SCREENS else pytest.mark.long)
        for screen in product((400, 1280, 3840), (False, True))
    ],
)
def test_page_is_accessible(
    browser: Browser, daemon: RunningDaemon, width: int, *, is_dark: bool
) -> None:
    """WCAG AA by axe-core, with every part of the page shown; nothing is wider than the screen."""
    with opened_page(browser, width=width, is_dark=is_dark) as watched:
        page = watched.page
        playground = Playground(page, daemon.url)
        answer = playground.ask("say <think>hm</think>see\n```python\n1 + 1\n```\n")
        answer.locator("summary").click()
        if width < 1000:
            page.get_by_role("button", name="Settings").click()
        page.get_by_label("Log-probabilities").check()
        page.get_by_label("JSON schema of the answer").check()
        page.get_by_label("Top p").fill("7")
        assert violations(page) == []
        page.get_by_label("Top p").fill("")
        page.get_by_role("checkbox", name="JSON schema").uncheck()
        if width < 1000:
            page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Compare").click()
        playground.send(f"say {_CALL}")
        playground.wait_for_end(playground.answers.nth(2))
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
