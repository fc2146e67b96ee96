"""Tasksets of the package verifiers (0.4): their tasks are a source, an episode is a rollout, and the parts of their rubric are components.

An episode runs as verifiers runs it, with its proxy between agent and gateway. Only the agent of a taskset that names none is ours: a chat in
this process, where verifiers would start a program for each rollout.
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
CHAT = "midflight_chat"
"""What verifiers knows our agent by: it takes agents from modules, by names without a dot."""


def tasks(
    taskset: str,
    size: int = 1000,
    harness: str = "",
    runtime: str = "subprocess",
    options: dict[str, Json] | None = None,
    env: str = "",
) -> list[dict[str, Json]]:
    """At most `size` tasks of the taskset of that id, whose own options are `options`. `harness` is the agent's program, by default that of
    the taskset, else ours; `env` is another environment to play it in. `ConfigError` where it cannot be trained."""
    told: dict[str, Json] = {"taskset": taskset, "size": size, "harness": harness, "runtime": runtime, "options": options or {}, "env": env}
    _, found = _opened(json.dumps(told))
    return [{"question": each.data.prompt_text, "key": each.key, "number": number, NAME: told} for number, each in enumerate(found)]


async def play(task: Task, client: Any) -> Result:
    """One episode. Waits for it; ended by its caller."""
    environment, found = cast(Any, await in_thread(lambda: _opened(json.dumps(settings(task, NAME)))))  # seconds, the first time
    vf = package("verifiers.v1", extra=NAME)
    # Its serving resources are those of this episode: with a client for each address they would pile up in one that lives on.
    environment = copy.copy(environment)
    endpoint = vf.EvalClientConfig(base_url=str(client.base_url), api_key_var="MIDFLIGHT_NO_KEY")
    async with environment.serving():
        episode = await environment.run_episode(found[cast(int, task.data["number"])], vf.ModelContext(model="policy", client=endpoint))
    return _result(task, episode)


def _result(task: Task, episode: Any) -> Result:
    said = f"task {task.id} of {task.source}: the episode of {episode.env.id}"
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EnvironmentFailed(f"{said} failed: {'; '.join(f'{e.type}: {e.message}' for e in errors) or 'it says not why'}"[:2000])
    (trace,) = episode.traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        raise EnvironmentFailed(f"{said} gave no reward{f' for {unscored[0]!r}' if unscored else ''}, so it cannot be scored.")
    components = {name: float(reward.value) for name, reward in trace.rewards.items()}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    messages = [message.model_dump(mode="json", exclude_none=True) for message in trace.messages]
    return Result(sum(components.values()), components=components, metrics=metrics, fields={"messages": cast(Json, messages)})


# --- The taskset -------------------------------------------------------------------------------------------------------


_opening = Lock()


def _opened(told: str) -> tuple[Any, Sequence[Any]]:
    """The environment, and its tasks: once in a process, whichever thread asks. `ConfigError` names what cannot be used."""
    with _opening:
        return _made(told)


@lru_cache(maxsize=16)
def _made(told: str) -> tuple[Any, Sequence[Any]]:
    options = json.loads(told)
    vf, loaders = package("verifiers.v1", extra=NAME), package("verifiers.v1.utils.loaders", extra=NAME)
    name = options["taskset"]
    try:
        _register_chat(vf)
        kind = loaders.env_config_type(name, options["env"])
        (seat, *others) = package("verifiers.v1.configs.agent", extra=NAME).agent_config_fields(kind())
        if others:
            raise ConfigError(
                f"the environment of {name!r} has the agents {', '.join([seat, *others])}, and all would be trained as one; name one of a single agent."
            )
        own = loaders.default_harness_id(name)
        harness = options["harness"] or (CHAT if own == "bash" else own)
        agent = {"harness": {"id": harness}, "runtime": {"type": options["runtime"]}}
        taskset = {"id": name, **options["options"]}
        made = loaders.load_environment(loaders.resolve_env_config({"id": options["env"], "taskset": taskset, seat: agent}))
        found = list(islice(made.taskset, options["size"]))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"verifiers makes nothing of the taskset {name!r}: {type(error).__name__}: {error}; install its package beside "
            "midflight[verifiers], or change the source's options."
        ) from error
    if not found:
        raise ConfigError(f"the taskset {name!r} has no tasks; change its options.")
    scores_itself = type(made).run is not loaders.SingleAgentEnv.run or type(made).finalize is not loaders.SingleAgentEnv.finalize
    if not (scores_itself or found[0].hooks("reward") or found[0].config.judges):
        raise ConfigError(
            f"the taskset {name!r} has no rewards, so there is nothing to learn from; add one: options.options.task.rewards, or a method "
            "with @vf.reward in its task."
        )
    return made, found


def _register_chat(vf: Any) -> None:
    """Our agent: asks what the task asks, and what a user says after that. What the task's tools are it does not know."""
    if CHAT in sys.modules:
        return
    wire = package("verifiers.v1.dialects.chat", extra=NAME).message_to_wire
    result = package("verifiers.v1.runtimes", extra=NAME).ProgramResult

    async def launch(self: Any, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any) -> Any:
        """Waits for one answer, which verifiers records; ended by its caller."""
        del trace, runtime, mcp_urls
        system, prompt = self.resolve_prompt(data)
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [wire(message) for message in prompt]
        messages = [*([{"role": "system", "content": system}] if system else []), *asked]
        body, headers = {"model": ctx.model, "messages": messages}, {"authorization": f"Bearer {secret}"}
        async with (
            ClientSession(timeout=ClientTimeout(total=None)) as http,
            http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answered,
        ):
            error = "" if answered.status == 200 else await answered.text()
        return result(exit_code=int(bool(error)), stdout="", stderr=error)

    flags = {"APPENDS_SYSTEM_PROMPT": True, "SUPPORTS_RESUME": True, "EXECUTES_CODE": False, "NEEDS_CONTAINER": False}
    base = vf.Harness[vf.HarnessConfig]
    module: Any = ModuleType(CHAT)
    module.ChatHere = new_class("ChatHere", (base,), exec_body=lambda space: space.update({**flags, "launch": launch}))
    module.__all__ = ["ChatHere"]
    sys.modules[CHAT] = module
