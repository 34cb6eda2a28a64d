"""``machd model pull``, ``list`` and ``remove`` against a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.forked_programs import ForkedProgram
from support.daemon.loopback_hub import COMMIT, LoopbackHub
from support.every_run import sampled

from machd.engine.loading.hub_cache import download_lock
from machd.served.model_files import discover

_MODEL = "org/name"
_WEIGHTS = "model.safetensors"
_SIZE_BYTES = 3_000_000
_CONTENT = random.Random(1).randbytes(_SIZE_BYTES)
_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
    _WEIGHTS: _CONTENT,
    "small.Q4_K_M.gguf": b"GGUF" + _CONTENT[:1000],
    "pytorch_model.bin": b"pickle",
    "modeling_org.py": b"raise SystemExit",
    "README.md": b"# Name",
}


class _Machine:
    """A home directory, and the command in it."""

    def __init__(self, hub: LoopbackHub, home: Path) -> None:
        self.environ = hub.environ(home)
        self.cache = home / "hf" / "hub"
        self.repository = self.cache / "models--org--name"
        self.partials = self.repository / "blobs"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return ForkedProgram(
            [sys.executable, "-m", "machd", "model", *arguments],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, exit_code: int = 0) -> str:
        """Run a command to its end; returns all that it prints."""
        process = self.start(*arguments)
        out, errors = process.communicate(timeout=CEILING_S)
        assert process.returncode == exit_code, out + errors
        return out + errors

    def names(self) -> set[str]:
        """Files of the snapshot."""
        snapshot = self.repository / "snapshots" / COMMIT
        return {one.name for one in snapshot.iterdir()}

    def partial_bytes(self) -> int:
        """Bytes of what was fetched in part."""
        return sum(one.stat().st_size for one in self.partials.glob("*.incomplete"))


@pytest.fixture(name="hub")
def _hub() -> Iterator[LoopbackHub]:
    with LoopbackHub({_MODEL: _FILES}) as hub:
        yield hub


@pytest.fixture(name="machine")
def _machine(hub: LoopbackHub, tmp_path: Path) -> _Machine:
    return _Machine(hub, tmp_path)


def _ranges(hub: LoopbackHub, file: str = _WEIGHTS) -> list[int]:
    return [one.start for one in hub.transfers if one.file == file]


def test_pull_fetches_what_mlx_lm_reads(hub: LoopbackHub, machine: _Machine) -> None:
    """Data files come into the hub's cache, no code and no pickles; a second pull fetches nothing."""
    said = machine.run("pull", _MODEL)

    assert machine.names() == {"config.json", "tokenizer.json", "chat_template.jinja", _WEIGHTS}
    assert COMMIT in said
    (found,) = discover(machine.cache)
    assert (found.name, found.path.name) == (_MODEL, COMMIT)
    assert (found.path / _WEIGHTS).read_bytes() == _CONTENT
    assert (machine.repository / "refs" / "main").read_text() == COMMIT
    before = len(hub.transfers)
    machine.run("pull", f"{_MODEL}@main")
    assert len(hub.transfers) == before


def test_include_chooses_a_gguf_file(machine: _Machine) -> None:
    """That file alone comes, and the path that serve takes is printed."""
    said = machine.run("pull", _MODEL, "--include", "*q4_k_m.gguf")

    assert machine.names() == {"small.Q4_K_M.gguf"}
    assert f"{COMMIT}/small.Q4_K_M.gguf" in said


@pytest.mark.parametrize(
    "pattern", sampled(["*Q8_0.gguf", "*-00002-of-00002.gguf", "*q8_0*"], ["*-00002-of-00002.gguf"])
)
def test_include_chooses_every_part_of_a_split_file(tmp_path: Path, pattern: str) -> None:
    """By the name that the parts share, or by one part's; the path that is printed is the first part's, and the list has it once."""
    parts = {f"big.Q8_0-{number:05}-of-00002.gguf": b"GGUF%d" % number for number in (1, 2)}
    with LoopbackHub({_MODEL: parts | {"big.Q4_0.gguf": b"GGUF"}}) as hub:
        machine = _Machine(hub, tmp_path)
        said = machine.run("pull", _MODEL, "--include", pattern)
        assert machine.names() == set(parts)
        assert f"{COMMIT}/big.Q8_0-00001-of-00002.gguf" in said
        assert f"{COMMIT}/big.Q8_0-00001-of-00002.gguf" in machine.run("list")
        refused = machine.run("pull", _MODEL, exit_code=2)
    assert "big.Q4_0.gguf, big.Q8_0.gguf" in refused


def test_include_takes_no_code(machine: _Machine) -> None:
    """Files that are code, or run it when they are read, are not fetched whatever is asked for."""
    said = machine.run("pull", _MODEL, "--include", "*.py", "--include", "*.bin", exit_code=2)
    assert "has no file that --include names" in said


def test_a_repository_of_gguf_files_names_them(tmp_path: Path) -> None:
    """Without weights that mlx-lm reads, the error says what --include could take."""
    files = {"config.json": b"{}", "a.Q4_0.gguf": b"GGUF", "a.Q8_0.gguf": b"GGUF8"}
    with LoopbackHub({_MODEL: files}) as hub:
        said = _Machine(hub, tmp_path).run("pull", _MODEL, exit_code=2)
    assert "a.Q4_0.gguf, a.Q8_0.gguf" in said
    assert "--include" in said


def test_cut_transfer_is_resumed(hub: LoopbackHub, machine: _Machine) -> None:
    """The rest is asked for, not the whole; a hub that is busy for a moment is asked again."""
    hub.cuts[_WEIGHTS] = [1_000_000, 500_000]
    hub.unavailable = 1
    machine.run("pull", _MODEL)

    assert _ranges(hub) == [0, 0, 1_000_000, 1_500_000]
    assert discover(machine.cache)


def test_a_hub_without_ranges_is_asked_for_the_whole(hub: LoopbackHub, machine: _Machine) -> None:
    """The file is right although the answer to a range is all of it."""
    hub.cuts[_WEIGHTS] = [1_000_000]
    hub.ignores_ranges = True
    machine.run("pull", _MODEL)

    (found,) = discover(machine.cache)
    assert (found.path / _WEIGHTS).read_bytes() == _CONTENT


def test_a_transfer_that_comes_no_further_ends_and_is_kept(
    hub: LoopbackHub, machine: _Machine
) -> None:
    """The tries are bounded; what has come stays, and the next run goes on from there."""
    hub.cuts[_WEIGHTS] = [1_000_000, *([0] * 20)]
    said = machine.run("pull", _MODEL, exit_code=2)

    assert "no further than 1,000,000 of 3,000,000 bytes" in said
    assert len(_ranges(hub)) <= 6
    assert discover(machine.cache) == []
    listed = json.loads(machine.run("list", "--json"))["models"][1]
    assert (listed["id"], listed["present"], listed["complete"]) == (_MODEL, True, False)
    hub.cuts.clear()
    hub.transfers.clear()
    machine.run("pull", _MODEL)
    assert _ranges(hub) == [1_000_000]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_pull_goes_on_where_it_ended(
    hub: LoopbackHub, machine: _Machine, number: signal.Signals
) -> None:
    """Ctrl-C ends it with 130 and says how much is kept; the next run asks for the rest."""
    hub.bytes_per_s = 400_000
    process = machine.start("pull", _MODEL)
    wait_until(lambda: machine.partial_bytes() > 200_000, "some of it has come")
    process.send_signal(number)
    _, errors = process.communicate(timeout=CEILING_S)
    kept = machine.partial_bytes()

    if number is signal.SIGINT:
        assert process.returncode == 130
        assert "bytes are kept, and the same command goes on from there" in errors
    assert 0 < kept < _SIZE_BYTES
    hub.bytes_per_s = None
    machine.run("pull", _MODEL)
    assert _ranges(hub) == [0, kept]


@pytest.mark.parametrize("file", sampled([_WEIGHTS, "tokenizer.json"], [_WEIGHTS]))
def test_wrong_hash_is_deleted(hub: LoopbackHub, machine: _Machine, file: str) -> None:
    """A file that is not what the hub says ends the pull with 2; nothing of it stays, and no model is seen."""
    hub.wrong.add(file)
    said = machine.run("pull", _MODEL, exit_code=2)

    assert f"{file} of {_MODEL} has the" in said
    assert "it was deleted" in said
    assert machine.partial_bytes() == 0
    assert not (machine.repository / "snapshots" / COMMIT / file).exists()
    hub.wrong.clear()
    machine.run("pull", _MODEL)
    assert discover(machine.cache)


def test_a_damaged_part_of_an_earlier_run_is_fetched_anew(
    hub: LoopbackHub, machine: _Machine
) -> None:
    """What an earlier run has left is not trusted: the whole is fetched if its hash is wrong."""
    hub.cuts[_WEIGHTS] = [1_000_000, *([0] * 20)]
    machine.run("pull", _MODEL, exit_code=2)
    (partial,) = machine.partials.glob("*.incomplete")
    partial.write_bytes(bytes(1_000_000))
    hub.cuts.clear()
    hub.transfers.clear()
    machine.run("pull", _MODEL)
    assert _ranges(hub) == [1_000_000, 0]


def test_disk_space_is_checked_before_anything_comes(hub: LoopbackHub, machine: _Machine) -> None:
    """The error says how much is needed and how much is free."""
    hub.sizes[_WEIGHTS] = 10**15
    said = machine.run("pull", _MODEL, exit_code=2)

    assert "needs 1000000.00 GB" in said
    assert "GB free; nothing was fetched" in said
    assert not hub.transfers


def test_two_processes_fetch_a_model_once(hub: LoopbackHub, machine: _Machine) -> None:
    """The second says that it waits, and finds everything there; meanwhile nothing is removed."""
    hub.bytes_per_s = 200_000
    first = machine.start("pull", _MODEL)
    wait_until(lambda: machine.partial_bytes() > 0, "the first fetches")
    second = machine.start("pull", _MODEL)
    assert "is being fetched" in machine.run("remove", _MODEL, "--yes", exit_code=1)
    assert second.stderr is not None
    assert "another process fetches org/name; waiting for it" in second.stderr.readline()
    hub.bytes_per_s = None
    said = [process.communicate(timeout=CEILING_S)[1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert _ranges(hub) == [0]


def test_the_token_stays_with_the_hub(hub: LoopbackHub, machine: _Machine) -> None:
    """HF_TOKEN opens a private model; the other origin that gives its weights does not see it."""
    hub.token = "hf_secret"
    assert "HF_TOKEN" in machine.run("pull", _MODEL, exit_code=2)
    machine.environ["HF_TOKEN"] = "hf_wrong"
    assert "the hub does not know the token" in machine.run("pull", _MODEL, exit_code=2)
    machine.environ["HF_TOKEN"] = "hf_secret"
    machine.run("pull", _MODEL)

    tokens = {one.file: one.token for one in hub.transfers}
    assert tokens["config.json"] == "Bearer hf_secret"
    assert tokens[_WEIGHTS] is None


def test_refusals_are_told_by_name(hub: LoopbackHub, machine: _Machine) -> None:
    """No such model, no such revision, a gated one, and a name that is none."""
    assert "the hub has no model org/other" in machine.run("pull", "org/other", exit_code=2)
    assert "has no revision nowhere" in machine.run("pull", f"{_MODEL}@nowhere", exit_code=2)
    assert "what follows @ is no revision" in machine.run("pull", f"{_MODEL}@../x", exit_code=2)
    assert "not an embedded model" in machine.run("pull", "gpt-4o", exit_code=2)
    hub.is_gated = True
    assert "is gated: accept its terms" in machine.run("pull", _MODEL, exit_code=2)


def test_an_unreachable_hub_is_named(machine: _Machine) -> None:
    """The line says which address was asked, and what sets it; so does a hub that is switched off."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        machine.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{closed.getsockname()[1]}"
        said = machine.run("pull", _MODEL, exit_code=2)
    assert f"cannot reach the hub at {machine.environ['HF_ENDPOINT']} (HF_ENDPOINT)" in said
    machine.environ["HF_HUB_OFFLINE"] = "1"
    assert "HF_HUB_OFFLINE is set" in machine.run("pull", _MODEL, exit_code=2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(b"<html>", "is no JSON"), (b"[]", "describes no model"), (b"\xff", "JSON")],
)
def test_what_is_no_hub_is_told(
    hub: LoopbackHub, machine: _Machine, answer: bytes, said: str
) -> None:
    """A page of a proxy, or another service, is an error that names the address, not a traceback."""
    hub.info = answer
    told = machine.run("pull", _MODEL, exit_code=2)
    assert f"what answers at {hub.url} (HF_ENDPOINT) is no hub" in told
    assert said in told
    assert "Traceback" not in told


@pytest.mark.parametrize("what", ["info", "tree"])
def test_a_hub_that_never_answers_ends_the_pull(
    hub: LoopbackHub, machine: _Machine, what: str
) -> None:
    """Every request has a timeout, those of the library's own listings, too; its warnings tell no password."""
    hub.stalled.add(what)
    machine.environ["HF_HUB_DOWNLOAD_TIMEOUT"] = "1"
    machine.environ["HF_ENDPOINT"] = hub.url.replace("://", "://user:pass%40word@")
    told = machine.run("pull", _MODEL, exit_code=2)
    assert f"cannot reach the hub at {hub.url}" in told
    assert "word" not in told


def test_no_password_of_the_hubs_address_is_told(hub: LoopbackHub, machine: _Machine) -> None:
    """HF_ENDPOINT may have one; it is sent, and no error has it."""
    machine.environ["HF_ENDPOINT"] = hub.url.replace("://", "://user:pass%40word@")
    hub.info = b"<html>"
    told = machine.run("pull", _MODEL, exit_code=2)
    assert f"answers at {hub.url} (HF_ENDPOINT)" in told
    assert hub.authorizations == ["Basic dXNlcjpwYXNzQHdvcmQ="]
    hub.info = None
    hub.wrong.add("tokenizer.json")
    told += machine.run("pull", _MODEL, exit_code=2)
    assert "word" not in told
    assert "user" not in told


def test_a_damaged_small_file_is_fetched_anew(hub: LoopbackHub, machine: _Machine) -> None:
    """One that is here is hashed, too: the library's files may be damaged where the power has failed."""
    machine.run("pull", _MODEL)
    file = machine.repository / "snapshots" / COMMIT / "tokenizer.json"
    file.resolve().write_bytes(bytes(len(_FILES["tokenizer.json"])))
    hub.transfers.clear()
    machine.run("pull", _MODEL)
    assert file.read_bytes() == _FILES["tokenizer.json"]
    assert [one.file for one in hub.transfers] == ["tokenizer.json"]


def test_a_file_that_is_too_large_for_http_is_refused_first(
    hub: LoopbackHub, machine: _Machine
) -> None:
    """Nothing is fetched of a model that could not become complete."""
    name = "small.Q4_K_M.gguf"
    hub.sizes[name] = 60_000_000_000
    machine.partials.mkdir(parents=True)
    digest = hashlib.sha256(_FILES[name]).hexdigest()
    with (machine.partials / f"{digest}.incomplete").open("wb") as part:
        part.truncate(hub.sizes[name] - 1)  # a hole: there is room for the rest
    said = machine.run("pull", _MODEL, "--include", "*", exit_code=2)
    assert f"{name} has 60 GB, more than the hub gives over HTTP" in said
    assert not hub.transfers


def test_json_lines_tell_the_progress(machine: _Machine) -> None:
    """The plan comes first, then bytes, then the path; an error is a line as well."""
    lines = [json.loads(line) for line in machine.run("pull", _MODEL, "--json").splitlines()]

    assert lines[0]["status"] == "planned"
    assert lines[0]["files"] == 4
    assert {one["status"] for one in lines[1:-1]} == {"downloading"}
    assert lines[-2]["all_completed_bytes"] == lines[0]["total_bytes"]
    assert lines[-1]["status"] == "success"
    failed = machine.run("pull", "org/other", "--json", exit_code=2).splitlines()
    assert json.loads(failed[0])["code"] == "model_missing"


def test_list_and_remove(machine: _Machine, tmp_path: Path) -> None:
    """What lies here is listed with its size; removing asks first, and frees what it says."""
    machine.run("pull", _MODEL)
    config = tmp_path / "machd.toml"
    config.write_text(f'[models]\ndirectory = "{tmp_path / "models"}"\n')
    own = tmp_path / "models" / "mine"
    own.mkdir(parents=True)
    for name in ("config.json", _WEIGHTS):
        (own / name).write_bytes(_FILES[name])

    def listed() -> dict[str, dict[str, Any]]:
        said = machine.run("list", "--json", "--config", str(config))
        return {one["id"]: one for one in json.loads(said)["models"]}

    assert set(listed()) == {"smollm2-135m-instruct", _MODEL, "mine"}
    assert listed()[_MODEL]["size_bytes"] >= _SIZE_BYTES
    assert "org/name  (hub, 0.00 GB)" in machine.run("list")
    machine.run("remove", _MODEL, exit_code=130)  # nobody says yes
    assert machine.repository.exists()
    freed = json.loads(machine.run("remove", _MODEL, "--yes", "--json"))
    assert freed["freed_bytes"] >= _SIZE_BYTES
    assert not machine.repository.exists()
    machine.run("remove", "mine", "--yes", "--config", str(config))
    assert not own.exists()
    assert set(listed()) == {"smollm2-135m-instruct"}
    assert "no model org/name is on this machine" in machine.run(
        "remove", _MODEL, "--yes", exit_code=2
    )


def test_remove_frees_the_blobs_of_another_hub_cache(machine: _Machine, tmp_path: Path) -> None:
    """A snapshot in models.directory is links: its repository is deleted, under the lock of downloads there."""
    machine.run("pull", _MODEL)
    other = tmp_path / "other"
    machine.cache.rename(other)
    config = tmp_path / "machd.toml"
    config.write_text(f'[models]\ndirectory = "{other}"\n')
    remove = ("remove", _MODEL, "--yes", "--config", str(config))

    with download_lock(other, _MODEL) as is_ours:
        assert is_ours
        assert "is being fetched" in machine.run(*remove, exit_code=1)
    freed = json.loads(machine.run(*remove, "--json"))

    assert freed["freed_bytes"] >= _SIZE_BYTES
    assert not (other / "models--org--name").exists()


def test_environ_of_the_hub_names_no_other(hub: LoopbackHub, tmp_path: Path) -> None:
    """Tests talk to loopback alone."""
    environ = hub.environ(tmp_path)
    assert environ["HF_ENDPOINT"].startswith("http://127.0.0.1:")
    assert not [
        name
        for name in os.environ
        if name.startswith("HF_") and environ.get(name) == os.environ[name]
    ]
