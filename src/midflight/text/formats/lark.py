"""Grammars in llguidance's Lark dialect
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from midflight.types import Grammar, GrammarKind, Json

_SPACING: dict[str, Json] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""The spacing of `json.dumps` and of chat templates. It leaves no room for endless whitespace.
"""

_BLANKS: dict[str, Json] = {"whitespace_pattern": r"[ \n\r\t]{0,40}"}
"""The whitespace between JSON tokens of a client's schema. It suffices for indented JSON, and
prevents an endless answer of blanks.
"""


@dataclass(frozen=True, slots=True)
class Lark:
    """Writes the parts of a grammar. `tokens` has the ids of markers that are tokens of their own.

    Such a marker is written by its id, whether or not the tokenizer calls it special. llguidance
    keeps every added token in angle brackets out of texts, so in letters the marker could only be
    written in a way that the model never saw.
    """

    tokens: Mapping[str, int]
    announcing: str | None = None
    """A marker that may follow free text. The rule `announced` covers both."""

    def marker(self, text: str) -> str:
        """The token, or the letters if it is none."""
        if text == self.announcing:
            return "announced"
        return f"<[{self.tokens[text]}]>" if text in self.tokens else literal(text)

    def announced(self, marker: str) -> str:
        """Two rules: `announced` is any text up to and including the first `marker`, `FREE` is a
        text without one.
        """
        free = "FREE: /(?s:.+)/"
        # A text never matches a token. Of two readings llguidance takes the lazy one as soon as it
        # ends.
        if marker in self.tokens:
            return f"{free}\nannounced: FREE? {self.marker(marker)}"
        return f"{free}\n{self.ending('announced', marker)}"

    def ending(self, name: str, marker: str) -> str:
        """A rule for any text up to and including the first `marker`."""
        if marker in self.tokens:
            return f"{name}: /(?s:.*)/ {self.marker(marker)}"
        return f"{name}[lazy]: /(?s:.*){_slashed(re.escape(marker))}/"


def literal(text: str) -> str:
    return json.dumps(text)


def arguments(schema: Mapping[str, Json]) -> str:
    """A grammar for an object that matches a tool's schema. The schema is the root, so that its
    `$ref`s hold.
    """
    return json_value({**schema, "type": "object"})


def json_value(schema: Mapping[str, Json]) -> str:
    """A grammar for a value that matches a schema, with the spacing of `json.dumps`."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def alternatives(names: list[str]) -> str:
    return f"({' | '.join(names)})"


def embedded(name: str, grammar: Grammar) -> str:
    """A rule that matches the same texts as `grammar`."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{name}: %json {_bounded(grammar.text)}"
        case GrammarKind.REGEX:
            return f"{name}: /(?:{_slashed(grammar.text)})/"
        case GrammarKind.LARK:
            return f"{name}: %lark {{\n{grammar.text}\n}}"


def _bounded(schema: str) -> str:
    """The schema with bounded blanks. A text that is no JSON object stays as it is, for the engine
    to refuse.
    """
    try:
        parsed = cast(Json, json.loads(schema))
    except (ValueError, RecursionError):
        return schema
    if not isinstance(parsed, dict):
        return schema
    return json.dumps({"x-guidance": _BLANKS, **parsed})


def _slashed(pattern: str) -> str:
    """A regular expression as it is written between slashes, on one line."""
    escapes = {"/": r"\/", "\n": r"\n"}
    return re.sub(
        r"\\.|/|\n", lambda found: escapes.get(found[0], found[0]), pattern, flags=re.DOTALL
    )
