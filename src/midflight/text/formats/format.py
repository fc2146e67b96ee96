"""The format of one model's messages, found from its chat template."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.text.formats.assistant import AssistantMessage, ContentPiece, MessageParser, Piece, Tool, joined
from midflight.text.tokenizer import Tokenizer
from midflight.types import Grammar


class MessageFormat:
    """Which markers the model writes tool calls and thinking between. Stateless."""

    def __init__(self, tokenizer: Tokenizer, *, tools: str = "auto", reasoning: str = "auto") -> None:
        """`auto` chooses from the chat template; `none` leaves the text as it is."""
        self.kept_token_ids: frozenset[int] = frozenset()
        """Special tokens that are markers: their text must reach the parser."""

    def parser(self, prompt_text: str | None, *, calls: bool) -> MessageParser:
        """A parser for one message. `prompt_text` says whether thinking was opened by the prompt; `calls`: whether tool calls are looked for."""
        return _Plain()

    def parse(self, text: str, prompt_text: str | None, *, calls: bool) -> AssistantMessage:
        parser = self.parser(prompt_text, calls=calls)
        return joined(parser.feed(text) + parser.finish())

    def calls_grammar(self, tools: Sequence[Tool], *, parallel: bool, prompt_text: str | None) -> Grammar:
        """What a message matches that calls at least one of these tools and says nothing else; thinking may come first."""
        raise NotImplementedError

    def after_thinking(self, grammar: Grammar, *, prompt_text: str | None) -> Grammar:
        """The same grammar for the content of a message that may think first."""
        return grammar


class _Plain:
    def feed(self, text: str) -> tuple[Piece, ...]:
        return (ContentPiece(text),) if text else ()

    def finish(self) -> tuple[Piece, ...]:
        return ()
