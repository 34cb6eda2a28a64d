"""Rules of accessibility, as axe-core checks them."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

_LEVELS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_OPTIONS = {"runOnly": {"type": "tag", "values": _LEVELS}, "resultTypes": ["violations"]}
_RUN = "options => axe.run(options).then(found => found.violations)"
"""What passes stays in the browser: it is a hundred times as much."""


def violations(page: Page) -> list[str]:
    """What a page breaks of WCAG 2.2 AA and axe-core's own good practice: the rule and the first elements that do."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(Axe().axe_script)
    found = page.evaluate(_RUN, _OPTIONS)
    return [f"{one['id']}: {[node['html'] for node in one['nodes'][:3]]}" for one in found]
