"""``machd check --cache-report``: what it makes of sessions as coding clients sent them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.clients.planted_changes import PLANTS, Plant
from support.clients.recorded_sessions import RecordedRequest, read_session
from support.engines.fake_engine import FakeEngine
from support.every_run import sampled

from machd.cli.cache_report import CacheReporter, DecodeMedia, no_media, replayed
from machd.cli.cache_report_document import CacheReport
from machd.cli.cache_table import print_cache_report
from machd.cli.recorded_requests import RecordedConversation, read_line, recorded_requests
from machd.cli.request_changes import ChangeKind
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.front import OpenedFront
from machd.engine.protocol.engine import ModelFront
from machd.engine.protocol.media import Media
from machd.engine.protocol.tokenizer import ChatMessages
from machd.request.conversation import Conversation
from machd.request.media import MediaKind, media_of
from machd.scheduler.events import CacheReason
from machd.scheduler.prefix_limits import BlockCosts, PrefixConfig, PrefixLimits
from machd.settings.cache import PromptRuleName

_ROOM = PrefixLimits(max_bytes=1 << 40)
_FRONT = FakeEngine(context_tokens=1 << 20)


def report_of(
    requests: Sequence[RecordedRequest],
    folder: Path,
    *,
    front: ModelFront = _FRONT,
    decode_media: DecodeMedia = no_media,
    clients: Sequence[str] = (),
    rules: Sequence[PromptRuleName] = (),
    limits: PrefixLimits = _ROOM,
    costs: BlockCosts = BlockCosts(1024),  # noqa: B008 - frozen
) -> CacheReport:
    """Return the report of requests, which each client of ``clients`` sent in turn."""
    lines = [
        {"path": one.path, "body": one.body, "client": name}
        for one, name in zip(requests, clients or ["someone"] * len(requests), strict=True)
    ]
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    shape = PrefixConfig(b"", 256, costs)
    reporter = CacheReporter(
        front, shape, limits, is_shared=False, decode_media=decode_media, rules=rules
    )
    return replayed(reporter, recorded_requests(file))


_CHANGED_TOOLS = {
    "claude_code_tools_swapped",
    "claude_code_tool_description",
    "claude_code_tool_put_in_front",
    "claude_code_tool_taken_out",
    "qwen_code_tool_parameter",
}
"""Changes of long lists of tools, whose likes are planted in shorter requests in every run."""

_LIKE_OTHERS = {
    "claude_code_billing_token_added",
    "claude_code_git_status",
    "claude_code_date",
    "claude_code_one_character",
    "claude_code_tool_result",
    "codex_directory",
    "opencode_date",
    "opencode_question_edited",
    "qwen_code_folder",
    "qwen_code_call",
}
"""Changes that another one, which is in every run, is like in kind and in the role of the message."""

_NAMES = [one.name for one in PLANTS]


@pytest.mark.parametrize(
    "plant", sampled(PLANTS, set(_NAMES) - _CHANGED_TOOLS - _LIKE_OTHERS, _NAMES)
)
def test_cache_report_names_planted_change(plant: Plant, tmp_path: Path) -> None:
    """The report names what a session's request has changed of the one before: the kind, the message, the tool, the text."""
    former, later = plant.requests()

    report = report_of([former, later], tmp_path)

    assert not report.skipped
    lookup = report.lookups[1]
    found = [(one.change, one.message_index, one.role, one.tool_index) for one in report.causes]
    if plant.kind is None:
        assert (lookup.reason, found) == (CacheReason.CONTINUED, [])
        return
    assert found == [(plant.kind, plant.message_index, plant.role, plant.tool_index)]
    assert lookup.change is plant.kind
    cause = report.causes[0]
    assert 0 < cause.saved_tokens <= lookup.prompt_tokens - lookup.found_tokens
    if plant.changed is not None:
        assert cause.characters is not None
        assert (
            _message_text(later, plant.message_index or 0)[slice(*cause.characters)]
            == plant.changed
        )


def _message_text(request: RecordedRequest, index: int) -> str:
    recorded = read_line(1, json.dumps({"path": request.path, "body": request.body}).encode())
    assert isinstance(recorded, RecordedConversation)
    return str(recorded.conversation.messages[index]["content"])


def _session(name: str, *indices: int) -> list[RecordedRequest]:
    session = read_session(name)
    return [session[one] for one in indices]


def test_cache_report_names_other_clients_namespace(tmp_path: Path) -> None:
    """A prompt that another API key has sent before is computed again, for that reason, unless keys share a namespace."""
    report = report_of(_session("codex", 3, 3), tmp_path, clients=["one", "another"])

    (cause,) = report.causes
    assert (cause.reason, cause.change) == (CacheReason.OTHER_NAMESPACE, None)
    assert cause.saved_tokens == report.lookups[1].prompt_tokens - 1
    assert "cache.namespace" in cause.advice


def test_cache_report_names_other_salt(tmp_path: Path) -> None:
    """A prompt with another ``cache_salt`` is in another namespace."""
    (former,) = _session("codex", 3)
    later = RecordedRequest(former.path, {**former.body, "cache_salt": "planted"})

    report = report_of([former, later], tmp_path)

    assert [one.reason for one in report.causes] == [CacheReason.OTHER_NAMESPACE]


def test_cache_report_names_eviction(tmp_path: Path) -> None:
    """A prompt that was evicted for want of room is computed again, for that reason."""
    session = [*_session("codex", 3), *_session("opencode", 5), *_session("codex", 4)]
    limits = PrefixLimits(max_bytes=40_000 * 1024)  # one of the two clients' prompts

    report = report_of(session, tmp_path, limits=limits)

    assert [one.reason for one in report.causes] == [CacheReason.EVICTED]
    assert report.causes[0].lines == [3]
    assert "cache.memory_mb" in report.causes[0].advice


def test_cache_report_names_what_state_cannot(tmp_path: Path) -> None:
    """With caches that have state, a prompt that was cut back is computed whole, for that reason."""
    session = [*_session("codex", 4), *_session("codex", 4)]
    session[1].body["input"].pop()

    report = report_of(session, tmp_path, costs=BlockCosts(1024, 4096))

    assert report.cache == "state"
    assert [one.reason for one in report.causes] == [CacheReason.KIND_CANNOT]


def test_cache_report_sums_change_over_requests(tmp_path: Path) -> None:
    """A change that comes with each request is one cause, with the lines of all and the sum of their tokens."""
    session = [one for _ in range(2) for one in _session("opencode", 4, 5)]
    bodies = [json.loads(json.dumps(one.body)) for one in session]
    for number, body in enumerate(bodies):
        body["messages"][0]["content"] = f"Request {number}. {body['messages'][0]['content']}"
    session = [RecordedRequest(session[0].path, body) for body in bodies]

    report = report_of(session, tmp_path)

    (cause,) = report.causes
    assert (cause.lines, cause.message_index, cause.characters) == ([2, 3, 4], 0, (8, 9))
    assert cause.saved_tokens == sum(one.saved_tokens for one in report.lookups)
    assert report.prompt_tokens == report.found_tokens + report.computed_tokens
    assert sum(one.computed_tokens for one in report.parts) == report.computed_tokens


def test_cache_report_goes_by_rules_that_take_texts_out(tmp_path: Path) -> None:
    """A text that ``cache.normalise`` takes out is no cause, and what is behind it is found."""
    session = _session("claude_code", 5, 6)
    bodies = [json.loads(json.dumps(one.body)) for one in session]
    for number, body in enumerate(bodies):
        line = body["system"][0]["text"]
        body["system"][0]["text"] = line.replace("sdk-cli;", f"sdk-cli; cch={number:05x};")
    assert bodies[0]["system"] != bodies[1]["system"]
    session = [RecordedRequest(session[0].path, body) for body in bodies]

    as_sent = report_of(session, tmp_path)
    normalised = report_of(session, tmp_path, rules=["claude_code_billing"])

    assert [one.message_index for one in as_sent.causes] == [0]
    assert normalised.causes == []
    assert normalised.computed_tokens < as_sent.computed_tokens - as_sent.causes[0].saved_tokens / 2
    assert "cache.normalise takes texts out of 2 of the prompts" in normalised.notes[0]


def test_cache_report_finds_no_cause_between_conversations(tmp_path: Path) -> None:
    """Two conversations that have nothing but a few words in common are no change of one another."""
    report = report_of([*_session("opencode", 0), *_session("codex", 0)], tmp_path)

    assert report.causes == []


def test_cache_report_leaves_out_what_is_no_conversation(tmp_path: Path) -> None:
    """Lines that are no JSON, name another path or hold what machd refuses are left out, each with its reason."""
    good = {
        "path": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "x"}]},
    }
    wrong = {"path": "/v1/chat/completions", "body": {"messages": 5}}
    lines = [
        "{",
        json.dumps({"path": "/v1/models", "body": {}}),
        json.dumps(wrong),
        json.dumps(good),
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n\n".join(lines), "utf-8")
    reporter = CacheReporter(
        _FRONT, PrefixConfig(b"", 256, BlockCosts(1024)), _ROOM, is_shared=False
    )

    report = replayed(reporter, recorded_requests(file))

    assert [one.line for one in report.skipped] == [1, 3, 5]
    assert [one.line for one in report.lookups] == [7]
    assert "messages" in report.skipped[2].reason


def test_cache_table_tells_cause_and_saving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table says what changed, where, what that costs and what to do, and nothing of the text."""
    plant = next(one for one in PLANTS if one.name == "opencode_reminder_in_system")

    print_cache_report(report_of(plant.requests(), tmp_path))

    said = " ".join(capsys.readouterr().out.split())
    assert "message 0 (system), characters" in said
    assert "the text changes (line 2); without that" in said
    assert "move what changes into a message at the end" in said
    assert "190412" not in said


class _ThoughtfulTokenizer(FakeTokenizer):
    """Writes the thoughts of earlier answers into the prompt."""

    def render_chat(self, messages: ChatMessages, **options: Any) -> str:
        shown = [
            {**one, "content": f"<think>{thoughts}</think>{one['content']}"}
            if (thoughts := one.get("reasoning_content"))
            else one
            for one in messages
        ]
        return super().render_chat(shown, **options)


def test_cache_report_names_stripped_thoughts(tmp_path: Path) -> None:
    """Thoughts that a client sends once, and later leaves out, are named where the template writes them."""
    former, later = _session("opencode", 4, 5)
    former.body["messages"][4]["reasoning_content"] = "The user wants a summary. " * 4
    front = OpenedFront(_FRONT.model, _ThoughtfulTokenizer(), _FRONT.grammars)

    report = report_of([former, later], tmp_path, front=front)

    (cause,) = report.causes
    assert (cause.change, cause.message_index) == (ChangeKind.MESSAGE_THOUGHTS, 4)


def test_cache_report_does_not_name_what_the_template_leaves_out(tmp_path: Path) -> None:
    """Stripped thoughts that the template does not write are not the cause of a change behind them."""
    former, later = _session("opencode", 4, 5)
    former.body["messages"][4]["reasoning_content"] = "The user wants a summary. " * 4
    later.body["messages"][6]["tool_calls"][0]["function"]["arguments"] = "{}"

    report = report_of([former, later], tmp_path)

    assert [(one.change, one.message_index) for one in report.causes] == []
    assert report.lookups[1].message_index == 7


class _Images:
    """A processor of images that are their own tokens."""

    reads_parts = False

    def placeholder(self, kind: MediaKind, number: int) -> str:
        return f"<{kind} {number}>"

    def process(self, *_: object) -> Media:
        raise AssertionError("everything is decoded already")

    def close(self) -> None:
        """Hold nothing."""


def _decoded(conversation: Conversation) -> dict[int, Media]:
    return {
        id(one): Media(one.kind, one.content or b"", (65,) * 200, {})
        for one in media_of(conversation.messages)
    }


@pytest.mark.parametrize("is_changed", [True, False])
def test_cache_report_names_changed_image(*, is_changed: bool, tmp_path: Path) -> None:
    """Another image in an earlier message is named, with what follows it; the same image in other bytes of a request is none."""

    def request(image: bytes, *more: str) -> RecordedRequest:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        parts = [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "Say it in a word. " * 8},
        ]
        messages = [{"role": "user", "content": parts}]
        messages += [{"role": "user", "content": one} for one in more]
        return RecordedRequest("/v1/chat/completions", {"messages": messages})

    front = OpenedFront(_FRONT.model, FakeTokenizer(), _FRONT.grammars, _Images())
    requests = [request(b"one"), request(b"two" if is_changed else b"one", "And now?")]

    report = report_of(requests, tmp_path, front=front, decode_media=_decoded)

    found = [(one.reason, one.change, one.message_index) for one in report.causes]
    changed = (CacheReason.IMAGE_CHANGED, ChangeKind.MESSAGE_IMAGES, 0)
    assert found == ([changed] if is_changed else [])
