"""What clients ask of the form of an answer: texts that match something; and the body that OpenAI's
dialects share.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, Field, JsonValue
from pydantic_core import from_json

from midflight.errors import RequestRejected, nearest
from midflight.gateway.dialects.fields import Body, RequestBody, SamplingFields, filled, typed
from midflight.gateway.sessions.request import Asked
from midflight.types import Grammar, GrammarKind
from midflight.types.generation import Api

MAX_DEPTH = 64
"""How deep schemas may be nested."""

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
)


def check_schema(schema: JsonValue, param: str, *, of_object: bool = False) -> dict[str, JsonValue]:
    """The schema, if its keywords have the types that JSON Schema gives them. With `of_object` it
    must describe an object.
    """
    _check(schema, param, depth=0)
    if not isinstance(schema, dict):
        raise _refused(param, f"is {schema!r:.80}: send a JSON schema, which is an object.")
    if of_object and schema.get("type", "object") != "object":
        raise _refused(f"{param}.type", f"is {schema['type']!r:.80}: send the schema of an object.")
    try:
        json.dumps(schema, allow_nan=False)
    except ValueError:
        raise _refused(
            param, "holds a number that JSON cannot write: send finite numbers."
        ) from None
    return schema


def _refused(param: str, fault: str) -> RequestRejected:
    """`param` may be as long as the client's own names in it."""
    return RequestRejected(f"{param[:200]} {fault}", param=param[:200])


def _check(schema: JsonValue, param: str, *, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refused(param, f"is {schema!r:.80}: send a JSON schema, which is an object.")
    if depth > MAX_DEPTH:
        raise _refused(param, f"nests schemas more than {MAX_DEPTH} deep: flatten it with $defs.")
    _check_keywords(schema, param)
    for place, part in _parts(schema, param):
        _check(part, place, depth=depth + 1)


def _parts(schema: dict[str, JsonValue], param: str) -> Iterable[tuple[str, JsonValue]]:
    """The schemas inside a schema, with their places."""
    for name, value in schema.items():
        place = f"{param}.{name}"
        if name in _SINGLE or (name == "items" and not isinstance(value, list)):
            yield place, value
        elif name in _LISTS or name == "items":
            if not isinstance(value, list):
                raise _refused(place, f"is {value!r:.80}: send a list of schemas.")
            yield from ((f"{place}.{k}", part) for k, part in enumerate(value))
        elif name in _MAPS:
            if not isinstance(value, dict):
                raise _refused(place, f"is {value!r:.80}: send an object of schemas by name.")
            yield from ((f"{place}.{key}", part) for key, part in value.items())


_TEXTS: Mapping[str, type] = dict.fromkeys(
    ("$ref", "$id", "title", "description", "pattern", "format"), str
)


def _check_keywords(schema: dict[str, JsonValue], param: str) -> None:
    typed(schema, param, _TEXTS)
    kind = schema.get("type")
    kinds: list[JsonValue] = kind if isinstance(kind, list) else [kind] if "type" in schema else []
    if bad := [k for k in kinds if k not in _TYPES]:
        raise _refused(f"{param}.type", f"is {bad[0]!r:.80}: send one of {', '.join(_TYPES)}.")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{param}.required", f"is {required!r:.80}: send a list of names.")
    if not isinstance(schema.get("enum", []), list):
        raise _refused(f"{param}.enum", f"is {schema['enum']!r:.80}: send a list of values.")


MAX_LETTERS = 2**16
"""Length of one grammar, at most: each new one is compiled, and engines take no longer ones."""

ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')

_SPECIAL = re.compile(r"[\\.^$|?*+()\[\]{}]")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def grammar_of(body: BaseModel, *, prefix: str = "") -> tuple[str, Grammar] | None:
    """The name of the field that says what the answer must match, and the grammar. Two such fields
    are refused.
    """
    sent = body.model_fields_set
    if sent.isdisjoint(_READERS):
        return None
    found = [
        (prefix + name, grammar)
        for name, read in _READERS.items()
        if name in sent
        and (value := getattr(body, name, None)) is not None
        and (grammar := read(value, prefix + name)) is not None
    ]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestRejected(
            f"{names} both say what the answer must match: send one of them.", param=found[1][0]
        )
    return found[0] if found else None


def schema_grammar(schema: JsonValue, param: str) -> Grammar:
    """JSON that matches the schema, which is checked."""
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
    """OpenAI's wrapping of a schema. `strict` makes no difference: answers always match the
    schema.
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
    """A schema as an object, or as JSON text."""
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


def _choice(value: JsonValue, param: str) -> Grammar:
    """A grammar for one of several texts."""
    if not isinstance(value, list) or not value:
        raise RequestRejected(
            f"{param} is {value!r:.80}: send a list of the texts to choose from.", param=param
        )
    texts = [_text(text, f"{param}.{place}") for place, text in enumerate(value)]
    return Grammar(
        GrammarKind.REGEX,
        _bounded("|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts), param),
    )


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
    """vLLM's object, which holds any one of these."""
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
    return next((_INNER[name](inner, f"{param}.{name}") for name, inner in given.items()), None)


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
    "choice": _choice,
    "grammar": _lark,
}
_READERS: Mapping[str, _Reading] = {
    "response_format": _response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _lark,
}


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: frames are not padded."""


class ModelBody(RequestBody):
    model: str


OPENAI = SamplingFields(Api.OPENAI)


class SamplingBody(OPENAI.on(ModelBody)):
    """Fields that OpenAI's dialects share: those for sampling, and these."""

    n: Annotated[int, Field(ge=1)] | None = None
    response_format: dict[str, JsonValue] | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    guided_json: dict[str, JsonValue] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @cached_property
    def grammar(self) -> tuple[str, Grammar] | None:
        """The name of the field that says what the answer must match, and the grammar.
        `RequestRejected` if several fields do.
        """
        return grammar_of(self)

    def names(
        self, max_tokens: str = "max_tokens", *, top_logprobs: str = "top_logprobs"
    ) -> Mapping[str, str]:
        """What the client calls the parameters of `asked`, where the names differ."""
        grammar = "grammar" if self.grammar is None else self.grammar[0]
        return {"max_tokens": max_tokens, "top_logprobs": top_logprobs, "grammar": grammar}

    def asked(self, max_tokens: int | None, *, top_logprobs: int | None = None) -> Asked:
        grammar = None if self.grammar is None else self.grammar[1]
        return OPENAI.asked(self, max_tokens=max_tokens, top_logprobs=top_logprobs, grammar=grammar)
