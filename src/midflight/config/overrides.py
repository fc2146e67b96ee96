"""`--set section.key=value`: single values laid over the file. Members of a list are named by index: `environment.sources.0.size=100`."""

from __future__ import annotations

import tomllib
from typing import cast

from pydantic import BaseModel

from midflight.config.options import Option, options
from midflight.config.sections import Config
from midflight.errors import ConfigError
from midflight.types import Json

Table = dict[str, Json]
KeyPath = tuple[str | int, ...]


def key_of(path: KeyPath) -> str:
    """How the user writes it: `environment.sources.0.size`."""
    return ".".join(str(part) for part in path)


def option_at(path: KeyPath) -> Option | None:
    return options().get(".".join("*" if isinstance(part, int) else part for part in path))


def apply_override(table: Table, text: str) -> KeyPath:
    """Writes one override into `table` and returns where. `ConfigError` where it isn't `key=value` or leads through a value."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: expected section.key=value, such as --set rollout.max_staleness=2")
    parts = key.strip().split(".")
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in parts)
    if not all(parts):
        raise ConfigError(f"--set {text}: the key {key.strip()!r} has an empty part; write section.key=value")
    _assign(table, path, _value(value.strip(), option_at(path)), text)
    return path


def _value(text: str, option: Option | None) -> Json:
    """The text as a TOML value, else as it stands; always as it stands where text is wanted and TOML sees something else."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) != 1 or (option is not None and option.is_text and not isinstance(parsed["value"], str)):
        return text
    return cast(Json, parsed["value"])


def _assign(table: Table, path: KeyPath, value: Json, text: str) -> None:
    node: Json = table
    for depth in range(1, len(path)):
        here = path[:depth]
        node = _descend(node, here, text, empty=_default_list(here) if isinstance(path[depth], int) else {})
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
        raise ConfigError(f"--set {text}: {key_of(path[:-1])} has {len(node)} entries; use an index from 0 to {len(node)}")
    raise ConfigError(f"--set {text}: {key_of(path[:-1])} holds the value {node!r}, so it has no key {part!r}")


def _put(node: Json, path: KeyPath, value: Json, text: str) -> None:
    part = path[-1]
    if isinstance(node, dict):
        node[str(part)] = value
    elif isinstance(node, list) and isinstance(part, int) and part <= len(node):
        node[part : part + 1] = [value]
    else:
        raise ConfigError(f"--set {text}: {key_of(path[:-1])} holds {node!r}, so {part!r} can't be set in it")


def _default_list(path: KeyPath) -> Json:
    """The default members of a list of tables, as written in a file, so that an override can change one of them."""
    node: object = Config()
    for part in path:
        node = getattr(node, str(part), ())
    members = cast("tuple[object, ...]", node) if isinstance(node, tuple) else ()
    return [cast(Json, m.model_dump(mode="json", exclude_unset=True)) for m in members if isinstance(m, BaseModel)]
