"""The plainest environment (one question, one reply, right or wrong), and what others are written with too.

As `environment.entry` it runs in the rollout process, where it blocks nothing, and asks the gateway's application without an SDK.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from starlette.types import ASGIApp

from midflight.environments.conversation import asked
from midflight.environments.scoring import Unjudged
from midflight.errors import EnvironmentFailed
from midflight.ports import SessionHandle
from midflight.types import Json, Result, Task
from midflight.wire.asked import ask

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def exact_match(reply: str, answer: str) -> float:
    """1.0 if the reply is the answer, but for white space around either; else 0.0."""
    return float(reply.strip() == answer.strip())


def text_field(task: Task, name: str) -> str:
    """A field that must be there and hold text; `TaskFieldMissing` names the field, the task and what the task has."""
    return task.text(name)


async def answer(task: Task, client: AsyncOpenAI) -> float:
    """Asks the task's prompt and compares the reply with `answer`. Waits for the reply; ended by its caller."""
    messages, expected = task.messages, task.text("answer")
    completion = await client.chat.completions.create(model="policy", messages=cast(Any, messages))
    return exact_match(completion.choices[0].message.content or "", expected)


# --- Without an SDK ---------------------------------------------------------------------------------------------------


class AnswersHere:
    """Implements `AgentHost` for `answer`, in the gateway's own process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def judge(self, task: Task, attempts: Sequence[Unjudged]) -> Sequence[Result]:
        raise EnvironmentFailed("nothing here scores groups; name a function in [[environment.rewards]].")

    async def run(self, task: Task, session: SessionHandle) -> float:
        return await answer(task, cast(Any, SmallClient(self._app, session)))

    def excused(self, session_id: str) -> float:
        del session_id
        return 0.0


class SmallClient:
    """As much of the SDK's client as `answer` uses: the same request, and of its answer the reply."""

    def __init__(self, app: ASGIApp, session: SessionHandle) -> None:
        self._post, self._session = partial(ask, app), session
        self.chat = self.completions = self

    async def create(self, *, messages: Json, model: str) -> _Completion:
        """Waits for the answer, and a little before each further try; ended by its caller."""
        answered = await asked(self._post, self._session, msgspec.json.encode({"messages": messages, "model": model}))
        if answered.status == 200:
            return _completion(answered.content)
        raise EnvironmentFailed(f"the gateway answered {answered.status}: {answered.content.decode()[:500]}")


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]


_completion = msgspec.json.Decoder(_Completion).decode
