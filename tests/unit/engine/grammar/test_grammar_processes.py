"""Constraints that no limit of llguidance's bounds: compiled and followed in processes that end."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
from support.clients.explosive_constraints import (
    EXPLOSIVE_KINDS,
    FORTY_PATTERNS,
    explosive_constraint,
)
from support.clocks.polling import CEILING_S, wait_until
from support.engines.fake_engine import FakeEngine

from machd.clock import SystemClock
from machd.engine.grammar.grammar import LlguidanceCompiler, compiled
from machd.engine.grammar.grammar_child import Fork, _Forks
from machd.engine.grammar.grammar_processes import GrammarBounds, SeparateMatcher
from machd.engine.grammar.masks import TokenMasks
from machd.engine.grammar.matcher import Matcher, matcher_for
from machd.errors import GrammarError, OverloadedError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.generation import SamplingParams

_TIGHT = GrammarBounds(compile_s=0.4, step_s=0.2)
"""For what is to be ended. A machine that is busy ends what is harmless in them, too."""

_WIDE = GrammarBounds(compile_s=CEILING_S, step_s=CEILING_S, max_processes=4)


def _compiler(bounds: GrammarBounds = _WIDE) -> LlguidanceCompiler:
    model, tokenizer = FakeEngine().model, FakeEngine().tokenizer
    return LlguidanceCompiler(tokenizer, model.vocabulary_tokens, model.eos_token_ids, bounds)


@pytest.fixture(name="compiler")
def _opened() -> Iterator[LlguidanceCompiler]:
    """A compiler with bounds that nothing harmless meets."""
    compiler = _compiler()
    yield compiler
    compiler.close()


@pytest.fixture(name="tight")
def _opened_tight() -> Iterator[LlguidanceCompiler]:
    """A compiler with bounds that are met soon."""
    compiler = _compiler(_TIGHT)
    yield compiler
    compiler.close()


def _schema(schema: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), "response_format")


_ONE_PATTERN = _schema({"type": "string", "pattern": "^a*b$"})
_TWO_PATTERNS = _schema({"allOf": [{"type": "string", "pattern": "^a*b$"}, {"maxLength": 3}]})


def _matcher(compiler: LlguidanceCompiler, constraint: Constraint) -> Matcher:
    matcher = matcher_for(SamplingParams(grammar=compiler.compile(constraint)))
    assert matcher is not None
    return matcher


def _walk(matcher: Matcher, rng: random.Random, steps: int) -> bytes:
    """Say allowed bytes at random, at most ``steps``; 256 ends the text."""
    said = bytearray()
    for _ in range(steps):
        if forced := matcher.take_forced(steps):
            said += bytes(forced)
            continue
        token_id = rng.choice(sorted(matcher.allowed()))
        if token_id > 255:
            break
        matcher.accept(token_id)
        said.append(token_id)
    return bytes(said)


def _check_generated(compiler: LlguidanceCompiler, seed: int, kind: str) -> None:
    with contextlib.suppress(GrammarError):
        _walk(_matcher(compiler, explosive_constraint(kind, seed)), random.Random(seed), 25)
    # Whatever became of it, the next client's is served.
    assert _walk(_matcher(compiler, _ONE_PATTERN), random.Random(seed), 9)


@pytest.mark.parametrize("kind", EXPLOSIVE_KINDS)
def test_explosive_constraint_is_followed_or_refused_and_the_next_is_served(
    kind: str, tight: LlguidanceCompiler
) -> None:
    """Neither a compilation nor a step goes on beyond its bound, whatever the constraint."""
    _check_generated(tight, 1, kind)


@pytest.mark.longest
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("kind", EXPLOSIVE_KINDS)
def test_many_explosive_constraints_are_followed_or_refused(
    kind: str, seed: int, tight: LlguidanceCompiler
) -> None:
    """The same of twenty more of each kind."""
    _check_generated(tight, seed, kind)


def test_compilation_is_ended_when_it_is_late(tight: LlguidanceCompiler) -> None:
    """Forty patterns are refused in words, and nothing of their process is left."""
    with pytest.raises(GrammarError, match="response_format: too complex"):
        tight.compile(_schema(FORTY_PATTERNS))
    assert tight.process_count == 0


def test_compilation_is_ended_when_it_is_not_wanted_any_more() -> None:
    """A client that leaves takes its compilation with it, long before the bound."""
    compiler = _compiler(GrammarBounds(compile_s=CEILING_S, memory_bytes=1 << 40))
    with pytest.raises(GrammarError, match="no longer waited for"):
        compiler.compile(_schema(FORTY_PATTERNS), is_wanted=lambda: False)
    assert compiler.process_count == 0
    compiler.close()


def test_late_step_ends_its_own_row(compiler: LlguidanceCompiler) -> None:
    """A grammar that explodes behind its beginning fails its row; a neighbour's masks are filled."""
    patterns = [f"^(x|c(y|d(z|e(.*a{{{i}}}.*b))))$" for i in range(1, 41)]
    ending = _compiler(GrammarBounds(compile_s=CEILING_S, step_s=0.2))
    late = _matcher(
        ending, _schema({"allOf": [{"type": "string", "pattern": one} for one in patterns]})
    )
    late.take_forced(1)
    neighbour = _matcher(compiler, _TWO_PATTERNS)
    neighbour.take_forced(1)
    masks = TokenMasks(257, SystemClock())
    with contextlib.suppress(GrammarError):
        for character in b"cdeaaaa":
            masks.fill([late])
            late.accept(character)
    with pytest.raises(GrammarError, match="too complex to follow"):
        masks.fill([late])
    assert masks.fill([neighbour])[0, ord("b")].item()
    ending.close()


def test_separate_grammar_allows_what_llguidance_does_in_this_process() -> None:
    """Masks, forced tokens and ends are the same at each step of random answers."""
    compiler, schema = _compiler(), {"allOf": [{"type": "string", "pattern": "^(ab|cd|ef)+$"}]}
    here = _schema(schema)
    apart = _schema({"allOf": [*schema["allOf"], {"type": "string"}]})
    for seed in range(10):
        one, other = _matcher(compiler, here), _matcher(compiler, apart)
        assert isinstance(other.llmatcher, SeparateMatcher)
        assert not isinstance(one.llmatcher, SeparateMatcher)
        rng = random.Random(seed)
        for _ in range(20):
            assert one.forced == other.forced
            one.forced.clear()
            other.forced.clear()
            allowed = one.allowed()
            assert other.allowed() == allowed
            token_id = rng.choice(sorted(allowed))
            assert other.allows(token_id)
            assert other.fork().allows(token_id)
            if token_id > 255:
                break
            one.accept(token_id)
            other.accept(token_id)
    compiler.close()


def test_process_ends_with_the_last_row_of_a_grammar_that_is_not_kept(
    compiler: LlguidanceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are there for rows and for a few kept grammars, not for those of the past."""
    monkeypatch.setattr("machd.engine.grammar.grammar._MAX_KEPT_BYTES", 0)
    matcher = _matcher(compiler, _TWO_PATTERNS)
    assert compiler.process_count == 1
    del matcher
    gc.collect()
    assert compiler.process_count == 0


def test_number_of_processes_is_bounded(compiler: LlguidanceCompiler) -> None:
    """One grammar too many at once is refused for now; a kept one makes room for a new one."""
    rows = [
        _matcher(
            compiler, _schema({"allOf": [{"type": "string", "pattern": f"a{i}"}, {"maxLength": 9}]})
        )
        for i in range(4)
    ]
    with pytest.raises(OverloadedError):
        compiler.compile(_TWO_PATTERNS)
    rows.clear()
    gc.collect()
    compiler.compile(_TWO_PATTERNS)


def test_fork_that_the_system_refuses_ends_no_other_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is no room for a process the request learns it, and the forks that there are live on."""

    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "no room")

    ours, theirs = socket.socketpair()
    forks = _Forks(ours)
    forks._vocabulary = (None, None)  # type: ignore[assignment]
    monkeypatch.setattr(os, "fork", refused)
    with ours, theirs:
        answer = forks.answer(Fork(), [os.dup(theirs.fileno())])
    assert msgspec.msgpack.decode(answer) == -errno.EAGAIN


def test_numbers_of_dropped_matchers_are_taken_once_by_threads_at_once(
    compiler: LlguidanceCompiler,
) -> None:
    """The engine follows rows while a compilation looks whether a kept process is alive."""
    matcher = compiled(compiler.compile(_TWO_PATTERNS)).llmatcher
    assert isinstance(matcher, SeparateMatcher)
    process = matcher._process
    with ThreadPoolExecutor(2) as pool:
        for _ in range(200):
            for number in range(1000, 1020):
                process.drop(number)
            first, second = pool.map(lambda _: process._take_dropped(), range(2))
            assert sorted((*first, *second)) == list(range(1000, 1020))


def test_grammar_whose_process_has_ended_is_compiled_again(compiler: LlguidanceCompiler) -> None:
    """What is kept of it is of no use to the next request."""
    first = compiled(compiler.compile(_TWO_PATTERNS)).llmatcher
    compiler.close()
    assert compiled(compiler.compile(_TWO_PATTERNS)).llmatcher is not first


def test_one_compilation_does_not_wait_for_another() -> None:
    """A second thread's grammar is ready while the first still compiles."""
    compiler = _compiler(GrammarBounds(compile_s=CEILING_S, memory_bytes=1 << 40))
    is_wanted = threading.Event()
    is_wanted.set()

    def attack() -> None:
        with contextlib.suppress(GrammarError):
            compiler.compile(_schema(FORTY_PATTERNS), is_wanted=is_wanted.is_set)

    attacker = threading.Thread(target=attack)
    attacker.start()
    wait_until(lambda: compiler.process_count == 1, "the compilation has begun")
    compiler.compile(_TWO_PATTERNS)
    assert attacker.is_alive()
    is_wanted.clear()
    attacker.join()
    compiler.close()


_COMPILE_FOR_EVER = """
import json
from support.clients.explosive_constraints import FORTY_PATTERNS
from support.engines.fake_engine import FakeEngine
from machd.engine.grammar.grammar_processes import GrammarBounds
from machd.request.constraint import Constraint, ConstraintKind
engine = FakeEngine(grammar_bounds=GrammarBounds(compile_s=1e6, memory_bytes=1 << 40))
engine.grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(FORTY_PATTERNS), "p"))
"""


def test_compilation_ends_with_a_daemon_that_is_killed() -> None:
    """The process that forks the others ends them, even in the middle of a call."""
    daemon = subprocess.Popen([sys.executable, "-c", _COMPILE_FOR_EVER], env=_environment())
    try:
        process = psutil.Process(daemon.pid)
        wait_until(lambda: len(process.children(recursive=True)) == 2, "it compiles")
        processes = process.children(recursive=True)
        wait_until(lambda: processes[1].cpu_times().user > 0.2, "it is in the middle of it")
    finally:
        daemon.kill()
        daemon.wait()
    wait_until(lambda: all(_has_ended(one) for one in processes), "both have ended")


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)  # nobody may collect it
    except psutil.NoSuchProcess:
        return True


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
