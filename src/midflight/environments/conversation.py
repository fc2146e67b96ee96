"""The built-in loop: asks the task's prompt, calls the tools that the model calls, asks again, and
scores what came of it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeAlias, cast

import msgspec

from midflight.config.sections import EnvironmentSection
from midflight.environments.agents import in_thread
from midflight.environments.mcp_servers import McpServers
from midflight.environments.reward_functions import Dialogue, Rewards, place_of
from midflight.environments.scoring import Unjudged, checked_result
from midflight.environments.tool_time import UNLIMITED, ToolTime
from midflight.environments.tools import CallableTool, Toolbox, load_tools
from midflight.errors import ConfigError, EnvironmentFailed, TaskFieldMissing
from midflight.ports import SessionHandle
from midflight.types import Json, Result, Task
from midflight.wire.client import Answered

TRIES = 3
"""Of one request that no engine could answer, as the SDK has them."""
FULL = 429
"""The gateway has too many requests."""
AWAY = 503
"""No engine is there for the request."""
WAIT_SECONDS = 0.5
"""Before the second try, and as much more before each further one."""
LONGEST_WAIT_SECONDS = 8.0
PATH = "/v1/chat/completions"

Post: TypeAlias = Callable[[str, bytes], Awaitable[Answered]]
"""Posts a body to a path of the gateway. Waits for the whole answer; ended by its caller."""


async def asked(post: Post, session: SessionHandle, body: bytes) -> Answered:
    """The answer to a chat. Waits for it, and a little before each further try; ended by its
    caller.
    """
    path = f"/s/{session.api_key}{PATH}"
    for number in itertools.count(1):
        answered = await post(path, body)
        if not is_worth_a_try(answered.status, number):
            return answered
        await asyncio.sleep(wait_seconds(number))
    raise AssertionError("the last try returns")


def is_worth_a_try(status: int, number: int) -> bool:
    """Whether to ask again after so many tries: a full gateway as long as it is full, which is no
    fault of the rollout's.
    """
    return status == FULL or (status == AWAY and number < TRIES)


def wait_seconds(number: int) -> float:
    """Before the try after that."""
    return min(LONGEST_WAIT_SECONDS, WAIT_SECONDS * number)


class BuiltInLoop:
    """Implements `AgentHost`. What it is made of is checked when it is made; within `async with` it
    may run.
    """

    def __init__(
        self, section: EnvironmentSection, post: Post | None = None, *, stateful: type | None = None
    ) -> None:
        """`ConfigError` names what cannot be used. `stateful` is the class that `environment.entry`
        names, if it names one. `post` is needed to run."""
        self._section = section
        self._post = post
        self.rewards = Rewards(section.rewards, section.sandbox)
        found = [*load_tools(section.tools), *([] if stateful is None else [stateful])]
        classes = [
            StatefulClass(each, where="environment.entry" if stateful else "environment.tools")
            for each in found
            if isinstance(each, type)
        ]
        self._classes = {each.name: each for each in classes}
        if len(self._classes) < len(classes):
            raise ConfigError(
                f"environment.tools has two environments with state called {classes[0].name}; "
                "rename one."
            )
        self._functions = [each for each in found if isinstance(each, CallableTool)]
        for of_one in [each.tools for each in classes] or [[]]:
            self._check_names([*self._functions, *of_one])
        if not self.rewards.functions and not (classes and all(each.scores for each in classes)):
            raise ConfigError(
                "nothing scores the rollouts: name a function in [[environment.rewards]], or give "
                "the environment a `reward`."
            )
        self._servers = McpServers(section.mcp)
        self._slots = asyncio.Semaphore(section.tool_concurrency)
        self._wants_ids = self.rewards.asks_for("completion_ids")
        self._in_tools: dict[str, ToolTime] = {}
        """Of the rollouts that run."""
        self.on_tools: Callable[[str, float | None], None] = lambda session_id, limit: None
        """Told when a session's tools begin to run, for how many seconds at most, and with None
        when they have ended.
        """

    @staticmethod
    def _check_names(tools: Sequence[CallableTool]) -> None:
        places: dict[str, str] = {}
        for tool in tools:
            if tool.name in places:
                raise ConfigError(
                    f"environment.tools has two tools called {tool.name!r}, {places[tool.name]} "
                    f"and {tool.place}; rename one."
                )
            places[tool.name] = tool.place

    async def __aenter__(self) -> BuiltInLoop:
        await self._servers.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._servers.__aexit__(*exc)

    def excused(self, session_id: str) -> float:
        del session_id
        return 0.0

    def tool_seconds(self, session_id: str) -> float:
        """See the port."""
        return self._in_tools[session_id].seconds() if session_id in self._in_tools else 0.0

    @contextmanager
    def _tools(self, session: SessionHandle, limit: float) -> Generator[None]:
        """Within it tools run, for `limit` seconds at most."""
        spent = self._in_tools.setdefault(session.session_id, ToolTime())
        spent.begin(limit)
        self.on_tools(session.session_id, limit)
        try:
            yield
        finally:
            spent.end()
            self.on_tools(session.session_id, None)

    # --- One rollout ------------------------------------------------------------------------------

    async def run(self, task: Task, session: SessionHandle) -> Result | Unjudged:
        """Waits for answers, tools and rewards; ended by its caller."""
        try:
            return await self._attempted(task, session)
        finally:
            self._in_tools.pop(session.session_id, None)

    async def _attempted(self, task: Task, session: SessionHandle) -> Result | Unjudged:
        async with AsyncExitStack() as open_now:
            stateful = self._class_of(task)
            episode = None if stateful is None else stateful.made()
            if episode is not None:
                open_now.push_async_callback(episode.close)
            with self._tools(session, self._servers.start_seconds):
                servers = await open_now.enter_async_context(self._servers.of_rollout())
            tools = [*self._functions, *(episode.tools if episode else []), *servers]
            seconds = self._section.tool_seconds
            slots = self._slots
            toolbox = Toolbox(tools, seconds=seconds, slots=slots, one_by_one=episode is not None)
            attempt = await self._begun(task, episode)
            await self._converse(attempt, session, toolbox)
            attempt.metrics |= toolbox.metrics() if tools else {}
            return await self._scored(attempt, episode)

    def _class_of(self, task: Task) -> StatefulClass | None:
        """Of several the one that the task's column `environment` names. `TaskFieldMissing` where
        it names none of them.
        """
        if len(self._classes) < 2:
            return next(iter(self._classes.values()), None)
        if (found := self._classes.get(str(task.data.get("environment")))) is None:
            names = ", ".join(self._classes)
            raise TaskFieldMissing(
                f"task {task.id} of {task.source} has {task.data.get('environment')!r} in the "
                f"column 'environment', which must name one of {names}: there are several "
                "environments with state; correct the row."
            )
        return found

    async def _begun(self, task: Task, episode: Episode | None) -> Dialogue:
        messages = task.messages
        if self._section.system and not any(
            message.get("role") in ("system", "developer") for message in messages
        ):
            system: dict[str, Json] = {"role": "system", "content": self._section.system}
            messages = [system, *messages]
        if episode is not None and (observation := await episode.reset(task)):
            messages = with_observation(messages, observation)
        return Dialogue(
            task, messages, len(messages), environment=None if episode is None else episode.instance
        )

    async def _converse(self, attempt: Dialogue, session: SessionHandle, toolbox: Toolbox) -> None:
        """Leaves the whole conversation in the attempt: until an answer calls no tool, `max_turns`,
        or the end of the context.
        """
        exhausted = False
        for turn in range(self._section.max_turns):
            message = await self._answer(attempt, session, toolbox, may_end=turn > 0)
            if message is None:
                break
            attempt.messages.append(message)
            calls = cast("Sequence[Mapping[str, Any]]", message.get("tool_calls") or ())
            exhausted = bool(calls) and turn + 1 == self._section.max_turns
            if not calls or exhausted:
                break
            with self._tools(
                session,
                UNLIMITED if self._slots.locked() else self._section.tool_seconds * len(calls),
            ):
                attempt.messages += await toolbox.run(calls)
        if toolbox.schemas:
            attempt.metrics["tools/exhausted"] = float(exhausted)

    async def _answer(
        self, attempt: Dialogue, session: SessionHandle, toolbox: Toolbox, *, may_end: bool
    ) -> dict[str, Json] | None:
        """The model's next message; none where the conversation fills the context, which ends it if
        something was said already.
        """
        body: dict[str, object] = {"model": "policy", "messages": attempt.messages}
        if toolbox.schemas:
            body["tools"] = toolbox.schemas
        if self._section.template_options:
            body["chat_template_kwargs"] = self._section.template_options
        if self._wants_ids:
            body["return_token_ids"] = True
        assert self._post is not None
        answered = await asked(self._post, session, msgspec.json.encode(body))
        if answered.status == 400 and may_end and b"context_length_exceeded" in answered.content:
            return None
        if answered.status != 200:
            raise EnvironmentFailed(
                f"the gateway answered {answered.status}: "
                f"{answered.content.decode(errors='replace')[:500]}"
            )
        (choice, *_) = msgspec.json.decode(answered.content)["choices"]
        attempt.completion_ids += choice.get("token_ids") or []
        kept = {name: value for name, value in choice["message"].items() if value not in (None, [])}
        return {**kept, "content": kept.get("content", "")}

    async def _scored(self, attempt: Dialogue, episode: Episode | None) -> Result | Unjudged:
        components = dict(await self.rewards.score(attempt))
        if episode is not None and episode.scores:
            values = {
                **attempt.columns,
                "task": attempt.task,
                "messages": attempt.messages,
                "completion": attempt.completion,
            }
            components |= _named("environment", await episode.reward(values, attempt.task))
        return await completed(self.rewards, attempt, components)

    async def judge(self, task: Task, attempts: Sequence[Unjudged], *, name: str) -> list[Result]:
        """What reward functions of a whole group say of its attempts."""
        return await judged(self.rewards, task, attempts)


async def completed(
    rewards: Rewards, attempt: Dialogue, components: Mapping[str, float | None]
) -> Result | Unjudged:
    """The result, or what is still to be judged beside the others of its group; here, where the
    environment's object is asked for.
    """
    checked = checked_result(Result(None, components), task=attempt.task).components
    if rewards.of_group and rewards.asks_for_episodes:
        checked = {**checked, **(await rewards.score_group([attempt]))[0]}
    elif rewards.of_group:
        return Unjudged(
            attempt.messages,
            attempt.num_prompt,
            attempt.completion_ids,
            dict(attempt.fields),
            dict(attempt.metrics),
            dict(checked),
        )
    return Result(rewards.total(checked), checked, attempt.metrics, (), attempt.fields)


async def judged(rewards: Rewards, task: Task, waiting: Sequence[Unjudged]) -> list[Result]:
    attempts = [
        Dialogue(
            task,
            each.messages,
            each.num_prompt,
            each.completion_ids,
            each.fields,
            None,
            dict(each.metrics),
        )
        for each in waiting
    ]
    results: list[Result] = []
    for each, attempt, found in zip(
        waiting, attempts, await rewards.score_group(attempts), strict=True
    ):
        components = checked_result(
            Result(None, {**each.components, **found}), task=task
        ).components
        results.append(
            Result(
                rewards.total(components),
                components,
                attempt.metrics,
                each.turns,
                attempt.fields,
                each.roles,
            )
        )
    return results


def _named(label: str, found: object) -> dict[str, Any]:
    """The components of what an environment's own reward returned, which is not checked yet."""
    if isinstance(found, Mapping):
        return {
            f"{label}/{name}": value
            for name, value in cast("Mapping[object, object]", found).items()
        }
    return {label: found}


# --- Environments with state ----------------------------------------------------------------------


NO_TOOLS = frozenset({"reset", "reward", "close"})


def is_stateful(found: object) -> bool:
    """Whether it is a class, or makes objects, of this shape."""
    return (
        inspect.isclass(found)
        and callable(getattr(found, "reset", None))
        and "__call__" not in vars(found)
    )


class StatefulClass:
    """One such class."""

    def __init__(self, found: type, *, where: str) -> None:
        """`ConfigError` names file, line and function if it cannot be used."""
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
        self.tools = [
            CallableTool.of(
                method,
                where=where,
                skip_self=not isinstance(
                    inspect.getattr_static(found, name), staticmethod | classmethod
                ),
            )
            for name, method in methods.items()
            if inspect.isroutine(method)
        ]
        self.scores = callable(getattr(found, "reward", None))

    def made(self) -> Episode:
        return Episode(self.found(), self)


class Episode:
    """An object of one rollout."""

    def __init__(self, instance: Any, of: StatefulClass) -> None:
        self.instance = instance
        self._of = of
        self.tools = [tool.bound_to(instance) for tool in of.tools]

    @property
    def scores(self) -> bool:
        return self._of.scores

    async def reset(self, task: Task) -> str | None:
        """Waits for it. What it returns is shown to the model after the prompt."""
        found = await called(self.instance.reset, {**task.data, "task": task}, task)
        return None if found is None else str(found)

    async def reward(self, values: Mapping[str, object], task: Task) -> object:
        """Waits for it; None where the class has none."""
        return await called(self.instance.reward, values, task) if self._of.scores else None

    async def close(self) -> None:
        """Waits for it, if there is one."""
        if callable(close := getattr(self.instance, "close", None)):
            await called(close, {}, None)


async def called(
    function: Callable[..., object], values: Mapping[str, object], task: Task | None
) -> object:
    """Calls it with those of the values that its parameters name. Waits for it, in a thread of its
    own if it is plain.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        arguments = dict(values)
    else:
        arguments = {p.name: values[p.name] for p in parameters if p.name in values}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in arguments
    ]
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


def with_observation(messages: list[dict[str, Json]], observation: str) -> list[dict[str, Json]]:
    """The conversation with what the environment showed at first, at the end of its last message if
    that is the user's.
    """
    if messages and messages[-1].get("role") == "user":
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{last.get('content') or ''}{observation}"}]
    return [*messages, {"role": "user", "content": observation}]
