"""The parser of one message: thinking, then content with calls in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby

from midflight.text.formats.assistant import CallPiece, ContentPiece, Piece, ReasoningPiece, Tool, ToolCall, ToolFormat
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading, TrimmedText, outside
from midflight.text.formats.lark import Lark


class Begun(Enum):
    """How far the prompt has taken the thinking block."""

    NOT = auto()
    OPENED = auto()
    """The message begins inside it."""
    CLOSED = auto()
    """The model was told not to think."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A block at the beginning of a message. Whitespace just inside and just outside the markers belongs to no text."""

    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing)

    def begun(self, prompt_text: str | None) -> Begun:
        """How far the prompt has taken the block. A prompt of ids (`None`) has not opened it."""
        end = (prompt_text or "").rstrip()
        if end.endswith(self.opening):
            return Begun.OPENED
        return Begun.CLOSED if end.endswith(self.closing) else Begun.NOT

    def before(self, lark: Lark, rule: str, prompt_text: str | None) -> str | None:
        """Rules in which `start` is `rule` after a block: one that ends if the prompt opened it, else one that may come.
        `None` where no thinking can come."""
        match self.begun(prompt_text):
            case Begun.OPENED:
                start = f"start: thought GAP? {rule}"
            case Begun.NOT:
                start = f"start: ({lark.marker(self.opening)} thought GAP?)? {rule}"
            case Begun.CLOSED:
                return None
        return "\n".join([start, lark.ending("thought", self.closing), r"GAP: /\n{1,2}/"])


THINK = Thinking("<think>", "</think>")
MISTRAL_THINK = Thinking("[THINK]", "[/THINK]")


_ANY = re.compile(r"(?s:.)+")


class PlainParser:
    """A `MessageParser` where nothing is looked for: all is content."""

    def feed(self, text: str) -> tuple[Piece, ...]:
        return (ContentPiece(text),) if text else ()

    def finish(self) -> tuple[Piece, ...]:
        return ()


class FormatParser:
    """A `MessageParser`. Linear in the text, and cut anywhere the text gives the same message: the next letter alone decides.

    Whitespace: inside a thinking block its ends are dropped, and so is what stands before and after the block. Whitespace
    beside calls is dropped where the content would begin or end with it, and kept between two texts. All other is content.

    Held back are: half a marker; a call until it is whole; and, while calls are looked for, whitespace at the end.
    """

    def __init__(self, tools: ToolFormat | None, thinking: Thinking | None, *, opened: bool, known: Sequence[Tool] = ()) -> None:
        """`None` looks for none. `opened`: the text begins inside the thinking block. `known`: the tools that may be called."""
        self._tools, self._thinking, self._opened, self._known = tools, thinking, opened, known
        self._cursor = Cursor()
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._content = TrimmedText()
        self._reading = self._message()
        self._ended = False

    def feed(self, text: str) -> tuple[Piece, ...]:
        assert not self._ended, "a finished message has no more text"
        self._cursor.push(text)
        return self._advance()

    def finish(self) -> tuple[Piece, ...]:
        if self._ended:
            return ()
        self._ended = True
        self._cursor.end()
        return self._advance()

    def _advance(self) -> tuple[Piece, ...]:
        next(self._reading, None)
        pieces = tuple(_merged(self._pieces))
        self._pieces.clear()
        return pieces

    def _message(self) -> Reading[None]:
        if self._thinking is not None and (self._opened or (yield from self._opens(self._thinking))):
            self._cursor.drop()
            yield from self._think(self._thinking)
            self._content.touch()
        if self._tools is None:
            yield from self._plain()
        else:
            yield from self._with_calls(self._tools)

    def _opens(self, thinking: Thinking) -> Reading[bool]:
        yield from self._cursor.run(SPACES)
        return (yield from self._cursor.literal(thinking.opening))

    def _think(self, thinking: Thinking) -> Reading[None]:
        """Up to the closing marker, or the end of the text."""
        reasoning = TrimmedText()
        reasoning.touch()
        inside = outside(thinking.closing)
        while (yield from self._cursor.peek()):
            if not self._cursor.take(inside):
                if (yield from self._cursor.literal(thinking.closing)):
                    self._cursor.drop()
                    return
                yield from self._cursor.letter()
            if text := reasoning.add(self._cursor.drop()):
                self._pieces.append(ReasoningPiece(text))

    def _plain(self) -> Reading[None]:
        """Content to the end, without delay."""
        if self._content.touched:
            yield from self._cursor.run(SPACES)
            self._cursor.drop()
        while (yield from self._cursor.peek()):
            self._cursor.take(_ANY)
            self._give(self._cursor.drop())
        self._give(self._cursor.drop())

    def _with_calls(self, tools: ToolFormat) -> Reading[None]:
        yield from self._bare(tools)
        plain = outside(tools.opening)
        while (yield from self._cursor.peek()):
            if self._cursor.take(plain):
                self._write()
            elif (yield from self._cursor.literal(tools.opening)):
                yield from self._calls(tools.read(self._cursor, self._call, self._known))
            else:
                yield from self._cursor.letter()
                self._write()
        self._give(self._content.end())

    def _bare(self, tools: ToolFormat) -> Reading[None]:
        """Calls without a marker, if the message begins so."""
        yield from self._cursor.run(SPACES)
        reading = tools.read_bare(self._cursor, self._call)
        if reading is not None and (yield from self._cursor.peek()) == "{":
            yield from self._calls(reading)
        self._write()

    def _calls(self, reading: Reading[None]) -> Reading[None]:
        with suppress(NotACall):
            yield from reading
        self._write()

    def _call(self, call: ToolCall) -> None:
        self._cursor.drop()
        self._content.touch()
        self._pieces.append(CallPiece(self._num_calls, call))
        self._num_calls += 1

    def _write(self) -> None:
        self._give(self._content.add(self._cursor.drop()))

    def _give(self, text: str) -> None:
        if text:
            self._pieces.append(ContentPiece(text))


def _merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbouring texts of one kind as one piece."""
    for kind, group in groupby(pieces, type):
        if kind is CallPiece:
            yield from group
        else:
            text = "".join(piece.text for piece in group if not isinstance(piece, CallPiece))
            yield ContentPiece(text) if kind is ContentPiece else ReasoningPiece(text)
