"""Finding the environment that a configuration names.

An environment is one async function `(task, client) -> reward`, or a class without constructor arguments whose instances are
called like one. The decorator `environment` checks that where it is written, and may give it a name for reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, overload

from midflight.entries import load_entry
from midflight.errors import ConfigError
from midflight.types import Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

F = TypeVar("F", bound=Callable[..., Any])
SHAPE = "an environment is `async def name(task, client) -> reward`, or a class with `async def __call__(self, task, client)`"
_NAME = "__environment_name__"


class Environment(Protocol):
    """What a rollout runs. The result is checked by `checked_reward`, so its type is anything."""

    def __call__(self, task: Task, client: AsyncOpenAI, /) -> Coroutine[Any, Any, object]: ...


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
    call = getattr(found, "__call__", None) if inspect.isclass(found) or not inspect.isroutine(found) else found  # noqa: B004
    if call is None or not inspect.iscoroutinefunction(call):
        raise ConfigError(f"{where} is {type(found).__name__} {found!r} and not async: {SHAPE}.")
    try:
        _bind(found, call)
    except TypeError as error:
        raise ConfigError(f"{where} cannot be called with (task, client): {error}; {SHAPE}.") from None


def _bind(found: object, call: Callable[..., object]) -> None:
    """Raises `TypeError` unless the arguments fit: none for a class's constructor, two for the call."""
    if inspect.isclass(found):
        inspect.signature(found).bind()
        inspect.signature(call).bind(None, None, None)
    else:
        inspect.signature(call).bind(None, None)
