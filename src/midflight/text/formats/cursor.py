"""Reading a text that is still growing: a reading is a generator that stops where the text stops,
and goes on with more.
"""

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Yields when it needs more text; returns what it read."""

_BLANKS = " \t\r\n"
SPACES = re.compile(f"[{_BLANKS}]+")
"""What counts as whitespace in messages: JSON's."""


class NotACall(Exception):
    """What is being read is no tool call. Never leaves the parser: the text is content."""


class Cursor:
    """A place in a growing text. What was read since the last `drop` is kept, in fragments. Nothing
    is read twice but the beginnings of markers, so a letter is handled no more often than a marker
    is long.

    A reading yields only when all the text at hand is read, so `push` never meets a rest.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._taken: list[str] = []
        self._doubt: int | None = None

    def push(self, text: str) -> None:
        assert self._at == len(self._text), "a reading stops only at the end of the text"
        self._text = text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    def peek(self) -> Reading[str]:
        """The next letter; empty at the end of the text."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self, pattern: re.Pattern[str]) -> str:
        """Takes what matches here in the text at hand; empty if nothing does."""
        match = pattern.match(self._text, self._at)
        return "" if match is None else self._take(match.end())

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes letters as long as they match; `pattern` is one class of letters, repeated."""
        parts: list[str] = []
        while (yield from self.peek()) and (part := self.take(pattern)):
            parts.append(part)
        return "".join(parts)

    def letter(self) -> Reading[str]:
        """Takes one letter; empty at the end of the text."""
        if found := (yield from self.peek()):
            self._take(self._at + 1)
        return found

    def literal(self, text: str) -> Reading[bool]:
        """Takes `text` if it stands here, else nothing."""
        for place, letter in enumerate(text):
            if (yield from self.peek()) != letter:
                self._back(text[:place])
                return False
            self._at += 1
        self._taken.append(text)
        return True

    def expect(self, text: str) -> Reading[None]:
        if not (yield from self.literal(text)):
            raise NotACall

    def until(self, marker: str) -> Reading[str]:
        """Takes text up to the first `marker` and the marker; the text without it."""
        mark = self.mark()
        other = outside(marker)
        while (yield from self.peek()):
            if self.take(other):
                continue
            if (yield from self.literal(marker)):
                return self.since(mark)[: -len(marker)]
            yield from self.letter()
        raise NotACall

    def mark(self) -> int:
        return len(self._taken)

    def doubt(self) -> None:
        """What is taken from here on may prove wrong when more of it is read, until `trust`."""
        self._doubt = len(self._taken)

    def trust(self) -> None:
        self._doubt = None

    @property
    def sure(self) -> int:
        """A mark: what was taken before it will not prove wrong."""
        return len(self._taken) if self._doubt is None else self._doubt

    def between(self, start: int, end: int) -> str:
        """What was taken between two marks, of which nothing was dropped."""
        return "".join(self._taken[start:end])

    def since(self, mark: int) -> str:
        """What was taken since `mark`, of which nothing was dropped."""
        return "".join(self._taken[mark:])

    def drop(self) -> str:
        """What was taken, which is forgotten here."""
        text = "".join(self._taken)
        self._taken.clear()
        self._doubt = None
        return text

    def _back(self, text: str) -> None:
        """Goes back over `text`, part of which may have come with an earlier push."""
        if self._at < len(text):
            self._text = text + self._text[self._at :]
            self._at = len(text)
        self._at -= len(text)

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        self._taken.append(text)
        return text


def outside(marker: str) -> re.Pattern[str]:
    """Letters that cannot begin `marker`."""
    return re.compile(f"[^{re.escape(marker[0])}]+")


class TrimmedText:
    """Takes text as it comes and gives it on. Whitespace at a touched place is dropped if the text
    begins or ends there.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        """Whitespace after which nothing has come yet."""
        self._begun = False
        self.touched = False
        """Whether only whitespace came since the last `touch`."""

    def touch(self) -> None:
        """A marker stands here."""
        self.touched = True

    def add(self, text: str) -> str:
        """What is certain now: text up to its last letter that is no whitespace."""
        body = text.rstrip(_BLANKS)
        if not body:
            self._held.append(text)
            return ""
        given = "".join([*self._held, body])
        if self.touched and not self._begun:
            given = given.lstrip(_BLANKS)
        self._held = [text[len(body) :]]
        self._begun = True
        self.touched = False
        return given

    def end(self) -> str:
        """The rest, when the text has ended."""
        return "" if self.touched else "".join(self._held)
