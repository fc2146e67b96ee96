"""The parser of one message: thinking, then content with calls in it. And the format of one model's
messages: chosen by name, or by what its chat template and its special tokens show.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby

from midflight.errors import ConfigError, RequestRejected, nearest
from midflight.text.formats import assistant
from midflight.text.formats.cursor import SPACES, Cursor, NotACall, Reading, TrimmedText, outside
from midflight.text.formats.json_formats import ARGUMENTS, Hermes, Llama3, Mistral
from midflight.text.formats.lark import Lark, embedded
from midflight.text.formats.qwen_coder import PARAMETER, QwenCoder
from midflight.text.tokenizer import Tokenizer
from midflight.types import Grammar, GrammarKind


class Begun(Enum):
    """How far the prompt has taken the thinking block."""

    NOT = auto()
    OPENED = auto()
    """The message begins inside it."""
    CLOSED = auto()
    """The model was told not to think."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A block at the beginning of a message. Whitespace just inside and just outside the markers
    belongs to no text.
    """

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
        """Rules in which `start` is `rule` after a block: one that ends if the prompt opened it,
        else one that may come. `None` where no thinking can come."""
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

    num_calls = 0

    def feed(self, text: str) -> tuple[assistant.Piece, ...]:
        return (assistant.ContentPiece(text),) if text else ()

    def finish(self) -> tuple[assistant.Piece, ...]:
        return ()


class FormatParser:
    """A `MessageParser`. Linear in the text, and cut anywhere the text gives the same message: the
    next letter alone decides.

    Whitespace: inside a thinking block its ends are dropped, and so is what stands before and after
    the block. Whitespace beside calls is dropped where the content would begin or end with it, and
    kept between two texts. All other is content.

    Held back are: half a marker; a call until it is whole; and, while calls are looked for,
    whitespace at the end. With `partly` the call of a known tool is told from the first letter of
    its arguments on. If it then breaks off or proves to be none, it stays a call with the arguments
    that were told: always the beginning of a JSON object. A whole text would be content there.
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
        """`None` looks for none. `opened`: the text begins inside the thinking block. `known`: the
        tools that may be called.
        """
        self._tools = tools
        self._thinking = thinking
        self._opened = opened
        self._known = known
        self._early = {tool.name for tool in known if not tool.told_whole} if partly else set[str]()
        self._cursor = Cursor()
        self._pieces: list[assistant.Piece] = []
        self.num_calls = 0
        self._told: int | None = None
        """A mark of the cursor: up to there the arguments of a call that began were told. None: no
        call has begun.
        """
        self._end: int | None = None
        """A mark of the cursor: where these arguments end, once they do."""
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
        if self._thinking is not None and (
            self._opened or (yield from self._opens(self._thinking))
        ):
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
                self._pieces.append(assistant.ReasoningPiece(text))

    def _plain(self) -> Reading[None]:
        """Content to the end, without delay."""
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
        """Calls without a marker, if the message begins so."""
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
        """Arguments that have become certain. `told`: up to where they were told before."""
        sure = self._cursor.sure if self._end is None else self._end
        if sure > told or last:
            self._pieces.append(
                assistant.ArgumentsPiece(self.num_calls, self._cursor.between(told, sure), last)
            )
            self._told = sure

    def _break_off(self, told: int) -> None:
        """The call that began is none. Where the text has ended, a half word is the beginning of
        one; else it is content.
        """
        if self._ended:
            self._cursor.trust()
        self._tell(told)
        rest = "" if self._end is not None else self._cursor.since(self._cursor.sure)
        self._over()
        self._give(self._content.add(rest))

    def _over(self) -> None:
        """A call stands before this place."""
        self._cursor.drop()
        self._content.touch()
        self.num_calls = self.num_calls + 1
        self._told = None

    def _write(self) -> None:
        self._give(self._content.add(self._cursor.drop()))

    def _give(self, text: str) -> None:
        if text:
            self._pieces.append(assistant.ContentPiece(text))


def _merged(pieces: Iterable[assistant.Piece]) -> Iterator[assistant.Piece]:
    """Neighbouring texts of one kind as one piece."""
    for kind, group in groupby(pieces, type):
        pieces = list(group)
        if kind is assistant.CallPiece:
            yield from pieces
            continue
        text = "".join(piece.text for piece in pieces if not isinstance(piece, assistant.CallPiece))
        if isinstance(last := pieces[-1], assistant.ArgumentsPiece):
            yield assistant.ArgumentsPiece(last.index, text, last.last)
        else:
            yield (
                assistant.ContentPiece(text)
                if kind is assistant.ContentPiece
                else assistant.ReasoningPiece(text)
            )


AUTO = "auto"
NONE = "none"

_TOOLS: Mapping[str, Callable[[bool], assistant.ToolFormat]] = {
    "hermes": lambda named: Hermes(),
    "llama3": lambda named: Llama3(),
    "mistral": Mistral,
    "qwen_coder": lambda named: QwenCoder(),
}
"""Made with whether the model knows `[ARGS]`."""

_REASONING: Mapping[str, Thinking] = {"think": THINK, "mistral": MISTRAL_THINK}

TOOL_FORMATS = (AUTO, NONE, *_TOOLS)
REASONING_FORMATS = (AUTO, NONE, *_REASONING)

_TOOL_SIGNS = (
    (PARAMETER, "qwen_coder"),
    (Hermes.opening, "hermes"),
    (Mistral.opening, "mistral"),
    (Llama3.opening, "llama3"),
)
"""What a template or a vocabulary that has the first is taken to write; the first that is found
counts.
"""

_REASONING_SIGNS = tuple(
    (marker, name) for name, thinking in _REASONING.items() for marker in thinking.markers
)


def tool_format(name: str, tokenizer: Tokenizer) -> assistant.ToolFormat | None:
    """`None`: the model has no format of its own. An unknown name: `ConfigError`."""
    chosen = _chosen("tool_format", name, TOOL_FORMATS, _TOOL_SIGNS, tokenizer)
    return (
        None
        if chosen == NONE
        else _TOOLS[chosen](
            ARGUMENTS in _source(tokenizer) or ARGUMENTS in _special_tokens(tokenizer)
        )
    )


def reasoning_format(name: str, tokenizer: Tokenizer) -> Thinking | None:
    """`None`: the model does not think. An unknown name: `ConfigError`."""
    chosen = _chosen("reasoning_format", name, REASONING_FORMATS, _REASONING_SIGNS, tokenizer)
    return None if chosen == NONE else _REASONING[chosen]


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Texts of the tokens that are never part of a longer text (special ones, and others), and
    their ids.
    """
    return {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}


def _special_tokens(tokenizer: Tokenizer) -> set[str]:
    return {text for text, i in added_tokens(tokenizer).items() if i in tokenizer.special_token_ids}


def _chosen(
    option: str,
    name: str,
    known: tuple[str, ...],
    signs: tuple[tuple[str, str], ...],
    tokenizer: Tokenizer,
) -> str:
    if name not in known:
        raise ConfigError(f"{option} is {name!r}: no such format.{nearest(name, known)}")
    if name != AUTO:
        return name
    places = (_source(tokenizer), _special_tokens(tokenizer))
    return next((named for place in places for sign, named in signs if sign in place), NONE)


def _source(tokenizer: Tokenizer) -> str:
    return "" if tokenizer.template is None else tokenizer.template.source


class MessageFormat:
    """Which markers the model writes tool calls and thinking between. Stateless."""

    def __init__(self, tokenizer: Tokenizer, *, tools: str = AUTO, reasoning: str = AUTO) -> None:
        """`auto` chooses from the chat template, else from the special tokens. A model without
        markers for calls writes them as Hermes does; `tools` = `none` reads no call but one that
        was forced. An unknown name: `ConfigError`."""
        self._reads_free_calls = tools != NONE
        self._tools = tool_format(tools, tokenizer) or Hermes()
        self._thinking = reasoning_format(reasoning, tokenizer)
        markers = self._tools.markers + (self._thinking.markers if self._thinking else ())
        added = added_tokens(tokenizer)
        self._lark = Lark({marker: added[marker] for marker in markers if marker in added})
        self.kept_token_ids: frozenset[int] = tokenizer.special_token_ids & set(
            self._lark.tokens.values()
        )
        """Special tokens that are markers: their text must reach the parser."""

    def parser(
        self,
        prompt_text: str | None,
        *,
        calls: bool,
        forced: bool = False,
        tools: Sequence[assistant.Tool] = (),
        partly: bool = False,
    ) -> assistant.MessageParser:
        """A parser for one message. `prompt_text` says whether thinking was opened by the prompt;
        `calls`: whether tool calls are looked for, `forced`: even where free text is not searched
        for them. `tools`, where they are known, give types to arguments that the format writes
        without. `partly` tells a call as it comes."""
        reads = calls and (forced or self._reads_free_calls)
        if self._thinking is None and not reads:
            return PlainParser()
        opened = self._thinking is not None and self._thinking.begun(prompt_text) is Begun.OPENED
        return FormatParser(
            self._tools if reads else None,
            self._thinking,
            opened=opened,
            known=tools,
            partly=partly,
        )

    def parse(
        self,
        text: str,
        prompt_text: str | None,
        *,
        calls: bool,
        forced: bool = False,
        tools: Sequence[assistant.Tool] = (),
    ) -> assistant.AssistantMessage:
        parser = self.parser(prompt_text, calls=calls, forced=forced, tools=tools)
        return assistant.joined(parser.feed(text) + parser.finish())

    def calls_grammar(
        self, tools: Sequence[assistant.Tool], *, parallel: bool, prompt_text: str | None
    ) -> Grammar:
        """What a message matches that calls one of these tools (`parallel`: one or more calls) and
        says nothing else; thinking may come first. Arguments match the tool's schema."""
        if not tools:
            raise RequestRejected(
                "tool_choice asks for a call, but there is no tool: send tools.",
                param="tool_choice",
            )
        rules = self._tools.rules(self._lark, tools, parallel=parallel)
        start = self._thinking_before("calls", prompt_text) or "start: calls"
        return Grammar(GrammarKind.LARK, f"{start}\n{rules}\n")

    @property
    def announces_calls(self) -> bool:
        """Whether a grammar can tell calls from the text around them."""
        return self._reads_free_calls and self._tools.announces

    def calls_amid_text(
        self, tools: Sequence[assistant.Tool], *, parallel: bool, prompt_text: str | None
    ) -> Grammar:
        """What a message matches that is free to say anything and to call these tools: each call
        has a known name, and arguments that match the tool's schema. Without `parallel` it ends
        with its one call. Only where the format `announces_calls`."""
        marker = self._tools.opening
        rules = self._tools.rules(replace(self._lark, announcing=marker), tools, parallel=parallel)
        start = self._thinking_before("amid", prompt_text) or "start: amid"
        amid = "calls* FREE?" if parallel else "calls | FREE?"
        return Grammar(
            GrammarKind.LARK, f"{start}\namid: {amid}\n{self._lark.announced(marker)}\n{rules}\n"
        )

    def calls_or(
        self,
        grammar: Grammar,
        tools: Sequence[assistant.Tool],
        *,
        parallel: bool,
        prompt_text: str | None,
    ) -> Grammar:
        """What a message matches that is free to call one of these tools: `calls_grammar`, or
        content that matches `grammar`; never both. Content alone where free text is not searched
        for calls."""
        if not tools or not self._reads_free_calls:
            return self.after_thinking(grammar, prompt_text=prompt_text)
        rules = self._tools.rules(self._lark, tools, parallel=parallel)
        start = self._thinking_before("answer", prompt_text) or "start: answer"
        return Grammar(
            GrammarKind.LARK,
            f"{start}\nanswer: calls | content\n{rules}\n{embedded('content', grammar)}\n",
        )

    def after_thinking(self, grammar: Grammar, *, prompt_text: str | None) -> Grammar:
        """The same grammar for the content of a message that may think first."""
        start = self._thinking_before("content", prompt_text)
        return (
            grammar
            if start is None
            else Grammar(GrammarKind.LARK, f"{start}\n{embedded('content', grammar)}\n")
        )

    def _thinking_before(self, rule: str, prompt_text: str | None) -> str | None:
        return (
            None if self._thinking is None else self._thinking.before(self._lark, rule, prompt_text)
        )
