"""Schemas as Google's clients write them: a part of OpenAPI's, with the names of types in capitals."""

from collections.abc import Mapping

from pydantic import JsonValue
from pydantic.alias_generators import to_camel

_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("anyOf", "prefixItems")
_MAPS: Mapping[str, str] = {"properties": "properties", "defs": "$defs"}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""Google writes whole numbers of 64 bits as texts."""
_FORMATS = ("date", "date-time", "time", "duration")
"""The formats of JSON Schema. Google's others say how wide a number is, or that a text has an
`enum`.
"""
_RENAMED: Mapping[str, str] = {"ref": "$ref"}


def json_schema(schema: JsonValue) -> JsonValue:
    """The JSON schema that means the same. What is none is returned as it is, for the check of
    schemas to refuse.
    """
    if not isinstance(schema, dict):
        return schema
    given = {to_camel(name): value for name, value in schema.items()}
    order = given.pop("propertyOrdering", None)
    nullable = given.pop("nullable", None)
    found: dict[str, JsonValue] = {}
    for name, value in given.items():
        if name in _SCHEMAS:
            found[name] = json_schema(value)
        elif name in _LISTS and isinstance(value, list):
            found[name] = [json_schema(part) for part in value]
        elif name in _MAPS and isinstance(value, dict):
            found[_MAPS[name]] = {key: json_schema(part) for key, part in value.items()}
        elif name == "type":
            found |= _type(value)
        elif name in _COUNTS and isinstance(value, str) and value.isdecimal():
            found[name] = int(value)
        elif name != "format" or value in _FORMATS:
            found[_RENAMED.get(name, name)] = value
    if isinstance(order, list):
        found = _ordered(found, order)
    return _or_null(found) if nullable is True else found


def _type(value: JsonValue) -> dict[str, JsonValue]:
    if value == "TYPE_UNSPECIFIED":
        return {}
    return {"type": value.lower() if isinstance(value, str) else value}


def _ordered(schema: dict[str, JsonValue], order: list[JsonValue]) -> dict[str, JsonValue]:
    """The schema with its properties in this order. Answers are sampled in the order of the
    properties.
    """
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    names = [name for name in order if isinstance(name, str) and name in properties]
    names += [name for name in properties if name not in names]
    return {**schema, "properties": {name: properties[name] for name in names}}


def _or_null(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    kind = schema.get("type")
    choices = schema.get("enum")
    others = schema.get("anyOf")
    if isinstance(kind, str):
        schema = {**schema, "type": [kind, "null"]}
    if isinstance(choices, list):
        schema = {**schema, "enum": [*choices, None]}
    if isinstance(others, list):
        schema = {**schema, "anyOf": [*others, {"type": "null"}]}
    return schema
