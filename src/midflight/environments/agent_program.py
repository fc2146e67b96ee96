"""Finds the environment that a configuration names, and runs it: as the built-in loop, or as the
user's own function. Reward functions may score its rollouts.

An environment is one function `(task, client) -> reward`, or a class without constructor arguments
whose instances are called like one. An async environment gets an async client. A plain one gets a
synchronous client, and a thread for each rollout. The decorator `environment` checks this where the
environment is written, and may give it a name for reports.
"""

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints, overload

from midflight.config.agent import agent_of, is_built_in
from midflight.config.environment import EnvironmentSection
from midflight.entries import load_entry
from midflight.environments.agents import (
    AgentHost,
    Environment,
    LocalAgents,
    SharedClients,
    is_async,
)
from midflight.environments.built_in_loop import BuiltInLoop, Post, complete_result, group_results
from midflight.environments.result_checks import UnscoredRollout, result_of
from midflight.environments.reward_functions import Dialogue, Rewards
from midflight.environments.stateful import is_stateful
from midflight.errors import ConfigError, TaskFieldMissing
from midflight.ports import SessionHandle
from midflight.types import Json, Result, Task

F = TypeVar("F", bound=Callable[..., Any])
SHAPE = (
    "an environment is `async def name(task, client) -> reward`, the same with `def`, or a "
    "class with such a `__call__(self, task, client)`"
)
_NAME = "__environment_name__"


@overload
def environment(target: F, /) -> F: ...
@overload
def environment(*, name: str) -> Callable[[F], F]: ...
def environment(target: F | None = None, /, *, name: str | None = None) -> F | Callable[[F], F]:
    """Marks a function or class as an environment, as `@environment` or `@environment(name="...")`.
    Raises `ConfigError` if it cannot be one.
    """

    def mark(found: F) -> F:
        _check_shape(found, found.__qualname__)
        setattr(found, _NAME, name or found.__name__)
        return found

    return mark if target is None else mark(target)


def environment_name(found: Environment) -> str:
    """The name for reports: the one given to the decorator, or that of the function or class."""
    name = getattr(found, _NAME, None) or getattr(found, "__name__", None)
    return str(name or type(found).__name__)


def load_environment(entry: str) -> Environment:
    """Returns the environment at `module:function`. The current folder is searched too. Raises
    `ConfigError` with the fault and its remedy.
    """
    such_as = "midflight.environments.single_turn:answer"
    found = load_entry(entry, option="environment.entry", such_as=such_as)
    return environment_at(found, entry)


def environment_at(found: object, entry: str) -> Environment:
    """The environment that an entry named, if it is one."""
    _check_shape(found, entry)
    return cast(Environment, found() if inspect.isclass(found) else found)


def _check_shape(found: object, where: str) -> None:
    """Raises `ConfigError` unless `found` can be called as an environment."""
    call = _call_of(found)
    if call is None or inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise ConfigError(
            f"{where} is {type(found).__name__} {found!r}, which cannot be run: {SHAPE}."
        )
    try:
        _bind(found, call)
    except TypeError as error:
        raise ConfigError(
            f"{where} cannot be called with (task, client): {error}; {SHAPE}."
        ) from None


def _call_of(found: object) -> Callable[..., object] | None:
    """The function that runs when `found` is called, or for a class when its instances are called.
    None if they cannot be called.
    """
    if inspect.isclass(found):
        for cls in found.__mro__:
            if "__call__" in cls.__dict__:
                return cls.__dict__["__call__"]
        return None
    if inspect.isroutine(found):
        return found
    return getattr(found, "__call__", None)  # noqa: B004


def _bind(found: object, call: Callable[..., object]) -> None:
    """Raises `TypeError` unless the arguments fit: none for a class's constructor, and two for the
    call.
    """
    if inspect.isclass(found):
        inspect.signature(found).bind()
        inspect.signature(call).bind(None, None, None)
    else:
        inspect.signature(call).bind(None, None)


# --- Running it -----------------------------------------------------------------------------------


class AgentProgram:
    """The program that `[environment]` names, imported and checked. Raises `ConfigError` with the
    fault and its remedy.
    """

    def __init__(self, section: EnvironmentSection) -> None:
        self._section = section
        found: object = None
        if not is_built_in(section):
            entry = agent_of(section)
            found = load_entry(entry, option="environment.entry", such_as="my_agent:run")
        self._stateful = cast("type", found) if is_stateful(found) else None
        self.is_built_in = found is None or self._stateful is not None
        self.environment: Environment | None = None
        self.tools: list[Mapping[str, Json]] = []
        """The schemas of tools that are known before a run."""
        if self.is_built_in:
            loop = BuiltInLoop(section, stateful=self._stateful)
            self.rewards = loop.rewards
            self.tools = loop.known_schemas
        else:
            self.environment = environment_at(found, agent_of(section))
            self.rewards = Rewards(section.rewards, section.sandbox)

    @property
    def cancels(self) -> bool:
        """True if its agents can be cancelled. Threads end by themselves."""
        return self.environment is None or is_async(self.environment)

    def check_columns(self, tasks: Sequence[Task]) -> None:
        """Raises `ConfigError` for a reward that asks for a column that no source has, or for the
        conversation of an environment that returns a number alone. The names in an environment's
        `fields` are known only in a rollout.
        """
        if self.environment is None:
            self.rewards.check_columns(tasks)
            return
        asked = conversation_asked(self.rewards)
        if asked is not None and returns_a_number(self.environment):
            raise ConfigError(
                f"environment.rewards: a reward function asks for {asked!r}, and "
                f"{agent_of(self._section)} says that it returns a number: let it return "
                '`Result(..., fields={"messages": [...]})`, or take the reward away.'
            )

    @asynccontextmanager
    async def host(
        self, post: Post, clients: Callable[[], AbstractAsyncContextManager[SharedClients]]
    ) -> AsyncGenerator[AgentHost]:
        """Agents may run within it. `post` reaches the gateway. `clients` is called if an
        environment wants the SDK's clients.
        """
        if self.environment is None:
            async with BuiltInLoop(self._section, post, stateful=self._stateful) as conversations:
                yield conversations
            return
        async with clients() as shared:
            here = LocalAgents(
                self.environment,
                client_for=shared.client_for,
                plain_client_for=shared.plain_client_for,
            )
            yield ScoredAgents(here, self.rewards) if self.rewards.functions else here


class ScoredAgents:
    """Runs agents on another `AgentHost`, then scores each result by the run's reward functions,
    which read the `fields` that the environment returns.
    """

    def __init__(self, host: AgentHost, rewards: Rewards) -> None:
        self._host = host
        self._rewards = rewards

    async def run(self, task: Task, session: SessionHandle) -> Result | UnscoredRollout:
        """Runs an agent, see `AgentHost.run`. An environment that returns nothing but None could
        not run its agent, and is not scored (I10).
        """
        said = await result_of(await self._host.run(task, session), task=task)
        if isinstance(said, UnscoredRollout):
            return said
        if said.reward is None and not said.fields and not said.components:
            return said
        attempt = self._attempt(task, said)
        components: dict[str, Any] = dict(said.components)
        if not components and said.reward is not None:
            components["environment"] = said.reward
        components.update(await self._rewards.score(attempt))
        scored = await complete_result(self._rewards, attempt, components)
        return replace(scored, turns=tuple(said.turns), roles=dict(said.roles))

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> Sequence[Result]:
        return await group_results(self._rewards, task, attempts)

    def excused(self, session_id: str) -> float:
        return self._host.excused(session_id)

    def tool_seconds(self, session_id: str) -> float:
        return self._host.tool_seconds(session_id)

    def _attempt(self, task: Task, said: Result) -> Dialogue:
        fields = said.fields
        messages = said.fields.get("messages")
        if not isinstance(messages, list):
            asked = conversation_asked(self._rewards)
            if asked is not None and asked not in fields:
                raise TaskFieldMissing(
                    f"scoring task {task.id} of {task.source}: a reward function asks for "
                    f"{asked!r}, and the environment does not give the "
                    'conversation; let it return Result(..., fields={"messages": [...]}).'
                )
            messages = []
        conversation = cast("list[dict[str, Json]]", messages)
        num_prompt = len(task.messages) if conversation else 0
        return Dialogue(task, conversation, num_prompt, fields=fields, metrics=dict(said.metrics))


def conversation_asked(rewards: Rewards) -> str | None:
    """The first name by which a reward function asks for the conversation. None if none does."""
    for name in ("messages", "completion", "completions"):
        if rewards.asks_for(name):
            return name
    return None


def returns_a_number(environment: Environment) -> bool:
    """True if the environment's annotation says that it returns a number or None, and nothing
    else. False if it has none, or one that cannot be read.
    """
    try:
        hints = get_type_hints(_call_of(environment))
    except (NameError, TypeError):
        return False
    if "return" not in hints:
        return False
    kinds: tuple[object, ...] = (hints["return"],)
    if get_origin(hints["return"]) in (Union, UnionType):
        kinds = get_args(hints["return"])
    return set(kinds) <= {bool, int, float, type(None)}
