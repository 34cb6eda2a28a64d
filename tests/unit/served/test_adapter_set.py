"""The registry of adapters: when files are read, how often they are hashed, and what is known once they change."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from machd.errors import AdapterError, NotFoundError, SettingsError
from machd.served.adapter_places import AdapterToServe, adapters_to_serve
from machd.served.adapter_readings import AdapterFacts, AdapterFiles
from machd.served.adapter_set import AdapterSet
from machd.settings.adapters import AdaptersSettings, AdapterTable


class _Files:
    """Reads adapters whose weights are their own hash, and notes what is read."""

    def __init__(self) -> None:
        self.hashed: list[str] = []
        self.described: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def adapters(self) -> AdapterSet:
        return AdapterSet(AdapterFiles(self._describe, self._digest))

    def _describe(self, path: Path) -> AdapterFacts:
        self.described.append(path.name)
        if (path / "weights").read_bytes() == b"damaged":
            raise AdapterError("its weights are damaged")
        return SimpleNamespace(
            format="peft", max_rank=1, layers=1, dtype="float32", base_model=None, size_bytes=1
        )

    def _digest(self, path: Path) -> bytes:
        self.may_go_on.wait()
        self.hashed.append(path.name)
        return (path / "weights").read_bytes()


def _write(path: Path, weights: bytes) -> AdapterToServe:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "weights").write_bytes(weights)
    return AdapterToServe(path.name, path)


def test_files_are_hashed_once_until_they_change(tmp_path: Path) -> None:
    """Neither a request nor a list reads them again; a change of equal length is noticed, with its time put back, too."""
    files = _Files()
    one = _write(tmp_path / "one", b"first")
    adapters = files.adapters()
    adapters.take_on(AdaptersSettings(), [one])

    async def ask() -> bytes:
        await adapters.listed()
        return (await adapters.resolve(one)).digest

    assert [asyncio.run(ask()) for _ in range(3)] == [b"first"] * 3
    assert (files.described, files.hashed) == (["one"], ["one"])
    weights = tmp_path / "one" / "weights"
    before = weights.stat()
    weights.write_bytes(b"other")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert asyncio.run(ask()) == b"other"
    assert files.hashed == ["one", "one"]


def test_requests_at_once_hash_the_files_once_though_one_leaves(tmp_path: Path) -> None:
    """The others wait for the one that reads, and it goes on without its client; other adapters do not wait."""
    files = _Files()
    one, two = _write(tmp_path / "one", b"1"), _write(tmp_path / "two", b"2")
    adapters = files.adapters()
    adapters.take_on(AdaptersSettings(), [one, two])
    files.may_go_on.clear()

    async def ask() -> list[bytes]:
        first, *others = [asyncio.create_task(adapters.resolve(one)) for _ in range(5)]
        await asyncio.sleep(0)
        first.cancel()
        described = await adapters.described(two)
        assert described.adapter is two
        files.may_go_on.set()
        return [(await other).digest for other in others]

    assert asyncio.run(ask()) == [b"1"] * 4
    assert files.hashed == ["one"]


def test_damaged_files_are_logged_once_until_they_change(tmp_path: Path) -> None:
    """Each request is told the reason, no list has the adapter, and the path is told nobody."""
    files = _Files()
    one, two = _write(tmp_path / "one", b"damaged"), _write(tmp_path / "two", b"2")
    adapters = files.adapters()
    adapters.take_on(AdaptersSettings(), [one, two])

    def reason() -> str:
        with pytest.raises(AdapterError) as refused:
            asyncio.run(adapters.resolve(one))
        return refused.value.message

    with capture_logs() as logs:
        reasons = {reason() for _ in range(3)}
        names = [shown.adapter.name for shown in asyncio.run(adapters.listed())]

    assert reasons == {"the adapter 'one' cannot be used: its weights are damaged"}
    assert names == ["two"]
    assert [(line["event"], line["name"]) for line in logs] == [("adapter.refused", "one")]
    _write(tmp_path / "one", b"mended")
    assert asyncio.run(adapters.resolve(one)).digest == b"mended"


def test_id_of_an_adapter_stays_whatever_comes_and_goes(tmp_path: Path) -> None:
    """llama.cpp's clients keep ids: one that was another adapter's is given to no other."""
    named = {name: _write(tmp_path / name, name.encode()) for name in ("b", "c", "a")}
    adapters = _Files().adapters()

    def ids() -> dict[str, int]:
        return {one.adapter.name: one.number for one in asyncio.run(adapters.listed())}

    adapters.take_on(AdaptersSettings(), [named["b"], named["c"]])
    first = ids()
    adapters.take_on(AdaptersSettings(), [named["c"], named["a"]])
    second = ids()

    assert first == {"b": 0, "c": 1}
    assert second == {"a": 2, "c": 1}
    assert adapters.numbered(0) is None


def test_only_names_of_the_directory_are_loaded(tmp_path: Path) -> None:
    """A name is looked up among its entries; nothing is joined to a path."""
    directory = tmp_path / "adapters"
    directory.mkdir()
    _write(tmp_path / "outside", b"x")
    (directory / "link").symlink_to(tmp_path / "outside")
    adapters = _Files().adapters()
    adapters.take_on(AdaptersSettings(directory=str(directory)), [])
    _write(directory / "new", b"new")

    for name in ("../outside", "link", str(tmp_path / "outside"), "", ".", "new/", "a" * 10_000):
        with pytest.raises(NotFoundError):
            asyncio.run(adapters.load(name))
    asyncio.run(adapters.load("new"))
    assert [one.name for one in adapters] == ["new"]


def _by_name(name: str) -> str | None:
    return {"coder": "coder", "default": "default"}.get(name)


def _find(**section: object) -> Callable[[], list[tuple[str, str, float]]]:
    settings = AdaptersSettings.model_validate(section)
    return lambda: [
        (one.name, one.model_name, one.scale) for one in adapters_to_serve(settings, _by_name)
    ]


def test_tables_come_before_the_directory(tmp_path: Path) -> None:
    """A table says of an adapter in the directory which model it is of; a directory keeps the name of a file beside it."""
    _write(tmp_path / "style", b"1")
    _write(tmp_path / "b:c", b"2")
    for name in ("style.gguf", "other.GGUF", "notes.txt", ".hidden.gguf"):
        (tmp_path / name).write_bytes(b"x")
    table = AdapterTable(base="coder", scale=0.5)

    found = _find(directory=str(tmp_path), tables={"style": table})()

    assert found == [
        ("other", "default", 1.0),
        ("style", "coder", 0.5),
        ("style.gguf", "default", 1.0),
    ]


def test_tables_of_nothing_are_all_told(tmp_path: Path) -> None:
    """One failed start shows all that is to be mended."""
    tables = {"a": AdapterTable(), "b": AdapterTable(path="/b", base="nobody")}

    with pytest.raises(SettingsError) as refused:
        _find(directory=str(tmp_path), tables=tables)()

    assert [problem.partition(":")[0] for problem in refused.value.problems] == [
        "adapters.a",
        "adapters.b.base",
    ]
