"""What the scripted model says to coding agents: whole tasks in the tools of each, chosen by what the conversation holds so far."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_MESSAGE = re.compile(r"<\|(user|assistant|tool|system)\|>(.*?)(?:<\|end\|>|$)", re.DOTALL)
_PLACE = re.compile(r"do it in ([^\s\"<]+)")
LONG = "\n".join(f"line {number} of a long file, with some words in it" for number in range(600)) + "\n"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thinking(thought: str, said: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{said}"


def reply(prompt: str) -> str:
    """The answer to a rendered conversation. The task is the user's message that has its name; what an agent shows before that is no turn."""
    messages = [(role, text) for role, text in _MESSAGE.findall(prompt)]
    if messages and messages[-1] == ("assistant", ""):
        messages.pop()
    users = [text for role, text in messages if role == "user"]
    said = "\n".join(users)
    asked = next((place for place, (role, text) in enumerate(messages) if role == "user" and "TASK-" in text), 0)
    num_turns = sum(role == "assistant" for role, _ in messages[asked:])
    if "SUMMARY-OF-ALL" in said:
        return thinking("I know enough.", "Finished after a summary.")
    if "Generate a title" in said:
        return "A task"
    if _wants_summary(users):
        return "<analysis>all of it</analysis>\n<summary>SUMMARY-OF-ALL: the long files were read.</summary>"
    for name, steps in TASKS.items():
        if name in said:
            step = steps[min(num_turns, len(steps) - 1)].replace("AGENT-ID", _agent_id(prompt))
            return step.replace("FOLDER", next(iter(_PLACE.findall(said)), "."))
    return "ok"


def _agent_id(prompt: str) -> str:
    """The last one that a tool told of."""
    return next(reversed(re.findall(r'"agent_id\W+([0-9a-f-]{36})', prompt)), "")


def _wants_summary(users: Sequence[str]) -> bool:
    """Claude Code and Codex ask for one in a user's message at the end, each in words of its own."""
    last = users[-1].lower() if len(users) > 1 else ""
    return "checkpoint" in last or ("summary" in last and "task-" not in last)


CLAUDE_SUB = (
    thinking("I count.", call("Bash", command="wc -w b.txt", description="Count words")),
    "b.txt has two words.",
)
# Claude Code writes `replace_all` into the conversation also where the model left it out: then the turns after are a row of their own.
CLAUDE = (
    thinking("I look at both.", "I read both files.\n" + call("Read", file_path="a.txt") + "\n" + call("Read", file_path="b.txt")),
    call("Edit", file_path="a.txt", old_string="two", new_string="TWO", replace_all=False),
    thinking("Now I look.", call("Bash", command="cat a.txt", description="Show the file")),
    call(
        "Agent",
        description="Count words",
        prompt="TASK-SUB: count the words of b.txt",
        subagent_type="general-purpose",
        run_in_background=False,
    ),
    thinking("All is done.", "Finished: a.txt says TWO."),
)
CLAUDE_LONG = (
    call("Read", file_path="long.txt"),
    call("Read", file_path="longer.txt"),
    call("Bash", command="ls", description="List"),
    "Finished without a summary.",
)
CODEX_SUB = (
    thinking("I count.", call("exec_command", cmd="wc -w b.txt")),
    "b.txt has two words.",
)
# Its tools for agents stand in a namespace.
CODEX_ASKING = (
    call("multi_agent_v1__spawn_agent", message="TASK-CODEX-SUB: count the words of b.txt"),
    call("multi_agent_v1__wait_agent", targets=["AGENT-ID"], timeout_ms=60000),
    thinking("It knows.", "Finished: asked."),
)
CODEX = (
    thinking(
        "I look at both.", "I read both files.\n" + call("exec_command", cmd="cat a.txt") + "\n" + call("exec_command", cmd="cat b.txt")
    ),
    call("exec_command", cmd="sed -i s/two/TWO/ a.txt"),
    thinking("Now I look.", call("exec_command", cmd="cat a.txt")),
    thinking("All is done.", "Finished: a.txt says TWO."),
)
CODEX_LONG = (
    call("exec_command", cmd="cat long.txt"),
    call("exec_command", cmd="cat longer.txt"),
    call("exec_command", cmd="ls"),
    "Finished without a summary.",
)
QWEN = (
    thinking(
        "I look at both.",
        "I read both.\n" + call("read_file", file_path="FOLDER/a.txt") + "\n" + call("read_file", file_path="FOLDER/b.txt"),
    ),
    call("edit", file_path="FOLDER/a.txt", old_string="two", new_string="TWO"),
    thinking("Now I look.", call("run_shell_command", command="cat a.txt", is_background=False)),
    thinking("All is done.", "Finished: a.txt says TWO."),
)
OPENCODE = (
    thinking("I look at both.", "I read both.\n" + call("read", filePath="FOLDER/a.txt") + "\n" + call("read", filePath="FOLDER/b.txt")),
    call("edit", filePath="FOLDER/a.txt", oldString="two", newString="TWO"),
    thinking("Now I look.", call("bash", command="cat a.txt")),
    thinking("All is done.", "Finished: a.txt says TWO."),
)
GEMINI = (
    thinking(
        "I look at both.",
        "I read both.\n" + call("read_file", file_path="FOLDER/a.txt") + "\n" + call("read_file", file_path="FOLDER/b.txt"),
    ),
    call("replace", file_path="FOLDER/a.txt", instruction="Write it large.", old_string="two", new_string="TWO"),
    thinking("Now I look.", call("run_shell_command", command="cat a.txt")),
    thinking("All is done.", "Finished: a.txt says TWO."),
)
# aider has no tools: edits are texts, and what its test says comes back.
AIDER = tuple(
    f"I edit.\n\na.txt\n```\n<<<<<<< SEARCH\none {old} three\n=======\none {new} three\n>>>>>>> REPLACE\n```\n"
    for old, new in (("two", "2"), ("2", "TWO"))
)
TASKS = {
    "TASK-QWEN": QWEN,
    "TASK-OPENCODE": OPENCODE,
    "TASK-GEMINI": GEMINI,
    "TASK-AIDER": AIDER,
    "TASK-SUB": CLAUDE_SUB,
    "TASK-CODEX-SUB": CODEX_SUB,
    "TASK-CLAUDE-LONG": CLAUDE_LONG,
    "TASK-CLAUDE": CLAUDE,
    "TASK-CODEX-LONG": CODEX_LONG,
    "TASK-CODEX-ASKING": CODEX_ASKING,
    "TASK-CODEX": CODEX,
}
"""The first name that the user's messages hold counts."""
