"""Let the site's pages lead where they lead on disk (a hook of mkdocs, named in mkdocs.yml).

Pages link to files of the repository by relative paths, which forges and editors follow. The site
has only docs/. So the pages at the repository's root become pages of the site too, a settings file
is shown on one, and a link to any other file outside docs/ is left as its text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
"""A link, and a picture behind its exclamation mark."""
_SCHEME = re.compile(r"[a-z]+:")

_PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "project/readme.md",
    "SECURITY.md": "project/security.md",
    "systemd/README.md": "project/service-units.md",
}
"""Pages outside docs/ by what the site calls them."""

_SHOWN = {
    "config/machd.toml": ("project/machd-toml.md", "Example settings", "toml"),
    "config/prometheus/alerts.yml": ("project/alerts-yml.md", "Alerts", "yaml"),
    "config/prometheus/prometheus.yml": ("project/prometheus-yml.md", "Example scrape", "yaml"),
}
"""Other files, each on a page made for it: its name, its title, its language."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    for source, name in _PAGES.items():
        if (_ROOT / source).is_file():
            files.append(File.generated(config, name, abs_src_path=str(_ROOT / source)))
    for source, (name, title, language) in _SHOWN.items():
        text = (_ROOT / source).read_text("utf-8")
        page = f"# {title}\n\n`{source}`:\n\n```{language}\n{text}```\n"
        files.append(File.generated(config, name, content=page))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    folder = _folder_in_repository(page.file, config)
    here = posixpath.dirname(page.file.src_uri)

    def in_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if _SCHEME.match(target):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        name = _name_in_site(path)
        if name is None or files.get_file_from_path(name) is None:
            return link[0] if path.startswith("docs/") else text
        return f"[{text}]({posixpath.relpath(name, here or '.')}{anchor})"

    return _LINK.sub(in_site, markdown)


def _folder_in_repository(file: File, config: MkDocsConfig) -> str:
    """Where the page's own links start from, relative to the repository's root."""
    source = Path(file.abs_src_path) if file.abs_src_path else Path(config.docs_dir)
    return Path(os.path.relpath(source.parent, _ROOT)).as_posix()


def _name_in_site(path: str) -> str | None:
    """What the site calls a file of the repository; None if it has none."""
    if path in _SHOWN:
        return _SHOWN[path][0]
    return _PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
