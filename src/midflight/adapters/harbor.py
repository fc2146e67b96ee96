"""Tasks in Harbor's folders: an instruction, an environment, and tests that score the agent's work.

The agent works in a box. Tests run in it afterwards, and the reward that they write is that of the
rollout. With docker a box is built from the task's Dockerfile. Elsewhere nothing can be built, so
that only the files that a Dockerfile copies are there.
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
from midflight.adapters.games import ask_model, settings
from midflight.entries import load_entry
from midflight.environments.result_checks import number_in
from midflight.environments.sandboxes.choice import sandbox
from midflight.environments.sandboxes.port import Box, BoxSetup
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
    """A task in its folder."""

    folder: Path
    instruction: str
    furnished: BoxSetup
    memory_mb: int
    verifier_seconds: float
    variables: dict[str, str]
    """The environment variables of its tests."""

    @classmethod
    def of(cls, folder: Path, kind: str) -> "HarborTask":
        """Returns the task in a folder. Raises `ConfigError` with the parts that it lacks, or that
        a box of this kind cannot give.
        """
        said = f"the task of Harbor in {folder}"
        if not (folder / "instruction.md").is_file():
            raise ConfigError(f"{said} has no instruction.md, so nothing is asked; add it.")
        if not (folder / "tests/test.sh").is_file():
            raise ConfigError(f"{said} has no tests/test.sh, so nothing scores it; add it.")
        try:
            options = tomllib.loads((folder / "task.toml").read_text())
        except ValueError as error:
            raise ConfigError(
                f"{said} has a task.toml that cannot be read: {error}; correct it."
            ) from None
        verifier = options.get("verifier", {})
        agent = options.get("agent", {})
        machine = options.get("environment", {})
        variables = {**machine.get("env", {}), **verifier.get("env", {})}
        secret = [name for name, value in variables.items() if "${" in str(value)]
        if secret:
            raise ConfigError(
                f"{said} wants {secret[0]} of our environment, which no sandbox is given; write "
                "its value."
            )
        has_containers = (folder / "environment/docker-compose.yaml").exists()
        if options.get("steps") or has_containers or machine.get("gpus"):
            raise ConfigError(
                f"{said} has several steps, several containers, or a GPU, which is not played "
                "here; leave it out."
            )
        verifier_seconds = float(verifier.get("timeout_sec", 600.0))
        agent_seconds = float(agent.get("timeout_sec", 600.0))
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
            replace(furnished, seconds=verifier_seconds + agent_seconds),
            int(machine.get("memory_mb", 2048)),
            verifier_seconds,
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
    `[environment.sandbox]`; one on this machine is tried. `agent` names an `async (task, client, box)` of one's own. Without it
    the agent is a chat of `turns` answers at most, whose scripts may take `seconds` each. Raises
    `ConfigError` with a task that cannot be played, or if this machine cannot isolate.
    """
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
    rows: list[dict[str, Json]] = []
    for folder in found:
        question = begin + HarborTask.of(folder, kind).instruction
        key = str(folder)
        rows.append({"question": question, "key": key, NAME: {**told, "folder": key}})
    if kind == "bubblewrap":
        _made(sandbox or {})  # else each rollout would find that it cannot isolate
    return rows


async def play(task: Task, client: Any) -> Result:
    """Plays one task. Waits for the agent and for the tests, or until its caller cancels it."""
    told = settings(task, NAME)
    found = HarborTask.of(Path(told["folder"]), told["sandbox"].get("kind", "bubblewrap"))
    run: Any = chat
    if told["agent"]:
        run = load_entry(told["agent"], option="agent", such_as="my_agent:work")
    options = {"memory_mb": found.memory_mb, "disk_mb": 256, **told["sandbox"]}
    async with _sandbox(json.dumps(options)).opened(found.furnished) as box:
        await run(task, client, box)
        return await _scored(f"task {task.id} of {task.source} ({found.folder.name})", found, box)


async def chat(task: Task, client: Any, box: Box) -> None:
    """The agent of this adapter. Waits for answers and scripts."""
    told = settings(task, NAME)
    messages = list[dict[str, Json]](task.messages)
    for _ in range(int(told["turns"])):
        said = await ask_model(client, messages) or {}
        script = re.search(r"```(?:bash|sh)?\n(.*?)```", str(said.get("content")), re.DOTALL)
        if script is None:
            return
        ran = await box.run(["bash", "-c", script[1]], seconds=float(told["seconds"]))
        ended = f"exit status {ran.status}"
        if ran.ended_by:
            ended = f"ended by its limit of {ran.ended_by}"
        messages.append(said)
        output = f"{ran.stdout[-4000:]}{ran.stderr[-4000:]}\n({ended})"
        messages.append({"role": "user", "content": output})


async def _scored(said: str, found: HarborTask, box: Box) -> Result:
    """Runs the tests, and waits for them. First they remove any files that the agent has put into
    their place or that of their rewards.
    """
    own = f"{TESTS}/{secrets.token_hex(8)}"
    folder = found.folder / "tests"
    tests = {f"{own}/{file.relative_to(folder)}": file.read_bytes() for file in files_in(folder)}
    command = ["env"]
    command += [f"{name}={value}" for name, value in found.variables.items()]
    command += ["sh", "-c", TESTED, "sh", own]
    ran = await box.run(command, files=tests, seconds=found.verifier_seconds)
    written = await box.run(
        ["sh", "-c", f"cd {REWARDS} && cat reward.json; printf '\\0'; cat reward.txt"]
    )
    parts, _, text = (part.strip() for part in written.stdout.partition("\0"))
    if ran.ended_by or not (parts or text):
        why = "wrote neither reward.txt nor reward.json"
        if ran.ended_by:
            why = f"were ended by their limit of {ran.ended_by}"
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
    total = sum(numbers.values())
    if text:
        total = number_in(given, f"scoring {said}: reward.txt")
    return Result(numbers.get("reward", total), components=numbers)


@lru_cache(maxsize=64)
def _sandbox(options: str) -> Any:
    """The sandbox of these options, as JSON, shared by all rollouts that want the same."""
    return _made(json.loads(options))


def _made(options: dict[str, Json]) -> Any:
    """A sandbox of these options. Raises `ConfigError` for one without boxes, or if this machine
    cannot isolate.
    """
    made = sandbox(**options)
    if not hasattr(made, "opened"):
        raise ConfigError(
            "tasks of Harbor need a sandbox with boxes: bubblewrap, docker, e2b, daytona or modal; "
            "name one in sandbox.kind."
        )
    return made
