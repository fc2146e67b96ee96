"""A scripted model that does a task in any agent's own tools: it looks for the tool that runs
commands among those that the prompt offers, and writes its commands into it.

Give it to `Replies` as its rule. An agent that has a shell, which nearly every coding agent has,
then works with it as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from midflight.errors import RequestRejected
from midflight.types import Json

_Schema = Mapping[str, Json]

_TURN = re.compile(r"<\|(user|assistant|tool|system)\|>(.*?)(?=<\|end\|>|$)", re.DOTALL)
_WRITTEN = ("command", "cmd", "commands", "script", "shell_command", "code", "input")
"""The names under which tools take a command, the likeliest first."""
_RUNS = ("bash", "shell", "terminal", "exec", "run", "command", "execute")
"""Words in the names of tools that run commands, the likeliest first."""


@dataclass(frozen=True, slots=True)
class OfferedShell:
    """The tool of an agent that runs commands."""

    name: str
    parameter: str
    """The parameter that takes the command."""
    schema: _Schema

    def call(self, command: str) -> str:
        """A call of the tool, in the form that scripted models write. What else the tool requires
        gets the plainest value that its schema allows.
        """
        properties = _of(self.schema, "properties")
        is_list = _of(properties, self.parameter).get("type") == "array"
        arguments: dict[str, Json] = {
            self.parameter: ["bash", "-lc", command] if is_list else command
        }
        required = self.schema.get("required")
        for name in cast("list[str]", required if isinstance(required, list) else []):
            if name not in arguments:
                arguments[name] = _plainest(_of(properties, name))
        written = json.dumps({"name": self.name, "arguments": arguments})
        return f"<tool_call>\n{written}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class ScriptedCommands:
    """The rule: one command a turn, then `end`. The task is the first message of the user that
    holds `task`; a request without it (a title, a summary, a question of the agent's own) is
    answered by `aside`.
    """

    task: str
    commands: Sequence[str]
    end: str
    aside: str = "ok"
    thought: str = ""
    """What it thinks before each command, between the markers `<think>` and `</think>`."""

    def __call__(self, prompt: str) -> str:
        turns = [(match[1], match[2]) for match in _TURN.finditer(prompt)]
        if turns and turns[-1] == ("assistant", ""):
            turns.pop()
        begun = [
            at for at, (role, text) in enumerate(turns) if role == "user" and self.task in text
        ]
        shell = offered_shell(prompt)
        if not begun or (shell is None and len(turns) == begun[0] + 1):
            return self.aside
        done = sum(role == "assistant" for role, _ in turns[begun[0] :])
        if done >= len(self.commands):
            return self.end
        if shell is None:
            raise RequestRejected(
                f"the agent offers no tool that runs commands: {offered_names(prompt)}. Give it one."
            )
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thought else ""
        return thought + shell.call(self.commands[done])


def offered_names(prompt: str) -> list[str]:
    """The names of the tools that a prompt offers."""
    return [str(function.get("name")) for function in _functions(prompt)]


def offered_shell(prompt: str) -> OfferedShell | None:
    """The tool that runs commands, among those that a prompt offers as lines of JSON."""
    found: list[tuple[int, int, OfferedShell]] = []
    for function in _functions(prompt):
        schema = _of(function, "parameters")
        properties = _of(schema, "properties")
        name = str(function.get("name"))
        words = [rank for rank, word in enumerate(_RUNS) if word in name.lower()]
        takes = [rank for rank, parameter in enumerate(_WRITTEN) if parameter in properties]
        if words and takes:
            shell = OfferedShell(name, _WRITTEN[takes[0]], schema)
            found.append((words[0], takes[0], shell))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _functions(prompt: str) -> Iterator[_Schema]:
    for line in prompt.splitlines():
        if not line.startswith("{"):
            continue
        try:
            tool = json.loads(line)
        except ValueError:
            continue
        if isinstance(tool, dict) and "function" in tool:
            yield _of(cast(_Schema, tool), "function")


def _of(schema: _Schema, name: str) -> _Schema:
    found = schema.get(name)
    return found if isinstance(found, dict) else {}


def _plainest(schema: _Schema) -> Json:
    """A value that the schema allows."""
    if "default" in schema:
        return schema["default"]
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    match schema.get("type"):
        case "boolean":
            return False
        case "integer" | "number":
            least = schema.get("minimum")
            return least if isinstance(least, int | float) else 60
        case "array":
            return []
        case "object":
            return {}
        case _:
            return "a step"
