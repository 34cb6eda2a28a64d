"""The directory of blocks: private, because blocks hold prompts, and one daemon's at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines.block_samples import content_of, files_in, saved_block

from machd.engine.open import engine_loader
from machd.engine.prefix_blocks.directory import BlockDirectory, check_block_directory
from machd.engine.prefix_blocks.disk_tier import DiskTier
from machd.engine.protocol.progress import SilentProgress
from machd.errors import SettingsError
from machd.settings.cache import CacheSettings
from machd.settings.model import Settings

KEY = b"k" * 16

_LOCK_AND_WAIT = """
import sys
from pathlib import Path
from machd.engine.prefix_blocks.directory import BlockDirectory
directory = BlockDirectory(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def _link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


def _open_to(mode: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    make.__name__ = f"mode_{mode:o}"
    return make


def _of_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


def test_directories_and_files_are_private(tmp_path: Path) -> None:
    """Directories are made with mode 0700 and files with 0600, whatever the process's mask is."""
    root = tmp_path / "new" / "blocks"
    before = os.umask(0)
    try:
        files = DiskTier(root, KEY)
        saved = saved_block(1)
        files.save(saved, content_of(saved))
        files.close(10)
    finally:
        os.umask(before)
    assert [_mode(one) for one in (root.parent, root, root / KEY.hex())] == [0o700] * 3
    assert [_mode(one) for one in (root / KEY.hex()).iterdir()] == [0o600]
    assert _mode(root / "lock") == 0o600


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_link, "link or no directory"),
        (Path.touch, "link or no directory"),
        (_open_to(0o750), "chmod 700"),
        (_open_to(0o701), "chmod 700"),
        (_open_to(0o777), "chmod 700"),
        (_of_another_user, "owned by user id 12345"),
    ],
)
def test_directory_that_others_can_reach_is_refused(
    tmp_path: Path, make: Callable[[Path], None], problem: str
) -> None:
    """The message names the setting and the remedy."""
    path = tmp_path / "blocks"
    make(path)
    with pytest.raises(SettingsError, match=f"^cache.disk_dir: .*{problem}"):
        check_block_directory(path)
    with pytest.raises(SettingsError, match=f"^cache.disk_dir: .*{problem}"):
        DiskTier(path, KEY)


@pytest.mark.parametrize("make", [_link, Path.touch, _open_to(0o755)])
def test_planted_directory_of_a_key_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """The lock is released again, so that every start says the same."""
    check_block_directory(tmp_path / "blocks")
    make(tmp_path / "blocks" / KEY.hex())
    for _ in range(2):
        with pytest.raises(SettingsError, match=r"^cache.disk_dir: .*(link|chmod)"):
            DiskTier(tmp_path / "blocks", KEY)


def test_planted_lock_is_refused(tmp_path: Path) -> None:
    """A link named like the lock would have another file opened for writing."""
    path = tmp_path / "blocks"
    path.mkdir(mode=0o700)
    (path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(SettingsError, match=r"^cache.disk_dir"):
        check_block_directory(path)
    assert not (tmp_path / "precious").exists()


def test_impossible_path_is_refused() -> None:
    """No directory can be made there, or no path is like that."""
    with pytest.raises(SettingsError, match="name a place that the daemon's user can write to"):
        check_block_directory(Path("/proc/blocks" if sys.platform == "linux" else "/dev/null/x"))
    with pytest.raises(SettingsError, match="no path is like that"):
        check_block_directory(Path("a\0b"))


def test_directory_is_used_by_one_daemon_at_a_time(tmp_path: Path) -> None:
    """Another key makes no difference; the next daemon gets the directory once the first has closed it."""
    first = DiskTier(tmp_path / "blocks", KEY)
    for key in (KEY, b"another"):
        with pytest.raises(SettingsError, match=r"another daemon uses .*; give each one"):
            DiskTier(tmp_path / "blocks", key)
    first.close(10)
    DiskTier(tmp_path / "blocks", KEY).close(10)


def test_killed_process_releases_its_lock(tmp_path: Path) -> None:
    """The kernel releases the lock with the process."""
    path = tmp_path / "blocks"
    with subprocess.Popen(
        [sys.executable, "-c", _LOCK_AND_WAIT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(SettingsError, match="another daemon"):
            check_block_directory(path)
        process.kill()
    check_block_directory(path)


def test_unusable_directory_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    """A daemon's start with a model that does not exist complains of the directory first."""
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks").chmod(0o755)
    settings = Settings(cache=CacheSettings(disk_dir=str(tmp_path / "blocks")))
    environ: dict[str, str] = {}
    with pytest.raises(SettingsError, match="chmod 700"):
        engine_loader(
            settings,
            cache_directory=tmp_path,
            environ=environ,
            progress=SilentProgress(),
        )
    assert environ == {}


def test_other_keys_files_are_deleted_for_the_budget(tmp_path: Path) -> None:
    """Files of other keys go, longest unused first, until all fits; files of the own key stay."""
    root = tmp_path / "blocks"
    sizes = []
    for n, key in enumerate((b"old", b"recent", b"own")):
        files = DiskTier(root, key)
        for number in range(3):
            files.save(saved_block(number), content_of(saved_block(number)))
        files.close(10)
        for path in (root / key.hex()).iterdir():
            os.utime(path, (1000 + n, 1000 + n))
        sizes.append(sum(files_in(root, key).values()))
    (root / b"empty".hex()).mkdir(mode=0o700)
    (root / "not a key").mkdir()
    DiskTier(root, b"own").close(10)
    assert (root / b"old".hex()).exists(), "without a budget others are left alone"
    DiskTier(root, b"own", budget_bytes=sum(sizes)).close(10)
    assert len(files_in(root, b"old")) == 3
    DiskTier(root, b"own", budget_bytes=sum(sizes) - 1).close(10)
    assert len(files_in(root, b"old")) == 2, "no more goes than has to"
    DiskTier(root, b"own", budget_bytes=sum(sizes[1:])).close(10)
    assert not (root / b"old".hex()).exists()
    assert len(files_in(root, b"recent")) == 3
    DiskTier(root, b"own", budget_bytes=0).close(10)
    assert {one.name for one in root.iterdir()} == {"lock", "not a key", b"own".hex()}
    assert len(files_in(root, b"own")) == 3


def test_links_among_other_keys_are_not_followed(tmp_path: Path) -> None:
    """Making room deletes nothing outside of the directory."""
    root = tmp_path / "blocks"
    elsewhere = DiskTier(tmp_path / "elsewhere", b"theirs")
    elsewhere.save(saved_block(1), content_of(saved_block(1)))
    elsewhere.close(10)
    BlockDirectory(root).close()
    (root / b"link".hex()).symlink_to(tmp_path / "elsewhere" / b"theirs".hex())
    DiskTier(root, KEY, budget_bytes=0).close(10)
    assert len(files_in(tmp_path / "elsewhere", b"theirs")) == 1
