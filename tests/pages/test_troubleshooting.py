"""docs/troubleshooting.md: the texts that it names are texts of the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .blocks import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
WORDS = 3
"""A quoted text of at least this many words is looked for in the sources."""


def texts_of_program() -> Iterator[str]:
    """Every text of the sources and of the Makefile; what is filled in is left out."""
    yield (ROOT / "Makefile").read_text()
    for path in sorted((ROOT / "src" / "midflight").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def quoted_texts() -> Iterator[str]:
    for row in re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE):
        for quoted in re.findall(r"`([^`]+)`", row):
            yield from (part.strip(" :;.") for part in quoted.split("…"))


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def test_each_text_that_the_page_names_is_a_text_of_the_program() -> None:
    known = "\n".join(plain(text) for text in texts_of_program())
    texts = [plain(text) for text in quoted_texts()]
    looked_for = [text for text in texts if len(text.split()) >= WORDS and text not in known]
    assert len(texts) > 10
    assert looked_for == []
