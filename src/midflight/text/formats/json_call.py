"""JSON objects in a growing text, and the tool calls they stand for."""

import json
import re
from collections.abc import Mapping
from typing import NoReturn, cast

from midflight.text.formats.assistant import Calls, ToolCall
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading
from midflight.types import Json

MAX_DEPTH = 200
"""Deepest nesting of a call; what reads it after us recurses, and Python allows it about 1000
levels.
"""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_LETTERS = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")


def read_object(cursor: Cursor, calls: Calls | None = None) -> Reading[dict[str, str]]:
    """The members of a JSON object (RFC 8259), each value as written. Of members with one name the
    first counts.

    `NotACall` at the first letter that no object can have there. `calls` hears of arguments that
    come after the name of their call.
    """
    members: dict[str, str] = {}
    yield from cursor.expect("{")
    if (yield from _next(cursor)) == "}":
        yield from cursor.letter()
        return members
    while True:
        key = yield from _key(cursor)
        yield from _next(cursor)
        mark = cursor.mark()
        begins = (
            calls is not None
            and key in _ARGUMENTS
            and _may_begin(members)
            and (yield from cursor.peek()) == "{"
        )
        if begins and calls is not None:
            calls.begin(cast(str, loads(members["name"])))
        yield from _value(cursor)
        if begins and calls is not None:
            calls.end()
        members.setdefault(key, cursor.since(mark))
        yield from _next(cursor)
        if not (yield from cursor.literal(",")):
            yield from cursor.expect("}")
            return members
        yield from _next(cursor)


def _may_begin(members: Mapping[str, str]) -> bool:
    return members.get("name", "").startswith('"') and not any(
        name in members for name in _ARGUMENTS
    )


def as_call(members: Mapping[str, str]) -> ToolCall:
    """The call that an object means: `name`, and `arguments` or `parameters`, an object or a JSON
    string that holds one; the first counts.

    Other members mean nothing. Anything else is `NotACall`.
    """
    name = loads(members.get("name", ""))
    arguments = next((value for key, value in members.items() if key in _ARGUMENTS), "")
    if arguments.startswith('"'):
        arguments = cast(str, loads(arguments))
        if not isinstance(loads(arguments), dict):
            raise NotACall
    if not isinstance(name, str) or not name.strip() or not arguments.lstrip().startswith("{"):
        raise NotACall
    if not (_is_writable(name) and _is_writable(arguments)):
        raise NotACall
    return ToolCall(name, arguments)


def loads(text: str) -> Json:
    """The value of a JSON text; `NotACall` if it is none."""
    try:
        return cast(Json, json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        raise NotACall from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _is_writable(text: str) -> bool:
    """Half a surrogate pair can be escaped in JSON but not written."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _next(cursor: Cursor) -> Reading[str]:
    """The next letter that is no whitespace, not taken."""
    yield from cursor.run(SPACES)
    return (yield from cursor.peek())


def _key(cursor: Cursor) -> Reading[str]:
    mark = cursor.mark()
    yield from _string(cursor)
    key = cast(str, loads(cursor.since(mark)))
    yield from _next(cursor)
    yield from cursor.expect(":")
    return key


def _value(cursor: Cursor) -> Reading[None]:
    """One value. A loop over the open brackets, so that a letter costs the same at any depth."""
    closers: list[str] = []
    while True:
        first = yield from _next(cursor)
        if first in _CLOSERS:
            opened = yield from _open(cursor, closers)
            if opened:
                continue
        elif first == '"':
            yield from _string(cursor)
        else:
            cursor.doubt()
            if _SCALAR.fullmatch((yield from cursor.run(_SCALAR_LETTERS))) is None:
                raise NotACall
            cursor.trust()
        if not (yield from _goes_on(cursor, closers)):
            return


def _open(cursor: Cursor, closers: list[str]) -> Reading[bool]:
    """Takes an opening bracket (and the first key); False if the container is empty, and taken
    whole.
    """
    closer = _CLOSERS[(yield from cursor.letter())]
    if len(closers) == MAX_DEPTH:
        raise NotACall
    if (yield from _next(cursor)) == closer:
        yield from cursor.letter()
        return False
    closers.append(closer)
    if closer == "}":
        yield from _key(cursor)
    return True


def _goes_on(cursor: Cursor, closers: list[str]) -> Reading[bool]:
    """After a value: takes brackets that close here. True if another value follows in an open
    one.
    """
    while closers:
        yield from _next(cursor)
        if (yield from cursor.literal(",")):
            if closers[-1] == "}":
                yield from _next(cursor)
                yield from _key(cursor)
            return True
        yield from cursor.expect(closers.pop())
    return False


def _string(cursor: Cursor) -> Reading[None]:
    yield from cursor.expect('"')
    while True:
        yield from cursor.run(_PLAIN)
        if (yield from cursor.literal('"')):
            return
        cursor.doubt()
        yield from cursor.expect("\\")
        escape = yield from cursor.letter()
        if escape == "u":
            for _ in range(4):
                if (yield from cursor.letter()) not in tuple("0123456789abcdefABCDEF"):
                    raise NotACall
        elif escape not in tuple('"\\/bfnrt'):
            raise NotACall
        cursor.trust()
