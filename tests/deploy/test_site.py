"""The documentation as a site: built without a warning, no dead link, and nothing from anywhere else.

Skipped without mkdocs (pip install -e '.[docs]').
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

pytestmark = pytest.mark.night

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install -e '.[docs]'")
pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")

ROOT = Path(__file__).resolve().parents[2]


def build(site: Path, *, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT)


@dataclass
class Read(HTMLParser):
    """Addresses that one page fetches by itself, destinations of its links, and its anchors."""

    fetched: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names.add(given.get("id", ""))
        if tag == "a":
            self.links.append(given.get("href", ""))
        else:
            self.fetched += [given[name] for name in ("src", "href", "srcset", "data") if name in given]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Read]:
    found = {}
    for path in site.rglob("*.html"):
        found[path] = Read()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def test_every_document_is_a_page(site: Path) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        place = document.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (place if place.name != "README.html" else "index.html")).is_file(), place
    for name in ("start", "contributing", "changelog", "reporting", "campaigns"):
        assert (site / f"{name}.html").is_file()


def test_nothing_is_fetched_from_anywhere_else(site: Path, pages: dict[Path, Read]) -> None:
    fetched = {address for page in pages.values() for address in page.fetched}
    assert [address for address in fetched if re.match(r"(?:\w+:)?//", address)] == []
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_no_link_is_dead(site: Path, pages: dict[Path, Read]) -> None:
    dead = []
    for path, page in pages.items():
        for link in {*page.links, *page.fetched}:
            target, _, name = unquote(link).partition("#")
            if path.name == "404.html" or re.match(r"[a-z]+:", link):
                continue
            found = (path.parent / target).resolve() if target else path
            found = found / "index.html" if found.is_dir() else found
            if not found.is_file() or (name and name not in pages[found].names):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_the_search_finds_documents_and_leaves_source_files_out(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert '"location":"scheduling.html#' in index
    assert '"location":"source/' not in index


def test_a_dead_link_and_a_page_without_a_place_fail_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "README.md").write_text("# Here\n\n[gone](../engine/gone.py) and [no part](#nowhere)\n")
    (docs / "apart.md").write_text("# Apart\n")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[0]
    config = config.replace("scripts/", f"{ROOT}/scripts/") + "\nnav: [README.md]\n"
    (tmp_path / "mkdocs.yml").write_text(config)
    built = build(tmp_path / "site", config=tmp_path / "mkdocs.yml")
    assert built.returncode == 1
    assert "source/engine/gone.py.md" in built.stderr
    assert "#nowhere" in built.stderr
    assert "apart.md" in built.stderr
