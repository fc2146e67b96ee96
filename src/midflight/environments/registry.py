"""Finding the environment that a configuration names.

An environment is one function `(task, client) -> reward`, or a class without constructor arguments whose instances are called like
one. An async one gets an async client; a plain one a synchronous client, and a thread for each rollout. The decorator `environment` checks that where it is written, and may give it a name for reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, overload

from midflight.entries import load_entry
from midflight.errors import ConfigError
from midflight.types import Task

F = TypeVar("F", bound=Callable[..., Any])
SHAPE = (
    "an environment is `async def name(task, client) -> reward`, the same with `def`, or a class with such a `__call__(self, task, client)`"
)
_NAME = "__environment_name__"


class Environment(Protocol):
    """What a rollout runs: a coroutine function or a plain one. The result is checked by `checked_result`, so its type is anything."""

    def __call__(self, task: Task, client: Any, /) -> Any: ...


@overload
def environment(target: F, /) -> F: ...
@overload
def environment(*, name: str) -> Callable[[F], F]: ...
def environment(target: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Marks a function or class as an environment, as `@environment` or `@environment(name="...")`. `ConfigError` if it is none."""

    def mark(found: F) -> F:
        _check_shape(found, found.__qualname__)
        setattr(found, _NAME, name or found.__name__)
        return found

    return mark if target is None else mark(target)


def environment_name(found: Environment) -> str:
    """The name for reports: the one given to the decorator, else that of the function or class."""
    name = getattr(found, _NAME, None) or getattr(found, "__name__", None)
    return str(name or type(found).__name__)


def load_environment(entry: str) -> Environment:
    """The environment at `module:function`. The current folder is searched too. `ConfigError` says what is wrong and how to mend it."""
    found = load_entry(entry, option="environment.entry", such_as="midflight.environments.single_turn:answer")
    _check_shape(found, entry)
    return cast(Environment, found() if inspect.isclass(found) else found)


def _check_shape(found: object, where: str) -> None:
    """`ConfigError` unless `found` can be called as an environment."""
    call = _call_of(found)
    if call is None or inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise ConfigError(f"{where} is {type(found).__name__} {found!r}, which cannot be run: {SHAPE}.")
    try:
        _bind(found, call)
    except TypeError as error:
        raise ConfigError(f"{where} cannot be called with (task, client): {error}; {SHAPE}.") from None


def _call_of(found: object) -> Callable[..., object] | None:
    """What runs when `found` is called, or for a class when its instances are; None if neither can be."""
    if inspect.isclass(found):
        return next((cls.__dict__["__call__"] for cls in found.__mro__ if "__call__" in cls.__dict__), None)
    return found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004


def _bind(found: object, call: Callable[..., object]) -> None:
    """Raises `TypeError` unless the arguments fit: none for a class's constructor, two for the call."""
    if inspect.isclass(found):
        inspect.signature(found).bind()
        inspect.signature(call).bind(None, None, None)
    else:
        inspect.signature(call).bind(None, None)
