"""From a TOML file and overrides to a checked `Config`. Every error names the file, the key, the
value and the remedy.

Overrides are `--set section.key=value`: single values laid over the file. Members of a list are
named by index: `environment.sources.0.size=100`. What the sections allow is data, one `Option` per
key: for error messages, overrides and the reference page.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from midflight.config.checks import contradictions
from midflight.config.seats import placed
from midflight.config.sections import Config
from midflight.config.unset import with_derived
from midflight.errors import ConfigError, nearest
from midflight.models.gguf_folders import model_folder
from midflight.types import Json

# --- The options ----------------------------------------------------------------------------------


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
        what = (
            "one of " + ", ".join(repr(c) for c in self.choices)
            if self.choices
            else f"{self.kind} {self.limits}".strip()
        )
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


def _option(
    key: str, variants: list[Schema], *, optional: bool, required: bool, default: Json
) -> Option:
    first = variants[0]
    choices = [
        str(c)
        for variant in variants
        for c in cast(
            "list[Json]", variant.get("enum", [variant["const"]] if "const" in variant else [])
        )
    ]
    bounds = _bounds(first)
    of_numbers = cast(Schema, first.get("items", {})).get("type") == "integer"
    kind = _KINDS[str(first.get("type", "string"))] if not of_numbers else "a list of whole numbers"
    kind = "a list of tables" if _is_list_of_tables(first) else kind
    if len(variants) > 1 and not choices:
        each = [
            " ".join(
                [_KINDS[str(variant.get("type", "string"))], " and ".join(_bounds(variant))]
            ).strip()
            for variant in variants
        ]
        kind = " or ".join(each)
        bounds = ()
    return Option(key, kind, bounds, tuple(choices), optional, required, default)


def _bounds(schema: Schema) -> tuple[str, ...]:
    return tuple(
        f"{sign} {_short(schema[name])}" for name, sign in _BOUNDS.items() if name in schema
    )


def _is_list_of_tables(schema: Schema) -> bool:
    return "$ref" in cast(Schema, schema.get("items", {}))


def _short(number: Json) -> str:
    return f"{number:g}" if isinstance(number, int | float) else str(number)


# --- The file -------------------------------------------------------------------------------------


Table = dict[str, Json]
KeyPath = tuple[str | int, ...]


def key_of(path: KeyPath) -> str:
    """How the user writes it: `environment.sources.0.size`."""
    return ".".join(str(part) for part in path)


def option_at(path: KeyPath) -> Option | None:
    return options().get(".".join("*" if isinstance(part, int) else part for part in path))


def apply_override(table: Table, text: str) -> KeyPath:
    """Writes one override into `table` and returns where. `ConfigError` where it isn't `key=value`
    or leads through a value.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {text}: an override is KEY=VALUE, such as --set rollout.max_staleness=2"
        )
    parts = key.strip().split(".")
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in parts)
    if not all(parts):
        raise ConfigError(
            f"--set {text}: the key {key.strip()!r} has an empty part; write section.key=value"
        )
    _assign(table, path, _value(value.strip(), option_at(path)), text)
    return path


def _value(text: str, option: Option | None) -> Json:
    """The text as a TOML value, else as it stands; always as it stands where text is wanted and
    TOML sees something else.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) != 1 or (
        option is not None and option.is_text and not isinstance(parsed["value"], str)
    ):
        return text
    return cast(Json, parsed["value"])


def _assign(table: Table, path: KeyPath, value: Json, text: str) -> None:
    node: Json = table
    for depth in range(1, len(path)):
        here = path[:depth]
        node = _descend(
            node, here, text, empty=_default_list(here) if isinstance(path[depth], int) else {}
        )
    _put(node, path, value, text)


def _descend(node: Json, path: KeyPath, text: str, *, empty: Json) -> Json:
    part = path[-1]
    if isinstance(node, dict):
        return node.setdefault(str(part), empty)
    if isinstance(node, list) and isinstance(part, int):
        if part == len(node):
            node.append(empty)
        if part < len(node):
            return node[part]
        raise ConfigError(
            f"--set {text}: {key_of(path[:-1])} has {len(node)} entries; use an index from 0 to "
            f"{len(node)}"
        )
    raise ConfigError(
        f"--set {text}: {key_of(path[:-1])} holds the value {node!r}, so it has no key {part!r}"
    )


def _put(node: Json, path: KeyPath, value: Json, text: str) -> None:
    part = path[-1]
    if isinstance(node, dict):
        node[str(part)] = value
    elif isinstance(node, list) and isinstance(part, int) and part <= len(node):
        node[part : part + 1] = [value]
    else:
        raise ConfigError(
            f"--set {text}: {key_of(path[:-1])} holds {node!r}, so {part!r} can't be set in it"
        )


def _default_list(path: KeyPath) -> Json:
    """The default members of a list of tables, as written in a file, so that an override can change
    one of them.
    """
    node: object = Config()
    for part in path:
        node = getattr(node, str(part), ())
    members = cast("tuple[object, ...]", node) if isinstance(node, tuple) else ()
    return [
        cast(Json, m.model_dump(mode="json", exclude_unset=True))
        for m in members
        if isinstance(m, BaseModel)
    ]


_BOUND_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def load_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    table: Mapping[str, Mapping[str, object]] | None = None,
) -> Config:
    """The run described by a TOML file with `section.key=value` overrides laid over it; `None`
    starts from the defaults.

    `table`: a Python program's own options by section, laid over those of the file.

    Raises `ConfigError` with one line for each thing that is wrong, all of them at once where that
    is possible.
    """
    whole: Table = {} if path is None else _read(Path(path))
    for name, options in (table or {}).items():
        _lay_over(whole, name, options)
    overridden = {apply_override(whole, text) for text in overrides}
    origin = _Origin("" if path is None else str(path), overridden)
    _refuse(list(_unknown(whole, (), origin)))
    config = placed(with_derived(_with_folders(_validate(whole, origin))))
    _refuse(
        [
            f"{origin.file}: {problem}" if origin.file else problem
            for problem in contradictions(config)
        ]
    )
    return config


def _lay_over(table: Table, name: str, value: object) -> None:
    """A copy as it is after a trip through JSON; tables are laid over tables."""
    under = table.get(name)
    over = cast(Json, json.loads(json.dumps(value, default=str)))
    table[name] = {**under, **over} if isinstance(under, dict) and isinstance(over, dict) else over


def _with_folders(config: Config) -> Config:
    """With a model folder in the place of each GGUF file. Waits for the conversion of one that has
    none yet.
    """
    updates: dict[str, object] = {}
    if config.model.path is not None:
        updates["model"] = config.model.model_copy(update={"path": model_folder(config.model.path)})
    if config.distillation.teacher is not None:
        updates["distillation"] = config.distillation.model_copy(
            update={"teacher": model_folder(config.distillation.teacher)}
        )
    return config.model_copy(update=updates)


class _Origin:
    """Where a key came from, for the start of a message."""

    def __init__(self, file: str, overridden: set[KeyPath]) -> None:
        self.file = file
        self._overridden = overridden

    def of(self, path: KeyPath) -> str:
        if any(
            path[: len(given)] == given or given[: len(path)] == path for given in self._overridden
        ):
            return f"--set {key_of(path)}: "
        return f"{self.file}: " if self.file else ""


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


# --- Reading --------------------------------------------------------------------------------------


def _read(path: Path) -> Table:
    try:
        return cast(Table, tomllib.loads(path.read_bytes().decode()))
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}.{_near_files(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: byte {error.start} is not UTF-8 text; save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); give the path of a readable TOML file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_toml_message(path, str(error))) from None


def _near_files(path: Path) -> str:
    folders = dict.fromkeys([path.parent, Path("configs"), Path()])
    found = {
        str(file.name): str(file)
        for folder in folders
        if folder.is_dir()
        for file in sorted(folder.glob("*.toml"))
    }
    found.pop("pyproject.toml", None)
    close = difflib.get_close_matches(path.name, found, n=1)
    if close:
        return f" Did you mean {found[close[0]]}?"
    return (
        f" There is: {', '.join(sorted(found.values()))}."
        if found
        else " Give the path of a TOML file."
    )


def _toml_message(path: Path, message: str) -> str:
    where = re.search(r" \(at line (\d+), column (\d+)\)", message)
    if where is None:
        return f"{path}: not valid TOML: {message}; something is still open at the end of the file"
    line = int(where[1])
    column = int(where[2])
    text = (
        path.read_text().splitlines()[line - 1].strip()
        if line <= len(path.read_text().splitlines())
        else ""
    )
    return (
        f"{path}:{line}:{column}: not valid TOML: {message[: where.start()]}, in the line {text!r}"
    )


# --- Unknown keys ---------------------------------------------------------------------------------


def _unknown(node: Table, path: KeyPath, origin: _Origin) -> Iterator[str]:
    """Problems with the keys of one table, and below; turns "none" into None where an option may be
    unset.
    """
    for name, value in node.items():
        here = (*path, name)
        generic = ".".join("*" if isinstance(part, int) else part for part in here)
        option = options().get(generic)
        if generic in tables() and option is None:
            yield from _unknown_below(value, here, origin)
        elif option is None:
            yield (
                f"{origin.of(here)}unknown key {key_of(here)!r} (value "
                f"{value!r}).{_suggestion(here)}"
            )
        elif option.is_list:
            yield from _unknown_members(value, here, origin)
        elif option.optional and value == "none":
            node[name] = None


def _unknown_below(value: Json, path: KeyPath, origin: _Origin) -> Iterable[str]:
    if isinstance(value, dict):
        return _unknown(value, path, origin)
    return [
        (
            f"{origin.of(path)}{key_of(path)} must be a table of options, got {value!r}; write "
            f"[{key_of(path)}]"
        )
    ]


def _unknown_members(value: Json, path: KeyPath, origin: _Origin) -> Iterator[str]:
    if not isinstance(value, list):
        yield (
            f"{origin.of(path)}{key_of(path)} must be a list of tables, got {value!r}; write "
            f"[[{key_of(path)}]]"
        )
        return
    for index, member in enumerate(value):
        yield from _unknown_below(member, (*path, index), origin)


def _suggestion(path: KeyPath) -> str:
    """The nearest key: first the same word in another section, then a similar word here."""
    word = str(path[-1])
    prefix = ".".join("*" if isinstance(part, int) else part for part in path[:-1])
    elsewhere = [key for key in options() if key.rpartition(".")[2] == word]
    if elsewhere:
        return f" Did you mean {elsewhere[0]!r}?"
    known = {
        key
        for key in (*options(), *tables())
        if key.rpartition(".")[0] == prefix and not key.endswith("*")
    }
    return nearest(f"{prefix}.{word}" if prefix else word, known)


# --- Values ---------------------------------------------------------------------------------------


def _validate(table: Table, origin: _Origin) -> Config:
    """Strict types, as JSON, because there a text is a path or a choice and a list a tuple, but
    `true` is no number.
    """
    try:
        return Config.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        problems = {
            _value_problem(table, e["loc"], e["type"], origin): None
            for e in error.errors(include_url=False)
        }
        raise ConfigError("\n".join(problems)) from None


def _value_problem(
    table: Table, location: tuple[int | str, ...], kind: str, origin: _Origin
) -> str:
    # A union adds its variant to the location ("pause_mode", "enum"): cut back to the option
    # itself.
    path: KeyPath = location
    while path and option_at(path) is None:
        path = path[:-1]
    option = option_at(path)
    if option is None:
        return f"{origin.of(location)}{key_of(location)} is not valid"
    if kind == "missing":
        return f"{origin.of(path)}{key_of(path)} is missing; it must be {option.expectation}"
    value = _value_at(table, path)
    expected = option.limits if kind in _BOUND_ERRORS and option.bounds else option.expectation
    hint = nearest(value, option.choices) if option.choices and isinstance(value, str) else ""
    return (
        f"{origin.of(path)}{key_of(path)} must be {expected}, got "
        f"{value!r}{'.' + hint if 'mean' in hint else ''}"
    )


def _value_at(table: Table, path: KeyPath) -> Json:
    node: Json = table
    for part in path:
        if isinstance(node, dict):
            node = node.get(str(part))
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part]
    return node
