"""What `make docs` does to the pages on their way to the site (hooks of MkDocs; `mkdocs.yml` names
this file).

The pages are written to be read in the repository. So links lead to files: to other pages, to those
of the root, to sources, tests, configurations and folders. On the site each file that a page links
to is a page with its text, and each such folder one that lists what is in it; a link to something
that is not there fails the build. `<!-- site: api -->` becomes what mkdocstrings makes of the
public names.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/NOTES.md": "notes.md",
}
"""Pages outside docs, by their places on the site."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LANGUAGES = {
    ".py": "python",
    ".pyi": "python",
    ".toml": "toml",
    ".jsonl": "json",
    ".json": "json",
    ".txt": "text",
    ".yml": "yaml",
}
LARGEST = 200_000
"""Bytes of a file that is shown whole."""
WIDE = (
    ".md-grid { max-width: 80rem; }\n.md-typeset table:not([class]) code { white-space: normal; }\n"
)
"""Room for code of 140 columns and for tables."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs, and a page for each file and folder that any page links to."""
    from mkdocs.structure.files import File

    added = {
        place: (ROOT / name).read_text() for name, place in PAGES.items() if (ROOT / name).exists()
    }
    for path in sorted(_linked()):
        added[_place_of(path)] = _shown(path)
    added["site.css"] = WIDE
    for place, text in added.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.startswith("source/"):
        return markdown
    home = _home_of(page.file.src_uri)
    parts = CODE.split(markdown.replace("<!-- site: api -->", _public_names()))
    return "".join(
        part if number % 2 else _for_site(part, home, page.file.src_uri)
        for number, part in enumerate(parts)
    )


def _for_site(text: str, home: Path, place: str) -> str:
    """Links lead to places on the site; a list that follows a line of text has the blank line that
    Python-Markdown wants.
    """
    text = re.sub(r"(?m)^((?![ \t]*(?:[-*] |\d+\. ))\S.*)\n(?=(?:[-*]|1\.) )", r"\1\n\n", text)

    def led(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        if not target or "://" in target:
            return found[0]
        path = (home / target).resolve()
        there = posixpath.relpath(_place_of(path), posixpath.dirname(place) or ".")
        return f"{found[1]}{there}{'#' * bool(anchor)}{anchor}{found[3]}"

    return LINK.sub(led, text)


def _public_names() -> str:
    """What mkdocstrings is asked for: each public name of ours where it is defined, then the
    shipped rewards. Nothing is imported.
    """
    tree = ast.parse((ROOT / "src" / "midflight" / "__init__.py").read_text())
    (homes,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    names = [home.replace(":", ".") for home in homes.values() if home.startswith("midflight.")]
    return "\n\n".join(
        f"::: {name}"
        for name in [
            *sorted(names, key=lambda name: name.rpartition(".")[2].lower()),
            "midflight.rewards",
        ]
    )


def _home_of(place: str) -> Path:
    """The folder from which the links of a page begin."""
    outside = {where: name for name, where in PAGES.items()}
    return (ROOT / outside.get(place, f"docs/{place}")).parent


def _place_of(path: Path) -> str:
    """Where something of the repository is on the site."""
    inside = path.relative_to(ROOT).as_posix()
    if inside in PAGES:
        return PAGES[inside]
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    return f"source/{inside or 'repository'}.md"


def _linked() -> Iterator[Path]:
    """Files and folders outside the pages that a page links to, each once; what a listed folder
    holds too.
    """
    found: set[Path] = set()
    for page in [ROOT / name for name in PAGES if (ROOT / name).exists()] + sorted(
        (ROOT / "docs").rglob("*.md")
    ):
        targets = [
            target.partition("#")[0]
            for _, target, _ in LINK.findall(CODE.sub("", page.read_text()))
        ]
        found.update(
            (page.parent / target).resolve() for target in targets if target and "://" not in target
        )
    for folder in [path for path in found if path.is_dir()]:
        found.update(path for path in folder.iterdir() if _is_shown(path))
    yield from (path for path in found if path.exists() and _place_of(path).startswith("source/"))


def _is_shown(path: Path) -> bool:
    return (
        path.is_file()
        and not path.name.startswith(".")
        and path.suffix in LANGUAGES
        and path.stat().st_size < LARGEST
    )


def _shown(path: Path) -> str:
    """A page of the site: the text of a file, or what is in a folder."""
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        rows = [
            f"- [{each.name}]({path.name}/{each.name}.md) {_sentence(each)}"
            for each in sorted(path.iterdir())
            if _is_shown(each)
        ]
        return HIDDEN + title + _sentence(path / "__init__.py") + "\n\n" + "\n".join(rows) + "\n"
    text = path.read_text().replace("`" * 6, "")
    return f"{HIDDEN}{title}``````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n``````\n"


def _sentence(path: Path) -> str:
    """What a module says of itself, first of all."""
    if path.suffix != ".py" or not path.exists():
        return ""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(said.partition("\n\n")[0].split())
