"""Models that are found in a directory: which, under what names, and what is passed over."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machd.served import model_files
from machd.served.model_files import FoundModel, ModelFilesKind, discover, files_at

_INDEX = "model.safetensors.index.json"


def write(path: Path, size_bytes: int = 10) -> Path:
    """A file of a size, with the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size_bytes)
    return path


def checkpoint(path: Path, *weights: str) -> Path:
    """A checkpoint with files of weights, one unless they are named."""
    for name in ("config.json", *(weights or ("model.safetensors",))):
        write(path / name)
    return path


def hub_model(cache: Path, repository: str, *revisions: str) -> Path:
    """A model as a hub cache has it: links to blobs, for each revision its own."""
    folder = cache / f"models--{repository}"
    for revision in revisions:
        for name in ("config.json", "model.safetensors"):
            blob = write(folder / "blobs" / f"{revision}-{name}")
            link = folder / "snapshots" / revision / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return folder


def names(directory: Path) -> list[str]:
    """The names of what is found."""
    return [model.name for model in discover(directory)]


def test_checkpoints_and_gguf_files_are_found_at_two_levels(tmp_path: Path) -> None:
    """NAME and ORG/NAME, with path, kind, size and time."""
    coder = checkpoint(
        tmp_path / "Coder", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    )
    small = write(tmp_path / "small.gguf", 7)
    checkpoint(tmp_path / "org" / "Chat")
    write(tmp_path / "org" / "tiny.Q4_0.GGUF")
    write(tmp_path / "notes.txt")
    os.utime(coder / "config.json", (1, 9_999_999_999))
    os.utime(small, (1, 5))

    found = discover(tmp_path)

    assert [model.name for model in found] == ["Coder", "org/Chat", "org/tiny.Q4_0", "small"]
    assert found[0] == FoundModel("Coder", coder, ModelFilesKind.DIRECTORY, 30, 9_999_999_999)
    assert found[3] == FoundModel("small", small, ModelFilesKind.GGUF, 7, 5)


def test_a_hub_cache_is_read_by_repository(tmp_path: Path) -> None:
    """ORG/NAME, and its links to blobs count as files; the revision is main's, or else the newest."""
    newest = hub_model(tmp_path, "org--Name--x", "a1", "b2")
    os.utime(newest / "snapshots" / "a1", (1, 5))
    main = hub_model(tmp_path, "org--Main", "a1", "b2")
    os.utime(main / "snapshots" / "a1", (1, 5))
    write(main / "refs" / "main").write_text("a1\n")
    hub_model(tmp_path, "gpt2", "c3")
    write(tmp_path / "datasets--org--Data" / "snapshots" / "a1" / "config.json")
    checkpoint(tmp_path / ".locks" / "models--x--y")

    found = {model.name: model for model in discover(tmp_path)}

    assert found.keys() == {"org/Name--x", "org/Main", "gpt2"}
    assert found["org/Name--x"].path == newest / "snapshots" / "b2"
    assert found["org/Main"].path == main / "snapshots" / "a1"
    assert found["gpt2"].kind is ModelFilesKind.HUB_SNAPSHOT
    assert found["gpt2"].size_bytes == 20


def test_gguf_files_of_a_hub_cache_are_found_under_the_hub_id(tmp_path: Path) -> None:
    """The only one of a repository as ORG/NAME, several as ORG/NAME/FILE, and those beside a checkpoint, too."""
    for path in (
        "org--One/snapshots/a1/one.Q4_0.gguf",
        "org--One/snapshots/a1/mmproj-one-f16.gguf",
        "org--Split/snapshots/a1/Q8_0/split-Q8_0-00001-of-00002.gguf",
        "org--Split/snapshots/a1/Q8_0/split-Q8_0-00002-of-00002.gguf",
        "org--Two/snapshots/a1/two.Q4_0.gguf",
        "org--Two/snapshots/a1/Q8_0/two.Q8_0.gguf",
        "org--Part/snapshots/a1/part-00001-of-00002.gguf",
        "gpt2/snapshots/a1/gpt2.Q4_0.gguf",
        "org--Both/snapshots/a1/both.Q4_0.gguf",
    ):
        write(tmp_path / f"models--{path}")
    checkpoint(tmp_path / "models--org--Both" / "snapshots" / "a1")

    found = {model.name: model for model in discover(tmp_path)}

    assert sorted(found) == [
        "gpt2", "org/Both", "org/Both/both.Q4_0", "org/One", "org/Split",
        "org/Two/two.Q4_0", "org/Two/two.Q8_0",
    ]  # fmt: skip
    assert found["org/One"].path.name == "one.Q4_0.gguf"
    assert found["org/Both"].kind is ModelFilesKind.HUB_SNAPSHOT
    assert found["org/Split"].path.name == "split-Q8_0-00001-of-00002.gguf"
    assert found["org/Split"].size_bytes == 20


def test_gguf_file_of_a_hub_cache_is_passed_over_until_all_of_it_has_come(tmp_path: Path) -> None:
    """A link to nothing is no file, and one that is whole stays while another one is fetched."""
    folder = tmp_path / "models--org--Name"
    snapshot = folder / "snapshots" / "a1"
    write(folder / "refs" / "main").write_text("a1")
    write(folder / "blobs" / "first")
    snapshot.mkdir(parents=True)
    (snapshot / "name.Q4_0.gguf").symlink_to("../../blobs/first")
    write(folder / "blobs" / "second.incomplete")
    assert names(tmp_path) == ["org/Name"]

    (snapshot / "name.Q8_0.gguf").symlink_to("../../blobs/second")
    assert names(tmp_path) == []
    (folder / "blobs" / "second.incomplete").rename(folder / "blobs" / "second")
    assert names(tmp_path) == ["org/Name/name.Q4_0", "org/Name/name.Q8_0"]


@pytest.mark.parametrize("revision", ["../../other/snapshots/a1", "missing", "", "\xff" * 300])
def test_a_strange_main_of_a_hub_cache_is_not_followed(tmp_path: Path, revision: str) -> None:
    """It only chooses among the repository's own snapshots."""
    folder = hub_model(tmp_path, "org--Name", "a1")
    write(folder / "refs" / "main").write_text(revision, "latin-1")

    assert [model.path for model in discover(tmp_path)] == [folder / "snapshots" / "a1"]


def test_an_incomplete_snapshot_gives_way_to_a_complete_one(tmp_path: Path) -> None:
    """A blob that is gone leaves a link to nothing."""
    folder = hub_model(tmp_path, "org--Name", "a1", "b2")
    write(folder / "refs" / "main").write_text("b2")
    (folder / "blobs" / "b2-model.safetensors").unlink()

    assert [model.path.name for model in discover(tmp_path)] == ["a1"]


@pytest.mark.parametrize(
    "files",
    [
        ["config.json"],
        ["model.safetensors"],
        ["config.json", "pytorch_model.bin"],
        ["config.json", "adapters.safetensors"],
        ["config.json", "model-00001-of-00002.safetensors"],
        ["config.json", "model.safetensors", "tokenizer.json.incomplete"],
        ["config.json", "model.safetensors", ".x.incomplete"],
        ["config.json", "model.safetensors", ".cache/huggingface/download/x.incomplete"],
    ],
)
def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path, files: list[str]) -> None:
    """Without weights, without a shard, or while a file is being fetched."""
    for file in files:
        write(tmp_path / "Coder" / file)

    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("index", "is_complete"),
    [
        (json.dumps({"weight_map": {"a": "model.safetensors"}}), True),
        (json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}), False),
        (json.dumps({"weight_map": ["model.safetensors"]}), False),
        (json.dumps([]), False),
        ("{", False),
        ("[" * 100_000, False),
    ],
)
def test_an_index_names_the_files_of_weights(
    tmp_path: Path, index: str, *, is_complete: bool
) -> None:
    """All of them have to be there; an index that cannot be read is of no complete model."""
    checkpoint(tmp_path / "Coder")
    (tmp_path / "Coder" / _INDEX).write_text(index)

    assert names(tmp_path) == ["Coder"] * is_complete


def test_a_hub_model_that_is_being_fetched_is_passed_over(tmp_path: Path) -> None:
    """Its blobs say so, whatever links are there already, where main names no complete snapshot."""
    folder = hub_model(tmp_path, "org--Name", "a1")
    write(folder / "blobs" / "c0ffee.incomplete")
    assert names(tmp_path) == []
    write(folder / "refs" / "main").write_text("b2")
    assert names(tmp_path) == []


def test_main_is_kept_while_another_revision_is_fetched(tmp_path: Path) -> None:
    """A part of a file hides no snapshot that main names and that lacks nothing."""
    folder = hub_model(tmp_path, "org--Name", "a1", "b2")
    write(folder / "blobs" / "c0ffee.incomplete")
    write(folder / "refs" / "main").write_text("a1")
    assert [model.path.name for model in discover(tmp_path)] == ["a1"]
    lost = write(folder / "blobs" / "lost")
    (folder / "snapshots" / "a1" / "tokenizer.json").symlink_to(lost)
    assert [model.path.name for model in discover(tmp_path)] == ["a1"]
    lost.unlink()
    assert names(tmp_path) == []


def test_names_of_shards_that_count_high_take_no_memory(tmp_path: Path) -> None:
    """A count beyond the files that are there is not written out for each of them."""
    shards = {f"model{one}-00001-of-99999.safetensors" for one in range(100)}
    checkpoint(tmp_path / "Coder", *shards)
    tracemalloc.start()
    try:
        assert names(tmp_path) == []
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_gguf_files_that_hold_no_whole_model_are_passed_over(tmp_path: Path) -> None:
    """Parts of a split file, an empty file, and a directory of such a name."""
    write(tmp_path / "big-00001-of-00002.gguf")
    write(tmp_path / "empty.gguf", 0)
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")

    assert names(tmp_path) == []


def test_split_gguf_model_is_one_with_the_size_of_all_parts(tmp_path: Path) -> None:
    """Its path is the first part's, and its name has no part's number; nothing is found of it while a part is missing."""
    parts = [tmp_path / "org" / f"big-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, part in enumerate(parts):
        assert names(tmp_path) == []
        write(part, 10 + number)
    (found,) = discover(tmp_path)
    assert (found.name, found.path, found.size_bytes) == ("org/big", parts[0], 33)
    for part in parts:
        looked_at = files_at(part)
        assert looked_at is not None
        assert looked_at.size_bytes == 33


@pytest.mark.parametrize(
    "name", ["a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-1-of-3.gguf", "a.gguf"]
)
def test_gguf_file_whose_name_is_no_parts_is_whole(tmp_path: Path, name: str) -> None:
    """Numbers that contradict each other are a part of the name."""
    write(tmp_path / name, 7)
    (found,) = discover(tmp_path)
    assert (found.name, found.size_bytes) == (name.removesuffix(".gguf"), 7)


def test_links_out_of_the_directory_are_not_followed(tmp_path: Path) -> None:
    """Neither of a directory, nor of a file, nor of weights; links within it are."""
    inside, outside = tmp_path / "models", tmp_path / "elsewhere"
    checkpoint(outside / "Coder")
    write(outside / "small.gguf")
    checkpoint(inside / "Real")
    (inside / "Linked").symlink_to(outside / "Coder")
    (inside / "linked.gguf").symlink_to(outside / "small.gguf")
    (inside / "Again").symlink_to("Real")
    (inside / "loop").symlink_to("loop")
    write(inside / "Weights" / "config.json")
    (inside / "Weights" / "model.safetensors").symlink_to(outside / "small.gguf")
    (inside / "org").symlink_to(outside)
    (inside / "models--org--Name").symlink_to(hub_model(outside, "org--Name", "a1"))

    assert names(inside) == ["Again", "Real"]
    (tmp_path / "link").symlink_to(inside)
    assert names(tmp_path / "link") == ["Again", "Real"]


def test_a_name_belongs_to_one_model(tmp_path: Path) -> None:
    """A directory keeps it, a GGUF file gets its suffix, a snapshot in a hub cache is left out."""
    checkpoint(tmp_path / "org" / "Name")
    write(tmp_path / "org" / "Name.gguf")
    hub_model(tmp_path, "org--Name", "a1")

    found = discover(tmp_path)

    assert [(model.name, model.kind) for model in found] == [
        ("org/Name", ModelFilesKind.DIRECTORY),
        ("org/Name.gguf", ModelFilesKind.GGUF),
    ]


@pytest.mark.parametrize("name", [" Coder", "Coder ", "a\tb", "..a", "a\\b", "\udcff", "~a"])
def test_a_name_that_no_request_can_ask_for_is_passed_over(tmp_path: Path, name: str) -> None:
    """A name of a model is printable and looks like no path."""
    checkpoint(tmp_path / name)

    assert names(tmp_path) == []


def test_what_is_looked_at_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a directory, and entries of one; the rest is left out."""
    for number in range(5):
        write(tmp_path / f"m{number}.gguf")
    assert len(names(tmp_path)) == 5
    monkeypatch.setattr(model_files, "_MAX_ENTRIES", 4)
    assert len(names(tmp_path)) == 4
    monkeypatch.setattr(model_files, "MAX_MODELS", 3)
    assert len(names(tmp_path)) == 3


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """What cannot be read below it is passed over, in silence."""
    with pytest.raises(FileNotFoundError):
        discover(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        discover(write(tmp_path / "file"))


_PARTS = st.sampled_from(
    "a b.gguf c.gguf config.json model.safetensors model-00001-of-00002.safetensors models--a--b snapshots "
    f"blobs x.incomplete refs main .cache {_INDEX}".split()
)


@given(paths=st.lists(st.lists(_PARTS, min_size=1, max_size=4), max_size=12))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_lies_in_a_directory_names_are_unique_and_models_complete(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[str]]
) -> None:
    """Any tree is read without an error, and what is found has its files."""
    directory = tmp_path_factory.mktemp("tree")
    for parts in paths:
        path = directory.joinpath(*parts)
        above = [one for one in path.parents if one.is_relative_to(directory)]
        if not path.exists() and all(one.is_dir() or not one.exists() for one in above):
            write(path)

    found = discover(directory)

    assert len({model.name for model in found}) == len(found)
    for model in found:
        assert model.path.is_relative_to(directory)
        assert model.size_bytes > 0
        if model.path.is_dir():
            assert (model.path / "config.json").is_file()
            assert any(model.path.glob("model*.safetensors"))
