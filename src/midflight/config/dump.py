"""A configuration as a TOML file with every option written out, which `load_config` reads back as
the same.
"""

import json
from collections.abc import Iterator, Mapping
from typing import cast

from midflight.config.sections import Config
from midflight.types import Json


def as_toml(config: Config) -> str:
    """The configuration as text. Unset options are left out: an option that may be unset is so by
    default.
    """
    sections = cast("dict[str, dict[str, Json]]", config.model_dump(mode="json"))
    lines: list[str] = []
    for section, options in sections.items():
        lists = {name: value for name, value in options.items() if _is_list_of_tables(value)}
        plain = {name: value for name, value in options.items() if name not in lists}
        lines += [f"[{section}]", *_pairs(plain), ""]
        for name, tables in lists.items():
            for table in cast("list[dict[str, Json]]", tables):
                lines += [f"[[{section}.{name}]]", *_pairs(table), ""]
    return "\n".join(lines)


def _is_list_of_tables(value: Json) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(member, dict) for member in value)


def _pairs(table: Mapping[str, Json]) -> Iterator[str]:
    for name, value in table.items():
        if value is not None:
            yield f"{name} = {_value(value)}"


def _value(value: Json) -> str:
    """Numbers, texts and booleans are written alike in JSON and TOML, but for one letter that JSON
    leaves as it is.
    """
    if isinstance(value, dict):
        pairs = [
            f"{json.dumps(name)} = {_value(member)}"
            for name, member in value.items()
            if member is not None
        ]
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
