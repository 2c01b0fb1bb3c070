"""Give mkdocs what lies outside of docs/: README.md and its like, and each file that a page links to.

    mkdocs build --strict        (pip install -e '.[docs]'; the options are in mkdocs.yml)

Owns: the places of those files in the site, and the links to them.
Never: a link to an address outside of the site, or a page in docs/ written for the site alone.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "campaigns/README.md": "campaigns.md",
}
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".yml": "yaml", ".yaml": "yaml", ".sh": "bash"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the decisions, so that a new page needs no line in mkdocs.yml."""
    pages = sorted(Path(config.docs_dir, "decisions").glob("*.md"))
    for section in config.nav or []:
        if "Decisions" in section:
            section["Decisions"] = [f"decisions/{page.name}" for page in pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of docs/, after a look at the links of every page."""
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for source, place in OUTSIDE.items():
        pages[source] = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=pages[source]))
    linked = {target for source, text in pages.items() for target in targets(source, text)}
    for target in sorted(linked - OUTSIDE.keys()):
        if not target.startswith("docs/") and (ROOT / target).exists():
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place_of(target), content=listing(target), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn each link from file to file into one from page to page."""
    place = page.file.src_uri
    source = next((each for each, at in OUTSIDE.items() if at == place), f"docs/{place}")
    if place.startswith("source/"):
        return markdown

    def rewritten(found: re.Match[str]) -> str:
        target = place_of(resolved(source, found[1]))
        return f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}{found[2] or ''})"

    return _LINK.sub(rewritten, markdown)


def targets(source: str, text: str) -> Iterator[str]:
    return (resolved(source, found[1]) for found in _LINK.finditer(text))


def resolved(source: str, link: str) -> str:
    """Path from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def place_of(target: str) -> str:
    """Path in the site's Markdown of a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return OUTSIDE.get(target) or f"source/{target}.md"


def listing(target: str) -> str:
    """A page that shows a file, or the names in a folder, and that the search leaves out."""
    path = ROOT / target
    if path.is_dir():
        names = [each.name for each in sorted(path.iterdir()) if not each.name.startswith("__pycache__")]
        text = "\n".join(names)
    else:
        text = path.read_text(encoding="utf-8")
    fence = "`" * 6
    language = _LANGUAGES.get(path.suffix, "text")
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {target}\n\n"
    return f"{head}{fence}{language}\n{text}\n{fence}\n"
