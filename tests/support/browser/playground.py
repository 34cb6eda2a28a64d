"""What tests do on the playground, in its words."""

from __future__ import annotations

from playwright.sync_api import Locator, Page


class Playground:
    """The playground at a daemon's address."""

    def __init__(self, page: Page, url: str) -> None:
        """Open it."""
        self.page = page
        page.goto(url)
        page.locator("main").wait_for()

    @property
    def message(self) -> Locator:
        """The field for the next message."""
        return self.page.get_by_label("Message", exact=True)

    @property
    def answers(self) -> Locator:
        """All answers, in order."""
        return self.page.locator(".message.model")

    def send(self, text: str) -> None:
        """Send a message by keyboard."""
        self.message.fill(text)
        self.message.press("Enter")

    def ask(self, text: str) -> Locator:
        """Send a message, and return the last answer once it is whole."""
        count = self.answers.count()
        self.send(text)
        answer = self.answers.nth(count)
        self.wait_for_end(answer)
        return answer

    def wait_for_end(self, answer: Locator) -> None:
        """Wait until an answer has ended, whichever way."""
        answer.get_by_role("button", name="Copy as curl").wait_for()

    def text_of(self, answer: Locator) -> str:
        """The text of an answer without what is around it."""
        return answer.locator(".text").inner_text()

    def copied(self, answer: Locator, label: str) -> str:
        """Copy with a button of an answer; returns the clipboard's text."""
        self.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        button = answer.get_by_role("button", name=label)
        button.click()
        button.get_by_text("Copied").wait_for()
        text: str = self.page.evaluate("navigator.clipboard.readText()")
        return text
