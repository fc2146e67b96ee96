"""Reward functions: found, checked before a run starts, and called with what the names of their
parameters ask for.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from midflight.config.agents import RewardSection, SandboxSection
from midflight.entries import load_entry
from midflight.environments.agents import in_thread
from midflight.environments.sandboxes.choice import sandbox_of
from midflight.environments.sandboxes.port import Sandbox
from midflight.environments.scoring import number_in
from midflight.errors import BadReward, ConfigError, TaskFieldMissing, first_error, nearest
from midflight.types import Json, Result, Task

T = TypeVar("T")
OF_ONE = ("task", "messages", "completion", "prompt", "environment", "log_metric", "sandbox")
"""What a function may ask for by name, beside the columns of the task and the fields of the
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
"""The same of a function of TRL's shape, whose columns are lists."""
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
    """All of it, the prompt too."""
    num_prompt: int
    """Messages of the prompt."""
    completion_ids: list[int] = field(default_factory=list[int])
    """Ids of all that the model said, where they were asked for."""
    fields: Mapping[str, Json] = field(default_factory=dict[str, Json])
    environment: object = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def completion(self) -> str:
        """The last answer as text."""
        said = next(
            (
                message
                for message in reversed(self.messages[self.num_prompt :])
                if message.get("role") == "assistant"
            ),
            None,
        )
        return str((said or {}).get("content") or "")

    @property
    def columns(self) -> Mapping[str, Json]:
        return {**self.task.data, **self.fields}

    def said(self) -> str | list[dict[str, Json]]:
        """As TRL has it: a text where the prompt is one, else the messages after it."""
        return (
            self.completion
            if isinstance(self.task.prompt, str)
            else self.messages[self.num_prompt :]
        )


def place_of(function: object) -> str:
    """Where it is written, such as `correct (rewards.py:12)`."""
    bare = inspect.unwrap(function) if callable(function) else function
    bare = getattr(bare, "func", bare)  # of a partial
    code = getattr(bare, "__code__", None) or getattr(
        getattr(bare, "__call__", None),  # noqa: B004
        "__code__",
        None,
    )
    name = getattr(bare, "__qualname__", type(bare).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)


class RewardFunction:
    """One of `environment.rewards`."""

    sandbox: Sandbox | None = None
    """Where one that asks for it runs what the model wrote."""

    def __init__(self, section: RewardSection, function: Callable[..., object]) -> None:
        """`ConfigError` names file, line and function if it cannot be called."""
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
        if odd := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
            raise ConfigError(
                f"environment.rewards: {self.place} has {odd[0]!r} by position only; let "
                f"parameters have names: {SHAPE}."
            )
        self.is_of_group = "completions" in self.named
        if (unknown := self._options.keys() - self.named.keys()) and not self._takes_all:
            raise ConfigError(
                f"environment.rewards: {self.place} has no {min(unknown)!r} for its "
                f"option.{nearest(min(unknown), self.named)}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """What every task must have, or the environment's fields."""
        given = {*(OF_MANY if self.is_of_group else OF_ONE), *self._options}
        return tuple(
            name for name, p in self.named.items() if p.default is p.empty and name not in given
        )

    def asks_for(self, name: str) -> bool:
        return name in self.named or (self._takes_all and self.is_of_group)

    async def score(self, attempt: Dialogue) -> Mapping[str, float | None]:
        """By component: the label, or `label/name` of each of a dict. Waits for the function, in a
        thread of its own if it is plain.
        """
        columns = attempt.columns
        values: dict[str, object] = {
            **columns,
            "task": attempt.task,
            "messages": attempt.messages,
            "completion": attempt.completion,
            "prompt": attempt.task.prompt,
            "environment": attempt.environment,
            "log_metric": attempt.metrics.__setitem__,
            "sandbox": self.sandbox,
            **self._options,
        }
        found = await self._called({name: values[name] for name in self._wanted(values, attempt)})
        return self._components(found, attempt.task)

    async def score_group(self, attempts: Sequence[Dialogue]) -> list[Mapping[str, float | None]]:
        """Of a function of TRL's shape: called once for all of them."""

        def log_metric(name: str, value: float) -> None:
            for attempt in attempts:
                attempt.metrics[name] = value

        names = list(dict.fromkeys(name for attempt in attempts for name in attempt.columns))
        values: dict[str, object] = {
            **{name: [attempt.columns.get(name) for attempt in attempts] for name in names},
            "prompts": [attempt.task.prompt for attempt in attempts],
            "completions": [attempt.said() for attempt in attempts],
            "completion_ids": [attempt.completion_ids for attempt in attempts],
            "environments": [attempt.environment for attempt in attempts],
            "trainer_state": None,
            "log_metric": log_metric,
            "log_extra": ignored,
            "sandbox": self.sandbox,
            **self._options,
        }
        found = await self._called(
            {name: values[name] for name in self._wanted(values, attempts[0])}
        )
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

    def _wanted(self, values: Mapping[str, object], attempt: Dialogue) -> list[str]:
        """The names to pass. `TaskFieldMissing` for one that the task has not got, which the
        function needs.
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
        return [name for name in (values if self._takes_all else self.named) if name in values]

    async def _called(self, arguments: dict[str, Any]) -> object:
        if inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004
        ):
            return await cast(Any, self.function)(**arguments)
        found = await in_thread(lambda: self.function(**arguments))
        return await found if inspect.isawaitable(found) else found

    def _components(self, found: object, task: Task) -> Mapping[str, float | None]:
        said = f"scoring task {task.id} of {task.source}: what {self.place} returned"
        if found is None:
            return {self.label: None}
        if isinstance(found, Mapping):
            parts = cast("Mapping[object, object]", found)
            return {
                f"{self.label}/{name}": None
                if value is None
                else number_in(value, f"{said} for {name!r}")
                for name, value in parts.items()
            }
        return {self.label: number_in(found, said)}


def ignored(name: str, values: object) -> None:
    """TRL's `log_extra` adds columns to a table of completions, which there is none of here."""
    del name, values


def _as_list(found: object) -> list[object] | None:
    """Of a list, an array or a tensor."""
    listed = getattr(found, "tolist", lambda: found)()
    return list(cast("Sequence[object]", listed)) if isinstance(listed, list | tuple) else None


async def together(running: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Waits for all of them; ended by the first error, which cancels the others and is raised as it
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
        """`ConfigError` if one cannot be imported or called, or asks for a sandbox that cannot be
        made here.
        """
        such_as = "midflight.rewards:exact_match"
        found = [
            (section, load_entry(section.entry, option="environment.rewards", such_as=such_as))
            for section in sections
        ]
        for section, function in found:
            if not callable(function):
                raise ConfigError(
                    f"environment.rewards: {section.entry} is {function!r:.200}, which cannot be "
                    f"called; {SHAPE}."
                )
        self.functions = [
            RewardFunction(section, cast("Callable[..., object]", function))
            for section, function in found
        ]
        if asking := [function for function in self.functions if "sandbox" in function.named]:
            made = sandbox_of(sandbox)
            for function in asking:
                function.sandbox = made
        self.of_one = [function for function in self.functions if not function.is_of_group]
        self.of_group = [function for function in self.functions if function.is_of_group]

    def check_columns(self, tasks: Sequence[Task]) -> None:
        """`ConfigError` for a column that none of these has; give one task of each source."""
        known = {name for task in tasks for name in task.data}
        for function in self.functions:
            for name in function.columns:
                if name not in known:
                    raise ConfigError(
                        f"environment.rewards: {function.place} has the parameter {name!r}, which "
                        "is a column of no "
                        f"source.{nearest(name, known | {*(OF_MANY if function.is_of_group else OF_ONE)})} "
                        "Rename it, or give it a default."
                    )

    def asks_for(self, name: str) -> bool:
        return any(function.asks_for(name) for function in self.functions)

    @property
    def asks_for_episodes(self) -> bool:
        """Some function of a group wants the environments' objects, which are where the rollouts
        are.
        """
        return any("environments" in function.named for function in self.of_group)

    async def score(
        self, attempt: Dialogue, functions: Sequence[RewardFunction] | None = None
    ) -> Mapping[str, float | None]:
        """The components that these functions give, together: those of one attempt, unless told
        otherwise.
        """
        began = asyncio.get_running_loop().time()
        found = await together(
            [
                function.score(attempt)
                for function in (self.of_one if functions is None else functions)
            ]
        )
        if found:
            attempt.metrics["rewards/seconds"] = asyncio.get_running_loop().time() - began
        return {name: value for components in found for name, value in components.items()}

    async def score_group(self, attempts: Sequence[Dialogue]) -> list[dict[str, float | None]]:
        """The components that functions of TRL's shape give, for each attempt."""
        of_each: list[dict[str, float | None]] = [{} for _ in attempts]
        for function in self.of_group:
            for components, found in zip(
                of_each, await function.score_group(attempts), strict=True
            ):
                components.update(found)
        return of_each

    def total(self, components: Mapping[str, float | None]) -> float | None:
        """The weighted sum of those that apply; none if none does."""
        weights = {function.label: function.weight for function in self.functions}
        there = [(name, value) for name, value in components.items() if value is not None]
        if not there:
            return None
        return sum(
            value * weights.get(name, weights.get(name.partition("/")[0], 1.0))
            for name, value in there
        )


def result_of_attempt(
    attempt: Dialogue, components: Mapping[str, float | None], total: float | None
) -> Result:
    return Result(total, components, attempt.metrics, (), attempt.fields)
