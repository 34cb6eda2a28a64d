"""The disk tier gives a block back as it was saved, or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S, wait_until
from support.engines.block_samples import (
    ROOT,
    chain,
    content_of,
    file_of,
    files_in,
    is_same_content,
    saved_block,
)

from machd.engine.prefix_blocks import scan as block_scan
from machd.engine.prefix_blocks.directory import KeyDirectory
from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.prefix_blocks.encoding import MAX_BLOCK_BYTES, BlockContent, header_stop
from machd.engine.prefix_blocks.writer import MAX_QUEUED_BYTES, BlockWriter
from machd.engine.protocol.blocks import SavedBlock
from machd.errors import SettingsError

KEY = b"k" * 16


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def _written(root: Path, blocks: Iterable[SavedBlock], key: bytes = KEY) -> None:
    """Write blocks for the next start to find."""
    files = DiskTier(root, key)
    for saved in blocks:
        files.save(saved, content_of(saved))
    files.close(30)


@pytest.fixture(name="opened")
def _opened(root: Path) -> Iterator[DiskTier]:
    """A tier on an empty directory."""
    files = DiskTier(root, KEY)
    yield files
    files.close(10)


def _is(files: DiskTier, saved: SavedBlock) -> bool:
    return is_same_content(files.load(saved), content_of(saved))


def test_saved_block_can_be_loaded(root: Path) -> None:
    """It can be loaded at once, when it is written, and after a restart."""
    blocks = list(chain(1, 5))
    files = DiskTier(root, KEY)
    assert files.saved() == ()
    for saved in blocks:
        files.save(saved, content_of(saved))
        assert _is(files, saved)
    wait_until(lambda: files.reading().written == 5, "all are written")
    assert all(_is(files, saved) for saved in blocks)
    files.close(10)
    again = DiskTier(root, KEY)
    assert all(_is(again, saved) for saved in again.saved())
    assert {one.digest for one in again.saved()} == {one.digest for one in blocks}
    assert again.reading().loaded == 5
    again.close(10)


def test_closed_tier_loads_nothing(root: Path) -> None:
    """Closing twice, and every call after it, is harmless."""
    files = DiskTier(root, KEY)
    saved = saved_block(1)
    files.save(saved, content_of(saved))
    files.close(10)
    files.close(10)
    assert files.load(saved) is None
    files.save(saved_block(2), content_of(saved_block(2)))
    files.forget([saved.digest])
    assert len(files_in(root, KEY)) == 1


def test_counted_bytes_are_those_of_the_files(root: Path) -> None:
    """They agree after any order of saving, forgetting, cutting elsewhere and saving again."""
    dice = random.Random(3)
    files = DiskTier(root, KEY)
    blocks = [saved_block(number) for number in range(12)]
    for step in range(400):
        saved = dice.choice(blocks)
        match dice.randrange(4):
            case 0:
                files.forget([saved.digest, b"unknown"])
            case 1:
                changed = replace(saved, has_state=not saved.has_state)
                files.save(changed, content_of(saved, 128 * dice.randrange(1, 40)))
            case _:
                files.save(saved, content_of(saved))
        if step % 100 == 50:
            files.close(30)
            assert files.reading().bytes == sum(files_in(root, KEY).values())
            files = DiskTier(root, KEY)
            assert files.reading().bytes == sum(files_in(root, KEY).values())
    files.close(30)
    reading = files.reading()
    assert reading.bytes == sum(files_in(root, KEY).values()) > 0
    assert (reading.damaged, reading.dropped) == (0, 0)


def test_forgotten_block_is_gone(opened: DiskTier, root: Path) -> None:
    """A block is gone whether it was written or not, and is there once it is saved again."""
    blocks = [saved_block(number) for number in range(20)]
    for saved in blocks[:10]:
        opened.save(saved, content_of(saved))
    wait_until(lambda: opened.reading().written == 10, "the first ones are written")
    for saved in blocks[10:]:
        opened.save(saved, content_of(saved))
    opened.forget(one.digest for one in blocks)
    assert opened.reading().bytes == 0
    assert [opened.load(saved) for saved in blocks] == [None] * 20
    opened.save(blocks[3], content_of(blocks[3]))
    assert _is(opened, blocks[3])
    opened.close(10)
    assert list(files_in(root, KEY)) == [file_of(root, KEY, blocks[3]).name]


def test_saving_again_notes_only_the_use(opened: DiskTier, root: Path) -> None:
    """The file is not written again, and its time is new."""
    saved = saved_block(1)
    opened.save(saved, content_of(saved))
    wait_until(lambda: opened.reading().written == 1, "it is written")
    path = file_of(root, KEY, saved)
    identity = path.stat().st_ino
    for is_saving in (True, False):
        os.utime(path, (1000, 1000))
        if is_saving:
            opened.save(saved, content_of(saved))
        else:
            assert _is(opened, saved)
        wait_until(lambda: path.stat().st_mtime > 1000, "its use is noted")
    assert opened.reading().written == 1
    assert path.stat().st_ino == identity


def test_time_of_use_survives_a_restart(root: Path) -> None:
    """A block that was last of use long ago is known to be so after a restart."""
    _written(root, [replace(saved_block(1), used_unix_s=12345.5), saved_block(2)])
    files = DiskTier(root, KEY)
    used = {one.digest: one.used_unix_s for one in files.saved()}
    assert used[saved_block(1).digest] == 12345.5
    assert used[saved_block(2).digest] > 1e9
    files.close(10)


def test_block_with_another_start_or_state_replaces_the_file(opened: DiskTier) -> None:
    """A digest names a text up to its end, so a block that starts elsewhere, or has state, is a new file."""
    first = saved_block(1, parent=saved_block(0))
    cut = replace(first, start=first.start + 3, token_ids=first.token_ids[3:], parent=b"p" * 16)
    stateful = replace(cut, has_state=True)
    for saved in (first, cut, stateful):
        opened.save(saved, content_of(saved))
        assert _is(opened, saved)
    wait_until(lambda: opened.load(stateful) is not None, "the last one is written")
    assert opened.load(first) is None


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def _grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("damage", [_truncated, _flipped, _grown, _linked, _piped, _emptied])
def test_damaged_file_is_deleted_and_counted(root: Path, damage: object, *, is_found: bool) -> None:
    """Damage before the start and after it is noticed alike; other files stay."""
    saved, other = saved_block(1), saved_block(2)
    _written(root, [saved, other])
    assert callable(damage)
    path = file_of(root, KEY, saved)
    if is_found:
        damage(path)
    files = DiskTier(root, KEY)
    if not is_found:
        damage(path)
    assert files.load(saved) is None
    assert files.reading().damaged == 1
    assert files.take_unsaved() == (saved.digest,)
    assert files.load(saved) is None
    assert _is(files, other)
    files.close(10)
    assert not os.path.lexists(path)
    assert files.reading().damaged == 1
    assert files.reading().bytes == file_of(root, KEY, other).stat().st_size


def _rewrite_head(path: Path, **changes: object) -> None:
    """Change a file's head; its checksum no longer holds."""
    whole = path.read_bytes()
    stop = header_stop(whole)
    header = json.loads(whole[8:stop])
    head = json.loads(header["__metadata__"]["machd_block"])
    header["__metadata__"]["machd_block"] = json.dumps(head | changes)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[stop:])


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": b64encode(bytes(4 * 100_000)).decode()},
        {"nbytes": 10**18},
        {"start": 10**30},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_damaged_heads_cost_no_other_file(root: Path, changes: dict[str, object]) -> None:
    """Numbers that no block has do not use up the limits of the scan or the tier's budget."""
    blocks = [replace(saved_block(n), used_unix_s=1000.0 + n) for n in range(300)]
    _written(root, blocks)
    for block in blocks[78:]:
        _rewrite_head(file_of(root, KEY, block), **changes)

    files = DiskTier(root, KEY)

    assert {one.digest for one in files.saved()} == {one.digest for one in blocks[:78]}
    assert files.reading().damaged == 222
    files.close(10)


def test_file_whose_entry_cannot_be_read_costs_no_other_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken file system that cannot tell a file's size does not end the scan."""
    blocks = [saved_block(n) for n in range(3)]
    _written(root, blocks)
    scandir = os.scandir

    class _Entries:
        def __init__(self, fd: int) -> None:
            self.entries = scandir(fd)

        def __enter__(self) -> Iterator[object]:
            return (_Broken(one) for one in self.entries)

        def __exit__(self, *_: object) -> None:
            self.entries.close()

    class _Broken:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name = entry.name
            self._entry = entry

        def stat(self, *, follow_symlinks: bool) -> os.stat_result:
            if self.name.startswith(blocks[0].digest.hex()):
                raise OSError(errno.EIO, "Input/output error")
            return self._entry.stat(follow_symlinks=follow_symlinks)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", _Entries)
        files = DiskTier(root, KEY)

    assert {one.digest for one in files.saved()} == {one.digest for one in blocks[1:]}
    files.close(10)


def test_file_under_another_blocks_name_is_damaged(root: Path) -> None:
    """An intact file is no other block."""
    saved, other = saved_block(1), saved_block(2)
    _written(root, [saved, other])
    file_of(root, KEY, other).unlink()
    file_of(root, KEY, saved).rename(file_of(root, KEY, other))
    files = DiskTier(root, KEY)
    assert files.saved() == ()
    assert files.load(other) is None
    assert files.reading().damaged == 1
    files.close(10)
    assert files_in(root, KEY) == {}


def test_file_of_another_key_is_damaged(root: Path) -> None:
    """A file that is copied to another key's directory is not used there."""
    saved = saved_block(1)
    _written(root, [saved], key=b"theirs")
    _written(root, [])
    path = file_of(root, KEY, saved)
    path.write_bytes(file_of(root, b"theirs", saved).read_bytes())
    files = DiskTier(root, KEY)
    assert (files.saved(), files.reading().damaged) == ((), 1)
    files.close(10)
    assert len(files_in(root, b"theirs")) == 1


def test_deleted_file_is_missing_and_not_damaged(root: Path) -> None:
    """A file that was deleted from outside is reported as unsaved."""
    _written(root, [saved_block(1)])
    files = DiskTier(root, KEY)
    file_of(root, KEY, saved_block(1)).unlink()
    assert files.load(saved_block(1)) is None
    assert (files.reading().damaged, files.reading().bytes, files.saved()) == (0, 0, ())
    assert files.take_unsaved() == (saved_block(1).digest,)
    files.close(10)


def test_found_blocks_come_after_their_parents(root: Path) -> None:
    """The order does not depend on how the files lie in the directory."""
    texts = [list(chain(number, 6)) for number in range(8)]
    blocks = [saved for text in texts for saved in text]
    random.Random(5).shuffle(blocks)
    _written(root, blocks)
    files = DiskTier(root, KEY)
    seen = {ROOT}
    for saved in files.saved():
        assert saved.parent in seen
        seen.add(saved.digest)
    assert len(seen) == 49
    files.close(10)


def test_blocks_without_a_parent_are_deleted(root: Path) -> None:
    """All that follows a missing block goes; a parent that ends elsewhere is none."""
    text, other = list(chain(1, 5)), list(chain(2, 3))
    shifted = replace(other[2], start=other[2].start + 1)
    _written(root, [*text, *other[:2], shifted])
    file_of(root, KEY, text[2]).unlink()
    files = DiskTier(root, KEY)
    assert {one.digest for one in files.saved()} == {one.digest for one in (*text[:2], *other[:2])}
    assert files.reading().damaged == 0
    files.close(10)
    assert len(files_in(root, KEY)) == 4


def test_temporary_files_are_removed_and_others_files_are_not(root: Path) -> None:
    """A killed process's temporary file goes; a file with a name of another kind stays."""
    _written(root, [saved_block(1)])
    place = root / KEY.hex()
    (place / f".{'ab' * 16}.{'0' * 16}.tmp").write_bytes(b"half")
    theirs = {"README", ".tmp", ".other.tmp", "XY.safetensors", "abc.safetensors"}
    for name in theirs:
        (place / name).write_bytes(b"theirs")
    DiskTier(root, KEY).close(10)
    assert set(files_in(root, KEY)) == {file_of(root, KEY, saved_block(1)).name, *theirs}


@pytest.mark.parametrize(("limit", "value"), [("MAX_FOUND_FILES", 4), ("MAX_FOUND_TOKENS", 39)])
def test_files_beyond_the_limits_are_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """The blocks that were last used are taken over; the other files go, so that bytes stay exact."""
    blocks = [replace(saved_block(n), used_unix_s=1000.0 + n) for n in range(10)]
    _written(root, blocks)
    monkeypatch.setattr(block_scan, limit, value)
    files = DiskTier(root, KEY)
    assert {one.digest for one in files.saved()} == {one.digest for one in blocks[-4:]}
    assert files.reading().damaged == 0
    assert files.reading().bytes == sum(files_in(root, KEY).values())
    assert len(files_in(root, KEY)) == 4
    files.close(10)


def _tree() -> tuple[SavedBlock, list[list[SavedBlock]]]:
    """Make a system prompt that is not used after it was written, and three conversations after it."""
    system = replace(saved_block(0), used_unix_s=1000.0)
    texts: list[list[SavedBlock]] = []
    for number in range(3):
        text = [system]
        for place in range(4):
            block = saved_block(100 * number + place + 1, parent=text[-1])
            text.append(replace(block, used_unix_s=2000.0 + 100 * number + place))
        texts.append(text[1:])
    return system, texts


@pytest.mark.parametrize(("limit", "per_block"), [("MAX_FOUND_FILES", 1), ("MAX_FOUND_TOKENS", 8)])
def test_leaf_blocks_are_deleted_first(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: str, per_block: int
) -> None:
    """A block stays as long as a block that follows it, even if its own file was not touched."""
    system, texts = _tree()
    _written(root, [system, *(one for text in texts for one in text)])
    monkeypatch.setattr(block_scan, limit, 12 * per_block)
    files = DiskTier(root, KEY)
    expected = {one.digest: one for one in (system, *texts[0][:3], *texts[1], *texts[2])}
    found = {one.digest: one for one in files.saved()}
    assert found.keys() == expected.keys(), "one file too many costs one file"
    assert found[system.digest].used_unix_s == texts[2][-1].used_unix_s
    assert [one.token_ids for one in found.values()] == [
        expected[digest].token_ids for digest in found
    ]
    files.close(10)
    monkeypatch.setattr(block_scan, limit, 6 * per_block)
    files = DiskTier(root, KEY)
    kept = (system, *texts[1][:1], *texts[2])
    assert {one.digest for one in files.saved()} == {one.digest for one in kept}
    assert files.reading().bytes == sum(files_in(root, KEY).values())
    files.close(10)


def test_other_keys_files_go_as_own_files_become_more(root: Path) -> None:
    """All keys together never take more than the budget, and others lose the ends of texts first."""
    system, texts = _tree()
    theirs = b"t" * len(KEY)
    _written(root, [system, *(one for text in texts for one in text)], key=theirs)
    size = max(files_in(root, theirs).values()) + 16
    budget_bytes = 14 * size
    files = DiskTier(root, KEY, budget_bytes=budget_bytes)
    assert len(files_in(root, theirs)) == 13
    for number in range(5):
        saved = saved_block(number)
        files.save(saved, content_of(saved))
        wait_until(lambda: files.reading().written == number + 1, "it is written")  # noqa: B023
        both = [*files_in(root, KEY).values(), *files_in(root, theirs).values()]
        assert sum(both) <= budget_bytes
    assert len(files_in(root, theirs)) == 9
    kept = {f"{one.digest.hex()}.safetensors" for one in (system, *texts[1], *texts[2])}
    assert set(files_in(root, theirs)) == kept
    for number in range(5, 14):
        saved = saved_block(number)
        files.save(saved, content_of(saved))
    files.close(10)
    assert len(files_in(root, KEY)) == 14, "the scheduler counts own files"
    assert not (root / theirs.hex()).exists()


_NOT_NOW = pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM, errno.EMFILE, errno.EACCES])


def _failing(number: int) -> Callable[[int, int], bytes]:
    def read(_fd: int, _size: int) -> bytes:
        raise OSError(number, os.strerror(number))

    return read


@_NOT_NOW
def test_file_that_cannot_be_read_now_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It is neither deleted nor counted as damaged, and can be read another time."""
    saved = saved_block(1)
    _written(root, [saved])
    files = DiskTier(root, KEY)
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", _failing(error))
        assert files.load(saved) is None
    assert (files.reading().damaged, files.take_unsaved()) == (0, ())
    assert _is(files, saved)
    files.close(10)


@_NOT_NOW
def test_file_that_cannot_be_read_at_the_start_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It stays with all that may follow it, and the next start finds them."""
    text = list(chain(1, 4))
    _written(root, text)
    first = file_of(root, KEY, text[0]).stat().st_ino
    read = os.read

    def fail_for_the_first(fd: int, size: int) -> bytes:
        return _failing(error)(fd, size) if os.fstat(fd).st_ino == first else read(fd, size)

    with monkeypatch.context() as patched:
        patched.setattr(os, "read", fail_for_the_first)
        files = DiskTier(root, KEY)
    assert (files.saved(), files.reading().damaged) == ((), 0)
    files.close(10)
    again = DiskTier(root, KEY)
    assert len(again.saved()) == 4
    again.close(10)


def test_block_is_read_when_all_file_descriptors_are_taken(root: Path) -> None:
    """A spare descriptor is enough where connections have all others, time and again."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    saved = saved_block(1)
    _written(root, [saved])
    files = DiskTier(root, KEY)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        found = [files.load(saved) for _ in range(3)]
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(is_same_content(one, content_of(saved)) for one in found)
    files.close(10)


def test_giant_file_is_not_read(root: Path) -> None:
    """A file larger than any that is written is deleted without a look."""
    _written(root, [saved_block(1)])
    os.truncate(file_of(root, KEY, saved_block(1)), MAX_BLOCK_BYTES + 1)
    files = DiskTier(root, KEY)
    assert (files.saved(), files.reading().damaged) == ((), 1)
    files.close(10)
    assert files_in(root, KEY) == {}


def test_unwritable_block_is_counted(opened: DiskTier) -> None:
    """Saving never raises, and the next block is written."""
    impossible = BlockContent({"a": np.array([object()])}, {})
    opened.save(saved_block(1), impossible)
    opened.save(saved_block(2), content_of(saved_block(2)))
    wait_until(lambda: opened.reading().written == 1, "the second one is written")
    assert opened.reading().dropped == 1
    assert opened.load(saved_block(1)) is None
    assert _is(opened, saved_block(2))


def test_full_disk_costs_only_blocks_that_do_not_fit(root: Path, opened: DiskTier) -> None:
    """A block that does not fit leaves no file, a smaller one is written after it, and one warning says so."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    small, large = saved_block(1), [saved_block(n) for n in range(2, 6)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with structlog.testing.capture_logs() as logs:
            for saved in large:
                opened.save(saved, content_of(saved, 4 << 20))
            opened.save(small, content_of(small))
            wait_until(lambda: opened.reading().written == 1, "the small one is written")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert opened.reading().dropped == 4
    assert set(opened.take_unsaved()) == {one.digest for one in large}
    assert opened.take_unsaved() == (), "each is told once"
    assert list(files_in(root, KEY)) == [file_of(root, KEY, small).name]
    assert opened.reading().bytes == sum(files_in(root, KEY).values())
    assert [one["event"] for one in logs] == ["blocks.not_written"]
    assert "large" in logs[0]["cause"]
    with structlog.testing.capture_logs() as logs:
        opened.close(10)
    assert [(one["event"], one["count"]) for one in logs] == [("blocks.not_written", 3)]


def _remove_key(root: Path) -> None:
    shutil.rmtree(root / KEY.hex())


def _remove_content(root: Path) -> None:
    for one in root.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()


@pytest.mark.parametrize("remove", [_remove_key, _remove_content, shutil.rmtree])
def test_removed_directory_is_made_again_and_used(
    root: Path, opened: DiskTier, remove: Callable[[Path], None]
) -> None:
    """The block in hand is kept, earlier blocks are reported as unsaved, and the directory is private."""
    before, after = saved_block(1), saved_block(2)
    opened.save(before, content_of(before))
    wait_until(lambda: opened.reading().written == 1, "the first is written")

    remove(root)
    opened.save(after, content_of(after))

    wait_until(lambda: opened.reading().written == 2, "the second is written")
    assert _is(opened, after)
    assert opened.take_unsaved() == (before.digest,)
    assert opened.load(before) is None
    assert opened.reading().bytes == sum(files_in(root, KEY).values())
    assert [stat.S_IMODE(one.stat().st_mode) for one in (root, root / KEY.hex())] == [0o700] * 2
    with pytest.raises(SettingsError, match="another daemon"):
        DiskTier(root, KEY)
    opened.close(10)
    again = DiskTier(root, KEY)
    assert [one.digest for one in again.saved()] == [after.digest]
    again.close(10)


def test_directory_that_another_daemon_has_made_again_is_left_to_it(
    root: Path, opened: DiskTier
) -> None:
    """Two daemons never share a directory, even after it was removed."""
    shutil.rmtree(root)
    other = DiskTier(root, KEY)
    with structlog.testing.capture_logs() as logs:
        opened.save(saved_block(1), content_of(saved_block(1)))
        wait_until(lambda: opened.reading().dropped == 1, "it cannot be written")
        wait_until(lambda: bool(logs), "it is reported")
    assert "another daemon" in logs[0]["cause"]
    assert opened.take_unsaved() == (saved_block(1).digest,)
    assert files_in(root, KEY) == {}
    other.close(10)


class _SlowDirectory(KeyDirectory):
    """A directory that ends a write when it is told to, and may fail the first one."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        super().__init__(os.open(path, os.O_RDONLY))
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.failures: list[OSError] = []

    def write(self, digest: bytes, pieces: Iterable[memoryview], used_unix_s: float) -> int:
        self.begun.set()
        assert self.may_end.wait(CEILING_S)
        if self.failures:
            raise self.failures.pop()
        return super().write(digest, pieces, used_unix_s)


@pytest.fixture(name="slow")
def _slow(tmp_path: Path) -> Iterator[_SlowDirectory]:
    directory = _SlowDirectory(tmp_path / "slow")
    yield directory
    directory.may_end.set()


def _writer(directory: KeyDirectory) -> BlockWriter:
    return BlockWriter(directory, KEY, {}, ManualClock(), directory.close)


def _big(nbytes: int) -> BlockContent:
    return BlockContent({"a": np.zeros(nbytes, dtype=np.uint8)}, {})  # never touched: no memory


def test_queue_is_bounded_when_the_disk_is_slow(slow: _SlowDirectory) -> None:
    """Blocks beyond the limit are dropped, and accepted again once there is room."""
    writer = _writer(slow)
    writer.put(saved_block(0), content_of(saved_block(0)))
    assert slow.begun.wait(CEILING_S)
    hundred = MAX_QUEUED_BYTES // 5 * 2
    for number in (1, 2, 3, 4):
        writer.put(saved_block(number), _big(hundred))
    assert writer.dropped == 2
    assert [writer.find(saved_block(n).digest) is None for n in (1, 2, 3, 4)] == [False] * 2 + [
        True
    ] * 2
    assert writer.take_unsaved() == (saved_block(3).digest, saved_block(4).digest)
    writer.forget([saved_block(1).digest])
    writer.put(saved_block(5), _big(hundred))
    assert writer.dropped == 2
    writer.forget(saved_block(n).digest for n in (2, 5))
    for number in range(100_000):
        writer.put(saved_block(number, tokens=1), BlockContent({}, {}))
    assert writer.dropped > 10_000, "empty blocks take memory, too"
    writer.forget(saved_block(n, tokens=1).digest for n in range(100_000))
    slow.may_end.set()
    writer.close(10)
    assert writer.written == 1


def test_block_that_is_saved_again_or_forgotten_is_not_unsaved(slow: _SlowDirectory) -> None:
    """The answer is about the blocks that are missing now."""
    writer = _writer(slow)
    blocks = [saved_block(number) for number in range(5)]
    writer.put(blocks[0], content_of(blocks[0]))
    assert slow.begun.wait(CEILING_S)
    writer.put(blocks[1], _big(MAX_QUEUED_BYTES - 100_000))
    for saved in blocks[2:]:
        writer.put(saved, _big(200_000))
    assert writer.dropped == 3
    writer.forget([blocks[1].digest, blocks[2].digest])
    writer.put(blocks[3], _big(200_000))

    assert writer.take_unsaved() == (blocks[4].digest,)


def test_unwritable_block_with_another_start_leaves_no_file(opened: DiskTier, root: Path) -> None:
    """The file that is there is of no use to a load of the new block."""
    saved = saved_block(1)
    opened.save(saved, content_of(saved))
    wait_until(lambda: opened.reading().written == 1, "it is written")
    opened.save(replace(saved, has_state=True), BlockContent({"a": np.array([object()])}, {}))
    wait_until(lambda: opened.take_unsaved() == (saved.digest,), "it is known not to be kept")
    wait_until(lambda: not files_in(root, KEY), "and nothing is")
    assert opened.reading().bytes == 0


def test_close_waits_no_longer_than_allowed(slow: _SlowDirectory) -> None:
    """Blocks that are not written then are counted, and the thread ends with the block in hand."""
    ended = threading.Event()
    writer = BlockWriter(slow, KEY, {}, ManualClock(), ended.set)
    for number in range(3):
        writer.put(saved_block(number), content_of(saved_block(number)))
    assert slow.begun.wait(CEILING_S)
    writer.close(0.05)
    assert writer.dropped == 2
    assert not ended.is_set(), "the directory is still written to"
    slow.may_end.set()
    assert ended.wait(CEILING_S)
    assert writer.written == 1


def test_block_that_is_forgotten_while_it_is_written_is_gone(
    slow: _SlowDirectory, tmp_path: Path
) -> None:
    """It is gone in the end, unless it was saved again after that."""
    writer = _writer(slow)
    saved, other = saved_block(1), saved_block(2)
    writer.put(saved, content_of(saved))
    assert slow.begun.wait(CEILING_S)
    writer.forget([saved.digest])
    assert writer.find(saved.digest) is None
    writer.put(other, content_of(other))
    writer.forget([other.digest])
    writer.put(other, content_of(other))
    slow.may_end.set()
    wait_until(lambda: writer.written == 2, "both are written")
    writer.close(10)
    assert [one.name for one in (tmp_path / "slow").iterdir()] == [
        f"{other.digest.hex()}.safetensors"
    ]
    assert writer.file_bytes == next((tmp_path / "slow").iterdir()).stat().st_size


def test_block_that_is_saved_again_while_it_is_written_is_written_once(
    slow: _SlowDirectory,
) -> None:
    """It is written once more only if it was forgotten in between."""
    writer = _writer(slow)
    saved = saved_block(1)
    writer.put(saved, content_of(saved))
    assert slow.begun.wait(CEILING_S)
    writer.put(saved, content_of(saved))
    slow.may_end.set()
    wait_until(lambda: writer.written == 1, "it is written")
    slow.begun.clear()
    slow.may_end.clear()
    writer.forget([saved.digest])
    writer.put(saved, content_of(saved))
    assert slow.begun.wait(CEILING_S)
    writer.forget([saved.digest])
    writer.put(saved, content_of(saved))
    slow.may_end.set()
    writer.close(10)
    assert writer.written == 3
    assert writer.has(saved)
    assert writer.file_bytes > 0


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_failed_write_of_a_block_that_was_forgotten_meanwhile_is_not_unsaved(
    slow: _SlowDirectory, *, is_saved_again: bool
) -> None:
    """The block is not wanted any more, or is written by a later write."""
    writer = _writer(slow)
    saved = saved_block(1)
    slow.failures.append(OSError(errno.EIO, "Input/output error"))
    writer.put(saved, content_of(saved))
    assert slow.begun.wait(CEILING_S)
    writer.forget([saved.digest])
    if is_saved_again:
        writer.put(saved, content_of(saved))
    slow.may_end.set()
    writer.close(10)

    assert writer.dropped == 1
    assert writer.take_unsaved() == ()
    assert writer.has(saved) is is_saved_again


def test_queued_block_is_replaced_by_one_with_another_start_or_state(slow: _SlowDirectory) -> None:
    """The new block takes the room of the old one in the queue."""
    writer = _writer(slow)
    writer.put(saved_block(0), content_of(saved_block(0)))
    assert slow.begun.wait(CEILING_S)
    plain, stateful = saved_block(1), saved_block(1, has_state=True)

    for saved in (plain, stateful):
        writer.put(saved, _big(MAX_QUEUED_BYTES // 5 * 3))

    assert writer.dropped == 0
    assert (writer.has(plain), writer.has(stateful)) == (False, True)
    writer.forget([stateful.digest])


def test_damage_is_reported_at_most_once_a_minute(root: Path) -> None:
    """The line has the number of all damaged files since the start."""
    blocks = [saved_block(n) for n in range(6)]
    _written(root, blocks)
    clock = ManualClock()
    files = DiskTier(root, KEY, clock=clock)
    with structlog.testing.capture_logs() as logs:
        for n, saved in enumerate(blocks):
            _flipped(file_of(root, KEY, saved))
            assert files.load(saved) is None
            if n == 3:
                clock.advance(61)
    assert [(one["event"], one["count"]) for one in logs] == [
        ("blocks.damaged", 1),
        ("blocks.damaged", 5),
    ]
    files.close(10)
