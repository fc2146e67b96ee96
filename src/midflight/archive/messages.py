"""Reads the messages of a token record: it cuts the record where the model's chat template begins a
message.
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
"""The content of the messages that the template is asked to write, to learn how it writes them."""
_USER: dict[str, Json] = {"role": "user", "content": f"{_SIGN}"}
_ASSISTANT: dict[str, Json] = {"role": "assistant", "content": f"{_SIGN}"}
_CALL: Json = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """One message of a conversation, and the tokens [begin, end) in which it and its marks are
    written.
    """

    role: str
    begin: int
    end: int
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    written: bool = False
    """True if the model wrote it. Otherwise the model read it."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The texts with which the template opens and ends messages of a role."""

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
        """The reader that uses the tokenizer with which the run began."""
        try:
            return cls(Tokenizer.load(folder / "start"), tools, reasoning)
        except ModelNotFound as error:
            raise ModelNotFound(f"reading the conversations of {folder}: {error}") from error

    @cached_property
    def format(self) -> MessageFormat:
        return MessageFormat(self.tokenizer, tools=self.tools, reasoning=self.reasoning)

    def pieces(self, token_ids: Int32) -> tuple[str, ...]:
        """The text of each token. Joined they are the text of all tokens. A letter that takes
        several tokens is in the piece of the last of them.
        """
        detokenizer = IncrementalDetokenizer(self.tokenizer, keep=self.tokenizer.special_token_ids)
        pieces = [detokenizer.push(int(token)) for token in token_ids]
        if pieces:
            pieces[-1] += detokenizer.finish()
        return tuple(pieces)

    def messages(
        self, token_ids: Int32, generated: Bool, pieces: Sequence[str]
    ) -> tuple[RecordedMessage, ...]:
        """Returns the messages of a record; the arguments are [T] each. Without a chat template,
        text that the model read is a message of the user, and text that it wrote one of the
        assistant.
        """
        starts = list(accumulate(map(len, pieces), initial=0))
        text = "".join(pieces)
        openings: list[re.Match[str]] = []
        if self._opening is not None:
            for match in self._opening.finditer(text):
                if not generated[_token_at(starts, match.start())]:
                    openings.append(match)
        if not openings:
            return self._unmarked(token_ids, spans(generated))
        ends = [match.start() for match in openings[1:]] + [len(text)]
        said: list[RecordedMessage] = []
        begin = openings[0].start()
        first = _token_at(starts, begin)
        if self._plain(token_ids[:first]).strip():
            said.append(RecordedMessage("system", 0, first, text[:begin]))
        for match, end in zip(openings, ends, strict=True):
            mark = self._by_opening[match[0]]
            message = self._message(token_ids, generated, starts, text, match.end(), mark, end)
            said.append(message)
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
    ) -> RecordedMessage:
        """The message of letters [opened, end), which follow its opening."""
        begin = _token_at(starts, opened - len(mark.opening))
        first = _token_at(starts, opened)
        last = _token_at(starts, end)
        if mark.role == "assistant":
            return self._assistant(token_ids, generated, begin, first, last, text[: starts[first]])
        letters = text[opened:end]
        content = letters.removesuffix(mark.ending)
        if content == letters:
            content = letters.removesuffix(mark.ending.rstrip())
        return RecordedMessage(mark.role, begin, last, content)

    def _assistant(
        self, token_ids: Int32, generated: Bool, begin: int, first: int, last: int, before: str
    ) -> RecordedMessage:
        written = np.flatnonzero(generated[first:last])
        at = first + int(written[0]) if len(written) else first
        end = first + int(written[-1]) + 1 if len(written) else last
        prompt = before + self.tokenizer.decode(token_ids[first:at].tolist())
        read = self.format.parse(self._plain(token_ids[at:end]), prompt, calls=True)
        return RecordedMessage(
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
    ) -> tuple[RecordedMessage, ...]:
        said: list[RecordedMessage] = []
        for begin, end, wrote in parts:
            role = "assistant" if wrote else "user"
            text = self._plain(token_ids[begin:end])
            said.append(RecordedMessage(role, begin, end, text, written=wrote))
        return tuple(said)

    def _plain(self, token_ids: Int32) -> str:
        """The text without the marks of the template. The marks of calls and thinking stay."""
        return self.tokenizer.decode(
            token_ids.tolist(), skip_special=True, keep=self.format.kept_token_ids
        )

    # --- How the template writes messages ---

    @cached_property
    def _by_opening(self) -> Mapping[str, _Mark]:
        return {mark.opening: mark for mark in reversed(self._marks()) if mark.opening.strip()}

    @cached_property
    def _opening(self) -> re.Pattern[str] | None:
        """Matches an opening, the longest first: a tool's answer may be written as a kind of user's
        message.
        """
        longest_first = sorted(self._by_opening, key=len, reverse=True)
        if not longest_first:
            return None
        return re.compile("|".join(map(re.escape, longest_first)))

    def _marks(self) -> list[_Mark]:
        """The marks of each role. A role that the template refuses has none."""
        user_end = self._around(_USER)[-1:]
        assistant_end = self._around(_USER, _ASSISTANT)[-1:]
        if not user_end or not assistant_end:
            return []
        asked = self._around(_USER, _ASSISTANT)
        answered = self._around(_USER, _ASSISTANT, _USER)
        # A template may refuse a second message of the user.
        before_user = answered[2] if answered else ""
        marks = [
            _Mark("user", before_user.removeprefix(assistant_end[0]), user_end[0]),
            _Mark("assistant", asked[1].removeprefix(user_end[0]), assistant_end[0]),
        ]
        marks += self._tool_marks()
        system = self._around({"role": "system", "content": _SIGN}, _USER)
        if len(system) == 3:
            marks.append(_Mark("system", system[0], system[1].removesuffix(marks[0].opening)))
        return marks

    def _tool_marks(self) -> list[_Mark]:
        """The marks of a tool's answers: of the first in a message, and of those after it."""
        calling: dict[str, Json] = {**_ASSISTANT, "tool_calls": [_CALL]}
        tool: dict[str, Json] = {
            "role": "tool",
            "content": _SIGN,
            "tool_call_id": "call_0",
            "name": "f",
        }
        for before in (calling, _ASSISTANT):
            parts = self._around(_USER, before, tool, tool)
            if len(parts) != 5:
                continue
            called = self._around(_USER, before)[-1]
            between = parts[3]
            ending = self._around(_USER, before, tool)[-1]
            marks = [_Mark("tool", parts[2].removeprefix(called), ending)]
            if not between.startswith(ending):  # several answers in one message
                marks.append(_Mark("tool", between, ending))
            return marks
        return []

    def _around(self, *messages: Mapping[str, Json]) -> list[str]:
        """The template's own text before, between and after the contents. It is empty if the
        template refuses the messages or adds others.
        """
        try:
            parts = self.tokenizer.render(messages).split(_SIGN)
        except MidflightError:
            return []
        return parts if len(parts) == len(messages) + 1 else []


def _token_at(starts: Sequence[int], letter: int) -> int:
    """The first token that begins at this letter or later."""
    if not letter:
        return 0
    return int(np.searchsorted(np.asarray(starts[:-1]), letter, side="left"))


def as_chat(messages: Sequence[RecordedMessage]) -> list[dict[str, Json]]:
    """The messages in the form that chat APIs and `datasets` take: calls have ids, and each answer
    of a tool names the call that it answers.
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
                _call(call_id, call) for (call_id, _), call in zip(waiting, said.calls, strict=True)
            ]
        if said.role == "tool" and waiting:
            call_id, name = waiting.pop(0)
            message["tool_call_id"] = call_id
            message["name"] = name
        made.append(message)
    return made


def _call(call_id: str, call: ToolCall) -> dict[str, Json]:
    function: dict[str, Json] = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id, "type": "function", "function": function}
