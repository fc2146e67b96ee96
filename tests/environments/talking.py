"""A gateway that says what it is told to say, and the loop over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from midflight.config.sections import EnvironmentSection
from midflight.environments.built_in_loop import BuiltInLoop
from midflight.environments.result_checks import result_of
from midflight.types import Result, Task
from midflight.wire.client import HttpAnswer


@dataclass
class Session:
    session_id: str = "s"
    base_url: str = "http://gateway/s/s.secret/v1"
    api_key: str = "s.secret"


def says(content: str = "", *calls: tuple[str, Any]) -> dict[str, Any]:
    """An assistant's message: text, and calls as (name, arguments)."""
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)}}
        for i, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content or None, **({"tool_calls": made} if made else {})}


@dataclass
class Gateway:
    """Answers each request with the next message, the last one for ever."""

    messages: Sequence[dict[str, Any] | HttpAnswer]
    asked: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        self.paths.append(path)
        self.asked.append(json.loads(body))
        said = self.messages[min(len(self.asked), len(self.messages)) - 1]
        if isinstance(said, HttpAnswer):
            return said
        return HttpAnswer(200, json.dumps({"choices": [{"message": said, "token_ids": [1, 2]}]}).encode())


@asynccontextmanager
async def loop_over(gateway: Gateway, **section: Any):
    """`section` is `[environment]`."""
    stateful = section.pop("stateful", None)
    async with BuiltInLoop(EnvironmentSection.model_validate(section), gateway.post, stateful=stateful) as conversations:
        yield conversations


async def result(gateway: Gateway, task: Task, **section: Any) -> Result:
    async with loop_over(gateway, **section) as conversations:
        found = await result_of(await conversations.run(task, Session()), task=task)
    assert isinstance(found, Result)
    return found
