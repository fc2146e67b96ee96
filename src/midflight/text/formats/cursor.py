"""Readings of a growing text. A reading is a generator that pauses at the end of the text, and
continues when there is more.
"""

import re
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns what it has read."""

_BLANKS = " \t\r\n"
SPACES = re.compile(f"[{_BLANKS}]+")
"""Whitespace in messages is that of JSON."""


class NotACall(Exception):
    """Raised when a text proves to be no tool call. The parser catches it and takes the text as
    content.
    """


class Cursor:
    """A place in a growing text. The text since the last `drop` is kept, in fragments. Only the
    beginnings of markers are read twice, so a letter is handled no more often than a marker is
    long.

    A reading yields only when all the available text is read, so no text is left at a `push`.
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
        """Takes the text that matches here, as far as it is available. Empty if nothing matches."""
        match = pattern.match(self._text, self._at)
        return "" if match is None else self._take(match.end())

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes letters as long as they match. `pattern` is one class of letters, repeated."""
        parts: list[str] = []
        while (yield from self.peek()):
            part = self.take(pattern)
            if not part:
                break
            parts.append(part)
        return "".join(parts)

    def letter(self) -> Reading[str]:
        """Takes one letter. Empty at the end of the text."""
        found = yield from self.peek()
        if found:
            self._take(self._at + 1)
        return found

    def literal(self, text: str) -> Reading[bool]:
        """Takes `text` if it comes next, else nothing."""
        for place, letter in enumerate(text):
            if (yield from self.peek()) != letter:
                self._back(text[:place])
                return False
            self._at += 1
        self._taken.append(text)
        return True

    def expect(self, text: str) -> Reading[None]:
        """Takes `text`. Raises `NotACall` if it does not come next."""
        if not (yield from self.literal(text)):
            raise NotACall

    def until(self, marker: str) -> Reading[str]:
        """Takes text up to and including the first `marker`. Returns the text without the
        marker.
        """
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
        """Text that is taken from here on may prove wrong when more is read, until `trust`."""
        self._doubt = len(self._taken)

    def trust(self) -> None:
        self._doubt = None

    @property
    def sure(self) -> int:
        """A mark. Text that was taken before it will not prove wrong."""
        return len(self._taken) if self._doubt is None else self._doubt

    def between(self, start: int, end: int) -> str:
        """The text that was taken between two marks. It must not be dropped yet."""
        return "".join(self._taken[start:end])

    def since(self, mark: int) -> str:
        """The text that was taken since `mark`. It must not be dropped yet."""
        return "".join(self._taken[mark:])

    def drop(self) -> str:
        """Returns the text that was taken, and forgets it."""
        text = "".join(self._taken)
        self._taken.clear()
        self._doubt = None
        return text

    def _back(self, text: str) -> None:
        """Goes back over `text`. A part of it may have come with an earlier push."""
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
    """A pattern for letters that cannot begin `marker`."""
    return re.compile(f"[^{re.escape(marker[0])}]+")


class TrimmedText:
    """Passes text on as it comes. Whitespace beside a marker is dropped if the text begins or ends
    there.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        """Whitespace at the end of the text so far."""
        self._begun = False
        self.touched = False
        """True if only whitespace came since the last `touch`."""

    def touch(self) -> None:
        """Takes note of a marker at this place."""
        self.touched = True

    def add(self, text: str) -> str:
        """Takes text and returns the part that is certain: up to the last letter that is no
        whitespace.
        """
        body = text.rstrip(_BLANKS)
        if not body:
            self._held.append(text)
            return ""
        given = "".join(self._held) + body
        if self.touched and not self._begun:
            given = given.lstrip(_BLANKS)
        self._held = [text[len(body) :]]
        self._begun = True
        self.touched = False
        return given

    def end(self) -> str:
        """The rest, when the text has ended."""
        return "" if self.touched else "".join(self._held)
