"""A GGUF file is served in every way in which the directory of the same numbers is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from support.checkpoints.gguf_checkpoint import write_gguf_checkpoint
from support.checkpoints.gguf_rules import every_rules
from support.clients.cached_answers import Answer, Asked, ask
from support.daemon.serve_process import ServeProcess
from support.ranks.forked_ranks import forked_ranks
from support.ranks.ranks_daemon import RanksDaemon

_FLOAT32 = ("--model-dtype", "float32")
_PROMPTS = ([5, 9, 17, 33], [40, 41, 42], [7] * 9)
_NAME = "tiny"
_ROUNDING = 1e-4


@pytest.fixture(name="paths", scope="module")
def _paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny llama as a GGUF file and as a directory, under one name."""
    (rules,) = (one for one in every_rules() if one.title == "llama")
    directory = tmp_path_factory.mktemp("written")
    written = write_gguf_checkpoint(directory, rules)
    file, layout = directory / f"{_NAME}.gguf", directory / _NAME
    return {
        "file": written.file.path.rename(file),
        "directory": written.directory.path.rename(layout),
    }


def _answers(url: str) -> list[Answer]:
    asked = [
        Asked(
            {
                "model": _NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 1,
            }
        )
        for prompt in _PROMPTS
    ]  # fmt: skip
    return [ask(url, one) for one in asked]


_BATCHED = ("--continuous-batching", "--speculation-mode", "ngram", "--probe-on-start", "off")


@pytest.fixture(name="batched", scope="module")
def _batched(paths: dict[str, Path]) -> list[Answer]:
    """The directory's answers in batches and with drafts."""
    return _told(paths["directory"], _BATCHED)


def _told(path: Path, options: Sequence[str]) -> list[Answer]:
    with ServeProcess(str(path), *_FLOAT32, *options) as daemon:
        return _answers(daemon.url)


def _assert_same(found: list[Answer], expected: list[Answer]) -> None:
    """Compare log-probabilities: the two spell the same tokens in other ways, each by its own vocabulary."""
    for one, other in zip(found, expected, strict=True):
        assert one.completion_tokens == other.completion_tokens == 12
        assert one.logprob_error(other) < _ROUNDING


def test_answers_in_batches_with_drafts_are_those_of_the_directory(
    paths: dict[str, Path], batched: list[Answer]
) -> None:
    """The same tokens, with a log-probability for each."""
    _assert_same(_told(paths["file"], _BATCHED), batched)


@pytest.mark.long  # test_quantised_kv_daemon.py has the format, the test above the file
def test_answers_with_quantised_keys_and_values_are_those_of_the_directory(
    paths: dict[str, Path],
) -> None:
    """The same tokens, with a log-probability for each."""
    options = ("--cache-kv-quantization", "affine8")
    _assert_same(_told(paths["file"], options), _told(paths["directory"], options))


def test_two_ranks_answer_as_one_process_does(
    paths: dict[str, Path], batched: list[Answer], tmp_path: Path
) -> None:
    """Each rank takes its half of a file's tensors."""
    log, daemon = tmp_path / "log", RanksDaemon(paths["file"])
    arguments = [*daemon.machd_arguments, *_FLOAT32]
    with forked_ranks(2, "machd", arguments, log=log) as ranks:
        daemon.wait_until_ready(ranks, log)
        capabilities = httpx.get(f"{daemon.url}/v1/capabilities").json()
        assert capabilities["distributed"]["ranks"] == 2
        _assert_same(_answers(daemon.url), batched)
