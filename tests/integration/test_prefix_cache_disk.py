"""The disk tier under daemons that are stopped, killed, refused, damaged, and run out of room.

A daemon gives the answers of a daemon without any cache, whatever becomes of its files.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clients.cached_answers import Answer, Asked, ask, ask_all, prefix_stats, stats
from support.clients.common_words import WORDS
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.forked_daemons import DaemonParent, ForkedDaemon, daemon_parent

from machd.errors import SettingsError

_MODEL = "tiny"
_KILLED_AFTER_ANSWERS = 12
_KILLED_WITHIN_S = 0.1
_STARTED_WITHIN_S = 1.0
_ASKING = 3
_ANSWER_TOKENS = 6
_BEGINNINGS = 4
_HEADER_BYTES = 1500
_TEXT_BLOCKS = 32
"""What the first beginning's texts and their answers are cut into."""
_KILL_FLAGS = (
    "--continuous-batching", "--continuous-batching-max-b", "4", "--probe-on-start", "off",
    "--cache-memory-mb", "1",  # 2,000 tokens of this model, so that blocks are read all the time
    "--cache-disk-budget-gb", "0.004",  # and some are forgotten, too
)  # fmt: skip


def _texts() -> list[str]:
    """Make prompts that share beginnings in many ways: some are the beginnings of others."""
    dice = random.Random(3)
    found: list[str] = []
    for _ in range(_BEGINNINGS):
        words = [dice.choice(WORDS) for _ in range(260)]
        stops = (40, 120, 121, 200, 260)
        found += [" ".join(words[:stop]) for stop in stops]
        found += [" ".join([*words[:stop], "and", "so", "on"]) for stop in stops[:-1]]
    return found


TEXTS = _texts()
_WRITTEN = TEXTS[:9]


def _question(text: str, **fields: object) -> Asked:
    return Asked(
        {
            "model": _MODEL, "prompt": text, "max_tokens": _ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, **fields,
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A model, a starter of daemons, and the answers that they have to give."""

    parent: DaemonParent
    model: Path
    answers: dict[str, Answer]

    def start(
        self, directory: Path, *flags: str, max_file_bytes: int | None = None
    ) -> ForkedDaemon:
        """Start a daemon with that directory."""
        return self.parent.start(
            str(self.model), "--cache-disk-dir", str(directory), *flags,
            max_file_bytes=max_file_bytes,
        )  # fmt: skip

    def check(self, url: str, texts: list[str] | None = None) -> list[Answer]:
        """Ask for texts, one after the other, and compare the answers."""
        got = [(text, ask(url, _question(text))) for text in texts or TEXTS]
        for text, answer in got:
            assert answer.said == self.answers[text].said, "it is what a daemon without cache says"
        return [answer for _, answer in got]


@pytest.fixture(name="site", scope="module")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Answers of a daemon without any cache."""
    directory = tmp_path_factory.mktemp("daemons")
    model = write_tiny_llama(directory / _MODEL)
    with daemon_parent(directory) as parent:
        with parent.running(str(model), "--no-cache-prefix") as daemon:
            answers = {text: ask(daemon.url, _question(text)) for text in TEXTS}
            assert len({one.texts for one in answers.values()}) > len(TEXTS) // 2, "they differ"
        yield Site(parent, model, answers)


@pytest.fixture(name="blocks")
def _blocks(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def _files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


@pytest.fixture(name="written", scope="module")
def _written(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a daemon that was asked for the first texts and stopped; tests take copies."""
    blocks = tmp_path_factory.mktemp("written") / "blocks"
    daemon = site.start(blocks)
    site.check(daemon.url, _WRITTEN)
    # At once: the last answer's own tokens are a block, too.
    assert daemon.stop() == 0
    return blocks


def test_stopped_daemons_prompts_are_found_by_the_next_one(
    site: Site, written: Path, blocks: Path
) -> None:
    """The stop writes queued blocks; the next daemon finds all tokens but the last, and answers alike."""
    texts = _WRITTEN
    shutil.copytree(written, blocks)
    assert len(_files(blocks)) == _TEXT_BLOCKS
    assert stat.S_IMODE(blocks.stat().st_mode) == 0o700
    assert {stat.S_IMODE(one.stat().st_mode) for one in _files(blocks)} == {0o600}

    daemon = site.start(blocks)
    assert prefix_stats(daemon.url)["saved_blocks"] == len(_files(blocks)), "all are known"
    answers = site.check(daemon.url, texts)
    assert [one.cached_tokens for one in answers] == [one.prompt_tokens - 1 for one in answers]
    disk = stats(daemon.url)["disk"]
    assert (disk["damaged"], disk["dropped"]) == (0, 0)
    assert disk["loaded"] > 0
    assert daemon.stop() == 0


class _Load:
    """Clients that ask for texts in any order, until the daemon is dead."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self.answers: list[tuple[str, Answer]] = []
        self.refused: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(seed * 10 + number), seed))
            for number in range(_ASKING)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, dice: random.Random, seed: int) -> None:
        while True:
            text = dice.choice(TEXTS)
            # Half of them are new to the daemon, whatever earlier trials have left.
            salt = {"cache_salt": f"trial {seed}"} if dice.random() < 0.5 else {}
            try:
                self.answers.append((text, ask(self._url, _question(text, **salt))))
            except httpx.HTTPError:
                return
            except AssertionError as error:
                self.refused.append(str(error))
                return

    def wait(self, answers: int) -> None:
        """Wait until there are ``answers`` answers."""
        wait_until(lambda: len(self.answers) >= answers, "it answers")

    def join(self) -> None:
        for thread in self._threads:
            thread.join(CEILING_S)
            assert not thread.is_alive(), "a dead daemon gives no answer"


@pytest.mark.parametrize("trials", [4, pytest.param(200, marks=pytest.mark.longest)])
def test_killed_daemon_leaves_blocks_that_answer_rightly(
    site: Site, blocks: Path, trials: int
) -> None:
    """Every start on the directory of a killed daemon succeeds, and every answer is right.

    Every fifth daemon is killed while it starts.
    """
    dice = random.Random(29)
    answered = reused = 0
    for trial in range(trials):
        daemon = site.start(blocks, *_KILL_FLAGS)
        if trial % 5 == 3:
            threading.Event().wait(dice.uniform(0, _STARTED_WITHIN_S))
            daemon.kill()
            continue
        load = _Load(daemon.url, trial)
        load.wait(dice.randrange(_KILLED_AFTER_ANSWERS))
        threading.Event().wait(dice.uniform(0, _KILLED_WITHIN_S))
        daemon.kill()
        load.join()
        assert not load.refused
        for text, answer in load.answers:
            assert answer.said == site.answers[text].said, f"trial {trial}"
        answered += len(load.answers)
        reused += sum(bool(answer.cached_tokens) for _, answer in load.answers)
        (found,) = [one for one in daemon.events if one["event"] == "blocks.found"]
        assert found["damaged"] == 0, "a file has its name only when it is whole"
        assert not [one for one in daemon.events if one["event"] == "blocks.damaged"]
    assert answered > trials
    assert reused > 0

    daemon = site.start(blocks, *_KILL_FLAGS)
    saved = prefix_stats(daemon.url)["saved_blocks"]
    assert saved > 0, "what they had written is there"
    site.check(daemon.url)
    disk = stats(daemon.url)["disk"]
    assert disk["damaged"] == 0
    assert disk["loaded"] > 0
    assert daemon.stop() == 0


def _truncated(files: list[Path]) -> None:
    for one in files[::3]:
        os.truncate(one, one.stat().st_size * 2 // 3)


def _flipped(files: list[Path]) -> None:
    """Flip a bit of the tensors in each file; the heads, which a start reads, stay right."""
    for one in files[::2]:
        whole = bytearray(one.read_bytes())
        whole[-7] ^= 4
        one.write_bytes(whole)


def _swapped(files: list[Path]) -> None:
    """Give each file another one's content, which is intact."""
    contents = [one.read_bytes() for one in files]
    for one, content in zip(files, [*contents[1:], contents[0]], strict=True):
        one.write_bytes(content)


@pytest.mark.long  # every run damages files of the tier, in unit/engine/prefix_blocks/test_disk_tier.py
@pytest.mark.parametrize(
    ("damage", "runs"), [(_truncated, False), (_flipped, False), (_swapped, True)]
)
def test_damaged_blocks_are_counted_and_never_answered(
    site: Site,
    written: Path,
    blocks: Path,
    damage: Callable[[list[Path]], None],
    runs: bool,  # noqa: FBT001
) -> None:
    """Damage between two daemons, and under one that has just started, makes it compute anew."""
    texts = TEXTS[:4]
    shutil.copytree(written, blocks)
    if not runs:
        damage(_files(blocks))
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        if runs:
            damage(_files(blocks))
        site.check(daemon.url, texts)
        # The last answer may be sent before the counts of its pass are published.
        wait_until(lambda: stats(daemon.url)["disk"]["damaged"] > 0, "it is counted")
        again = site.check(daemon.url, texts)
        assert all(one.cached_tokens == one.prompt_tokens - 1 for one in again), "it goes on"
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        # What was in memory before it was wanted from disk was not read there, so it is found out now.
        site.check(daemon.url, texts)
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        healed = site.check(daemon.url, texts)
        assert all(one.cached_tokens == one.prompt_tokens - 1 for one in healed), "written anew"
        assert stats(daemon.url)["disk"]["damaged"] == 0


@pytest.mark.long  # every run deletes files of the tier, in test_disk_tier.py
def test_daemon_goes_on_when_its_files_are_deleted(site: Site, written: Path, blocks: Path) -> None:
    """An operator may delete all files while the daemon runs, which costs their computation."""
    texts = TEXTS[:4]
    shutil.copytree(written, blocks)
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        for one in _files(blocks):
            one.unlink()
        site.check(daemon.url, texts)
        again = site.check(daemon.url, texts)
        assert all(one.cached_tokens == one.prompt_tokens - 1 for one in again)


@pytest.mark.long
def test_blocks_of_another_model_are_not_found(site: Site, blocks: Path, tmp_path: Path) -> None:
    """Other weights are another key, even with the same name, sizes and prompts."""
    text = TEXTS[0]
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        site.check(daemon.url, [text])
    other = write_tiny_llama(tmp_path / _MODEL, seed=1)
    with site.parent.running(str(other), "--cache-disk-dir", str(blocks)) as daemon:
        answer = ask(daemon.url, _question(text))
        assert answer.cached_tokens == 0
        assert answer.texts != site.answers[text].texts
        assert stats(daemon.url)["disk"]["loaded"] == 0
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        (answer,) = site.check(daemon.url, [text])
        assert answer.cached_tokens == answer.prompt_tokens - 1, "it is still there"


@pytest.mark.long  # test_directory.py has the lock in every run, and that the end of its process frees it
def test_second_daemon_on_a_directory_is_refused(site: Site, blocks: Path) -> None:
    """The message names the setting, the directory and the remedy; the first daemon goes on."""
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        second = site.start(blocks)
        assert second.wait() == SettingsError.exit_code
        said = second.log.read_text()
        assert "cache.disk_dir" in said
        assert str(blocks) in said
        assert "another daemon" in said
        assert "Traceback" not in said
        site.check(daemon.url, TEXTS[:1])
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        site.check(daemon.url, TEXTS[:1])


@pytest.mark.long
def test_full_disk_costs_only_unwritten_blocks(site: Site, blocks: Path) -> None:
    """Requests and the memory tier go on, unwritten blocks are counted, and no partial file is left."""
    page = resource.getpagesize()
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        site.check(daemon.url, TEXTS[:1])
    before = len(_files(blocks))
    # Less than a whole block of this model, which has 32 kB.
    daemon = site.start(blocks, max_file_bytes=5 * page)
    texts = TEXTS[9:13]
    site.check(daemon.url, texts)
    wait_until(lambda: stats(daemon.url)["disk"]["dropped"] > 0, "it is counted")
    again = site.check(daemon.url, texts)
    assert all(one.cached_tokens == one.prompt_tokens - 1 for one in again)
    assert daemon.stop() == 0
    assert not list(blocks.rglob("*.tmp"))
    sizes = [one.stat().st_size for one in _files(blocks)]
    assert len(sizes) >= before
    with site.parent.running(str(site.model), "--cache-disk-dir", str(blocks)) as daemon:
        site.check(daemon.url, TEXTS[:1] + texts)
        assert stats(daemon.url)["disk"]["damaged"] == 0


@pytest.mark.long  # every run has the budget of the pool, in unit/scheduler/test_block_pool.py
def test_files_never_exceed_the_disk_budget(site: Site, blocks: Path) -> None:
    """They are counted after every few answers, and with a smaller budget at the next start.

    A file's header weighs as much as the arrays in a model as small as this.
    """
    budget_bytes = 1_000_000
    daemon = site.start(blocks, "--cache-disk-budget-gb", "0.001")
    url = daemon.url
    highest = 0
    for at in range(0, len(TEXTS), 6):
        ask_all(url, [_question(text) for text in TEXTS[at : at + 6]])
        wait_until(lambda: not _is_over(blocks, budget_bytes), "files are within the budget")
        highest = max(highest, _file_bytes(blocks))
    assert highest > budget_bytes // 4, "it was used"
    assert daemon.stop() == 0
    daemon = site.start(blocks, "--cache-disk-budget-gb", "0.0002")
    assert daemon.url
    wait_until(lambda: not _is_over(blocks, budget_bytes // 5), "less is kept")
    site.check(daemon.url, TEXTS[:9])
    assert daemon.stop() == 0
    assert not _is_over(blocks, budget_bytes // 5)


def _is_over(blocks: Path, budget_bytes: int) -> bool:
    return _file_bytes(blocks) > budget_bytes + _HEADER_BYTES * len(_files(blocks))


def _file_bytes(blocks: Path) -> int:
    total = 0
    for one in _files(blocks):
        try:
            total += one.stat().st_size
        except FileNotFoundError:
            continue
    return total
