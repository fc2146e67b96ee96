"""What the sections allow, as data: one `Option` per key, for error messages, overrides and the reference page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

from midflight.config.sections import Config
from midflight.types import Json

Schema = dict[str, Json]

_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a table",
    "array": "a list of texts",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True, slots=True)
class Option:
    """One key of the configuration. In keys of lists of tables the index is written `*`."""

    key: str
    kind: str
    bounds: tuple[str, ...]
    choices: tuple[str, ...]
    optional: bool
    """May be unset; in TOML, which has no null, that is written "none"."""
    required: bool
    default: Json

    @property
    def is_text(self) -> bool:
        return self.kind == "text"

    @property
    def is_list(self) -> bool:
        return self.kind == "a list of tables"

    @property
    def limits(self) -> str:
        """The bounds in words: `>= 0 and <= 1`."""
        return " and ".join(self.bounds)

    @property
    def expectation(self) -> str:
        """What a value must be, as the end of the sentence `x must be ...`."""
        what = "one of " + ", ".join(repr(c) for c in self.choices) if self.choices else f"{self.kind} {self.limits}".strip()
        return f'{what} (or "none")' if self.optional else what


@cache
def options() -> Mapping[str, Option]:
    """Every option by its key, in the order of the sections."""
    schema = cast(Schema, Config.model_json_schema())
    return {option.key: option for option in _walk(schema, schema, "")}


@cache
def tables() -> frozenset[str]:
    """Keys that hold further keys: `rollout`, and `environment.sources.*` for the members of a list."""
    return frozenset(key.rpartition(".")[0] for key in options() if "." in key)


def _walk(root: Schema, schema: Schema, prefix: str) -> Iterator[Option]:
    required = cast("list[str]", schema.get("required", []))
    for name, given in cast("dict[str, Schema]", schema["properties"]).items():
        key = f"{prefix}{name}"
        variants, optional = _variants(root, given)
        if "properties" in variants[0]:
            yield from _walk(root, variants[0], f"{key}.")
            continue
        yield _option(key, variants, optional=optional, required=name in required, default=given.get("default"))
        if _is_list_of_tables(variants[0]):
            yield from _walk(root, _resolve(root, cast(Schema, variants[0]["items"])), f"{key}.*.")


def _variants(root: Schema, given: Schema) -> tuple[list[Schema], bool]:
    alternatives = cast("list[Schema]", given.get("anyOf", given.get("allOf", [given])))
    resolved = [_resolve(root, alternative) for alternative in alternatives]
    kept = [variant for variant in resolved if variant.get("type") != "null"]
    return kept, len(kept) < len(resolved)


def _resolve(root: Schema, schema: Schema) -> Schema:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    return cast("dict[str, Schema]", root["$defs"])[reference.rpartition("/")[2]]


def _option(key: str, variants: list[Schema], *, optional: bool, required: bool, default: Json) -> Option:
    first = variants[0]
    choices = [
        str(c) for variant in variants for c in cast("list[Json]", variant.get("enum", [variant["const"]] if "const" in variant else []))
    ]
    bounds = tuple(f"{sign} {_short(first[name])}" for name, sign in _BOUNDS.items() if name in first)
    kind = "a list of tables" if _is_list_of_tables(first) else _KINDS[str(first.get("type", "string"))]
    return Option(key, kind, bounds, tuple(choices), optional, required, default)


def _is_list_of_tables(schema: Schema) -> bool:
    return "$ref" in cast(Schema, schema.get("items", {}))


def _short(number: Json) -> str:
    return f"{number:g}" if isinstance(number, int | float) else str(number)
