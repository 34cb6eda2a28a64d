"""The prefix cache of real daemons, held against daemons without one: answers, tokens, memory.

The models are tiny, so that batteries of questions cost little.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.cached_answers import Answer, Asked, ask, ask_all, ask_streamed, prefix_stats
from support.clients.common_words import WORDS
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.engine_processes import engine_of
from support.daemon.forked_daemons import DaemonParent, ForkedDaemon, daemon_parent
from support.engines.dialogue import completion, told
from support.engines.fake_engine import FakeEngine

from machd.engine.loading.embedded_tokenizer import EMBEDDED_VOCABULARY_TOKENS
from machd.engine.protocol.step import StepPlan

ALICE = "k-alice-0123456789abcdef"
BOB = "k-bob-0123456789abcdef"
_TINY = "tiny"
_MB = 1_000_000
_NOISE = 1e-3
_SAME_BY_CHANCE = 6
_USERS = 10
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _text(seed: str, words: int) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choice(WORDS) for _ in range(words)) + "."


def _prompt(seed: str, words: int, **fields: object) -> Asked:
    """A completion of one token."""
    key = fields.pop("key", ALICE)
    assert isinstance(key, str)
    body = {"model": _TINY, "prompt": _text(seed, words), "max_tokens": 1, "temperature": 0}
    return Asked({**body, **fields}, key)


def _is_miss(answer: Answer) -> bool:
    """Nothing was found, but for words that texts of the same few words happen to begin with."""
    return answer.cached_tokens <= _SAME_BY_CHANCE


@dataclass(frozen=True)
class Pair:
    """Two daemons of one model: one has a prefix cache, the other has none."""

    cached: ForkedDaemon
    plain: ForkedDaemon


@pytest.fixture(name="parent", scope="module")
def _parent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonParent]:
    with daemon_parent(tmp_path_factory.mktemp("daemons")) as parent:
        yield parent


@pytest.fixture(name="tiny", scope="module")
def _tiny(parent: DaemonParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A daemon of the tiny model, with two API keys."""
    model = str(write_tiny_llama(tmp_path_factory.mktemp("model") / _TINY))
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"alice:{ALICE}\nbob:{BOB}\n")
    keys.chmod(0o600)
    flags = (
        model, "--continuous-batching", "--continuous-batching-max-b", str(_USERS),
        "--auth-api-keys-file", str(keys),
    )  # fmt: skip
    with (
        parent.running(*flags) as cached,
        parent.running(*flags, "--no-cache-prefix") as plain,
    ):
        yield Pair(cached, plain)


def _questions() -> list[Asked]:
    """All that a prefix cache could get wrong, with a system prompt that all of them share."""
    system = {"role": "system", "content": _text("system", 80)}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}}
    # Of twenty tokens a rounding error never chooses another one, of the whole vocabulary it may.
    drawn = {"temperature": 1, "top_k": 20}
    ways: list[dict[str, object]] = [
        {"temperature": 0},
        {**drawn, "seed": 7},
        {**drawn, "seed": 3, "n": 3},
        {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"temperature": 0, "repetition_penalty": 1.5, "logprobs": True},
        {**drawn, "seed": 11, "repetition_penalty": 1.3},
        {**drawn, "seed": 5, "max_tokens": 60, "response_format": shape},
    ]
    users = ("Tell me about paper.", "Tell me about paper and silver.", _text("user", 70))
    chats = [
        Asked(
            {
                "model": _TINY, "max_tokens": 10, **way,
                "messages": [system, {"role": "user", "content": user}],
            },
            ALICE,
        )
        for user in users
        for way in ways
    ]  # fmt: skip
    texts = [
        Asked({"model": _TINY, "prompt": _text("text", 100) + user, "max_tokens": 8, **way}, ALICE)
        for user in users
        for way in ({"temperature": 0, "logprobs": 2}, {"temperature": 0, "echo": True})
    ]
    return chats + texts


_QUESTIONS = _questions()


def _check_same(
    questions: Sequence[Asked], expected: Sequence[Answer], got: Sequence[Answer], what: str
) -> None:
    for asked, one, other in zip(questions, expected, got, strict=True):
        fields = {name: value for name, value in asked.fields.items() if name != "messages"}
        assert one.said == other.said, f"{what}: {fields}"
        assert one.logprob_error(other) < _NOISE, f"{what}: {fields}"


@pytest.mark.parametrize(
    ("mode", "questions"),
    [
        ("batched", _QUESTIONS[::3]),  # every way once
        pytest.param("batched", _QUESTIONS, marks=pytest.mark.long),
        pytest.param("single", _QUESTIONS, marks=pytest.mark.long),
    ],
    ids=["batched-some", "batched-every", "single-every"],
)
def test_answers_are_those_of_a_daemon_without_a_cache(
    tiny: Pair, mode: str, questions: Sequence[Asked]
) -> None:
    """Cold, warm, and all at once; greedy and drawn, n, penalties, logprobs, structured output."""
    for daemon in (tiny.cached, tiny.plain):
        daemon.change("/admin/mode", {"mode": mode})
    tiny.cached.change("/admin/cache/clear", {})
    expected = [ask(tiny.plain.url, one) for one in questions]
    assert len({one.texts for one in expected}) > len(questions) // 2, "answers differ"
    assert not any(one.cached_tokens for one in expected)
    _check_same(
        questions, expected, [ask(tiny.cached.url, one) for one in questions], "the first time"
    )
    again = [ask(tiny.cached.url, one) for one in questions]
    _check_same(questions, expected, again, "the second time")
    assert all(one.cached_tokens == one.prompt_tokens - 1 for one in again)
    together = ask_all(tiny.cached.url, questions)
    _check_same(questions, expected, together, "all at once")
    if mode == "batched":
        tiny.cached.change("/admin/cache/clear", {})
        _check_same(questions, expected, ask_all(tiny.cached.url, questions), "all at once, cold")


def test_modes_keep_the_cache(tiny: Pair) -> None:
    """A prompt that one has computed is found by the other, to the last token but one."""
    answers = []
    for mode, text in (
        ("single", "one"),
        ("batched", "two"),
        ("single", "two"),
        ("batched", "one"),
    ):
        tiny.cached.change("/admin/mode", {"mode": mode})
        asked = _prompt(f"mode {text}", 60, max_tokens=2)
        answers.append(ask(tiny.cached.url, asked))
    assert all(_is_miss(one) or one.cached_tokens == one.prompt_tokens - 1 for one in answers)
    assert answers[-1].cached_tokens == answers[-1].prompt_tokens - 1


def test_stop_texts_and_leaving_spoil_nothing(tiny: Pair) -> None:
    """Prompts whose earlier answers were cut short, by a text or by a client that left, in company."""
    asked = Asked(
        {
            "model": _TINY, "prompt": _text("cut", 90), "max_tokens": 24, "temperature": 0,
            "ignore_eos": True,
        },
        ALICE,
    )  # fmt: skip
    whole = ask(tiny.plain.url, asked)
    word = whole.texts[0].split()[3]
    stopped = Asked({**asked.fields, "stop": [word]}, ALICE)
    expected = ask(tiny.plain.url, stopped)
    assert expected.reasons == ("stop",)
    with ThreadPoolExecutor(4) as pool:
        for after in (1, 2, 5, 9):
            pool.submit(ask_streamed, tiny.cached.url, asked, leaves_after=after)
            assert ask(tiny.cached.url, stopped).said == expected.said
    for _ in range(2):
        assert ask(tiny.cached.url, asked).said == whole.said
        assert ask(tiny.cached.url, stopped).said == expected.said
    longer = Asked(
        {**asked.fields, "prompt": f"{asked.fields['prompt']}{whole.texts[0]} and on"}, ALICE
    )
    said = ask(tiny.cached.url, longer)
    assert said.said == ask(tiny.plain.url, longer).said
    assert said.cached_tokens >= whole.prompt_tokens, "an answer is reused, too"


def test_steps_of_the_table(tiny: Pair) -> None:
    """A prompt is a miss, then a full hit; a longer one is a prefix hit, and the first one a hit again."""
    url = tiny.cached.url
    first = _prompt("table", 60)
    begun = prefix_stats(url, ALICE)
    cold = ask(url, first)
    assert _is_miss(cold)
    warm = ask(url, first)
    assert warm.computed_tokens == 1
    longer = ask(url, _prompt("table", 60, prompt=f"{_text('table', 60)} And so on."))
    assert cold.prompt_tokens - 1 <= longer.cached_tokens < longer.prompt_tokens - 1
    back = ask(url, first)
    assert back.computed_tokens == 1
    assert cold.said == warm.said == back.said == ask(tiny.plain.url, first).said
    wait_until(
        lambda: prefix_stats(url, ALICE)["queries"] == begun["queries"] + 4, "all are counted"
    )
    ended = prefix_stats(url, ALICE)
    counts = {name: ended[name] - begun[name] for name in ("hits", "prefix_hits", "misses")}
    begins_like_another = bool(cold.cached_tokens)
    assert counts == {
        "hits": 2,
        "prefix_hits": 1 + begins_like_another,
        "misses": 1 - begins_like_another,
    }


def test_ten_users_of_one_system_prompt_compute_it_once(tiny: Pair) -> None:
    """One computes it, nine wait for that and begin with it, a late one too; it is kept once."""
    url = tiny.cached.url
    system = _text("ten", 200)
    prompts = [f"{system} User {number}." for number in range(_USERS)]

    begun_queries = prefix_stats(url, ALICE)["queries"]

    def held_bytes(*, asked: int) -> int:
        """Bytes once so many prompts are counted and none runs: the page is a moment behind the answers."""
        held: list[int] = []

        def is_settled() -> bool:
            said = prefix_stats(url, ALICE)
            held.append(int(said["bytes"]))
            return said["queries"] == begun_queries + asked and not said["pinned_blocks"]

        wait_until(is_settled, "all are counted, and nothing runs")
        return held[-1]

    begun_bytes = held_bytes(asked=0)
    ask(url, _prompt("ten alone", 200))
    alone_bytes = held_bytes(asked=1) - begun_bytes
    answers = ask_all(url, [_prompt("", 0, prompt=one) for one in prompts], streamed=True)
    computing = [one for one in answers if one.cached_tokens < one.prompt_tokens // 2]
    assert len(computing) == 1, "one computes it"
    rests = [one.computed_tokens for one in answers if one not in computing]
    assert max(rests) < 0.1 * answers[0].prompt_tokens, "the others compute what is theirs"
    shared_bytes = held_bytes(asked=1 + _USERS) - begun_bytes - alone_bytes

    salted = [
        _prompt("", 0, prompt=one, cache_salt=f"{number}") for number, one in enumerate(prompts)
    ]
    apart = ask_all(url, salted, streamed=True)
    assert not any(one.cached_tokens for one in apart)
    salted_bytes = held_bytes(asked=1 + 2 * _USERS) - begun_bytes - alone_bytes - shared_bytes
    assert shared_bytes - alone_bytes <= 0.2 * salted_bytes
    late = ask(url, _prompt("", 0, prompt=f"{system} Late."))
    assert late.computed_tokens < 0.1 * late.prompt_tokens


def test_another_key_meets_a_miss(tiny: Pair) -> None:
    """Each key computes its prompts itself; what keys share they are told to share, and salts keep apart."""
    url = tiny.cached.url
    for number in range(3):
        cold, warm, other = (
            ask(url, _prompt(f"keys {number}", 150, key=key)) for key in (ALICE, ALICE, BOB)
        )
        assert _is_miss(cold)
        assert warm.computed_tokens == 1
        assert _is_miss(other)
        assert other.said == warm.said

    for salt, cached in (("a", False), ("b", False), ("a", True)):
        answer = ask(url, _prompt("keys salts", 40, cache_salt=salt))
        assert _is_miss(answer) is not cached
    assert not ask(url, _prompt("keys salts", 40, key=BOB, cache_salt="a")).cached_tokens
    assert _is_miss(ask(url, _prompt("keys salts", 40)))

    # At once, too: neither waits for the other's prompt.
    both = [_prompt("keys at once", 100, key=key) for key in (ALICE, BOB)]
    assert all(_is_miss(one) for one in ask_all(url, both))

    tiny.cached.change("/admin/config", {"cache": {"namespace": "shared"}})
    try:
        shared = [_prompt("keys shared", 60, key=key) for key in (ALICE, BOB)]
        assert _is_miss(ask(url, shared[0]))
        found = ask(url, shared[1])
        assert found.cached_tokens == found.prompt_tokens - 1
        assert not ask(url, _prompt("keys shared", 60, key=BOB, cache_salt="a")).cached_tokens
        assert _is_miss(ask(url, _prompt("keys 0", 150, key=BOB))), "that was under keys"
    finally:
        tiny.cached.change("/admin/config", {"cache": {"namespace": "key"}})


class _Watch:
    """Looks at a daemon from outside until it is left: its process's memory, and what it says."""

    def __init__(self, daemon: ForkedDaemon) -> None:
        self._process = engine_of(daemon.process_id)
        self._url = daemon.url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.begun_bytes = self._process.memory_info().rss
        self.highest_bytes = self.begun_bytes
        self.readings: list[tuple[int, int]] = []

    @property
    def grown_bytes(self) -> int:
        return int(self.highest_bytes - self.begun_bytes)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.highest_bytes = max(self.highest_bytes, self._process.memory_info().rss)
            prefix = httpx.get(f"{self._url}/v1/cache/stats", timeout=CEILING_S).json()["prefix"]
            if prefix is not None:
                self.readings.append((prefix["bytes"], prefix["limit_bytes"]))


@pytest.mark.parametrize("prompts", [7, pytest.param(40, marks=pytest.mark.long)])
def test_tiny_memory_limit_is_kept(parent: DaemonParent, tmp_path: Path, prompts: int) -> None:
    """At every look, with memory that the system counts; a smaller one evicts at once, none keeps none."""
    # 49 kB a token, like a model of 135 million parameters.
    model = str(
        write_tiny_llama(
            tmp_path / _TINY,
            vocabulary=EMBEDDED_VOCABULARY_TOKENS,
            layers=3,
            head_dim=64,
            kv_heads=32,
        )
    )
    # A prompt is 10 MB. On a busy machine three of them are still being copied, or given back: 44 MB were seen, 30 on a quiet one.
    limit_mb, allowance = 20, 40 * _MB
    with (
        parent.running(model, "--cache-memory-mb", str(limit_mb)) as cached,
        parent.running(model, "--no-cache-prefix") as plain,
    ):
        url = cached.url
        watches = []
        for daemon in (plain, cached):
            ask(daemon.url, _prompt("longest", 200))
            with _Watch(daemon) as watch:
                for number in range(prompts):
                    ask(daemon.url, _prompt(f"tiny {number}", 130 + 10 * number % 70))
            watches.append(watch)
        grown, watch = [one.grown_bytes for one in watches], watches[-1]
        assert watch.readings
        assert all(held <= limit_mb * _MB == limit for held, limit in watch.readings)
        # What the page says is read when nothing runs, which is a moment after the last answer.
        wait_until(lambda: prefix_stats(url)["evictions"] > prompts, "blocks were evicted")
        assert prefix_stats(url)["bytes"] > limit_mb * _MB // 2, "it is used"
        without, limited = grown
        assert limited <= without + limit_mb * _MB + allowance

        cached.change("/admin/config", {"cache": {"memory_mb": 5}})
        wait_until(lambda: prefix_stats(url)["bytes"] <= 5 * _MB, "it goes at once")
        again = _prompt("kept", 40)
        ask(url, again)
        assert ask(url, again).cached_tokens > 0
        cached.change("/admin/config", {"cache": {"memory_mb": 0}})
        wait_until(lambda: prefix_stats(url)["bytes"] == 0, "nothing is kept")
        answers = [ask(url, again) for _ in range(2)]
        assert [one.cached_tokens for one in answers] == [0, 0]
        assert answers[0].said == ask(plain.url, again).said
        assert prefix_stats(url)["bytes"] == prefix_stats(url)["blocks"] == 0


def test_a_fault_forgets_and_goes_on(tmp_path: Path) -> None:
    """A failed step drops all blocks in memory. A resumed request computes its prompt anew, which is kept again."""
    fails = threading.Event()
    behind_fault: list[StepPlan] = []

    def fail(plan: StepPlan) -> None:
        if fails.is_set() and not behind_fault:
            fails.clear()
            behind_fault.append(plan)
            raise RuntimeError("a step fails")
        if behind_fault:
            behind_fault.append(plan)

    text = "A prompt that is long enough to be kept, and to be found again later on. " * 2
    flags = {"cache.memory_mb": 100, "continuous_batching.enabled": True}
    with AdminDaemon(tmp_path, lambda: FakeEngine(told, before_step=fail), flags) as daemon:

        def cached() -> int:
            answer = daemon.http.post("/v1/completions", json=completion(text, max_tokens=1))
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached(), cached()] == [0, len(text) - 1]
        fails.set()
        answer = daemon.http.post("/v1/completions", json=completion(f"{text} x", max_tokens=1))
        assert answer.status_code == 200
        (before,), (after,) = (behind_fault[at].prefill for at in (0, 1))
        assert before.reused is not None
        assert (after.start, after.reused) == (0, None)
        wait_until(lambda: daemon.status["running"] == 0, "nothing runs")
        assert [cached(), cached()] == [len(text) - 1] * 2
