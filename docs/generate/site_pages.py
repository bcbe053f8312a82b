"""Collect the pages of the documentation's site, with links that work there.

    python docs/generate/site_pages.py build/site

writes `build/site/pages` and `build/site/zensical.toml`, which is `make docs`; `make docs-site` then builds
`build/site/html`. The tables that are written from code come into their pages here (`built_parts.py`). Zensical knows
one folder of pages, but ours link to examples and code. So everything that a page links to comes along: Markdown as a
page, other text as a page that shows it, a folder as a list of what is in it. The site needs no address of a repository
then.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path, PurePosixPath

import api_page
from built_parts import with_parts

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(\]\()(?!https?:|mailto:)([^)\s#]*)(#[^)\s]+)?(\))")
_RAW = {".png", ".svg", ".gif", ".ipynb"}
"""Files that come along as they are."""
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}
_FENCE = "~~~~~~"
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_SKIPPED = {"__pycache__", "output"}


class Site:
    """Pages by their place on the site, collected from what the first ones link to."""

    def __init__(self, root: Path, folder: Path) -> None:
        """Read below `root`, write below `folder`."""
        self._root, self._folder = root, folder
        self._done: set[Path] = set()
        self._waiting: list[Path] = []

    def place(self, source: Path) -> PurePosixPath:
        """Return where a file or a folder of the repository is on the site."""
        inside = PurePosixPath(source.relative_to(self._root).as_posix())
        if str(inside) == "README.md":
            return PurePosixPath("index.md")
        if source.is_dir():
            return PurePosixPath("files") / inside / "folder.md"
        if inside.parts[0] == "docs" and source.suffix in (".md", *_RAW):
            return PurePosixPath(*inside.parts[1:])
        if source.suffix in (".md", *_RAW):
            return inside
        return PurePosixPath("files") / f"{inside}.md"

    def collect(self, first: list[Path]) -> int:
        """Write the pages and all that they lead to; returns how many files that are."""
        self._waiting.extend(first)
        while self._waiting:
            source = self._waiting.pop()
            if source not in self._done:
                self._done.add(source)
                self._write(source)
        return len(self._done)

    def _write(self, source: Path) -> None:
        target = self._folder / self.place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.write_text(self._listing(source), "utf-8")
        elif source.suffix == ".md":
            target.write_text(self.rewrite(source, with_parts(source.read_text("utf-8"))), "utf-8")
        elif source.suffix in _RAW:
            shutil.copyfile(source, target)
        else:
            name, language = source.relative_to(self._root).as_posix(), _LANGUAGES.get(source.suffix, "text")
            text = source.read_text("utf-8").rstrip()
            target.write_text(f"{_NOT_SEARCHED}# {name}\n\n{_FENCE}{language}\n{text}\n{_FENCE}\n", "utf-8")

    def _listing(self, folder: Path) -> str:
        lines = [f"{_NOT_SEARCHED}# {folder.relative_to(self._root).as_posix()}\n"]
        for entry in sorted(folder.iterdir()):
            if not entry.name.startswith(".") and entry.name not in _SKIPPED and entry.suffix != ".pyc":
                lines.append(f"* [{entry.name}]({self._way(folder, entry)})")
        return "\n".join(lines) + "\n"

    def _way(self, start: Path, end: Path) -> str:
        """Return the link between the two places, and a note that the second has to come along."""
        self._waiting.append(end)
        return os.path.relpath(self.place(end), self.place(start).parent)

    def rewrite(self, source: Path, text: str) -> str:
        """Return a page's text with links to places on the site. What stands in code stays."""

        def link(match: re.Match[str]) -> str:
            before, path, anchor, after = match.groups()
            # GitHub writes `A / B` as `a--b`, Python-Markdown as `a-b`.
            anchor = re.sub("-+", "-", anchor or "")
            if not path:
                return f"{before}{anchor}{after}"
            end = (source.parent / path).resolve()
            if not end.exists() or not end.is_relative_to(self._root):
                raise ValueError(f"{source.relative_to(self._root)}: the link {path} leads nowhere")
            return f"{before}{self._way(source, end)}{anchor}{after}"

        # Odd pieces are fenced blocks.
        pieces = re.split(r"(^ *```.*?^ *```)", reindented(text), flags=re.MULTILINE | re.DOTALL)
        return "".join(piece if odd % 2 else _LINK.sub(link, piece) for odd, piece in enumerate(pieces))


def reindented(text: str) -> str:
    """Return the text with lists' content four spaces in, as Python-Markdown wants it; GitHub takes two."""
    lines: list[str] = []
    width, in_fence = 0, False  # of the item that we are in, 0 outside of lists; in a block that is outside of lists
    for line in text.splitlines():
        marker = re.match(r"(\*|\d+\.) ", line)
        if in_fence or line.startswith("```"):
            in_fence ^= line.startswith("```")
            width = 0
        elif marker:
            if not width and lines and lines[-1] and marker[1] == "*":
                lines.append("")  # a list begins after an empty line
            width = len(marker[0])
        elif width and line.startswith(" " * width):
            line = " " * 4 + line[width:]
        elif line:
            width = 0
        lines.append(line)
    return "\n".join(lines) + "\n"


def first_pages(root: Path) -> list[Path]:
    """Return the pages from which all others are reached: those at the top and in docs/."""
    return sorted(root.glob("*.md")) + sorted((root / "docs").glob("*.md"))


def main() -> None:
    """Write a fresh folder of pages beside a copy of docs/zensical.toml."""
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder / "pages", ignore_errors=True)
    count = Site(ROOT, folder / "pages").collect(first_pages(ROOT))
    (folder / "pages" / "api.md").write_text(api_page.page(ROOT), "utf-8")
    shutil.copyfile(ROOT / "docs" / "zensical.toml", folder / "zensical.toml")
    sys.stdout.write(f"{count} files in {folder / 'pages'}\n")


if __name__ == "__main__":
    main()
