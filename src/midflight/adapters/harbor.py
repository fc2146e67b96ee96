"""Tasks in Harbor's folders: an instruction, an environment, and tests that say what the agent's
work is worth.

The agent works in a box, tests run in it afterwards, and what they write as reward is the
rollout's. With docker a box is built of the task's Dockerfile. Elsewhere there is nothing to build
with, so only what a Dockerfile copies can be had.
"""

import json
import re
import secrets
import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from midflight.adapters.dockerfile import files_in, furnished_by
from midflight.adapters.games import answered, settings
from midflight.entries import load_entry
from midflight.environments.sandboxes.choice import sandbox
from midflight.environments.sandboxes.port import Box, Furnished
from midflight.environments.scoring import number_in
from midflight.errors import ConfigError, EnvironmentFailed
from midflight.types import Json, Result, Task

NAME = "harbor"
TESTS = "/tests"
REWARDS = "/logs/verifier"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
TESTED = f"""find {TESTS} -mindepth 1 -maxdepth 1 ! -path "$1" -exec rm -rf {{}} + && find "$1" -mindepth 1 -maxdepth 1 -exec mv {{}} {TESTS} ";"
rm -rf {REWARDS} && mkdir -p {REWARDS} && bash {TESTS}/test.sh"""
ASKED = (
    "You work in a shell of Linux. Each of your answers has one script in a ```bash block; you "
    "are shown what it says. Answer without a block when the work is done.\n\n"
)


@dataclass(frozen=True, slots=True)
class HarborTask:
    folder: Path
    instruction: str
    furnished: Furnished
    memory_mb: int
    verifier_seconds: float
    variables: dict[str, str]
    """Of the environment of its tests."""

    @classmethod
    def of(cls, folder: Path, kind: str) -> "HarborTask":
        """`ConfigError` names what it lacks, or what a box of this kind cannot give."""
        said = f"the task of Harbor in {folder}"
        for name in ("instruction.md", "tests/test.sh"):
            if not (folder / name).is_file():
                raise ConfigError(
                    f"{said} has no {name}, so "
                    f"{'nothing scores it' if 'test' in name else 'nothing is asked'}; add it."
                )
        try:
            options = tomllib.loads((folder / "task.toml").read_text())
        except ValueError as error:
            raise ConfigError(
                f"{said} has a task.toml that cannot be read: {error}; correct it."
            ) from None
        verifier, agent, machine = (
            options.get(name, {}) for name in ("verifier", "agent", "environment")
        )
        variables = {**machine.get("env", {}), **verifier.get("env", {})}
        if secret := [name for name, value in variables.items() if "${" in str(value)]:
            raise ConfigError(
                f"{said} wants {secret[0]} of our environment, which no sandbox is given; write "
                "its value."
            )
        if (
            options.get("steps")
            or (folder / "environment/docker-compose.yaml").exists()
            or machine.get("gpus")
        ):
            raise ConfigError(
                f"{said} has several steps, several containers, or a GPU, which is not played "
                "here; leave it out."
            )
        seconds = (
            float(verifier.get("timeout_sec", 600.0)),
            float(agent.get("timeout_sec", 600.0)),
        )
        furnished = furnished_by(
            folder / "environment",
            said,
            image=machine.get("docker_image", ""),
            kind=kind,
            beside=(TESTS, REWARDS),
        )
        return cls(
            folder,
            (folder / "instruction.md").read_text(),
            replace(furnished, seconds=sum(seconds)),
            int(machine.get("memory_mb", 2048)),
            seconds[0],
            variables,
        )


def tasks(
    path: str,
    size: int = 1000,
    agent: str = "",
    turns: int = 20,
    seconds: float = 60.0,
    sandbox: dict[str, Json] | None = None,
) -> list[dict[str, Json]]:
    """At most `size` of the tasks in the folders of `path`. `sandbox` has the options of
    `[environment.sandbox]`. `agent` names an `async (task, client, box)` of one's own; else a chat
    of `turns` answers at most, whose scripts may take `seconds` each. `ConfigError` names a task
    that cannot be played."""
    if not Path(path).is_dir():
        raise ConfigError(f"there is no folder {path!r} with tasks of Harbor; correct path.")
    found = sorted(file.parent for file in Path(path).resolve().glob("**/task.toml"))[:size]
    if not found:
        raise ConfigError(
            f"no folder in {path!r} has a task.toml, so none is a task of Harbor; correct path."
        )
    told: dict[str, Json] = {
        "agent": agent,
        "turns": turns,
        "seconds": seconds,
        "sandbox": sandbox or {},
    }
    kind = str((sandbox or {}).get("kind", "bubblewrap"))
    begin = "" if agent else ASKED
    return [
        {
            "question": begin + HarborTask.of(each, kind).instruction,
            "key": str(each),
            NAME: {**told, "folder": str(each)},
        }
        for each in found
    ]


async def play(task: Task, client: Any) -> Result:
    """One task. Waits for the agent and for the tests; ended by its caller."""
    told = settings(task, NAME)
    found = HarborTask.of(Path(told["folder"]), told["sandbox"].get("kind", "bubblewrap"))
    run = (
        load_entry(told["agent"], option="agent", such_as="my_agent:work")
        if told["agent"]
        else chat
    )
    async with _sandbox(
        json.dumps({"memory_mb": found.memory_mb, "disk_mb": 256, **told["sandbox"]})
    ).opened(found.furnished) as box:
        await cast(Any, run)(task, client, box)
        return await _scored(f"task {task.id} of {task.source} ({found.folder.name})", found, box)


async def chat(task: Task, client: Any, box: Box) -> None:
    """Our agent. Waits for answers and scripts."""
    told = settings(task, NAME)
    messages = list[dict[str, Json]](task.messages)
    for _ in range(int(told["turns"])):
        said = await answered(client, messages) or {}
        if (
            script := re.search(r"```(?:bash|sh)?\n(.*?)```", str(said.get("content")), re.DOTALL)
        ) is None:
            return
        ran = await box.run(["bash", "-c", script[1]], seconds=float(told["seconds"]))
        ended = (
            f"ended by its limit of {ran.ended_by}" if ran.ended_by else f"exit status {ran.status}"
        )
        messages.append(said)
        messages.append(
            {"role": "user", "content": f"{ran.stdout[-4000:]}{ran.stderr[-4000:]}\n({ended})"}
        )


async def _scored(said: str, found: HarborTask, box: Box) -> Result:
    """Waits for the tests. What the agent has put where they and their rewards go, goes first."""
    own = f"{TESTS}/{secrets.token_hex(8)}"
    tests = {
        f"{own}/{file.relative_to(found.folder / 'tests')}": file.read_bytes()
        for file in files_in(found.folder / "tests")
    }
    command = [
        "env",
        *(f"{name}={value}" for name, value in found.variables.items()),
        "sh",
        "-c",
        TESTED,
        "sh",
        own,
    ]
    ran = await box.run(command, files=tests, seconds=found.verifier_seconds)
    written = await box.run(
        ["sh", "-c", f"cd {REWARDS} && cat reward.json; printf '\\0'; cat reward.txt"]
    )
    parts, _, text = (part.strip() for part in written.stdout.partition("\0"))
    if ran.ended_by or not (parts or text):
        why = (
            f"were ended by their limit of {ran.ended_by}"
            if ran.ended_by
            else "wrote neither reward.txt nor reward.json"
        )
        raise EnvironmentFailed(
            f"scoring {said}: its tests {why}, so nobody knows what it is worth: "
            f"{(ran.stdout + ran.stderr)[-1000:]}"
        )
    given: object = float(text) if NUMBER.fullmatch(text) else text
    try:
        components = cast("dict[str, object]", json.loads(parts)) if parts else {"reward": given}
        numbers = {
            name: number_in(value, f"scoring {said}: the reward {name!r}")
            for name, value in components.items()
        }
    except (ValueError, AttributeError):
        numbers = {}
    if not numbers:
        raise EnvironmentFailed(
            f"scoring {said}: reward.json was {parts!r:.200}, expected an object of numbers."
        )
    total = numbers.get(
        "reward", number_in(given, f"scoring {said}: reward.txt") if text else sum(numbers.values())
    )
    return Result(total, components=numbers)


@lru_cache(maxsize=64)
def _sandbox(options: str) -> Any:
    """The same for all rollouts that want the same. `ConfigError` for one without boxes."""
    made = sandbox(**json.loads(options))
    if not hasattr(made, "opened"):
        raise ConfigError(
            "tasks of Harbor need a sandbox with boxes: bubblewrap, docker, e2b, daytona or modal; "
            "name one in sandbox.kind."
        )
    return made
