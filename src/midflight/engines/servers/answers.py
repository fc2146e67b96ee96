"""Reading what servers say of themselves: parts of JSON answers that should be there."""

from __future__ import annotations

from typing import cast

from midflight.errors import EngineError


def part(answer: object, *path: str | int, of: str) -> object:
    """A part of a JSON answer; `EngineError` where it is not there. `of` names the server that gave it, and the version it takes."""
    at = answer
    for key in path:
        if isinstance(at, dict) and key in at:
            at = cast(dict[object, object], at)[key]
        elif isinstance(at, list) and isinstance(key, int) and key < len(cast(list[object], at)):
            at = cast(list[object], at)[key]
        else:
            raise EngineError(f"reading {str(answer)[:200]!r}: it has no {'.'.join(map(str, path))}. Attach to {of}.")
    return at


def number(answer: object, *path: str | int, of: str) -> int:
    """A part that is a whole number; `EngineError` where it is none."""
    found = part(answer, *path, of=of)
    if not isinstance(found, int):
        raise EngineError(
            f"reading {str(answer)[:200]!r}: {'.'.join(map(str, path))} is {found!r}, expected a whole number. Attach to {of}."
        )
    return found
