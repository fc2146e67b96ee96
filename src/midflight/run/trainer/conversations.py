"""Conversations to learn from. They hold each message of the assistant, calls of tools included,
after the prompt that the chat template makes of the messages before it. The gateway sends an engine
the same prompt, so the model learns the answers that it samples later.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from midflight.environments.reasoning_gym import rank_of
from midflight.environments.rows import SHOWN, Columns, open_rows
from midflight.errors import ConfigError, RequestRejected
from midflight.text.tokenizer import Message, Tokenizer
from midflight.types import Json

Learnt = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids of a prompt and of the message to learn, with the token that ends it."""
MAX_APART = 256
"""The most conversations that are held out."""


class Conversations:
    """The conversations of one file, by number. Each is read and rendered when it is asked for;
    Raises `ConfigError` with the place of a broken one.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, *, max_tokens: int) -> None:
        """`max_tokens` is the limit of a message and all before it."""
        self._rows = open_rows(path, option="warm_start.data")
        self._path = path
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        if not len(self._rows):
            raise ConfigError(
                f"warm_start.data is {str(path)!r}, which has no conversation; give it some."
            )

    def __len__(self) -> int:
        return len(self._rows)

    def turns(self, number: int) -> list[Learnt]:
        """Every message of the assistant in a conversation."""
        return self._turns(self._rows[number], number)

    def split(self, *, seed: int, every: int) -> tuple[Sequence[int], Sequence[int]]:
        """The numbers of conversations to learn from, and of those held out, one of `every` by a
        hash of the messages. No conversation is in both, even if the file has it twice.
        """
        if not every:
            return range(len(self)), ()
        ranks = [_rank(row, seed) for row in self._rows]
        distinct = sorted(set(ranks))
        number = min(MAX_APART, -(-len(distinct) // every))
        if number >= len(distinct):
            raise ConfigError(
                f"warm_start.data is {str(self._path)!r} with {len(distinct)} conversations, none "
                "of which would be left to learn from; add some."
            )
        limit = distinct[number]
        learnt: list[int] = []
        apart: list[int] = []
        seen = set[int]()
        for place, rank in enumerate(ranks):
            if rank >= limit:
                learnt.append(place)
            elif rank not in seen:
                seen.add(rank)
                apart.append(place)
        return learnt, apart

    def check(self, *, seconds: float) -> int:
        """Renders one conversation after the other until that has taken so many seconds of
        processor time. Returns how many it rendered.
        """
        until = time.thread_time() + seconds
        number = 0
        for number, row in enumerate(self._rows, start=1):
            self._turns(row, number - 1)
            if time.thread_time() > until:
                break
        return number

    def _turns(self, row: Columns, number: int) -> list[Learnt]:
        try:
            messages = _messages(row)
            tools = _tools(row)
            return [
                self._learnt(messages, i, tools)
                for i, message in enumerate(messages)
                if message["role"] == "assistant"
            ]
        except (ValueError, RequestRejected) as error:
            raise ConfigError(f"{self._rows.place(number)}: {error}") from None

    def _learnt(
        self, messages: Sequence[Message], place: int, tools: Sequence[Message] | None
    ) -> Learnt:
        """The message at a place, with its prompt. Raises `ValueError` if it is too long, or if the
        template does not write it after the prompt's own beginning of an answer.
        """
        before = self._tokenizer.render(messages[:place], tools=tools, add_generation_prompt=True)
        whole = self._tokenizer.render(messages[: place + 1], tools=tools)
        if not whole.startswith(before):
            raise ValueError(
                f"message {place}: the chat template begins an answer with {before[-20:]!r}, and "
                "writes this one otherwise; write it as the model would, with its thinking if the "
                "template asks for that."
            )
        prompt = self._tokenizer.encode(before)
        answer = self._tokenizer.encode_after(prompt[-1], whole[len(before) :])
        learnt = self._ended(answer)
        if len(prompt) + len(learnt) > self._max_tokens:
            raise ValueError(
                f"message {place} ends at token {len(prompt) + len(learnt)}, and model.max_context "
                f"is {self._max_tokens}; raise it, or shorten the conversation."
            )
        return prompt, learnt

    def _ended(self, answer: tuple[int, ...]) -> tuple[int, ...]:
        """The answer up to the first token that ends a message, which is added if it lacks one."""
        for place, token in enumerate(answer):
            if token in self._tokenizer.eos_token_ids:
                return answer[: place + 1]
        return (*answer, min(self._tokenizer.eos_token_ids))


def _rank(row: Columns, seed: int) -> int:
    return rank_of(json.dumps(row.get("messages"), sort_keys=True), seed=seed)


def _messages(row: Columns) -> list[dict[str, Json]]:
    found = row.get("messages")
    if not isinstance(found, list) or not found:
        raise ValueError(
            f"expected a list of messages in column 'messages', got {_short(found)}; there are "
            f"{', '.join(row)}."
        )
    for number, message in enumerate(found):
        _check_message(message, number)
    messages = cast("list[dict[str, Json]]", found)
    is_answer = [message["role"] == "assistant" for message in messages]
    if is_answer[0] or not any(is_answer):
        raise ValueError(
            "there is no message of the assistant behind another one, so there is nothing to "
            "learn; add one, or remove the row."
        )
    return messages


def _check_message(message: Json, number: int) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} is {_short(message)}; give it a role.")
    content = message.get("content")
    only_calls = message["role"] == "assistant" and message.get("tool_calls")
    if not isinstance(content, str) and not only_calls:
        raise ValueError(f"message {number} has content {_short(content)}; give it a text.")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise ValueError(
            f'message {number} has tool_calls {_short(calls)}; write each as {{"function": '
            f'{{"name": ..., "arguments": {{...}}}}}}.'
        )


def _is_call(call: Json) -> bool:
    if not isinstance(call, dict):
        return False
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("arguments"), dict | str)


def _tools(row: Columns) -> list[Message] | None:
    """The tools as OpenAI's `tools` has them, in the column as a list or as a text of JSON."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = cast(Json, json.loads(tools))
        except ValueError as error:
            raise ValueError(
                f"column 'tools' is a text that is not JSON ({error}); give it a list of tools."
            ) from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"column 'tools' holds {_short(tools)}; give it a list of tools, each an object."
        )
    return cast("list[Message]", tools)


def _short(value: Json) -> str:
    shown = json.dumps(value, default=str)
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]} ..."
