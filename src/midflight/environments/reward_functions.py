"""Reward functions. They are found and checked before a run starts, and called with the arguments
that their parameters name.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar, cast

from midflight.config.agents import RewardSection, SandboxSection
from midflight.entries import load_entry
from midflight.environments.agents import in_thread
from midflight.environments.result_checks import number_in
from midflight.environments.sandboxes.choice import sandbox_of
from midflight.environments.sandboxes.port import Sandbox
from midflight.errors import BadReward, ConfigError, TaskFieldMissing, first_error, nearest
from midflight.types import Json, Task

T = TypeVar("T")
OF_ONE = ("task", "messages", "completion", "prompt", "environment", "log_metric", "sandbox")
"""Names that a function may ask for, beside the columns of the task and the fields of the
environment's result.
"""
OF_MANY = (
    "prompts",
    "completions",
    "completion_ids",
    "environments",
    "trainer_state",
    "log_metric",
    "log_extra",
    "sandbox",
)
"""The same for a function with TRL's signature, whose columns are lists."""
SHAPE = (
    "a reward is `def name(completion, answer) -> float` with the parameters it needs of task, "
    "messages, completion and the task's columns, or of TRL's shape, `def name(completions, "
    "**columns) -> list[float]`"
)


@dataclass(slots=True)
class Dialogue:
    """A conversation that has ended and is to be scored."""

    task: Task
    messages: list[dict[str, Json]]
    """The whole conversation, including the prompt."""
    num_prompt: int
    """The number of messages that belong to the prompt."""
    completion_ids: list[int] = field(default_factory=list[int])
    """The token ids of all answers, if a function asks for them."""
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])
    environment: object = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def completion(self) -> str:
        """The last answer as text."""
        for message in reversed(self.messages[self.num_prompt :]):
            if message.get("role") == "assistant":
                return str(message.get("content") or "")
        return ""

    @property
    def columns(self) -> Mapping[str, Json]:
        return {**self.task.data, **self.fields}

    def said(self) -> str | list[dict[str, Json]]:
        """The completion as TRL gives it: a text if the prompt is one, otherwise the messages after
        the prompt.
        """
        if isinstance(self.task.prompt, str):
            return self.completion
        return self.messages[self.num_prompt :]


def place_of(function: object) -> str:
    """The place at which a function is written, such as `correct (rewards.py:12)`."""
    bare = inspect.unwrap(function) if callable(function) else function
    bare = getattr(bare, "func", bare)  # the function of a partial
    call = getattr(bare, "__call__", None)  # noqa: B004
    code = getattr(bare, "__code__", None) or getattr(call, "__code__", None)
    name = getattr(bare, "__qualname__", type(bare).__name__)
    if code is None:
        return str(name)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


class RewardFunction:
    """One of `environment.rewards`."""

    sandbox: Sandbox | None = None
    """The sandbox for the model's programs, for a function that asks for one."""

    def __init__(self, section: RewardSection, function: Callable[..., object]) -> None:
        """Raises `ConfigError` with file, line and function if it cannot be called."""
        self.label = section.label
        self.weight = section.weight
        self._options = section.options
        self.place = place_of(function)
        self.function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"environment.rewards: {section.entry} cannot be called: {error}; {SHAPE}."
            ) from None
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.named = {
            p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        nameless = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if nameless:
            raise ConfigError(
                f"environment.rewards: {self.place} has {nameless[0]!r} by position only; let "
                f"parameters have names: {SHAPE}."
            )
        self.is_of_group = "completions" in self.named
        unknown = self._options.keys() - self.named.keys()
        if unknown and not self._takes_all:
            raise ConfigError(
                f"environment.rewards: {self.place} has no {min(unknown)!r} for its "
                f"option.{nearest(min(unknown), self.named)}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that every task must have, or the fields of the environment's result."""
        given = set[str](OF_MANY if self.is_of_group else OF_ONE)
        given.update(self._options)
        return tuple(
            name for name, p in self.named.items() if p.default is p.empty and name not in given
        )

    def asks_for(self, name: str) -> bool:
        return name in self.named or (self._takes_all and self.is_of_group)

    async def score(self, attempt: Dialogue) -> Mapping[str, float | None]:
        """The reward by component: the label, or `label/name` for each name of a dict. Waits for
        the function, which has a thread of its own if it is plain.
        """
        values: dict[str, object] = dict(attempt.columns)
        values["task"] = attempt.task
        values["messages"] = attempt.messages
        values["completion"] = attempt.completion
        values["prompt"] = attempt.task.prompt
        values["environment"] = attempt.environment
        values["log_metric"] = attempt.metrics.__setitem__
        values["sandbox"] = self.sandbox
        values.update(self._options)
        found = await self._called(self._wanted(values, attempt))
        return self._components(found, attempt.task)

    async def score_group(self, attempts: Sequence[Dialogue]) -> list[Mapping[str, float | None]]:
        """The components of each attempt, from a function of TRL's shape: it is called once for all
        of them.
        """

        def log_metric(name: str, value: float) -> None:
            for attempt in attempts:
                attempt.metrics[name] = value

        columns = [attempt.columns for attempt in attempts]
        values: dict[str, object] = {}
        for name in dict.fromkeys(chain.from_iterable(columns)):
            values[name] = [of_attempt.get(name) for of_attempt in columns]
        values["prompts"] = [attempt.task.prompt for attempt in attempts]
        values["completions"] = [attempt.said() for attempt in attempts]
        values["completion_ids"] = [attempt.completion_ids for attempt in attempts]
        values["environments"] = [attempt.environment for attempt in attempts]
        values["trainer_state"] = None
        values["log_metric"] = log_metric
        values["log_extra"] = ignored
        values["sandbox"] = self.sandbox
        values.update(self._options)
        found = await self._called(self._wanted(values, attempts[0]))
        listed = _as_list(found)
        if listed is None or len(listed) != len(attempts):
            raise BadReward(
                f"scoring task {attempts[0].task.id} of {attempts[0].task.source}: {self.place} "
                f"returned {found!r:.200}, expected a list of {len(attempts)} numbers, one for "
                "each of completions."
            )
        return [
            self._components(value, attempt.task)
            for value, attempt in zip(listed, attempts, strict=True)
        ]

    def _wanted(self, values: Mapping[str, object], attempt: Dialogue) -> dict[str, Any]:
        """The arguments to pass. Raises `TaskFieldMissing` with a column that the function needs
        and the task does not have.
        """
        task = attempt.task
        for name in self.columns:
            if name not in values:
                has = ", ".join(sorted(attempt.columns)) or "none"
                raise TaskFieldMissing(
                    f"scoring task {task.id} of {task.source}: {self.place} needs the column "
                    f"{name!r}, and the task has {has}; add it to the data, or give the parameter "
                    "a default."
                )
        if self._takes_all:
            return dict(values)
        return {name: values[name] for name in self.named if name in values}

    async def _called(self, arguments: dict[str, Any]) -> object:
        call = getattr(self.function, "__call__", None)  # noqa: B004
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call):
            return await cast(Any, self.function)(**arguments)
        found = await in_thread(lambda: self.function(**arguments))
        return await found if inspect.isawaitable(found) else found

    def _components(self, found: object, task: Task) -> Mapping[str, float | None]:
        said = f"scoring task {task.id} of {task.source}: what {self.place} returned"
        if found is None:
            return {self.label: None}
        if isinstance(found, Mapping):
            components: dict[str, float | None] = {}
            for name, value in cast("Mapping[object, object]", found).items():
                component = f"{self.label}/{name}"
                components[component] = None
                if value is not None:
                    components[component] = number_in(value, f"{said} for {name!r}")
            return components
        return {self.label: number_in(found, said)}


def ignored(name: str, values: object) -> None:
    """Takes the place of TRL's `log_extra`, which adds columns to a table of completions. There is
    no such table here.
    """
    del name, values


def _as_list(found: object) -> list[object] | None:
    """The items of a list, an array or a tensor, or None if it is none of these."""
    listed = getattr(found, "tolist", lambda: found)()
    if not isinstance(listed, list | tuple):
        return None
    return list(cast("Sequence[object]", listed))


async def gather_or_cancel(running: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Waits for all of them, or until the first error, which cancels the others and is raised as it
    is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in running]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return [task.result() for task in tasks]


class Rewards:
    """All reward functions of a run."""

    def __init__(self, sections: Sequence[RewardSection], sandbox: SandboxSection) -> None:
        """Raises `ConfigError` if one cannot be imported or called, or asks for a sandbox that
        cannot be made here.
        """
        found = [_loaded(section) for section in sections]
        for section, function in zip(sections, found, strict=True):
            if not callable(function):
                raise ConfigError(
                    f"environment.rewards: {section.entry} is {function!r:.200}, which cannot be "
                    f"called; {SHAPE}."
                )
        self.functions = [
            RewardFunction(section, cast("Callable[..., object]", function))
            for section, function in zip(sections, found, strict=True)
        ]
        asking = [function for function in self.functions if "sandbox" in function.named]
        if asking:
            made = sandbox_of(sandbox)
            for function in asking:
                function.sandbox = made
        self.of_one = [function for function in self.functions if not function.is_of_group]
        self.of_group = [function for function in self.functions if function.is_of_group]

    def check_columns(self, tasks: Sequence[Task]) -> None:
        """Raises `ConfigError` for a column that none of these tasks has. Give one task of each
        source.
        """
        known = set[str]()
        for task in tasks:
            known.update(task.data)
        for function in self.functions:
            for name in function.columns:
                if name not in known:
                    given = OF_MANY if function.is_of_group else OF_ONE
                    raise ConfigError(
                        f"environment.rewards: {function.place} has the parameter {name!r}, which "
                        f"is a column of no source.{nearest(name, known.union(given))} "
                        "Rename it, or give it a default."
                    )

    def asks_for(self, name: str) -> bool:
        return any(function.asks_for(name) for function in self.functions)

    @property
    def asks_for_episodes(self) -> bool:
        """True if some function of a group wants the environments' objects, which are in the
        processes of the rollouts.
        """
        return any("environments" in function.named for function in self.of_group)

    async def score(
        self, attempt: Dialogue, functions: Sequence[RewardFunction] | None = None
    ) -> Mapping[str, float | None]:
        """The components that these functions give, all together. Without `functions` they are
        those of one attempt.
        """
        if functions is None:
            functions = self.of_one
        began = asyncio.get_running_loop().time()
        found = await gather_or_cancel([function.score(attempt) for function in functions])
        if found:
            attempt.metrics["rewards/seconds"] = asyncio.get_running_loop().time() - began
        every: dict[str, float | None] = {}
        for components in found:
            every.update(components)
        return every

    async def score_group(self, attempts: Sequence[Dialogue]) -> list[dict[str, float | None]]:
        """The components that functions of TRL's shape give, for each attempt."""
        of_each: list[dict[str, float | None]] = [{} for _ in attempts]
        for function in self.of_group:
            scored = await function.score_group(attempts)
            for components, found in zip(of_each, scored, strict=True):
                components.update(found)
        return of_each

    def total(self, components: Mapping[str, float | None]) -> float | None:
        """The weighted sum of the components that apply; None if none does."""
        weights = {function.label: function.weight for function in self.functions}
        applying = {name: value for name, value in components.items() if value is not None}
        if not applying:
            return None
        total = 0.0
        for name, value in applying.items():
            label, _, _ = name.partition("/")
            total += value * weights.get(name, weights.get(label, 1.0))
        return total


def _loaded(section: RewardSection) -> object:
    return load_entry(
        section.entry, option="environment.rewards", such_as="midflight.rewards:exact_match"
    )
