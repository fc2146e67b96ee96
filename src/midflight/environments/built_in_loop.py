"""The built-in loop. It asks the task's prompt, calls the tools that the model calls, asks again,
and scores the conversation at its end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeAlias, cast

import msgspec

from midflight.config.environment import EnvironmentSection
from midflight.environments.mcp_servers import McpServers
from midflight.environments.processor_waits import current_waits
from midflight.environments.result_checks import UnscoredRollout, checked_result
from midflight.environments.reward_functions import Dialogue, Rewards
from midflight.environments.stateful import Episode, StatefulClass
from midflight.environments.tool_time import UNLIMITED, ToolTime
from midflight.environments.tools import CallableTool, Toolbox, ToolSource, load_tools
from midflight.errors import ConfigError, EnvironmentFailed, TaskFieldMissing
from midflight.ports import SessionHandle
from midflight.types import Json, Result, Task
from midflight.wire.client import HttpAnswer

TRIES = 3
"""The number of tries of a request that no engine could answer, as in the SDK."""
FULL = 429
"""The gateway has too many requests."""
AWAY = 503
"""No engine is there for the request."""
WAIT_SECONDS = 0.5
"""The wait before the second try. It grows by this much before each further one."""
LONGEST_WAIT_SECONDS = 8.0
PATH = "/v1/chat/completions"
TOOL_CONCURRENCY = 64
"""Calls of tools under way at once in one worker. More would ask much of the services behind
them.
"""

Post: TypeAlias = Callable[[str, bytes], Awaitable[HttpAnswer]]
"""Posts a body to a path of the gateway. Waits for the whole answer, or until its caller cancels
it.
"""


async def ask_with_retries(post: Post, session: SessionHandle, body: bytes) -> HttpAnswer:
    """The answer to a chat. Waits for it, and a little before each further try, or until its caller
    cancels it.
    """
    path = f"/s/{session.api_key}{PATH}"
    for number in itertools.count(1):
        answered = await post(path, body)
        if not is_worth_a_try(answered.status, number):
            return answered
        await asyncio.sleep(wait_seconds(number))
    raise AssertionError("the last try returns")


def is_worth_a_try(status: int, number: int) -> bool:
    """True if another request is worth a try after `number` tries. A full gateway is asked as long
    as it is full, because the rollout is not to blame for that.
    """
    return status == FULL or (status == AWAY and number < TRIES)


def wait_seconds(number: int) -> float:
    """Returns the seconds to wait after `number` tries before the next."""
    return min(LONGEST_WAIT_SECONDS, WAIT_SECONDS * number)


class BuiltInLoop:
    """Implements `AgentHost`. Its tools and rewards are checked when it is made; within `async
    with` it may run.
    """

    def __init__(
        self, section: EnvironmentSection, post: Post | None = None, *, stateful: type | None = None
    ) -> None:
        """Raises `ConfigError` with the parts that cannot be used. `stateful` is the class that
        `environment.entry` names, if it names one. `post` is needed to run.
        """
        self._section = section
        self._post = post
        self.rewards = Rewards(section.rewards, section.sandbox)
        found = load_tools(section.tools)
        if stateful is not None:
            found.append(stateful)
        where = "environment.tools" if stateful is None else "environment.entry"
        classes = [StatefulClass(each, where=where) for each in found if isinstance(each, type)]
        self._classes = {each.name: each for each in classes}
        if len(self._classes) < len(classes):
            raise ConfigError(
                f"environment.tools has two environments with state called {classes[0].name}; "
                "rename one."
            )
        self._functions = [each for each in found if isinstance(each, CallableTool)]
        self._check_names(self._functions)
        for each in classes:
            self._check_names(self._functions + each.tools)
        scores_itself = bool(classes) and all(each.scores for each in classes)
        if not self.rewards.functions and not scores_itself:
            raise ConfigError(
                "nothing scores the rollouts: name a function in [[environment.rewards]], or give "
                "the environment a `reward`."
            )
        self._servers = McpServers(section.mcp)
        self._slots = asyncio.Semaphore(TOOL_CONCURRENCY)
        self._wants_ids = self.rewards.asks_for("completion_ids")
        self._in_tools: dict[str, ToolTime] = {}
        """The time in tools of the rollouts that run."""
        self.on_tools: Callable[[str, float | None], None] = lambda session_id, limit: None
        """Called when a session's tools begin to run, with the seconds that they may take, and with
        None when they have ended.
        """

    @property
    def known_schemas(self) -> list[Mapping[str, Json]]:
        """The schemas of the tools that every conversation begins with, without those of servers,
        which are known when the servers run.
        """
        of_classes = [tool for each in self._classes.values() for tool in each.tools]
        return [tool.schema for tool in (*self._functions, *of_classes)]

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
        spent = self._in_tools.get(session_id)
        return 0.0 if spent is None else spent.seconds()

    @contextmanager
    def _tools(self, session: SessionHandle, limit: float) -> Generator[None]:
        """Counts the time within as time in tools, `limit` seconds at most."""
        spent = self._in_tools.setdefault(session.session_id, ToolTime(current_waits().seconds))
        spent.begin(limit)
        self.on_tools(session.session_id, limit)
        try:
            yield
        finally:
            spent.end()
            self.on_tools(session.session_id, None)

    # --- One rollout ------------------------------------------------------------------------------

    async def run(self, task: Task, session: SessionHandle) -> Result | UnscoredRollout:
        """Waits for answers, tools and rewards, or until its caller cancels it."""
        try:
            return await self._attempted(task, session)
        finally:
            self._in_tools.pop(session.session_id, None)

    async def _attempted(self, task: Task, session: SessionHandle) -> Result | UnscoredRollout:
        async with AsyncExitStack() as open_now:
            stateful = self._class_of(task)
            episode = None if stateful is None else stateful.made()
            if episode is not None:
                open_now.push_async_callback(episode.close)
            with self._tools(session, self._servers.start_seconds):
                servers = await open_now.enter_async_context(self._servers.of_rollout())
            tools: list[ToolSource] = list(self._functions)
            if episode is not None:
                tools += episode.tools
            tools += servers
            toolbox = Toolbox(
                tools,
                seconds=self._section.tool_seconds,
                slots=self._slots,
                one_by_one=episode is not None,
            )
            attempt = await self._begun(task, episode)
            await self._converse(attempt, session, toolbox)
            if tools:
                attempt.metrics |= toolbox.metrics()
            return await self._scored(attempt, episode)

    def _class_of(self, task: Task) -> StatefulClass | None:
        """Returns the class of a task's environment. If there are several, the task's column
        `environment` names it; raises `TaskFieldMissing` if it names none of them.
        """
        if len(self._classes) < 2:
            return next(iter(self._classes.values()), None)
        found = self._classes.get(str(task.data.get("environment")))
        if found is None:
            names = ", ".join(self._classes)
            raise TaskFieldMissing(
                f"task {task.id} of {task.source} has {task.data.get('environment')!r} in the "
                f"column 'environment', which must name one of {names}: there are several "
                "environments with state; correct the row."
            )
        return found

    async def _begun(self, task: Task, episode: Episode | None) -> Dialogue:
        messages = task.messages
        if episode is None:
            return Dialogue(task, messages, len(messages))
        observation = await episode.reset(task)
        if observation:
            messages = with_observation(messages, observation)
        return Dialogue(task, messages, len(messages), environment=episode.instance)

    async def _converse(self, attempt: Dialogue, session: SessionHandle, toolbox: Toolbox) -> None:
        """Leaves the whole conversation in the attempt. It goes on until an answer calls no tool,
        until `max_turns`, or until the end of the context.
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
            limit = self._section.tool_seconds * len(calls)
            if self._slots.locked():
                limit = UNLIMITED  # the calls wait in a queue
            with self._tools(session, limit):
                attempt.messages += await toolbox.run(calls)
        if toolbox.schemas:
            attempt.metrics["tools/exhausted"] = float(exhausted)

    async def _answer(
        self, attempt: Dialogue, session: SessionHandle, toolbox: Toolbox, *, may_end: bool
    ) -> dict[str, Json] | None:
        """The model's next message. It is None if the conversation fills the context, which ends
        the conversation if it has an answer already.
        """
        body: dict[str, object] = {"model": "policy", "messages": attempt.messages}
        if toolbox.schemas:
            body["tools"] = toolbox.schemas
        if self._section.template_options:
            body["chat_template_kwargs"] = self._section.template_options
        if self._wants_ids:
            body["return_token_ids"] = True
        assert self._post is not None
        answered = await ask_with_retries(self._post, session, msgspec.json.encode(body))
        if answered.status == 400 and may_end and b"context_length_exceeded" in answered.content:
            return None
        if answered.status != 200:
            said = answered.content.decode(errors="replace")[:500]
            raise EnvironmentFailed(f"the gateway answered {answered.status}: {said}")
        (choice, *_) = msgspec.json.decode(answered.content)["choices"]
        attempt.completion_ids += choice.get("token_ids") or []
        kept = {name: value for name, value in choice["message"].items() if value not in (None, [])}
        return {**kept, "content": kept.get("content", "")}

    async def _scored(self, attempt: Dialogue, episode: Episode | None) -> Result | UnscoredRollout:
        components = dict(await self.rewards.score(attempt))
        if episode is not None and episode.scores:
            values = {
                **attempt.columns,
                "task": attempt.task,
                "messages": attempt.messages,
                "completion": attempt.completion,
            }
            components |= _named("environment", await episode.reward(values, attempt.task))
        return await complete_result(self.rewards, attempt, components)

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> list[Result]:
        """The results of a group's attempts, from the reward functions of whole groups."""
        return await group_results(self.rewards, task, attempts)


async def complete_result(
    rewards: Rewards, attempt: Dialogue, components: Mapping[str, float | None]
) -> Result | UnscoredRollout:
    """The result, or the attempt that is still to be judged beside the others of its group. It is
    judged here if a function asks for the environment's object.
    """
    checked = dict(checked_result(Result(None, components), task=attempt.task).components)
    if rewards.of_group and rewards.asks_for_episodes:
        (found,) = await rewards.score_group([attempt])
        checked.update(found)
    elif rewards.of_group:
        return UnscoredRollout(
            attempt.messages,
            attempt.num_prompt,
            attempt.completion_ids,
            dict(attempt.fields),
            dict(attempt.metrics),
            checked,
        )
    return Result(rewards.total(checked), checked, attempt.metrics, (), attempt.fields)


async def group_results(
    rewards: Rewards, task: Task, waiting: Sequence[UnscoredRollout]
) -> list[Result]:
    """The results of attempts that waited to be judged together."""
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
    scored = await rewards.score_group(attempts)
    results: list[Result] = []
    for each, attempt, found in zip(waiting, attempts, scored, strict=True):
        unchecked = Result(None, {**each.components, **found})
        components = checked_result(unchecked, task=task).components
        result = Result(
            rewards.total(components),
            components,
            attempt.metrics,
            each.turns,
            attempt.fields,
            each.roles,
        )
        results.append(result)
    return results


def _named(label: str, found: object) -> dict[str, Any]:
    """Returns the components in the return value of an environment's own reward. They are not
    checked yet.
    """
    if not isinstance(found, Mapping):
        return {label: found}
    parts = cast("Mapping[object, object]", found)
    return {f"{label}/{name}": value for name, value in parts.items()}


def with_observation(messages: list[dict[str, Json]], observation: str) -> list[dict[str, Json]]:
    """Returns the conversation with the environment's first observation. It is added to the last
    message if that is the user's.
    """
    if not messages or messages[-1].get("role") != "user":
        return [*messages, {"role": "user", "content": observation}]
    last = dict(messages[-1])
    last["content"] = f"{last.get('content') or ''}{observation}"
    return [*messages[:-1], last]
