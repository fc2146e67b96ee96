"""The code of the pages: every fenced block, with what its page says of it to whoever tries it.

A page says so in comments that its readers don't see:

    <!-- block: file words.jsonl -->        before a block: it is the text of that file
    <!-- block: beside -->                  a program that does not end: it runs while what follows is tried
    <!-- block: not run: REASON -->         only looked at, as far as that is possible without running it
    <!-- try: midflight new-model MODEL -->  a command that is run here and not shown

A block without a comment is run where it stands; a block of Python whose first line is `# name.py` is that file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOUND = re.compile(
    r"^(?:<!-- block: (?P<mark>.*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$|^<!-- try: (?P<tried>.*?) -->$",
    re.DOTALL | re.MULTILINE,
)
NAMED = re.compile(r"# (\w+\.py)\n")
SERVERS = ("serve", "rollouts")
"""Commands of midflight that run until they are ended."""
PROGRAMS, DATA, SHOWN = {"python", "bash", "sh"}, {"toml", "json", "jsonl"}, {"text", ""}
"""Languages of blocks: run; read; and looked at by people only."""
MAKE = "the Makefile's targets are what CI consists of"


@dataclass(frozen=True)
class Block:
    """`hidden`: no reader sees it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    hidden: bool = False

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that it is the text of."""
        if self.mark.startswith("file "):
            return self.mark.removeprefix("file ")
        named = NAMED.match(self.text) if self.language == "python" and not self.mark else None
        return None if named is None else named[1]

    @property
    def beside(self) -> bool:
        return self.mark == "beside"

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        if self.mark.startswith("not run: "):
            return self.mark.removeprefix("not run: ")
        makes = self.language == "bash" and all(line.startswith("make ") for line in self.commands())
        return MAKE if makes else None

    def commands(self) -> list[str]:
        """Lines of a shell without comments, continued ones joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if shlex.split(line, comments=True)]

    @property
    def tried(self) -> str:
        """How: `run`, `file`, `read`, `looked at` or `shown`."""
        if self.language in SHOWN:
            return "shown"
        if self.reason is not None:
            return "looked at"
        return "file" if self.file else "read" if self.language in DATA else "run"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return list(_blocks(page, text))


def _blocks(page: Path, text: str) -> Iterator[Block]:
    for found in FOUND.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["tried"] is not None:
            yield Block(page, line, "bash", found["tried"], hidden=True)
        else:
            yield Block(page, line + (found["mark"] is not None), found["language"], found["text"], found["mark"] or "")


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def without_blocks(text: str) -> str:
    """The page as text: no code, and nothing that its readers don't see."""
    return re.sub(r"<!-- (?:try|block|site): .*? -->\n?", "", FOUND.sub("", text), flags=re.DOTALL)


ADAPTER = re.compile(r"midflight\.adapters\.(\w+)")
FILE = re.compile(r"(?:configs|examples)/\w+\.\w+")
ALONE = ("harbor",)
"""Adapters that need no package."""


def lacks(page: Path) -> str | None:
    """The package of an adapter that the page's blocks, or files that they name, need and that is not here.

    `make test-adapters` tries the page where it is.
    """
    code = "\n".join(block.text for block in blocks_of(page) if block.tried in ("run", "file", "read"))
    named = {name for name in FILE.findall(code) if (ROOT / name).exists()}
    texts = [code, *((ROOT / name).read_text() for name in sorted(named))]
    adapters = [name for text in texts for name in ADAPTER.findall(text) if name not in ALONE]
    return next((name for name in adapters if find_spec(name) is None), None)
