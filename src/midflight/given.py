"""Objects that a Python program gives to its run: functions of a notebook's cell, classes of a
script that nobody can import.

A configuration names one as `midflight.given:NAME`. The program packs them (cloudpickle: what is in
no module that can be imported goes by value); its launcher writes the bytes to the standard input
of each of its children, before anything else, and a child unpacks them when one is first asked for.
That pipe is between two processes of one user that the same program started, so nobody else can put
anything into it: pickled bytes come from nowhere else, no socket and no file.
"""

import inspect
import sys
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO

import msgspec

from midflight.errors import ConfigError, nearest

MODULE = "midflight.given"
_LENGTH = 8
"""Bytes that say how many follow."""


class NotGiven(ConfigError, AttributeError):
    """No program gave an object of that name. Also an `AttributeError`, because programs ask every
    module for all kinds of names.
    """


class Packed(msgspec.Struct, frozen=True):
    pickled: bytes
    path: list[str]
    """Where the program finds its modules: what is in one of them goes by name."""


NOTHING = bytes(_LENGTH)
"""What a run gets whose configuration says everything."""

_held: Packed | None = None
_objects: dict[str, object] = {}


def entry_of(name: str) -> str:
    """How a configuration names the object."""
    return f"{MODULE}:{name}"


def pack(objects: Mapping[str, object]) -> bytes:
    """For the standard input of a child. `ConfigError` names the object that cannot travel."""
    if not objects:
        return NOTHING
    import cloudpickle  # here: a run without given objects never needs it

    for value in objects.values():
        _resolve_types(value)
    try:
        pickled = cloudpickle.dumps(dict(objects))
    except Exception:
        for name, value in objects.items():
            _check(name, value)
        raise
    packed = msgspec.msgpack.encode(Packed(pickled, list(sys.path)))
    return len(packed).to_bytes(_LENGTH, "big") + packed


def _resolve_types(value: object) -> None:
    """Types that are written as text, as after `from __future__ import annotations`, are looked up
    here: what only they name does not travel.
    """
    methods = list(vars(value).values()) if inspect.isclass(value) else [value]
    for function in filter(inspect.isfunction, methods):
        if any(isinstance(written, str) for written in function.__annotations__.values()):
            with suppress(Exception):  # whoever needs the types says what is wrong with them
                function.__annotations__.update(
                    typing.get_type_hints(function, include_extras=True)
                )


def _check(name: str, value: object) -> None:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to the processes of the run ({type(error).__name__}: {error}); "
            "make what it refers to inside it, or put it into a module and name it as "
            "`module:function`."
        ) from error


def read(pipe: BinaryIO) -> None:
    """Takes what `pack` made from the beginning of standard input. Nothing is unpacked yet. Waits
    for the launcher.
    """
    global _held
    length = int.from_bytes(pipe.read(_LENGTH), "big")
    _objects.clear()
    _held = msgspec.msgpack.decode(pipe.read(length), type=Packed) if length else None


def __getattr__(name: str) -> object:
    """The object of that name, so that it is found like one in any other module."""
    if name.startswith("__"):
        raise AttributeError(name)
    if _held is None:
        raise NotGiven(
            f"`{entry_of(name)}` is an object of a Python program, which only a run started by "
            "that program has; start it there."
        )
    if not _objects:
        _objects.update(_unpacked(_held))
    if name not in _objects:
        raise NotGiven(f"the program gave no {name!r} to its run.{nearest(name, _objects)}")
    return _objects[name]


def _unpacked(held: Packed) -> dict[str, object]:
    import cloudpickle

    sys.path.extend(place for place in held.path if place not in sys.path)
    try:
        return cloudpickle.loads(held.pickled)
    except Exception as error:
        raise ConfigError(
            "what the program gave to its run cannot be read in another process "
            f"({type(error).__name__}: {error}); what these functions import must be importable "
            "there too."
        ) from error
