"""Reward functions as trl takes them: each gets all that there is by keyword, and returns a
list.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

from midflight.errors import ConfigError


def reward_functions(
    given: Any, environments: Sequence[type], *, weights: Sequence[float] | None
) -> list[Any]:
    """The functions with their weights, for `midflight.Trainer`. Raises `ConfigError` for what is
    no function, for weights that are not one for each, and where nothing gives a reward.
    """
    functions: list[Any] = []
    if isinstance(given, list | tuple):
        functions = list(cast("Sequence[Any]", given))
    elif given is not None:
        functions = [given]
    for function in functions:
        if isinstance(function, str) or not callable(function) or hasattr(function, "parameters"):
            raise ConfigError(
                f"reward_funcs has {function!r:.80}, expected a function; a reward model is one "
                "that you call in a function."
            )
    if not functions and not any(hasattr(environment, "reward") for environment in environments):
        raise ConfigError(
            "nothing gives a reward: pass reward_funcs, or an environment_factory whose "
            "environment has `get_reward`."
        )
    taken = [taking_completions(function) for function in functions]
    if weights is None:
        return taken
    if len(weights) != len(taken):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {len(taken)} reward functions; give "
            "one for each."
        )
    return [(function, float(weight)) for function, weight in zip(taken, weights, strict=True)]


def taking_completions(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a parameter `completions`, by which it is known that it takes lists. trl
    passes everything by keyword, so that one which takes any keyword need not name it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # refused with its place where rewards are loaded
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "trainer_state" in parameters:
        name = getattr(function, "__name__", "a reward function")
        warnings.warn(
            f"{name} asks for trainer_state, which is None: rewards run in processes of their own",
            stacklevel=2,
        )
    if "completions" in parameters or not takes_all:
        return function

    @functools.wraps(function)
    def called(**columns: Any) -> Any:
        return function(**columns)

    named = inspect.Parameter("completions", inspect.Parameter.KEYWORD_ONLY)
    others = list(parameters.values())
    at = len(others) - 1  # before **kwargs, which comes last
    called.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
        parameters=[*others[:at], named, *others[at:]]
    )
    return called
