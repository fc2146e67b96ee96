"""Checks of the JSON schemas that clients send."""

import json
from collections.abc import Iterable, Mapping

from pydantic import JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.dialects.fields import typed

MAX_DEPTH = 64
"""The deepest nesting of schemas that is accepted."""

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
    """Returns the schema if its keywords have the types that JSON Schema gives them. With
    `of_object` it must describe an object.
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
    """A refusal. `param` is cut, because it may hold long names of the client's own."""
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
    kinds: list[JsonValue] = []
    if isinstance(kind, list):
        kinds = kind
    elif "type" in schema:
        kinds = [kind]
    bad = [k for k in kinds if k not in _TYPES]
    if bad:
        raise _refused(f"{param}.type", f"is {bad[0]!r:.80}: send one of {', '.join(_TYPES)}.")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _refused(f"{param}.required", f"is {required!r:.80}: send a list of names.")
    if not isinstance(schema.get("enum", []), list):
        raise _refused(f"{param}.enum", f"is {schema['enum']!r:.80}: send a list of values.")
