"""The options of all sections as data: one `Option` for each key, for error messages, overrides and
the reference page.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import cast

from midflight.config.sections import Config
from midflight.types import Json

Schema = dict[str, Json]
KeyPath = tuple[str | int, ...]

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
    """It may be unset. In TOML, which has no null, that is written "none"."""
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
        """The values that the option accepts, as the end of the sentence `x must be ...`."""
        what = f"{self.kind} {self.limits}".strip()
        if self.choices:
            what = f"one of {', '.join(map(repr, self.choices))}"
        return f'{what} (or "none")' if self.optional else what


@cache
def options() -> Mapping[str, Option]:
    """Every option by its key, in the order of the sections."""
    schema = cast(Schema, Config.model_json_schema())
    return {option.key: option for option in _walk(schema, schema, "")}


@cache
def tables() -> frozenset[str]:
    """Keys that hold further keys: `rollout`, and `environment.sources.*` for the members of a
    list.
    """
    return frozenset(key.rpartition(".")[0] for key in options() if "." in key)


def key_of(path: KeyPath) -> str:
    """The key as the user writes it: `environment.sources.0.size`."""
    return ".".join(str(part) for part in path)


def generic_key(path: KeyPath) -> str:
    """The key with `*` for each index, as in `Option.key`."""
    return ".".join(map(_generic, path))


def _generic(part: str | int) -> str:
    return "*" if isinstance(part, int) else part


def option_at(path: KeyPath) -> Option | None:
    """The option at a path, if there is one."""
    return options().get(generic_key(path))


def _walk(root: Schema, schema: Schema, prefix: str) -> Iterator[Option]:
    required = cast("list[str]", schema.get("required", []))
    for name, given in cast("dict[str, Schema]", schema["properties"]).items():
        key = f"{prefix}{name}"
        variants, optional = _variants(root, given)
        if "properties" in variants[0]:
            yield from _walk(root, variants[0], f"{key}.")
            continue
        yield _option(
            key,
            variants,
            optional=optional,
            required=name in required,
            default=given.get("default"),
        )
        if _is_list_of_tables(variants[0]):
            members = _resolve(root, cast(Schema, variants[0]["items"]))
            yield from _walk(root, members, f"{key}.*.")


def _variants(root: Schema, given: Schema) -> tuple[list[Schema], bool]:
    """The kinds of value that an option may have, without null, and whether it may be null."""
    alternatives = cast("list[Schema]", given.get("anyOf", given.get("allOf", [given])))
    resolved = [_resolve(root, alternative) for alternative in alternatives]
    kept = [variant for variant in resolved if variant.get("type") != "null"]
    return kept, len(kept) < len(resolved)


def _resolve(root: Schema, schema: Schema) -> Schema:
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    return cast("dict[str, Schema]", root["$defs"])[reference.rpartition("/")[2]]


def _option(
    key: str, variants: list[Schema], *, optional: bool, required: bool, default: Json
) -> Option:
    first = variants[0]
    choices: list[str] = []
    for variant in variants:
        choices += map(str, _choices(variant))
    bounds = _bounds(first)
    kind = _kind(first)
    if len(variants) > 1 and not choices:
        kind = " or ".join(_kind_with_bounds(variant) for variant in variants)
        bounds = ()
    return Option(key, kind, bounds, tuple(choices), optional, required, default)


def _choices(variant: Schema) -> list[Json]:
    if "enum" in variant:
        return cast("list[Json]", variant["enum"])
    return [variant["const"]] if "const" in variant else []


def _kind(schema: Schema) -> str:
    if _is_list_of_tables(schema):
        return "a list of tables"
    if cast(Schema, schema.get("items", {})).get("type") == "integer":
        return "a list of whole numbers"
    return _KINDS[str(schema.get("type", "string"))]


def _kind_with_bounds(schema: Schema) -> str:
    kind = _KINDS[str(schema.get("type", "string"))]
    return f"{kind} {' and '.join(_bounds(schema))}".strip()


def _bounds(schema: Schema) -> tuple[str, ...]:
    return tuple(
        f"{sign} {_short(schema[name])}" for name, sign in _BOUNDS.items() if name in schema
    )


def _is_list_of_tables(schema: Schema) -> bool:
    return "$ref" in cast(Schema, schema.get("items", {}))


def _short(number: Json) -> str:
    return f"{number:g}" if isinstance(number, int | float) else str(number)
