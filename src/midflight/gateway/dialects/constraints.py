"""Grammars that an answer must match, from the fields in which clients ask for them."""

import json
import re
from collections.abc import Callable, Mapping

from pydantic import BaseModel, JsonValue
from pydantic_core import from_json

from midflight.errors import RequestRejected, nearest
from midflight.gateway.dialects.fields import filled, typed
from midflight.gateway.dialects.schemas import check_schema
from midflight.types import Grammar, GrammarKind

MAX_LETTERS = 2**16
"""The most letters of one grammar. Each new grammar is compiled, and engines take no longer
ones.
"""

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
ANY_JSON = Grammar(GrammarKind.JSON_SCHEMA, '{"type": ["object", "array"]}')
"""The form of an answer to Google's clients that ask for JSON without a schema."""

_SPECIAL = re.compile(r"[\\.^$|?*+()\[\]{}]")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def grammar_of(body: BaseModel, *, prefix: str = "") -> tuple[str, Grammar] | None:
    """The grammar that the answer must match, with the name of the field that gives it. Two such
    fields are refused.
    """
    sent = body.model_fields_set
    if sent.isdisjoint(_READERS):
        return None
    found: list[tuple[str, Grammar]] = []
    for name, read in _READERS.items():
        value = getattr(body, name, None) if name in sent else None
        if value is None:
            continue
        grammar = read(value, prefix + name)
        if grammar is not None:
            found.append((prefix + name, grammar))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestRejected(
            f"{names} both say what the answer must match: send one of them.", param=found[1][0]
        )
    return found[0] if found else None


def schema_grammar(schema: JsonValue, param: str) -> Grammar:
    """A grammar for JSON that matches the schema. The schema is checked."""
    text = json.dumps(check_schema(schema, param), separators=(",", ":"))
    return Grammar(GrammarKind.JSON_SCHEMA, _bounded(text, param))


def _response_format(value: JsonValue, param: str) -> Grammar | None:
    assert isinstance(value, dict)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return ANY_OBJECT
        case "json_schema":
            return _named_schema(value.get("json_schema"), f"{param}.json_schema")
        case kind:
            raise RequestRejected(
                f"{param}.type is {kind!r:.80}: send text, json_object or json_schema.",
                param=f"{param}.type",
            )


def _named_schema(value: JsonValue, param: str) -> Grammar:
    """Reads the object in which OpenAI wraps a schema. `strict` makes no difference, because
    answers always match the schema.
    """
    if not isinstance(value, dict):
        raise RequestRejected(
            f"{param} is {value!r:.80}: send an object with a name and a schema.", param=param
        )
    typed(value, param, {"strict": bool, "description": str})
    name = value.get("name", "schema")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestRejected(
            f"{param}.name is {name!r:.80}: send 1 to 64 of the letters A-Z, a-z, 0-9, _ and -.",
            param=f"{param}.name",
        )
    if value.get("schema") is None:
        raise RequestRejected(
            f"{param}.schema is missing: send a JSON schema.", param=f"{param}.schema"
        )
    return _schema(value["schema"], f"{param}.schema")


def _schema(value: JsonValue, param: str) -> Grammar:
    """Reads a schema that is an object or JSON text."""
    if isinstance(value, str):
        value = _decoded(value, param)
    return schema_grammar(value, param)


def _decoded(text: str, param: str) -> JsonValue:
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise RequestRejected(
            f"{param} is {text!r:.80}, which is not JSON ({error}): send a JSON schema.",
            param=param,
        ) from None


def _regex(value: JsonValue, param: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, _text(value, param))


def choice_grammar(value: JsonValue, param: str) -> Grammar:
    """A grammar for one of several texts."""
    if not isinstance(value, list) or not value:
        raise RequestRejected(
            f"{param} is {value!r:.80}: send a list of the texts to choose from.", param=param
        )
    texts = [_text(text, f"{param}.{place}") for place, text in enumerate(value)]
    pattern = "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)
    return Grammar(GrammarKind.REGEX, _bounded(pattern, param))


def _lark(value: JsonValue, param: str) -> Grammar:
    text = _text(value, param)
    if "::=" in text:
        raise RequestRejected(
            (
                f"{param} is written in EBNF with ::=, which is not read here: write it in "
                "llguidance's Lark dialect."
            ),
            param=param,
        )
    return Grammar(GrammarKind.LARK, text)


def _structured(value: JsonValue, param: str) -> Grammar | None:
    """Reads vLLM's object, which holds one field of `_INNER`."""
    assert isinstance(value, dict)
    given = {name: inner for name, inner in value.items() if inner not in (None, False)}
    for name in given:
        if name not in _INNER:
            raise RequestRejected(
                f"unknown field {f'{param}.{name}'[:80]!r}: leave it out.{nearest(name, _INNER)}",
                param=f"{param}.{name}"[:80],
            )
    if len(given) > 1:
        raise RequestRejected(
            f"{param} holds {' and '.join(given)}: send one of them.", param=param
        )
    for name, inner in given.items():
        return _INNER[name](inner, f"{param}.{name}")
    return None


def _text(value: JsonValue, param: str) -> str:
    return _bounded(filled(value, param), param)


def _bounded(text: str, param: str) -> str:
    if len(text) > MAX_LETTERS:
        raise RequestRejected(
            f"{param} has {len(text)} letters: send {MAX_LETTERS} at most.", param=param
        )
    return text


_Reading = Callable[[JsonValue, str], Grammar | None]

_INNER: Mapping[str, _Reading] = {
    "json": _schema,
    "json_object": lambda value, param: ANY_OBJECT,
    "regex": _regex,
    "choice": choice_grammar,
    "grammar": _lark,
}
_READERS: Mapping[str, _Reading] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": choice_grammar,
    "guided_grammar": _lark,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _lark,
}
