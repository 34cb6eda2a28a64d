"""Every alert has its heading on the page that it links to."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operating" / "troubleshoot.md"
RULES = ROOT / "config" / "prometheus" / "alerts.yml"


def kebab(alert: str) -> str:
    """``MachdEngineStalled`` as an anchor."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", alert).lower()


def alerts() -> list[str]:
    """The names of the alerts that are shipped."""
    return re.findall(r"^\s*- alert: (\w+)$", RULES.read_text("utf-8"), re.MULTILINE)


def headings() -> list[str]:
    """The page's headings that alerts lead to, as anchors."""
    titles = re.findall(r"^### (Machd .*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [title.lower().replace(" ", "-") for title in titles]


def test_every_alert_has_a_heading_and_every_heading_an_alert() -> None:
    """An alert and its place on the page come and go together, in the same order."""
    assert len(alerts()) >= 8
    assert headings() == [kebab(alert) for alert in alerts()]


def test_runbooks_lead_to_the_headings() -> None:
    """The link that an alert carries is a URL, with or without the label, of the page with its heading."""
    links = re.findall(r"runbook_url: '(.*)'", RULES.read_text("utf-8"))
    label, otherwise = (
        r"\{\{ with \$externalLabels.docs_url \}\}\{\{ . \}\}",
        r"\{\{ else \}\}(.*?)\{\{ end \}\}",
    )
    made = [re.sub(label + otherwise, r"\1", link) for link in links]

    page = "http://127.0.0.1:8000/operating/troubleshoot/"
    assert made == [f"{page}#{kebab(alert)}" for alert in alerts()]


def test_an_alerts_section_is_more_than_its_name() -> None:
    """Each alert's section says what to do, in at least thirty words."""
    text = PAGE.read_text("utf-8")
    sections = {
        part.splitlines()[0]: len(part.split())
        for part in re.split(r"^### (?=Machd )", text, flags=re.MULTILINE)[1:]
    }

    assert {title for title, words in sections.items() if words < 30} == set()
