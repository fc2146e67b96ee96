"""A checked `Config` from a TOML file and overrides. Every error names the file, the key, the value
and the remedy.

Overrides are `--set section.key=value`: single values laid over the file. Members of a list are
named by index: `environment.sources.0.size=100`.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ValidationError

from midflight.config.checks import contradictions
from midflight.config.model_defaults import with_derived
from midflight.config.options import (
    KeyPath,
    Option,
    generic_key,
    key_of,
    option_at,
    options,
    tables,
)
from midflight.config.replaced import REMOVED, REPLACED, RemovedOption
from midflight.config.seats import with_placement
from midflight.config.sections import Config
from midflight.errors import ConfigError, nearest
from midflight.models.gguf_folders import model_folder
from midflight.types import Json

# --- The file -------------------------------------------------------------------------------------


Table = dict[str, Json]


def apply_override(table: Table, text: str) -> KeyPath:
    """Writes one override into `table` and returns its path. Raises `ConfigError` if it isn't
    `key=value`, or leads through a value.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {text}: an override is KEY=VALUE, such as --set rollout.max_staleness=2"
        )
    parts = key.strip().split(".")
    path: KeyPath = tuple(map(_part, parts))
    if not all(parts):
        raise ConfigError(
            f"--set {text}: the key {key.strip()!r} has an empty part; write section.key=value"
        )
    _assign(table, path, _value(value.strip(), option_at(path)), text)
    return path


def _part(text: str) -> str | int:
    """A part of a key: an index, if it is a number."""
    return int(text) if text.isdecimal() else text


def _value(text: str, option: Option | None) -> Json:
    """The text as a TOML value. It is taken as text if it is not TOML, or if text is wanted and
    TOML sees something else.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) != 1:
        return text
    value = cast(Json, parsed["value"])
    if option is not None and option.is_text and not isinstance(value, str):
        return text
    return value


def _assign(table: Table, path: KeyPath, value: Json, text: str) -> None:
    node: Json = table
    for depth in range(1, len(path)):
        here = path[:depth]
        empty: Json = {}
        if isinstance(path[depth], int):
            empty = _default_list(here)
        node = _descend(node, here, text, empty=empty)
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
    if not isinstance(node, tuple):
        return []
    members = cast("tuple[object, ...]", node)
    return [
        cast(Json, member.model_dump(mode="json", exclude_unset=True))
        for member in members
        if isinstance(member, BaseModel)
    ]


_BOUND_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def load_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    table: Mapping[str, Mapping[str, object]] | None = None,
    note: Callable[[str], object] | None = None,
) -> Config:
    """The run described by a TOML file with `section.key=value` overrides laid over it; `None`
    starts from the defaults.

    `table`: a Python program's own options by section, laid over those of the file. `note`: given
    if the file is the stored configuration of a run, in which values that are gone are read as
    their replacements; it is called with a sentence about each. Options that are gone may stand
    there with their defaults.

    Raises `ConfigError` with one line for each thing that is wrong, all of them at once if that is
    possible.
    """
    whole: Table = {} if path is None else _read(Path(path))
    for name, section in (table or {}).items():
        _lay_over(whole, name, section)
    overridden = {apply_override(whole, text) for text in overrides}
    file = "" if path is None else str(path)
    origin = _Origin(file, whole, overridden, is_stored=note is not None)
    _refuse(list(_unknown(whole, (), origin)))
    _refuse(list(_replaced(whole, origin, note)))
    config = _with_folders(_validate(whole, origin))
    config = with_placement(with_derived(config))
    prefix = f"{origin.file}: " if origin.file else ""
    _refuse([f"{prefix}{problem}" for problem in contradictions(config)])
    return config


def past_config(path: Path) -> Config:
    """The configuration that a run has stored, for those who look at what the run did. Options that
    are gone are left out whatever they were, and nothing is said of what could not run here and
    now. Raises `ConfigError` if the file cannot be read.
    """
    whole = _read(path)
    origin = _Origin(str(path), whole, set(), is_stored=True, is_past=True)
    _refuse(list(_unknown(whole, (), origin)))
    _refuse(list(_replaced(whole, origin, lambda _: None)))
    return _validate(whole, origin)


def _lay_over(table: Table, name: str, value: object) -> None:
    """Puts a copy of the value into the table, as it is after a trip through JSON. A table is laid
    over the table that is there.
    """
    under = table.get(name)
    over = cast(Json, json.loads(json.dumps(value, default=str)))
    if isinstance(under, dict) and isinstance(over, dict):
        table[name] = {**under, **over}
    else:
        table[name] = over


def _with_folders(config: Config) -> Config:
    """The configuration with a model folder in the place of each GGUF file. It waits for the
    conversion of a file that has none yet.
    """
    updates: dict[str, object] = {}
    path = config.model.path
    if path is not None:
        updates["model"] = config.model.model_copy(update={"path": model_folder(path)})
    teacher = config.distillation.teacher
    if teacher is not None:
        updates["distillation"] = config.distillation.model_copy(
            update={"teacher": model_folder(teacher)}
        )
    return config.model_copy(update=updates)


class _Origin:
    """The file and the overrides that keys came from, for the start of a message. `is_stored`: the
    file is the stored configuration of a run. `is_past`: the run does not go on with it.
    """

    def __init__(
        self,
        file: str,
        table: Table,
        overridden: set[KeyPath],
        *,
        is_stored: bool,
        is_past: bool = False,
    ) -> None:
        self.file = file
        self._table = table
        self._overridden = overridden
        self._is_stored = is_stored
        self._is_past = is_past

    def of(self, path: KeyPath) -> str:
        """The origin of a key."""
        if self.is_overridden(path):
            return f"--set {key_of(path)}: "
        return f"{self.file}: " if self.file else ""

    @property
    def remedy_of_unknown(self) -> str:
        """A sentence for an option that Midflight does not have, if the configuration is that of a
        past run. Otherwise it is empty, because the user may have mistyped the name.
        """
        if not self._is_past:
            return ""
        return " Another version of Midflight made the run; look at it with that one."

    def is_overridden(self, path: KeyPath) -> bool:
        """True if an override has set the key, or a part of it."""
        for given in self._overridden:
            shared = min(len(given), len(path))
            if path[:shared] == given[:shared]:
                return True
        return False

    def is_stored(self, path: KeyPath) -> bool:
        """True if a run has stored the key."""
        return self._is_stored and not self.is_overridden(path)

    def may_leave_out(self, path: KeyPath, value: Json, removed: RemovedOption) -> bool:
        """True if a run has stored an option that is gone with its default, or with the value of
        the option that says the same, or if the run is past.
        """
        if not self.is_stored(path):
            return False
        if self._is_past or value == removed.default:
            return True
        same: KeyPath = tuple(removed.same_as.split("."))
        return bool(removed.same_as) and value == _value_at(self._table, same)


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
    found: dict[str, str] = {}
    for folder in dict.fromkeys([path.parent, Path("configs"), Path()]):
        if folder.is_dir():
            for file in sorted(folder.glob("*.toml")):
                found[file.name] = str(file)
    found.pop("pyproject.toml", None)
    close = difflib.get_close_matches(path.name, found, n=1)
    if close:
        return f" Did you mean {found[close[0]]}?"
    if found:
        return f" There is: {', '.join(sorted(found.values()))}."
    return " Give the path of a TOML file."


def _toml_message(path: Path, message: str) -> str:
    where = re.search(r" \(at line (\d+), column (\d+)\)", message)
    if where is None:
        return f"{path}: not valid TOML: {message}; something is still open at the end of the file"
    line = int(where[1])
    column = int(where[2])
    lines = path.read_text().splitlines()
    text = lines[line - 1].strip() if line <= len(lines) else ""
    return (
        f"{path}:{line}:{column}: not valid TOML: {message[: where.start()]}, in the line {text!r}"
    )


# --- Unknown keys ---------------------------------------------------------------------------------


def _unknown(node: Table, path: KeyPath, origin: _Origin) -> Iterator[str]:
    """Problems with the keys of one table, and below. It turns "none" into None if an option may be
    unset, and takes out options that are gone and that a run has stored with their defaults.
    """
    for name, value in list(node.items()):
        here = (*path, name)
        option = option_at(here)
        removed = REMOVED.get(generic_key(here))
        if generic_key(here) in tables() and option is None:
            yield from _unknown_below(value, here, origin)
        elif removed is not None and origin.may_leave_out(here, value, removed):
            del node[name]
        elif removed is not None:
            yield (
                f"{origin.of(here)}{key_of(here)} (value {value!r}) is gone: {removed.instead}; "
                "remove it"
            )
        elif option is None:
            remedy = origin.remedy_of_unknown or _suggestion(here)
            yield f"{origin.of(here)}unknown key {key_of(here)!r} (value {value!r}).{remedy}"
        elif option.is_list:
            yield from _unknown_members(value, here, origin)
        elif _has_nul(value):
            yield (
                f"{origin.of(here)}{key_of(here)} has the character NUL (value {value!r}), which "
                "no name and no path may have; remove it"
            )
        elif isinstance(value, dict | list) and _has_null(value):
            yield (
                f"{origin.of(here)}{key_of(here)} has a member without a value (value {value!r}), "
                "which no TOML file can keep; leave the member out"
            )
        elif option.optional and value == "none":
            node[name] = None


def _has_nul(value: Json) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nul, (*value, *value.values())))
    if isinstance(value, list):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


def _has_null(value: Json) -> bool:
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    if isinstance(value, list):
        return any(map(_has_null, value))
    return value is None


def _unknown_below(value: Json, path: KeyPath, origin: _Origin) -> Iterable[str]:
    if isinstance(value, dict):
        return _unknown(value, path, origin)
    problem = (
        f"{origin.of(path)}{key_of(path)} must be a table of options, got {value!r}; write "
        f"[{key_of(path)}]"
    )
    return [problem]


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
    prefix = generic_key(path[:-1])
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


def _replaced(table: Table, origin: _Origin, note: Callable[[str], object] | None) -> Iterator[str]:
    """Problems with values that are gone. With `note` those of the file are replaced instead."""
    for key, replacements in REPLACED.items():
        section, name = key.split(".")
        options = table.get(section)
        if not isinstance(options, dict):
            continue
        value = options.get(name)
        found = replacements.get(value) if isinstance(value, str) else None
        if found is None:
            continue
        if note is None or origin.is_overridden((section, name)):
            yield f'{origin.of((section, name))}{key} = "{value}" is gone; {found.remedy}.'
        else:
            options[name] = found.value
            note(f'{key} was "{value}", which is gone; it is read as "{found.value}".')


def _validate(table: Table, origin: _Origin) -> Config:
    """The configuration of a table, with strict types. It goes by JSON, because there a text may be
    a path or a choice and a list a tuple, but `true` is no number.
    """
    try:
        return Config.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        problems = [
            _value_problem(table, found["loc"], found["type"], origin)
            for found in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


def _value_problem(
    table: Table, location: tuple[int | str, ...], kind: str, origin: _Origin
) -> str:
    # A union adds its variant to the location ("pause_mode", "enum"): it is cut back to the option.
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
    end = f".{hint}" if "mean" in hint else ""
    return f"{origin.of(path)}{key_of(path)} must be {expected}, got {value!r}{end}"


def _value_at(table: Table, path: KeyPath) -> Json:
    node: Json = table
    for part in path:
        if isinstance(node, dict):
            node = node.get(str(part))
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part]
    return node
