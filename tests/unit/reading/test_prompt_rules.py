"""A rule takes out what its client writes, where its client writes it, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machd.reading import normalised_messages
from machd.reading.normalised_messages import NormalisedMessages, PlacesInRequest
from machd.reading.prompt_marks import Messages
from machd.reading.prompt_places import PromptPart, PromptPlace, prompt_places
from machd.reading.prompt_rules import PROMPT_RULES, TEMPLATE_DATE
from machd.settings.cache import PromptRuleName

# As the clients send them, cut short where they go on with words of their own.
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"
CHANGING_BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"
AGENT = "You are a Claude agent, built on Anthropic's Claude Agent SDK."
LEFT = "<total_tokens>14979990 tokens left</total_tokens>"
USED = "Token usage: 20010/180000; 159990 remaining"
SPENT = "USD budget: $0.25/$5; $4.75 remaining"
CLAUDE_CONTEXT = (
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n"
    "{}# currentDate\nToday's date is {}.\n\n      IMPORTANT: this context may or may not be relevant to your "
    "tasks. You should not respond to this context unless it is highly relevant to your task.\n</system-reminder>\n\n"
)
OPENCODE_ENVIRONMENT = (
    "Here is some useful information about the environment you are running in:\n<env>\n"
    "  Working directory: /srv/project\n  Workspace root folder: /srv/project\n"
    "  Is directory a git repo: yes\n  Platform: linux\n  Today's date: {}\n</env>\n"
)
QWEN_CONTEXT = (
    "This is the Qwen Code. We are setting up the context for our chat.\n"
    "Today's date is {} (formatted according to the user's locale).\nMy operating system is: linux\n"
)
ALL: tuple[PromptRuleName, ...] = get_args(PromptRuleName)


def system(text: str) -> dict[str, object]:
    """A system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, object]:
    """A message of the user's."""
    return {"role": "user", "content": text}


def shown(*messages: dict[str, object], rules: tuple[PromptRuleName, ...] = ALL) -> list[object]:
    """Return the texts that the template gets."""
    return [one["content"] for one in NormalisedMessages(list(messages), rules).messages]


def test_every_name_of_the_setting_has_a_rule_with_a_source() -> None:
    """And the date of a template, which has no text, stands apart."""
    assert {*PROMPT_RULES, TEMPLATE_DATE} == set(ALL)
    assert all(rule.source for rule in PROMPT_RULES.values())
    assert all(
        "removed" in one.groupindex for rule in PROMPT_RULES.values() for one in rule.patterns
    )


@pytest.mark.parametrize(
    "line",
    [
        BILLING,
        CHANGING_BILLING.format("36ee5"),
        f"{BILLING} cch=36ee5; cc_workload=cron; cc_is_subagent=true;",
        "x-anthropic-billing-header: cc_version=2.1.222; cc_prev_req=req_011Cdk3;",
        "x-anthropic-billing-header: cc_version=2.1.222; cc_prev_req=req_011Cdk3",
    ],
)
def test_billing_line_is_taken_out_of_the_first_system_message(line: str) -> None:
    """As a line, before a text that begins at once, and as a message of its own."""
    assert shown(system(f"{line}\n{AGENT}"), user("Hi")) == [AGENT, "Hi"]
    assert shown(system(line), system(AGENT), user("Hi")) == [AGENT, "Hi"]
    if line.endswith(";"):
        assert shown(system(f"{line}{AGENT}"), user("Hi")) == [AGENT, "Hi"]


BILLING_ELSEWHERE: list[Messages] = [
    [system(AGENT), user(BILLING)],
    [user(f"{BILLING}\nWhy is this line in my prompt?")],
    [system(f"{AGENT}\n{BILLING}"), user("Hi")],
    [system(f" {BILLING}\n{AGENT}"), user("Hi")],
    [system(f"```\n{BILLING}\n```"), user("Hi")],
    [system("x-anthropic-billing-header: see the wiki\nBe brief."), user("Hi")],
    [system("x-anthropic-billing-header: cc_version=2 is old\nBe brief."), user("Hi")],
    [system(AGENT), user("Hi"), system(BILLING)],
    [system(AGENT), {"role": "tool", "content": BILLING}],
    [system(AGENT), user("Hi"), {"role": "assistant", "content": BILLING}],
]


@pytest.mark.parametrize("messages", BILLING_ELSEWHERE)
def test_billing_line_elsewhere_stays(messages: Messages) -> None:
    """In the user's words, in code, in the middle of a text, in results and answers."""
    assert NormalisedMessages(messages, ALL).messages == messages


def test_countdown_is_taken_out_of_system_messages() -> None:
    """As a paragraph of the first, and as a message of its own, which then is not there."""
    git = "gitStatus: This is the git status at the start of the conversation."
    turns: Messages = [user("Hi"), {"role": "tool", "content": "0"}]
    texts = shown(system(f"{AGENT}\n\n{LEFT}\n\n{git}"), *turns, system(LEFT))
    assert texts == [f"{AGENT}\n\n{git}", "Hi", "0"]
    assert shown(system(f"{AGENT}\n\n{LEFT}"), *turns, system(f"{LEFT}\n\n{USED}")) == texts_of(
        turns
    )
    assert shown(system(AGENT), *turns, system(f"{LEFT}\n\n{USED}\n\n{SPENT}\n\nStop soon.")) == [
        *texts_of(turns),
        "Stop soon.",
    ]
    assert shown(system(AGENT), *turns, system(f"Stop soon.\n\n{LEFT}")) == [
        *texts_of(turns),
        "Stop soon.",
    ]
    assert shown(system(AGENT), system(f"{LEFT}\n{USED}"))[1] == f"{LEFT}\n{USED}"
    infinite = LEFT.replace("14979990", "Infinite")
    assert shown(system(AGENT), *turns, system(infinite)) == texts_of(turns)


def texts_of(turns: Messages) -> list[object]:
    """Return the texts behind Claude Code's own."""
    return [AGENT, *(one["content"] for one in turns)]


COUNTDOWN_ELSEWHERE: list[Messages] = [
    [system(AGENT), user(LEFT)],
    [system(AGENT), user("Hi"), {"role": "tool", "content": f"0\n\n{LEFT}"}],
    [system(f"```\n{LEFT}\n```"), user("Hi")],
    [system(f"The client writes {LEFT} at the end."), user("Hi")],
    [system(f"{LEFT} Mind them."), user("Hi")],
    [system("<total_tokens>few tokens left</total_tokens>"), user("Hi")],
    [system("Token usage: high"), user("Hi")],
]


@pytest.mark.parametrize("messages", COUNTDOWN_ELSEWHERE)
def test_countdown_elsewhere_stays(messages: Messages) -> None:
    """In other roles, in code and in sentences."""
    assert NormalisedMessages(messages, ALL).messages == messages


@pytest.mark.parametrize("memory", ["", "# claudeMd\nUse tabs.\n\n# currentDate\nis above.\n"])
def test_date_of_claude_code_is_taken_out_of_its_context(memory: str) -> None:
    """So the same session goes on tomorrow with the same beginning; what the user said stays."""
    texts = [
        shown(
            system(AGENT),
            user(f"{CLAUDE_CONTEXT.format(memory, date)}\nHi"),
            user("Today's date is 2026-11-28."),
        )
        for date in ("2026-11-28", "2026-11-29")
    ]
    assert texts[0] == texts[1]
    assert "2026-11-2" not in str(texts[0][1])
    assert str(texts[0][1]).endswith("</system-reminder>\n\n\nHi")
    assert memory in str(texts[0][1])
    assert texts[0][2] == "Today's date is 2026-11-28."


def test_date_of_opencode_is_taken_out_of_its_environment() -> None:
    """Of the first such block alone; the others are a file's."""
    dates = ("Sat Nov 28 2026", "Sun Nov 29 2026")
    texts = [
        shown(
            system(
                OPENCODE_ENVIRONMENT.format(one) + OPENCODE_ENVIRONMENT.format("Fri Nov 27 2026")
            ),
            user("Hi"),
        )
        for one in dates
    ]
    assert texts[0] == texts[1]
    assert "  Platform: linux\n</env>\n" in str(texts[0][0])
    assert "  Today's date: Fri Nov 27 2026\n</env>\n" in str(texts[0][0])


def test_date_of_qwen_code_is_taken_out_of_its_context() -> None:
    """In whatever language the date is."""
    dates = ("Saturday, November 28, 2026", "2026年11月29日星期日")
    texts = [shown(system("You are Qwen Code."), user(QWEN_CONTEXT.format(one))) for one in dates]
    assert texts[0] == texts[1]
    assert texts[0][1] == QWEN_CONTEXT.replace(
        "Today's date is {} (formatted according to the user's locale).\n", ""
    )


DATES_ELSEWHERE: list[Messages] = [
    [system(AGENT), user("Look:\n" + CLAUDE_CONTEXT.format("", "2026-11-28"))],
    [system(AGENT), user("Hi"), user(CLAUDE_CONTEXT.format("", "2026-11-28"))],
    [system(AGENT), user(CLAUDE_CONTEXT.format("", "tomorrow"))],
    [system(CLAUDE_CONTEXT.format("", "2026-11-28")), user("Hi")],
    [user(OPENCODE_ENVIRONMENT.format("Sat Nov 28 2026"))],
    [system("Today's date: Sat Nov 28 2026"), user("Hi")],
    [system("<env>\n  Today's date: Sat Nov 28 2026\n</env>"), user("Hi")],
    [system(AGENT), user("Why?\n" + QWEN_CONTEXT.format("Monday"))],
    [system(QWEN_CONTEXT.format("Monday")), user("Hi")],
    [
        system(AGENT),
        user("Today's date is Monday (formatted according to the user's locale).\n"),
    ],
]


@pytest.mark.parametrize("messages", DATES_ELSEWHERE)
def test_dates_elsewhere_stay(messages: Messages) -> None:
    """In other places, other roles and other words than the client's."""
    assert NormalisedMessages(messages, ALL).messages == messages


# Rules as other servers have them.
_WIDE: dict[PromptRuleName, str] = {
    "claude_code_billing": r"(?P<removed>x-anthropic-billing-header:[^\n]*\n?)",
    "claude_code_countdown": r"(?P<removed><total_tokens>[^<]*</total_tokens>)",
    "claude_code_date": r"(?P<removed>Today's date is [^\n]*)",
    "opencode_date": r"(?P<removed>Today's date: [^\n]*)",
    "qwen_code_date": r"(?P<removed>Today's date is [^\n]*)",
}


@pytest.mark.parametrize("name", PROMPT_RULES)
def test_texts_elsewhere_tell_a_rule_that_is_too_wide(
    name: PromptRuleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that matches its words wherever they stand takes something out of them."""
    elsewhere = [*BILLING_ELSEWHERE, *COUNTDOWN_ELSEWHERE, *DATES_ELSEWHERE]
    wide = replace(PROMPT_RULES[name], patterns=(re.compile(_WIDE[name]),))
    monkeypatch.setattr(normalised_messages, "PROMPT_RULES", {name: wide})
    assert any(NormalisedMessages(one, [name]).removed for one in elsewhere)


_PIECES = st.sampled_from(
    [
        BILLING,
        LEFT,
        USED,
        AGENT,
        "\n",
        "\n\n",
        " ",
        "# currentDate\nToday's date is 2026-11-28.",
        "<env>\n  Working directory: /a\n",
        "  Today's date: Sat Nov 28 2026\n</env>",
        "```",
        "é☃",
    ]
)
_TEXTS = st.lists(_PIECES | st.text(max_size=5), max_size=8).map("".join)
_MESSAGES = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        _TEXTS,
    ),
    min_size=1,
    max_size=6,
)


@given(_MESSAGES, st.sets(st.sampled_from(ALL)))
def test_only_what_is_said_is_taken_out(messages: Messages, rules: set[PromptRuleName]) -> None:
    """The same objects where nothing matched; elsewhere as many characters fewer as are said; and no rule finds more then."""
    given_texts = [str(one["content"]) for one in messages]
    normalised = NormalisedMessages(messages, rules)
    assert [one["content"] for one in messages] == given_texts
    changed = {one.message_index for one in normalised.removed}
    assert {one.rule for one in normalised.removed} <= rules
    kept = {id(one) for one in normalised.messages}
    assert all(id(one) in kept for i, one in enumerate(messages) if i not in changed)
    lost = sum(map(len, given_texts)) - sum(len(str(one["content"])) for one in normalised.messages)
    assert lost == sum(one.characters for one in normalised.removed)
    assert bool(lost) == bool(normalised.removed)
    if not normalised.removed:
        assert normalised.messages == messages


@given(_MESSAGES)
def test_without_rules_nothing_changes(messages: Messages) -> None:
    """Not one byte, whatever the texts hold."""
    normalised = NormalisedMessages(messages, ())
    assert [id(one) for one in normalised.messages] == [id(one) for one in messages]
    assert normalised.removed == ()


def _rendered(messages: Messages, _tools: object = ()) -> str:
    return "".join(f"<{one['role']}>{one['content']}</{one['role']}>" for one in messages)


@given(_MESSAGES, st.data())
def test_a_place_is_told_in_the_messages_that_were_sent(
    messages: Messages, data: st.DataObject
) -> None:
    """The character at a token's place is the same one in the prompt and in the request."""
    normalised = NormalisedMessages(messages, ALL)
    text = _rendered(normalised.messages)
    pieces = [bytes([one]) for one in text.encode()]
    places = prompt_places(
        normalised.messages, normalised.messages, text, pieces, tools=(), render=_rendered
    )
    assert places is not None
    tokens = data.draw(st.integers(0, len(pieces) - 1))
    place = PlacesInRequest(places, normalised).at(tokens)
    assert place is not None
    before = places.at(tokens)
    assert before is not None
    if place.part is PromptPart.MESSAGE:
        assert place.message_index is not None
        assert place.character is not None
        assert before.message_index is not None
        assert before.character is not None
        sent = messages[place.message_index]
        cut = normalised.messages[before.message_index]
        assert sent["role"] == place.role
        assert str(sent["content"])[place.character] == str(cut["content"])[before.character]


def test_a_place_behind_a_removed_message_counts_it() -> None:
    """The index is the request's, and so is the character behind a removed beginning."""
    messages = [system(f"{BILLING}\n{AGENT}"), user("Hi"), system(LEFT), user("And?")]
    normalised = NormalisedMessages(messages, ALL)
    assert len(normalised.messages) == 3
    place = normalised.place_in_request(PromptPlace(PromptPart.MESSAGE, 2, "user", 1))
    assert (place.message_index, place.character) == (3, 1)
    place = normalised.place_in_request(PromptPlace(PromptPart.MESSAGE, 0, "system", 0))
    assert (place.message_index, place.character) == (0, len(BILLING) + 1)
    assert normalised.place_in_request(PromptPlace(PromptPart.TEMPLATE)).message_index is None


def test_an_index_is_the_requests_where_a_message_is_in_another_field() -> None:
    """As Anthropic's system prompt is, which has none."""
    messages = [system(f"{BILLING}\n{AGENT}"), user("Hi"), system(LEFT), user("And?")]
    normalised = NormalisedMessages(messages, ALL, indices=[None, 0, 1, 2])
    assert [one.message_index for one in normalised.removed] == [None, 1]
    assert [one.role for one in normalised.removed] == ["system", "system"]
    place = normalised.place_in_request(PromptPlace(PromptPart.MESSAGE, 2, "user", 1))
    assert (place.message_index, place.character) == (2, 1)
    place = normalised.place_in_request(PromptPlace(PromptPart.MESSAGE, 0, "system", 0))
    assert (place.message_index, place.character) == (None, len(BILLING) + 1)


def test_a_message_with_an_image_loses_the_text_in_front_of_it() -> None:
    """Its parts stay in their order."""
    image = {"type": "image", "source": object()}
    parts = [{"type": "text", "text": CLAUDE_CONTEXT.format("", "2026-11-28")}, image]
    normalised = NormalisedMessages([system(AGENT), {"role": "user", "content": parts}], ALL)
    content = normalised.messages[1]["content"]
    assert isinstance(content, list)
    assert content[1] is image
    assert "2026" not in content[0]["text"]
    bare: Messages = [{"role": "user", "content": [image]}]
    assert NormalisedMessages(bare, ALL).messages == bare
