"""Finding the environment that a configuration names, and what runs it: the built-in loop, or a
function of the user's, whose rollouts reward functions may score.

An environment is one function `(task, client) -> reward`, or a class without constructor arguments
whose instances are called like one. An async one gets an async client; a plain one a synchronous
client, and a thread for each rollout. The decorator `environment` checks that where it is written,
and may give it a name for reports.
"""

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast, overload

from midflight.config.agent import agent_of, is_built_in
from midflight.config.sections import EnvironmentSection
from midflight.entries import load_entry
from midflight.environments.agents import (
    AgentHost,
    AgentsHere,
    Environment,
    SharedClients,
    is_async,
)
from midflight.environments.conversation import BuiltInLoop, Post, completed, is_stateful, judged
from midflight.environments.reward_functions import Dialogue, Rewards
from midflight.environments.scoring import Unjudged, result_of
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
    `ConfigError` if it is none.
    """

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
    """The environment at `module:function`. The current folder is searched too. `ConfigError` says
    what is wrong and how to mend it.
    """
    return environment_at(
        load_entry(
            entry, option="environment.entry", such_as="midflight.environments.single_turn:answer"
        ),
        entry,
    )


def environment_at(found: object, entry: str) -> Environment:
    """What an entry named, if it is one."""
    _check_shape(found, entry)
    return cast(Environment, found() if inspect.isclass(found) else found)


def _check_shape(found: object, where: str) -> None:
    """`ConfigError` unless `found` can be called as an environment."""
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
    """What runs when `found` is called, or for a class when its instances are; None if neither can
    be.
    """
    if inspect.isclass(found):
        return next(
            (cls.__dict__["__call__"] for cls in found.__mro__ if "__call__" in cls.__dict__), None
        )
    return found if inspect.isroutine(found) else getattr(found, "__call__", None)  # noqa: B004


def _bind(found: object, call: Callable[..., object]) -> None:
    """Raises `TypeError` unless the arguments fit: none for a class's constructor, two for the
    call.
    """
    if inspect.isclass(found):
        inspect.signature(found).bind()
        inspect.signature(call).bind(None, None, None)
    else:
        inspect.signature(call).bind(None, None)


# --- Running it -----------------------------------------------------------------------------------


class AgentProgram:
    """What `[environment]` names, imported and checked: `ConfigError` says what cannot be used and
    how to mend it.
    """

    def __init__(self, section: EnvironmentSection) -> None:
        self._section = section
        found = (
            None
            if is_built_in(section)
            else load_entry(agent_of(section), option="environment.entry", such_as="my_agent:run")
        )
        self._stateful = cast("type", found) if is_stateful(found) else None
        self.is_built_in = found is None or self._stateful is not None
        self.environment: Environment | None = (
            None if self.is_built_in else environment_at(found, agent_of(section))
        )
        self._loop = BuiltInLoop(section, stateful=self._stateful) if self.is_built_in else None
        self.rewards = (
            Rewards(section.rewards, section.sandbox) if self._loop is None else self._loop.rewards
        )

    @property
    def cancels(self) -> bool:
        """Whether its agents can be cancelled; threads end by themselves."""
        return self.environment is None or is_async(self.environment)

    def check_columns(self, tasks: Sequence[Task]) -> None:
        """`ConfigError` for a reward that asks for a column of no source. What an environment's
        `fields` have is known only in a rollout.
        """
        if self.is_built_in:
            self.rewards.check_columns(tasks)

    @asynccontextmanager
    async def host(
        self, post: Post, clients: Callable[[], AbstractAsyncContextManager[SharedClients]]
    ) -> AsyncGenerator[AgentHost]:
        """Within it agents may run. `post` reaches the gateway; `clients` is asked for where an
        environment wants the SDK's.
        """
        if self.environment is None:
            async with BuiltInLoop(self._section, post, stateful=self._stateful) as conversations:
                yield conversations
            return
        async with clients() as shared:
            here = AgentsHere(
                self.environment,
                client_for=shared.client_for,
                plain_client_for=shared.plain_client_for,
            )
            yield ScoredAgents(here, self.rewards) if self.rewards.functions else here


class ScoredAgents:
    """Implements `AgentHost` around another: reward functions score what its environment gives in
    `fields`.
    """

    def __init__(self, host: AgentHost, rewards: Rewards) -> None:
        self._host = host
        self._rewards = rewards

    async def run(self, task: Task, session: SessionHandle) -> Result | Unjudged:
        """As the port. An environment that says nothing but None could not run its agent: that is
        not scored (I10).
        """
        said = await result_of(await self._host.run(task, session), task=task)
        if isinstance(said, Unjudged) or (
            said.reward is None and not said.fields and not said.components
        ):
            return said
        attempt = self._attempt(task, said)
        own: Mapping[str, Any] = said.components or (
            {} if said.reward is None else {"environment": said.reward}
        )
        scored = await completed(
            self._rewards, attempt, {**own, **await self._rewards.score(attempt)}
        )
        return replace(scored, turns=tuple(said.turns), roles=dict(said.roles))

    async def judge(
        self, task: Task, attempts: Sequence[Unjudged], *, name: str
    ) -> Sequence[Result]:
        return await judged(self._rewards, task, attempts)

    def excused(self, session_id: str) -> float:
        return self._host.excused(session_id)

    def tool_seconds(self, session_id: str) -> float:
        return self._host.tool_seconds(session_id)

    def _attempt(self, task: Task, said: Result) -> Dialogue:
        fields = said.fields
        messages = said.fields.get("messages")
        if not isinstance(messages, list):
            asked = next(
                (
                    name
                    for name in ("messages", "completion", "completions")
                    if self._rewards.asks_for(name)
                ),
                None,
            )
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
