"""Tasksets of the package verifiers (0.4). Their tasks are a source, an episode is a rollout, and
the parts of their rubric are components.

An episode runs as verifiers runs it, with its proxy between agent and gateway. Only the agent of a
taskset that names none is ours: it is a chat in this process, where verifiers would start a program
for each rollout.
"""

import copy
import json
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from threading import Lock
from types import ModuleType, new_class
from typing import Any, cast

from aiohttp import ClientSession, ClientTimeout

from midflight.adapters.games import settings
from midflight.entries import package
from midflight.environments.agents import in_thread
from midflight.errors import ConfigError, EnvironmentFailed
from midflight.types import Json, Result, Task

NAME = "verifiers"
CHAT = "midflight_chat"  # verifiers takes agents from modules, by names without a dot


def tasks(
    taskset: str,
    size: int = 1000,
    harness: str = "",
    runtime: str = "subprocess",
    options: dict[str, Json] | None = None,
    env: str = "",
) -> list[dict[str, Json]]:
    """Returns at most `size` tasks of the taskset of that id, whose own options are `options`.
    `harness` is the agent's program, by default that of the taskset, or else ours. `env` is another
    environment to play it in. Raises `ConfigError` if it cannot be trained.
    """
    told: dict[str, Json] = {
        "taskset": taskset,
        "harness": harness,
        "runtime": runtime,
        "options": options or {},
        "env": env,
    }
    _, found = _opened(json.dumps(told), size)
    return [
        {
            "question": each.data.prompt_text,
            "key": each.key,
            "data": each.data.model_dump(mode="json"),
            NAME: told,
        }
        for each in found
    ]


async def play(task: Task, client: Any) -> Result:
    """Plays one episode. Waits for it, or until its caller cancels it."""
    told = json.dumps(settings(task, NAME))
    # The first time this takes seconds.
    environment, _ = cast(Any, await in_thread(lambda: _opened(told, 0)))
    vf = package("verifiers.v1", extra=NAME)
    # Its serving resources are those of this episode: with a client for each address they would
    # pile up in one that lives on.
    environment = copy.copy(environment)
    kind = type(environment.taskset).task_type()
    # Verifiers' own server does the same.
    own = kind(kind.data_type().model_validate(task.data["data"]), environment.config.taskset.task)
    endpoint = vf.EvalClientConfig(base_url=str(client.base_url), api_key_var="MIDFLIGHT_NO_KEY")
    context = vf.ModelContext(model="policy", client=endpoint)
    async with environment.serving():
        episode = await environment.run_episode(own, context)
    return _result(task, episode)


def _result(task: Task, episode: Any) -> Result:
    said = f"task {task.id} of {task.source}: the episode of {episode.env.id}"
    if not episode.ok:
        errors = list(episode.errors)
        for trace in episode.traces:
            errors += trace.errors
        why = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise EnvironmentFailed(f"{said} failed: {why or 'it says not why'}"[:2000])
    (trace,) = episode.traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        part = f" for {unscored[0]!r}" if unscored else ""
        raise EnvironmentFailed(f"{said} gave no reward{part}, so it cannot be scored.")
    components: dict[str, float] = {}
    measured: dict[str, Any] = dict(trace.metrics)
    for name, reward in trace.rewards.items():
        if reward.weight:
            components[name] = float(reward.value)
        else:
            measured[name] = reward.score
    metrics = {name: float(value) for name, value in measured.items() if value is not None}
    messages = [message.model_dump(mode="json", exclude_none=True) for message in trace.messages]
    return Result(
        sum(components.values()),
        components=components,
        metrics=metrics,
        fields={"messages": cast(Json, messages)},
    )


_opening = Lock()


def _opened(told: str, size: int) -> tuple[Any, Sequence[Any]]:
    """The environment, and `size` of its tasks, made once in a process. Agents ask for no tasks,
    because theirs is in its row. Raises `ConfigError` with the options that cannot be used.
    """
    with _opening:
        return _made(told, size)


@lru_cache(maxsize=16)
def _made(told: str, size: int) -> tuple[Any, Sequence[Any]]:
    options = json.loads(told)
    vf = package("verifiers.v1", extra=NAME)
    loaders = package("verifiers.v1.utils.loaders", extra=NAME)
    name = options["taskset"]
    try:
        _prepare(vf)
        kind = loaders.env_config_type(name, options["env"])
        configs = package("verifiers.v1.configs.agent", extra=NAME)
        seats = list(configs.agent_config_fields(kind()))
        if len(seats) > 1:
            raise ConfigError(
                f"the environment of {name!r} has the agents {', '.join(seats)}, and all "
                "would be trained as one; name one of a single agent."
            )
        (seat,) = seats
        own = loaders.default_harness_id(name)
        harness = options["harness"] or (CHAT if own == "bash" else own)
        agent = {"harness": {"id": harness}, "runtime": {"type": options["runtime"]}}
        taskset = {"id": name, **options["options"]}
        config = {"id": options["env"], "taskset": taskset, seat: agent}
        made = loaders.load_environment(loaders.resolve_env_config(config))
        found = list(islice(made.taskset, size))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"verifiers makes nothing of the taskset {name!r}: {type(error).__name__}: {error}; "
            "install its package beside midflight[verifiers], or change the source's options."
        ) from error
    if not size:
        return made, found
    if not found:
        raise ConfigError(f"the taskset {name!r} has no tasks; change its options.")
    fields = type(found[0].data).model_fields
    hidden = [field for field, about in fields.items() if about.exclude]
    if hidden:
        raise ConfigError(
            f"tasks of {name!r} leave {', '.join(hidden)} out of what is written of them, so "
            "agents would not have it."
        )
    scores_itself = (
        type(made).run is not loaders.SingleAgentEnv.run
        or type(made).finalize is not loaders.SingleAgentEnv.finalize
    )
    if not (scores_itself or found[0].hooks("reward") or found[0].config.judges):
        raise ConfigError(
            f"the taskset {name!r} has no rewards, so there is nothing to learn from; add one: "
            "options.options.task.rewards, or a method with @vf.reward in its task."
        )
    return made, found


def _prepare(vf: Any) -> None:
    """Registers our agent, which sends the task's prompt and has no tools. It also lets all clients
    share one set of trusted certificates, because reading them takes as long as an episode.
    """
    if CHAT in sys.modules:
        return
    clients = package("verifiers.v1.clients.eval", extra=NAME)
    http = package("httpx", extra=NAME)

    def client(config: Any, trust: Any = http.create_ssl_context()) -> Any:
        return http.AsyncClient(timeout=http.Timeout(**config.timeout.model_dump()), verify=trust)

    clients.build_async_httpx = client
    wire = package("verifiers.v1.dialects.chat", extra=NAME).message_to_wire
    result = package("verifiers.v1.runtimes", extra=NAME).ProgramResult

    async def launch(
        self: Any,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Waits for one answer, which verifiers records, or until its caller cancels it."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [wire(message) for message in prompt]
        asking: dict[str, Any] = {
            "json": {"model": ctx.model, "messages": messages},
            "headers": {"authorization": f"Bearer {secret}"},
        }
        async with (
            ClientSession(timeout=ClientTimeout(total=None)) as chat,
            chat.post(f"{endpoint}/chat/completions", **asking) as answered,
        ):
            error = "" if answered.status == 200 else await answered.text()
        return result(exit_code=int(bool(error)), stdout="", stderr=error)

    own = {
        "APPENDS_SYSTEM_PROMPT": True,
        "SUPPORTS_RESUME": True,
        "EXECUTES_CODE": False,
        "NEEDS_CONTAINER": False,
        "launch": launch,
    }
    module: Any = ModuleType(CHAT)
    module.ChatHere = new_class(
        "ChatHere", (vf.Harness[vf.HarnessConfig],), exec_body=lambda space: space.update(own)
    )
    module.__all__ = ["ChatHere"]
    sys.modules[CHAT] = module
