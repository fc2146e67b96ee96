"""Makes a class of the kind that the built-in loop takes out of trl's `environment_factory`. It has
`reset`, public methods as tools, and a reward of its own.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from midflight.errors import ConfigError

Factory = Callable[[], Any]
NOT_TOOLS = ("reset", "get_reward")


def environment_class(factory: Factory, *, name: str | None = None) -> type:
    """Returns a class whose objects pass every call on to the object that the factory makes. Raises
    `ConfigError` if that object has no `reset`.
    """
    found = factory if inspect.isclass(factory) else type(factory())
    if not callable(getattr(found, "reset", None)):
        raise ConfigError(
            f"environment_factory makes a {found.__name__} without `reset`; define it: it begins "
            "an episode."
        )
    body: dict[str, Any] = {
        "__init__": _making(factory),
        "__getattr__": _attribute_of_made,
        "reset": _resetting(without="environment" if name else ""),
        "__doc__": found.__doc__,
        "__module__": found.__module__,
    }
    for tool, method in inspect.getmembers(found, predicate=inspect.isfunction):
        if not tool.startswith("_") and tool not in NOT_TOOLS:
            body[tool] = _passed_on(tool, method)
    if callable(getattr(found, "get_reward", None)):
        body["reward"] = _reward
    if name is not None:
        body["environment_name"] = name
    return type(found.__name__, (), body)


def _making(factory: Factory) -> Callable[[Any], None]:
    def __init__(self: Any) -> None:
        self.made = factory()

    return __init__


def _attribute_of_made(self: Any, name: str) -> Any:
    """An attribute of the object that was made, for reward functions that look at it."""
    if name == "made":  # not made yet
        raise AttributeError(name)
    return getattr(self.made, name)


def _resetting(*, without: str) -> Callable[..., Any]:
    def reset(self: Any, **row: Any) -> Any:
        """Passes on those columns of the row that the environment's own `reset` names, or all if it
        takes any keyword.
        """
        given = {name: value for name, value in row.items() if name not in ("task", without)}
        parameters = inspect.signature(self.made.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not takes_all:
            given = {name: value for name, value in given.items() if name in parameters}
        return self.made.reset(**given)

    return reset


def _reward(self: Any) -> Any:
    return self.made.get_reward()


def _passed_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the one of that name. It has the same signature and docstring, of which
    its schema is made.
    """
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def waited(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.made, name)(*args, **kwargs)

        return waited

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.made, name)(*args, **kwargs)

    return called


def rows_of_environments(
    factories: Mapping[str, Factory] | Factory, *, number: int
) -> list[dict[str, Any]]:
    """The rows if environments bring their own data: the given number of empty prompts, each with
    the name of its environment if there are several.
    """
    names: list[str | None] = [None]
    if isinstance(factories, Mapping):
        names = list(cast("Mapping[str, Factory]", factories))
    rows: list[dict[str, Any]] = []
    for index in range(max(number, len(names))):
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": ""}]}
        name = names[index % len(names)]
        if name is not None:
            row["environment"] = name
        rows.append(row)
    return rows
