"""A scripted model that works in the tools of any agent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midflight.errors import RequestRejected
from midflight.testing.commands import ScriptedCommands, offered_shell
from midflight.testing.script import scripted_tokenizer

CLAUDE = {
    "name": "Bash",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}, "description": {"type": "string"}},
        "required": ["command", "description"],
    },
}
CODEX = {"name": "exec_command", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}}
OLD_CODEX = {
    "name": "shell",
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}, "required": ["command"]},
}
QWEN = {
    "name": "run_shell_command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "is_background": {"type": "boolean"}, "mode": {"enum": ["sync", "async"]}},
        "required": ["command", "is_background", "mode"],
    },
}
READ = {"name": "read_command_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
RULE = ScriptedCommands("TASK", ("cat a.txt", "ls"), end="Finished.")


def prompt(*messages: tuple[str, str], tools: list[Any]) -> str:
    written = [{"type": "function", "function": tool} for tool in tools]
    return scripted_tokenizer().prompt([{"role": role, "content": text} for role, text in messages], tools=written or None)


def called(reply: str) -> Any:
    return json.loads(reply.partition("<tool_call>")[2].partition("</tool_call>")[0])


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        (CLAUDE, {"command": "cat a.txt", "description": "a step"}),
        (CODEX, {"cmd": "cat a.txt"}),
        (OLD_CODEX, {"command": ["bash", "-lc", "cat a.txt"]}),
        (QWEN, {"command": "cat a.txt", "is_background": False, "mode": "sync"}),
    ],
)
def test_each_agents_shell_is_found_among_its_tools_and_called_as_its_schema_wants(tool: Any, arguments: dict[str, Any]) -> None:
    asked = prompt(("system", "You code."), ("user", "TASK: do it"), tools=[READ, tool])
    assert called(RULE(asked)) == {"name": tool["name"], "arguments": arguments}


def test_it_goes_on_by_its_own_turns_and_ends() -> None:
    said = [("user", "TASK: do it"), ("assistant", "one"), ("tool", "x")]
    assert called(RULE(prompt(*said, tools=[CLAUDE])))["arguments"]["command"] == "ls"
    assert RULE(prompt(*said, ("assistant", "two"), ("tool", "y"), tools=[CLAUDE])) == "Finished."


def test_what_an_agent_asks_beside_the_task_is_answered_aside() -> None:
    assert RULE(prompt(("user", "Give this conversation a title"), tools=[])) == "ok"
    assert RULE(prompt(("user", "A title for: TASK: do it"), tools=[])) == "ok", "without tools nothing can be done"
    assert offered_shell(prompt(("user", "hi"), tools=[READ])) is None


def test_a_thought_comes_before_each_command() -> None:
    rule = ScriptedCommands("TASK", ("ls",), end="", thought="I look.")
    assert rule(prompt(("user", "TASK"), tools=[CODEX])).startswith("<think>\nI look.\n</think>\n\n<tool_call>")


def test_an_agent_whose_shell_is_gone_in_the_middle_is_told_so() -> None:
    said = [("user", "TASK: do it"), ("assistant", "one"), ("user", "go on")]
    with pytest.raises(RequestRejected, match="no tool that runs commands: \\['read_command_file'\\]"):
        RULE(prompt(*said, tools=[READ]))
