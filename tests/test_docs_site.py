"""The documentation's site: its pages, the parts that are written from code, and that every link leads somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlparse

import built_parts
import pytest

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    path = ROOT / "docs" / "generate" / "site_pages.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = load()


def small_repository(root: Path) -> None:
    (root / "docs").mkdir()
    (root / "examples" / "own").mkdir(parents=True)
    (root / "README.md").write_text("[a page](docs/a.md#two--words)\n\n```\n[code](nowhere.md)\n```\n", "utf-8")
    page = (
        "# A\n\n[yaml](../examples/own/run.yaml) [folder](../examples/own) [start](../README.md) [web](https://a.b/c)\n"
    )
    (root / "docs" / "a.md").write_text(page, "utf-8")
    (root / "examples" / "own" / "run.yaml").write_text("a: 1\n", "utf-8")
    (root / "examples" / "own" / "README.md").write_text("# Own\n", "utf-8")


def test_links_out_of_the_docs_lead_to_pages_that_come_along(tmp_path: Path):
    repository, pages = tmp_path / "repository", tmp_path / "pages"
    repository.mkdir()
    small_repository(repository)
    SITE.Site(repository, pages).collect(SITE.first_pages(repository))
    start = (pages / "index.md").read_text("utf-8")
    assert "[a page](a.md#two-words)" in start
    assert "[code](nowhere.md)" in start
    text = (pages / "a.md").read_text("utf-8")
    assert "[start](index.md) [web](https://a.b/c)" in text
    assert "[folder](files/examples/own/folder.md)" in text
    assert "a: 1" in (pages / re.search(r"\[yaml\]\(([^)]+)", text)[1]).read_text("utf-8")
    assert "[README.md](../../../examples/own/README.md)" in (pages / "files/examples/own/folder.md").read_text("utf-8")
    assert (pages / "examples/own/README.md").is_file()


def test_a_link_to_nothing_is_named(tmp_path: Path):
    (tmp_path / "README.md").write_text("[gone](docs/gone.md)\n", "utf-8")
    with pytest.raises(ValueError, match=r"README\.md: the link docs/gone\.md leads nowhere"):
        SITE.Site(tmp_path, tmp_path / "pages").collect([tmp_path / "README.md"])


def test_what_belongs_to_an_item_of_a_list_stays_in_it():
    text = "text\n* one\n  more\n\n  ```\n    x\n  ```\n\n1. two\n\n   three\n\nend\n```\n* code\n  y\n```\n"
    expected = (
        "text\n\n* one\n    more\n\n    ```\n      x\n    ```\n\n1. two\n\n    three\n\nend\n```\n* code\n  y\n```\n"
    )
    assert SITE.reindented(text) == expected


def test_the_navigation_has_every_page_once():
    def pages(entries: list) -> list[str]:
        values = [value for entry in entries for value in entry.values()]
        return [page for value in values for page in ([value] if isinstance(value, str) else pages(value))]

    found = pages(tomllib.loads((ROOT / "docs" / "zensical.toml").read_text("utf-8"))["project"]["nav"])
    site = SITE.Site(ROOT, ROOT)
    assert len(found) == len(set(found))
    assert set(found) >= {str(site.place(page)) for page in SITE.first_pages(ROOT)}


def test_the_page_of_the_api_has_signatures_and_docstrings_without_importing():
    import api_page

    text = api_page.page(ROOT)
    assert "### `train`" in text
    assert "class Env" in text
    source = "def f(a: int, *, b: str = 'x') -> list[<T>]: ...".replace("<T>", "int")
    assert api_page.signature(ast.parse(source).body[0]) == "def f(a: int, *, b: str='x') -> list[int]"
    documented = ast.parse('def f(a):\n    """Do <it>.\n\n    Args:\n        a: `<b>`.\n    """').body[0]
    assert api_page.text_of(documented) == "Do &lt;it>.\n\nArgs:\n\n* `a`: `<b>`.\n"


def test_every_built_part_stands_on_one_page_and_no_committed_page_has_its_text():
    pages = {path.name: path.read_text("utf-8") for path in SITE.first_pages(ROOT)}
    used = [name for page in pages.values() for name in built_parts.part_names(page)]
    assert sorted(used) == sorted(built_parts.PARTS)
    for page in pages.values():
        for name in built_parts.part_names(page):
            rows = {line for line in built_parts.PARTS[name]().splitlines() if line.startswith("| `")}
            assert len(rows) > (20 if name == "families" else 50)
            assert not rows & set(page.splitlines())


def test_a_part_comes_in_place_of_the_note_on_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(built_parts.PARTS, "metrics", lambda: "| `a` |")
    page = "# A\n\n<!-- built: metrics -->\nRun `make docs`.\n<!-- end -->\n\nLast.\n"
    assert built_parts.with_parts(page) == "# A\n\n| `a` |\n\nLast.\n"
    assert built_parts.with_parts("# B\n") == "# B\n"
    with pytest.raises(ValueError, match=r"needs a line '<!-- end -->'"):
        built_parts.with_parts(page.replace("<!-- end -->", ""))
    with pytest.raises(ValueError, match=r"no built part 'metric'; there are configuration, metrics"):
        built_parts.with_parts(page.replace("metrics", "metric"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` writes."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "docs/generate/site_pages.py", folder]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return folder


def test_every_page_is_built_whole_and_git_ignores_where_make_puts_them(built: Path):
    site = SITE.Site(ROOT, built)
    for page in SITE.first_pages(ROOT):
        text = (built / "pages" / site.place(page)).read_text("utf-8")
        assert not built_parts.part_names(text)
    assert (built / "zensical.toml").is_file()
    rows = {name: (built / "pages" / f"{name}.md").read_text("utf-8").count("\n| `") for name in COUNTED}
    assert {name: rows[name] >= least for name, least in COUNTED.items()} == dict.fromkeys(COUNTED, True), rows
    done = subprocess.run(["git", "check-ignore", "build/site/pages/metrics.md"], cwd=ROOT, timeout=60, check=False)
    assert done.returncode in (0, 128)  # 128: a copy without git


COUNTED = {"configuration": 700, "coming_from": 1000, "metrics": 250, "serve": 120}
"""Pages with rows that are written from code, and the least that are there."""


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(name for name in (given.get("id"), given.get("name")) if name)
        self.links.extend(link for link in (given.get("href"), given.get("src")) if link)


def broken_links(html: Path) -> list[str]:
    pages = {path: Page(path.read_text("utf-8")) for path in html.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in pages.items():
        for link in map(urlparse, page.links):
            if link.scheme or link.netloc:
                continue
            end = (path.parent / unquote(link.path)).resolve() if link.path else path
            end = end / "index.html" if end.is_dir() else end
            if not end.is_file() or (link.fragment and end in pages and link.fragment not in pages[end].anchors):
                broken.append(f"{path.relative_to(html)}: {link.geturl()}")
    return broken


def test_a_broken_link_of_the_site_is_found(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text('<a href="b/#x">b</a> <a href="c/">c</a> <a href="b/#y">b</a>', "utf-8")
    (tmp_path / "b" / "index.html").write_text('<h2 id="x">x</h2><a href="..">up</a>', "utf-8")
    assert broken_links(tmp_path) == ["index.html: c/", "index.html: b/#y"]


@pytest.mark.skipif(shutil.which("zensical") is None, reason="zensical isn't installed: pip install -e '.[docs]'")
def test_the_site_is_built_with_a_search_and_without_a_broken_link(built: Path):
    subprocess.run(["zensical", "build", "--strict"], cwd=built, check=True, timeout=300, capture_output=True)
    assert broken_links(built / "html") == []
    assert (built / "html" / "search.json").stat().st_size > 100_000
