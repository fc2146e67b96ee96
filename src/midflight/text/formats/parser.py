"""The parser of one message: thinking first, then content with calls in it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby

from midflight.text.formats import assistant
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading, TrimmedText, outside
from midflight.text.formats.thinking import Thinking

_ANY = re.compile(r"(?s:.)+")


class PlainParser:
    """A `MessageParser` that looks for nothing: the whole text is content."""

    num_calls = 0

    def feed(self, text: str) -> tuple[assistant.Piece, ...]:
        return (assistant.ContentPiece(text),) if text else ()

    def finish(self) -> tuple[assistant.Piece, ...]:
        return ()


class FormatParser:
    """A `MessageParser` for thinking and calls. Its time is linear in the text. The text gives the
    same message wherever it is cut, because only the next letter decides.

    Whitespace at the ends of a thinking block, and before and after the block, is dropped.
    Whitespace beside calls is dropped if the content would begin or end with it, and kept between
    two texts. All other whitespace is content.

    The parser holds back half a marker, an incomplete call, and, while it looks for calls,
    whitespace at the end. With `partly` the call of a known tool is given out from the first letter
    of its arguments on. If it then breaks off or proves to be no call, it stays a call with the
    arguments that were given out, which are always the beginning of a JSON object. Without
    `partly`, which reads a text to compare it with another, it is content.
    """

    def __init__(
        self,
        tools: assistant.ToolFormat | None,
        thinking: Thinking | None,
        *,
        opened: bool,
        known: Sequence[assistant.Tool] = (),
        partly: bool = False,
    ) -> None:
        """If `tools` or `thinking` is `None`, it looks for no calls or for no thinking. With
        `opened` the text begins inside the thinking block. `known` holds the tools that may be
        called.
        """
        self._tools = tools
        self._thinking = thinking
        self._opened = opened
        self._known = known
        self._early: set[str] = set()
        if partly:
            self._early = {tool.name for tool in known if not tool.told_whole}
        self._cursor = Cursor()
        self._pieces: list[assistant.Piece] = []
        self.num_calls = 0
        self._told: int | None = None
        """A mark of the cursor. The arguments of the open call were given out up to there. It is
        None if no call is open.
        """
        self._end: int | None = None
        """A mark of the cursor: the end of these arguments, once it is known."""
        self._content = TrimmedText()
        self._reading = self._message()
        self._ended = False

    def feed(self, text: str) -> tuple[assistant.Piece, ...]:
        assert not self._ended, "a finished message has no more text"
        self._cursor.push(text)
        return self._advance()

    def finish(self) -> tuple[assistant.Piece, ...]:
        if self._ended:
            return ()
        self._ended = True
        self._cursor.end()
        return self._advance()

    def _advance(self) -> tuple[assistant.Piece, ...]:
        next(self._reading, None)
        if self._told is not None:
            self._tell(self._told)
        pieces = tuple(_merged(self._pieces))
        self._pieces.clear()
        return pieces

    def _message(self) -> Reading[None]:
        if self._thinking is not None:
            thinks = self._opened or (yield from self._opens(self._thinking))
            if thinks:
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
        """Reads reasoning up to the closing marker, or to the end of the text."""
        reasoning = TrimmedText()
        reasoning.touch()
        inside = outside(thinking.closing)
        while (yield from self._cursor.peek()):
            if not self._cursor.take(inside):
                if (yield from self._cursor.literal(thinking.closing)):
                    self._cursor.drop()
                    return
                yield from self._cursor.letter()
            text = reasoning.add(self._cursor.drop())
            if text:
                self._pieces.append(assistant.ReasoningPiece(text))

    def _plain(self) -> Reading[None]:
        """Reads content up to the end, without delay."""
        if self._content.touched:
            yield from self._cursor.run(SPACES)
            self._cursor.drop()
        while (yield from self._cursor.peek()):
            self._cursor.take(_ANY)
            self._give(self._cursor.drop())
        self._give(self._cursor.drop())

    def _with_calls(self, tools: assistant.ToolFormat) -> Reading[None]:
        yield from self._bare(tools)
        plain = outside(tools.opening)
        while (yield from self._cursor.peek()):
            if self._cursor.take(plain):
                self._write()
            elif (yield from self._cursor.literal(tools.opening)):
                yield from self._calls(tools.read(self._cursor, self, self._known))
            else:
                yield from self._cursor.letter()
                self._write()
        self._give(self._content.end())

    def _bare(self, tools: assistant.ToolFormat) -> Reading[None]:
        """Reads calls without a marker, if the message begins with them."""
        yield from self._cursor.run(SPACES)
        reading = tools.read_bare(self._cursor, self)
        if reading is not None and (yield from self._cursor.peek()) == "{":
            yield from self._calls(reading)
        self._write()

    def _calls(self, reading: Reading[None]) -> Reading[None]:
        with suppress(NotACall):
            yield from reading
        if self._told is not None:
            self._break_off(self._told)
        self._write()

    def begin(self, name: str) -> None:
        if name in self._early and self._told is None:
            self._pieces.append(
                assistant.CallPiece(self.num_calls, assistant.ToolCall(name, ""), begins=True)
            )
            self._told = self._cursor.mark()
            self._end = None

    def end(self) -> None:
        if self._told is not None:
            self._end = self._cursor.mark()

    def give(self, call: assistant.ToolCall) -> None:
        if self._told is None:
            self._pieces.append(assistant.CallPiece(self.num_calls, call))
        else:
            self._tell(self._told, last=True)
        self._over()

    def _tell(self, told: int, *, last: bool = False) -> None:
        """Gives out arguments that have become certain. `told` is the mark up to which they were
        given out before.
        """
        sure = self._cursor.sure if self._end is None else self._end
        if sure > told or last:
            self._pieces.append(
                assistant.ArgumentsPiece(self.num_calls, self._cursor.between(told, sure), last)
            )
            self._told = sure

    def _break_off(self, told: int) -> None:
        """Ends an open call that is not complete. If the text has ended, an incomplete word belongs
        to the arguments; otherwise it is content.
        """
        if self._ended:
            self._cursor.trust()
        self._tell(told)
        rest = "" if self._end is not None else self._cursor.since(self._cursor.sure)
        self._over()
        self._give(self._content.add(rest))

    def _over(self) -> None:
        """A call has ended here."""
        self._cursor.drop()
        self._content.touch()
        self.num_calls += 1
        self._told = None

    def _write(self) -> None:
        self._give(self._content.add(self._cursor.drop()))

    def _give(self, text: str) -> None:
        if text:
            self._pieces.append(assistant.ContentPiece(text))


def _merged(pieces: Iterable[assistant.Piece]) -> Iterator[assistant.Piece]:
    """Joins neighbouring texts of one kind into one piece."""
    for kind, group in groupby(pieces, type):
        pieces = list(group)
        if kind is assistant.CallPiece:
            yield from pieces
            continue
        text = "".join(piece.text for piece in pieces if not isinstance(piece, assistant.CallPiece))
        last = pieces[-1]
        if isinstance(last, assistant.ArgumentsPiece):
            yield assistant.ArgumentsPiece(last.index, text, last.last)
        elif kind is assistant.ContentPiece:
            yield assistant.ContentPiece(text)
        else:
            yield assistant.ReasoningPiece(text)
