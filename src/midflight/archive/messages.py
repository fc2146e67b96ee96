"""Messages of a token record: the text of each token, and the record cut where the model's chat
template begins a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np

from midflight.errors import MidflightError, ModelNotFound
from midflight.text.detokenizer import IncrementalDetokenizer
from midflight.text.formats.assistant import ToolCall
from midflight.text.formats.format import AUTO, MessageFormat
from midflight.text.tokenizer import Tokenizer
from midflight.types import Bool, Int32, Json
from midflight.types.rollouts import spans

_SIGN = "\ue000"
"""Stands for content where the template is asked how it writes it."""
_USER: dict[str, Json] = {"role": "user", "content": f"{_SIGN}"}
_ASSISTANT: dict[str, Json] = {"role": "assistant", "content": f"{_SIGN}"}
_CALL: Json = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@dataclass(frozen=True, slots=True)
class MessageSaid:
    """One message of a conversation, and the tokens [begin, end) that it is written in, its marks
    too.
    """

    role: str
    begin: int
    end: int
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    written: bool = False
    """Whether the model wrote it; else it read it."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """How the template opens and ends messages of a role."""

    role: str
    opening: str
    ending: str


@dataclass(frozen=True)
class MessageReader:
    """Reads conversations back from token ids, by the tokenizer of a model folder."""

    tokenizer: Tokenizer
    tools: str = AUTO
    reasoning: str = AUTO

    @classmethod
    def of_run(cls, folder: Path, *, tools: str = AUTO, reasoning: str = AUTO) -> MessageReader:
        """By the tokenizer that the run began with."""
        try:
            return cls(Tokenizer.load(folder / "start"), tools, reasoning)
        except ModelNotFound as error:
            raise ModelNotFound(f"reading the conversations of {folder}: {error}") from error

    @cached_property
    def format(self) -> MessageFormat:
        return MessageFormat(self.tokenizer, tools=self.tools, reasoning=self.reasoning)

    def pieces(self, token_ids: Int32) -> tuple[str, ...]:
        """The text of each token; joined they are the text of all. A letter of several tokens is
        with the last of them.
        """
        detokenizer = IncrementalDetokenizer(self.tokenizer, keep=self.tokenizer.special_token_ids)
        pieces = [detokenizer.push(int(token)) for token in token_ids]
        if pieces and (rest := detokenizer.finish()):
            pieces[-1] += rest
        return tuple(pieces)

    def messages(
        self, token_ids: Int32, generated: Bool, pieces: Sequence[str]
    ) -> tuple[MessageSaid, ...]:
        """[T] each. Without a chat template what the model read is the user's, and what it wrote
        the assistant's.
        """
        starts = list(accumulate(map(len, pieces), initial=0))
        text = "".join(pieces)
        found = [
            (match.start(), match.end(), mark)
            for match in (self._opening.finditer(text) if self._opening else ())
            if not generated[_token_at(starts, match.start())]
            and (mark := self._by_opening[match[0]])
        ]
        if not found:
            return self._unmarked(token_ids, spans(generated))
        edges = [*(start for start, _, _ in found), len(text)]
        said = [
            self._message(token_ids, generated, starts, text, opened, mark, end)
            for (_, opened, mark), end in zip(found, edges[1:], strict=True)
        ]
        before = text[: edges[0]]
        if self._plain(token_ids[: _token_at(starts, edges[0])]).strip():
            said.insert(0, MessageSaid("system", 0, _token_at(starts, edges[0]), before))
        return tuple(said)

    def _message(
        self,
        token_ids: Int32,
        generated: Bool,
        starts: Sequence[int],
        text: str,
        opened: int,
        mark: _Mark,
        end: int,
    ) -> MessageSaid:
        """Of letters [opened, end), behind its opening."""
        begin, first, last = (
            _token_at(starts, at) for at in (opened - len(mark.opening), opened, end)
        )
        if mark.role != "assistant":
            content = text[opened:end].removesuffix(mark.ending)
            return MessageSaid(
                mark.role,
                begin,
                last,
                content
                if content != text[opened:end]
                else content.removesuffix(mark.ending.rstrip()),
            )
        return self._assistant(token_ids, generated, begin, first, last, text[: starts[first]])

    def _assistant(
        self, token_ids: Int32, generated: Bool, begin: int, first: int, last: int, before: str
    ) -> MessageSaid:
        written = np.flatnonzero(generated[first:last])
        at = first + int(written[0]) if len(written) else first
        end = first + int(written[-1]) + 1 if len(written) else last
        prompt = before + self.tokenizer.decode(token_ids[first:at].tolist())
        read = self.format.parse(self._plain(token_ids[at:end]), prompt, calls=True)
        return MessageSaid(
            "assistant",
            begin,
            last,
            read.content,
            read.reasoning,
            read.tool_calls,
            bool(len(written)),
        )

    def _unmarked(
        self, token_ids: Int32, parts: Sequence[tuple[int, int, bool]]
    ) -> tuple[MessageSaid, ...]:
        plain = (
            (begin, end, wrote, self._plain(token_ids[begin:end])) for begin, end, wrote in parts
        )
        return tuple(
            MessageSaid("assistant" if wrote else "user", begin, end, text, written=wrote)
            for begin, end, wrote, text in plain
        )

    def _plain(self, token_ids: Int32) -> str:
        """Without the marks of the template; those of calls and thinking stay."""
        return self.tokenizer.decode(
            token_ids.tolist(), skip_special=True, keep=self.format.kept_token_ids
        )

    # --- How the template writes messages ---

    @cached_property
    def _by_opening(self) -> Mapping[str, _Mark]:
        return {mark.opening: mark for mark in reversed(self._marks()) if mark.opening.strip()}

    @cached_property
    def _opening(self) -> re.Pattern[str] | None:
        """The longest first: a tool's answer may be written as a kind of user's message."""
        longest = sorted(self._by_opening, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest))) if longest else None

    def _marks(self) -> list[_Mark]:
        """A role that the template refuses has none."""
        user_end = self._around(_USER)[-1:]
        assistant_end = self._around(_USER, _ASSISTANT)[-1:]
        if not user_end or not assistant_end:
            return []
        asked = self._around(_USER, _ASSISTANT)
        answered = self._around(_USER, _ASSISTANT, _USER)
        opens = {"user": answered[2:3], "assistant": asked[1:2]}
        marks = [
            _Mark("user", "".join(opens["user"]).removeprefix(assistant_end[0]), user_end[0]),
            _Mark("assistant", asked[1].removeprefix(user_end[0]), assistant_end[0]),
        ]
        calling: dict[str, Json] = {**_ASSISTANT, "tool_calls": [_CALL]}
        tool: dict[str, Json] = {
            "role": "tool",
            "content": _SIGN,
            "tool_call_id": "call_0",
            "name": "f",
        }
        for before in (calling, _ASSISTANT):
            if len(parts := self._around(_USER, before, tool, tool)) == 5:
                called = self._around(_USER, before)[-1]
                between = parts[3]
                ending = self._around(_USER, before, tool)[-1]
                marks += [_Mark("tool", parts[2].removeprefix(called), ending)]
                if not between.startswith(ending):  # several answers in one message
                    marks.append(_Mark("tool", between, ending))
                break
        if len(parts := self._around({"role": "system", "content": _SIGN}, _USER)) == 3:
            marks.append(_Mark("system", parts[0], parts[1].removesuffix(marks[0].opening)))
        return marks

    def _around(self, *messages: Mapping[str, Json]) -> list[str]:
        """The template's own text before, between and after the contents; nothing where it refuses
        them or adds to them.
        """
        try:
            parts = self.tokenizer.render(messages).split(_SIGN)
        except MidflightError:
            return []
        return parts if len(parts) == len(messages) + 1 else []


def _token_at(starts: Sequence[int], letter: int) -> int:
    """The first token that begins at this letter or later."""
    return int(np.searchsorted(np.asarray(starts[:-1]), letter, side="left")) if letter else 0


def as_chat(messages: Sequence[MessageSaid]) -> list[dict[str, Json]]:
    """In the form that chat APIs and `datasets` take: calls have ids, and each answer of a tool
    names the call that it is of.
    """
    made: list[dict[str, Json]] = []
    waiting: list[tuple[str, str]] = []
    number = 0
    for said in messages:
        message: dict[str, Json] = {"role": said.role, "content": said.content}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            waiting = [(f"call_{number + at}", call.name) for at, call in enumerate(said.calls)]
            number += len(waiting)
            message["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for (name, _), call in zip(waiting, said.calls, strict=True)
            ]
        if said.role == "tool" and waiting:
            message["tool_call_id"], message["name"] = waiting.pop(0)
        made.append(message)
    return made
