"""Objects that a Python program passes to its run by pickling, such as functions of a notebook's
cell or classes of a script that cannot be imported.

A configuration names an object as `midflight.given:NAME`. The program pickles the objects with
cloudpickle, which sends objects by value if no importable module holds them. Its launcher writes
the bytes to the standard input of each of its children, before anything else, and a child unpickles
them when it first needs one. That pipe connects two processes of one user that the same program
started, so no other process can write into it. Pickled bytes are accepted from nowhere else: no
socket and no file.
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
"""The number of bytes of the length that comes first."""


class NotGiven(ConfigError, AttributeError):
    """No program passed an object of that name. It is also an `AttributeError`, because programs
    look up all kinds of names in every module.
    """


class PickledObjects(msgspec.Struct, frozen=True):
    pickled: bytes
    path: list[str]
    """The program's module search path. Objects in these modules are sent by name."""


NOTHING = bytes(_LENGTH)
"""The bytes for a run that gets no objects."""

_held: PickledObjects | None = None
_objects: dict[str, object] = {}


def entry_of(name: str) -> str:
    """The name of the object in a configuration."""
    return f"{MODULE}:{name}"


def pack(objects: Mapping[str, object]) -> bytes:
    """The bytes for the standard input of a child. Raises `ConfigError` that names an object which
    cannot be pickled.
    """
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
    packed = msgspec.msgpack.encode(PickledObjects(pickled, list(sys.path)))
    return len(packed).to_bytes(_LENGTH, "big") + packed


def _resolve_types(value: object) -> None:
    """Replaces annotations that are text, as after `from __future__ import annotations`, by the
    types. Objects that only such a text names would not be pickled.
    """
    methods = list(vars(value).values()) if inspect.isclass(value) else [value]
    for function in filter(inspect.isfunction, methods):
        if not any(isinstance(written, str) for written in function.__annotations__.values()):
            continue
        with suppress(Exception):  # the code that needs the types reports what is wrong with them
            types = typing.get_type_hints(function, include_extras=True)
            function.__annotations__.update(types)


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
    """Reads the bytes of `pack` from the beginning of standard input. Nothing is unpickled yet.
    Waits for the launcher.
    """
    global _held
    length = int.from_bytes(pipe.read(_LENGTH), "big")
    _objects.clear()
    _held = msgspec.msgpack.decode(pipe.read(length), type=PickledObjects) if length else None


def __getattr__(name: str) -> object:
    """The object of that name. So it is found like an object in any other module."""
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


def _unpacked(held: PickledObjects) -> dict[str, object]:
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
