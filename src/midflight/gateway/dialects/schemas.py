"""JSON schemas of clients, checked as far as that is possible without the engine that enforces them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import JsonValue

from midflight.errors import RequestRejected

MAX_DEPTH = 64
"""Schemas inside schemas."""

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems")


def check_schema(schema: JsonValue, param: str, *, of_object: bool = False) -> dict[str, JsonValue]:
    """The schema, if its keywords have the types that JSON Schema gives them; `of_object`: it must be one of an object."""
    _check(schema, param, depth=0)
    if not isinstance(schema, dict):
        raise RequestRejected(f"{param} is {schema!r:.80}: send a JSON schema, which is an object.", param=param)
    if of_object and schema.get("type", "object") != "object":
        raise RequestRejected(f"{param}.type is {schema['type']!r:.80}: send the schema of an object.", param=f"{param}.type")
    return schema


def _check(schema: JsonValue, param: str, *, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestRejected(f"{param} is {schema!r:.80}: send a JSON schema, which is an object.", param=param)
    if depth > MAX_DEPTH:
        raise RequestRejected(f"{param[:200]} nests schemas more than {MAX_DEPTH} deep: flatten it with $defs.", param=param[:200])
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
                raise RequestRejected(f"{place} is {value!r:.80}: send a list of schemas.", param=place)
            yield from ((f"{place}.{k}", part) for k, part in enumerate(value))
        elif name in _MAPS:
            if not isinstance(value, dict):
                raise RequestRejected(f"{place} is {value!r:.80}: send an object of schemas by name.", param=place)
            yield from ((f"{place}.{key}", part) for key, part in value.items())


def _check_keywords(schema: dict[str, JsonValue], param: str) -> None:
    kind = schema.get("type")
    kinds: list[JsonValue] = kind if isinstance(kind, list) else [kind] if "type" in schema else []
    if bad := [k for k in kinds if k not in _TYPES]:
        raise RequestRejected(f"{param}.type is {bad[0]!r:.80}: send one of {', '.join(_TYPES)}.", param=f"{param}.type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestRejected(f"{param}.required is {required!r:.80}: send a list of names.", param=f"{param}.required")
    if not isinstance(schema.get("enum", []), list):
        raise RequestRejected(f"{param}.enum is {schema['enum']!r:.80}: send a list of values.", param=f"{param}.enum")
