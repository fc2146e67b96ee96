"""Writing grammars in llguidance's Lark dialect
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
"""As `json.dumps` and the chat templates write: a model that wanders has no endless whitespace to
wander in.
"""

_BLANKS: dict[str, Json] = {"whitespace_pattern": r"[ \n\r\t]{0,40}"}
"""Between JSON tokens of a client's schema: enough for indented JSON, and no endless answer of
blanks.
"""


@dataclass(frozen=True, slots=True)
class Lark:
    """Writes the parts of a grammar. `tokens` has the ids of markers that are tokens of their own.

    Such a marker is written by its id whether or not the tokenizer calls it special: llguidance
    keeps every added token in angle brackets out of texts, so as letters it could only be written
    in a way the model never saw.
    """

    tokens: Mapping[str, int]
    announcing: str | None = None
    """A marker that free text may stand before: the rule `announced` is both."""

    def marker(self, text: str) -> str:
        """The token, or the letters if it is none."""
        if text == self.announcing:
            return "announced"
        return f"<[{self.tokens[text]}]>" if text in self.tokens else literal(text)

    def announced(self, marker: str) -> str:
        """Rules: `announced` is any text up to the first `marker` and with it, `FREE` a text
        without one.
        """
        free = "FREE: /(?s:.+)/"
        # A text holds no token, and of two readings llguidance takes the lazy one as soon as it
        # ends.
        return (
            f"{free}\nannounced: FREE? {self.marker(marker)}"
            if marker in self.tokens
            else f"{free}\n{self.ending('announced', marker)}"
        )

    def ending(self, name: str, marker: str) -> str:
        """A rule: any text, up to the first `marker` and with it."""
        if marker in self.tokens:
            return f"{name}: /(?s:.*)/ {self.marker(marker)}"
        return f"{name}[lazy]: /(?s:.*){_slashed(re.escape(marker))}/"


def literal(text: str) -> str:
    return json.dumps(text)


def arguments(schema: Mapping[str, Json]) -> str:
    """An object that matches a tool's schema; it is the root, so that its `$ref`s hold."""
    return json_value({**schema, "type": "object"})


def json_value(schema: Mapping[str, Json]) -> str:
    """A value that matches a schema, spaced as `json.dumps` does."""
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def alternatives(names: list[str]) -> str:
    return f"({' | '.join(names)})"


def embedded(name: str, grammar: Grammar) -> str:
    """A rule that matches what `grammar` does."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{name}: %json {_bounded(grammar.text)}"
        case GrammarKind.REGEX:
            return f"{name}: /(?:{_slashed(grammar.text)})/"
        case GrammarKind.LARK:
            return f"{name}: %lark {{\n{grammar.text}\n}}"


def _bounded(schema: str) -> str:
    """The schema with bounded blanks. What is no JSON object stays as it is, for the engine to
    refuse.
    """
    try:
        parsed = cast(Json, json.loads(schema))
    except (ValueError, RecursionError):
        return schema
    return json.dumps({"x-guidance": _BLANKS, **parsed}) if isinstance(parsed, dict) else schema


def _slashed(pattern: str) -> str:
    """A regular expression as it stands between slashes, on one line."""
    return re.sub(
        r"\\.|/|\n",
        lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]),
        pattern,
        flags=re.DOTALL,
    )
