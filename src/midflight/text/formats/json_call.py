"""Tool calls that are JSON objects, read from a growing text."""

import json
import re
from collections.abc import Mapping
from typing import NoReturn, cast

from midflight.text.formats.assistant import Calls, ToolCall
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading
from midflight.types import Json

MAX_DEPTH = 200
"""The deepest nesting of a call. Later readers recurse, and Python allows about 1000 levels."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_LETTERS = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")


def read_object(cursor: Cursor, calls: Calls | None = None) -> Reading[dict[str, str]]:
    """The members of a JSON object (RFC 8259), each value as it was written. If members have one
    name, the first counts.

    Raises `NotACall` at the first letter that no object can have there. `calls` is notified of
    arguments that come after the name of their call.
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
    """True if arguments that come now belong to a call whose name is known."""
    if any(name in members for name in _ARGUMENTS):
        return False
    return members.get("name", "").startswith('"')


def as_call(members: Mapping[str, str]) -> ToolCall:
    """The call that an object represents. The object has a `name`, and `arguments` or `parameters`,
    of which the first counts. These are an object, or a JSON string that holds one.

    Other members are ignored. Raises `NotACall` for any other object.
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
    """The value of a JSON text. Raises `NotACall` if the text is not JSON."""
    try:
        return cast(Json, json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        raise NotACall from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _is_writable(text: str) -> bool:
    """True if UTF-8 can hold the text. Half a surrogate pair can be escaped in JSON, but UTF-8
    cannot hold it.
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _next(cursor: Cursor) -> Reading[str]:
    """The next letter that is no whitespace. It is not taken."""
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
    """Reads one value. It loops over the open brackets, so that a letter costs the same at any
    depth.
    """
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
    """Takes an opening bracket, and in an object the first key. Returns False if the container is
    empty; then it is taken whole.
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
    """Takes the brackets that close after a value. Returns True if another value follows in an open
    container.
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
