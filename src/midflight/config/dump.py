"""A configuration as a TOML file with every option written out, which `load_config` reads back as
the same.
"""

import json
from collections.abc import Iterator, Mapping
from typing import cast

from midflight.config.sections import Config
from midflight.types import Json


def as_toml(config: Config) -> str:
    """What is unset is left out: whatever may be unset is so by default."""
    lines: list[str] = []
    for section, options in cast(
        "dict[str, dict[str, Json]]", config.model_dump(mode="json")
    ).items():
        members = {name: value for name, value in options.items() if _is_list_of_tables(value)}
        lines += [
            f"[{section}]",
            *_pairs({name: value for name, value in options.items() if name not in members}),
            "",
        ]
        for name, tables in members.items():
            for table in cast("list[dict[str, Json]]", tables):
                lines += [f"[[{section}.{name}]]", *_pairs(table), ""]
    return "\n".join(lines)


def _is_list_of_tables(value: Json) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(member, dict) for member in value)
    )


def _pairs(table: Mapping[str, Json]) -> Iterator[str]:
    for name, value in table.items():
        if value is not None:
            yield f"{name} = {_value(value)}"


def _value(value: Json) -> str:
    """Numbers, texts and booleans are written alike in JSON and TOML, but for one letter that JSON
    leaves as it is.
    """
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(
                f"{json.dumps(name)} = {_value(member)}"
                for name, member in value.items()
                if member is not None
            )
            + " }"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_value(member) for member in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
