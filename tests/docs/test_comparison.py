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


class Run(msgspec.Struct):
    """Of docs/speed.json, what the README's table shows of one run."""

    tokens_per_s: dict[str, list[float]]


class Speed(msgspec.Struct):
    """Of docs/speed.json, what the README's table shows."""

    streams: list[int]
    runs: list[Run]
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


def figure(number: float) -> str:
    """A number as the tables show it: with one decimal below 100."""
    return f"{number:g}" if number != int(number) or number >= 100 else f"{number:.1f}"


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
    """Each figure of the README's table is one of docs/speed.json, in its order."""
    speed = kept_speed()
    columns = [figures for run in speed.runs for figures in run.tokens_per_s.values()]
    shown = table_below("How fast", README)[1:]

    assert shown == [
        [str(streams), *(figure(column[place]) for column in columns)]
        for place, streams in enumerate(speed.streams)
    ]


def test_the_readme_names_the_servers_of_the_chart_in_its_order() -> None:
    """A column of the README's table is that of the server whose figures it has."""
    servers = [server for run in kept_speed().runs for server in run.tokens_per_s]
    header = table_below("How fast", README)[0][1:]

    assert [name.partition(",")[0] for name in header] == servers


def test_the_chart_shows_figures_of_the_page_of_performance() -> None:
    """Each figure and each version of docs/speed.json stands on the page that says how it was measured."""
    page = (ROOT / "docs" / "internals" / "performance.md").read_text("utf-8")
    section = page.partition("## Beside other servers\n")[2].partition("\n## ")[0]
    numbers = set(re.findall(r"\d+(?:\.\d+)?", section))
    speed = kept_speed()

    assert [
        number
        for run in speed.runs
        for figures in run.tokens_per_s.values()
        for number in figures
        if figure(number) not in numbers
    ] == []
    assert {speed.versions["mlx_lm.server"], speed.versions["vllm-mlx"]} <= numbers | set(
        re.findall(r"\d+\.\d+\.\d+", section)
    )


def test_every_cell_of_another_server_has_a_source() -> None:
    """What is said of a server leads to a file of its own repository."""
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
