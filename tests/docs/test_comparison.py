"""The README's speed and the page beside other servers say what their sources say."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
COMPARE = (ROOT / "docs" / "compare.md").read_text("utf-8")

_REPOSITORIES = {
    "mlx_lm.server": "https://github.com/ml-explore/mlx-lm/blob/",
    "vllm-mlx": "https://github.com/waybarrios/vllm-mlx/blob/",
    "llama.cpp": "https://github.com/ggml-org/llama.cpp/blob/",
    "Ollama": "https://github.com/ollama/ollama/blob/",
}
_DEFINITION = re.compile(r"^\[([\w-]+)\]: (\S+)$", re.MULTILINE)
_REFERENCE = re.compile(r"\[[^\]]+\]\[([\w-]+)\]")
_COMMIT = re.compile(r"\b[0-9a-f]{40}\b")


class Speed(msgspec.Struct):
    """Content of docs/speed.json that the README's table shows."""

    streams: list[int]
    machd_tokens_per_s: list[float]
    times_as_fast_as: dict[str, list[float]]
    versions: dict[str, str]


def kept_speed() -> Speed:
    """The figures that the chart is drawn from."""
    return msgspec.json.decode((ROOT / "docs" / "speed.json").read_bytes(), type=Speed)


def table_below(heading: str, text: str) -> list[list[str]]:
    """The cells of the first table below a heading, its header first, without emphasis."""
    table = re.search(
        r"^\|.*?(?=\n\n|\Z)", text.partition(f"## {heading}\n")[2], re.MULTILINE | re.DOTALL
    )
    assert table is not None, heading
    rows = [
        [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        for line in table[0].splitlines()
    ]
    assert set("".join(rows[1])) == {"-"}
    return [rows[0], *rows[2:]]


def peer_cells() -> list[tuple[str, str, str]]:
    """Each cell of another server: its server, the feature, the cell. Rows of a title have none."""
    header, *rows = table_below("Feature by feature", COMPARE)
    return [
        (server, feature, cell)
        for feature, _, *cells in rows
        if any(cells)
        for server, cell in zip(header[2:], cells, strict=True)
    ]


def test_the_readme_shows_the_speed_that_the_chart_shows() -> None:
    """Each figure of the README's table is one of docs/speed.json, in its order and below its server."""
    speed = kept_speed()
    header, *rows = table_below("How fast", README)

    assert header == [
        "Streams",
        "machd, tokens/s",
        *(f"\N{MULTIPLICATION SIGN} {server}" for server in speed.times_as_fast_as),
    ]
    assert [[float(cell) for cell in row] for row in rows] == [
        [float(streams), tokens_per_s, *ratios]
        for streams, tokens_per_s, *ratios in zip(
            speed.streams, speed.machd_tokens_per_s, *speed.times_as_fast_as.values(), strict=True
        )
    ]


def test_the_chart_shows_figures_of_the_page_of_performance() -> None:
    """The rows of docs/speed.json stand on the page that says how they were measured, and its versions too."""
    page = (ROOT / "docs" / "internals" / "performance.md").read_text("utf-8")
    section = page.partition("## Beside other servers\n")[2].partition("\n## ")[0]
    speed = kept_speed()
    rows = [
        re.findall(r"\d+(?:\.\d+)?", line) for line in section.splitlines() if line.startswith("|")
    ]

    for row in zip(
        speed.streams, speed.machd_tokens_per_s, *speed.times_as_fast_as.values(), strict=True
    ):
        assert [float(one) for one in row] in [[float(one) for one in shown] for shown in rows]
    assert {speed.versions["mlx_lm.server"], speed.versions["vllm-mlx"]} <= set(
        re.findall(r"\d+\.\d+\.\d+", section)
    )


def test_every_cell_of_another_server_has_a_source() -> None:
    """Each cell of another server leads to a file of that server's own repository."""
    sources = dict(_DEFINITION.findall(COMPARE))
    without = [
        (server, feature)
        for server, feature, cell in peer_cells()
        if not (named := _REFERENCE.findall(cell))
        or not all(sources.get(one, "").startswith(_REPOSITORIES[server]) for one in named)
        or _REFERENCE.sub("", cell).strip("; ")
    ]

    assert len(peer_cells()) > 80
    assert without == []


def test_every_source_is_used_and_of_a_version_that_is_named() -> None:
    """No source is left over, and each commit is one that the page says was looked at."""
    sources = dict(_DEFINITION.findall(COMPARE))
    looked_at = COMPARE.partition("## What was looked at\n")[2].partition("\n[")[0]
    used = {one for _, _, cell in peer_cells() for one in _REFERENCE.findall(cell)}

    assert set(sources) == used
    assert {one for url in sources.values() for one in _COMMIT.findall(url)} == set(
        _COMMIT.findall(looked_at)
    )
    assert all(f"| {server} |" in looked_at for server in _REPOSITORIES)


def test_the_comparison_says_where_machd_lacks_something() -> None:
    """The page is fair: machd's own column has rows that say no, and others lead to its pages."""
    _, *rows = table_below("Feature by feature", COMPARE)
    own = [row[1] for row in rows if any(row[2:])]

    assert len([cell for cell in own if re.match(r"\[?no\b", cell)]) >= 4
    assert [cell for cell in own if not cell.startswith("no") and "](" not in cell] == []
