"""Environments with state: a class whose methods are tools, with an object for each rollout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from midflight.environments.agents import in_thread
from midflight.environments.reward_functions import place_of
from midflight.environments.tools import CallableTool
from midflight.errors import ConfigError, TaskFieldMissing
from midflight.types import Task

NO_TOOLS = frozenset({"reset", "reward", "close"})
"""Public methods that are not tools."""


def is_stateful(found: object) -> bool:
    """True if it is a class of this shape: with `reset`, and not called like a function."""
    if not inspect.isclass(found) or "__call__" in vars(found):
        return False
    return callable(getattr(found, "reset", None))


class StatefulClass:
    """One such class, with its tools."""

    def __init__(self, found: type, *, where: str) -> None:
        """Raises `ConfigError` with file, line and function if it cannot be used."""
        self.found = found
        self.name = str(getattr(found, "environment_name", found.__name__))
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise ConfigError(
                f"{where}: {found.__qualname__} cannot be made without arguments: {error}; give "
                "them defaults."
            ) from None
        methods = {
            name: getattr(found, name)
            for name in dir(found)
            if not name.startswith("_") and name not in NO_TOOLS
        }
        self.tools: list[CallableTool] = []
        for name, method in methods.items():
            if inspect.isroutine(method):
                static = inspect.getattr_static(found, name)
                takes_self = not isinstance(static, staticmethod | classmethod)
                self.tools.append(CallableTool.of(method, where=where, skip_self=takes_self))
        self.scores = callable(getattr(found, "reward", None))

    def made(self) -> Episode:
        return Episode(self.found(), self)


class Episode:
    """The object of one rollout."""

    def __init__(self, instance: Any, of: StatefulClass) -> None:
        self.instance = instance
        self._of = of
        self.tools = [tool.bound_to(instance) for tool in of.tools]

    @property
    def scores(self) -> bool:
        return self._of.scores

    async def reset(self, task: Task) -> str | None:
        """Waits for the object's `reset`. Its return value is shown to the model after the
        prompt.
        """
        found = await call_with_named(self.instance.reset, {**task.data, "task": task}, task)
        return None if found is None else str(found)

    async def reward(self, values: Mapping[str, object], task: Task) -> object:
        """Waits for the object's `reward` and returns its value, or None if the class has none."""
        if not self._of.scores:
            return None
        return await call_with_named(self.instance.reward, values, task)

    async def close(self) -> None:
        """Waits for the object's `close`, if it has one."""
        close = getattr(self.instance, "close", None)
        if callable(close):
            await call_with_named(close, {}, None)


async def call_with_named(
    function: Callable[..., object], values: Mapping[str, object], task: Task | None
) -> object:
    """Calls a function with those of the values that its parameters name. Waits for it, in a thread
    of its own if it is plain.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = dict(values)
    else:
        arguments = {p.name: values[p.name] for p in parameters if p.name in values}
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in by_name if p.default is p.empty]
    missing = [name for name in needed if name not in arguments]
    if missing and task is not None:
        has = ", ".join(sorted(task.data)) or "none"
        raise TaskFieldMissing(
            f"task {task.id} of {task.source}: {place_of(function)} needs the column "
            f"{missing[0]!r}, and the task has {has}; add it to the data, or give the parameter a "
            "default."
        )
    if inspect.iscoroutinefunction(function):
        return await cast(Any, function)(**arguments)
    found = await in_thread(lambda: function(**arguments))
    return await found if inspect.isawaitable(found) else found
