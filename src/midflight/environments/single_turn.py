"""The plainest environment: one question, one reply, right or wrong. Other environments use its
functions, too.

As `environment.entry` it runs in the rollout process, where it blocks nothing, and asks the gateway
itself, without HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from midflight.environments.built_in_loop import is_worth_a_try, wait_seconds
from midflight.environments.result_checks import UnscoredRollout
from midflight.errors import EnvironmentFailed, MidflightError
from midflight.ports import Chats, SessionHandle
from midflight.types import Result, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI


def exact_match(reply: str, answer: str) -> float:
    """Returns 1.0 if the reply is the answer, apart from white space around either, and 0.0
    otherwise.
    """
    return float(reply.strip() == answer.strip())


def text_field(task: Task, name: str) -> str:
    """A field that must be there and hold text. Raises `TaskFieldMissing` with the field, the task
    and the fields that the task has.
    """
    return task.text(name)


async def answer(task: Task, client: AsyncOpenAI) -> float:
    """Asks the task's prompt and compares the reply with `answer`. Waits for the reply, or until
    its caller cancels it.
    """
    messages = task.messages
    expected = task.text("answer")
    completion = await client.chat.completions.create(model="policy", messages=cast(Any, messages))
    return exact_match(completion.choices[0].message.content or "", expected)


# --- Without an SDK -------------------------------------------------------------------------------


class LocalAnswers:
    """Implements `AgentHost` for `answer`, in the gateway's own process."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> Sequence[Result]:
        raise EnvironmentFailed(
            "nothing here scores groups; name a function in [[environment.rewards]]."
        )

    async def run(self, task: Task, session: SessionHandle) -> float:
        """Waits for the reply, and a little before each further try if the gateway is busy, or
        until its caller cancels it.
        """
        messages = task.messages
        expected = task.text("answer")
        for number in itertools.count(1):
            try:
                return exact_match(await self._chats.reply(session.api_key, messages), expected)
            except MidflightError as error:
                if not is_worth_a_try(error.status, number):
                    raise EnvironmentFailed(
                        f"the gateway answered {error.status}: {error}"
                    ) from error
            await asyncio.sleep(wait_seconds(number))
        raise AssertionError("the last try returns or raises")

    def excused(self, session_id: str) -> float:
        del session_id
        return 0.0

    def tool_seconds(self, session_id: str) -> float:
        del session_id
        return 0.0
