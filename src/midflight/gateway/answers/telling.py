"""What the agent sees of an answer, as its tokens come or all at once. Synchronous."""

from __future__ import annotations

from collections.abc import Sequence

from midflight.text import StopMatcher, Tokenizer
from midflight.text.formats import AssistantMessage, CallPiece, MessageParser, Piece
from midflight.text.formats.assistant import joined
from midflight.types import SamplingParams


class Telling:
    """One choice: tokens in, text and parsed pieces out. Nothing from the stop string on, no special token, no half character.

    Told in pieces or told whole, the agent gets the same message.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, parser: MessageParser | None, *, keep: frozenset[int], one_call: bool = False
    ) -> None:
        """`parser`: of a chat, else `None`. `keep`: special tokens that it needs to see. `one_call` shows the first tool call only."""
        self._tokenizer, self._sampling, self._parser = tokenizer, sampling, parser
        self._keep = keep if parser is not None else frozenset[int]()
        self._one_call = one_call
        self._matcher: StopMatcher | None = None
        self._pieces: list[Piece] = []
        self.text = ""
        """Told so far."""

    @property
    def message(self) -> AssistantMessage:
        return joined(tuple(self._pieces)) if self._parser is not None else AssistantMessage(self.text)

    def push(self, token_ids: Sequence[int]) -> tuple[str, tuple[Piece, ...]]:
        """The text and pieces that became certain with these tokens."""
        matcher = self._begun()
        matcher.feed(token_ids)
        return self._tell(matcher.take())

    def end(self) -> tuple[str, tuple[Piece, ...]]:
        """The rest, when there are no more tokens."""
        matcher = self._begun()
        return self._tell(matcher.take() + matcher.finish(), last=True)

    def whole(self, token_ids: Sequence[int]) -> tuple[str, tuple[Piece, ...]]:
        """The answer at once, instead of `push` and `end`."""
        if self._sampling.stop:
            self._begun().feed(token_ids)
            return self.end()
        return self._tell(self._tokenizer.decode(token_ids, skip_special=True, keep=self._keep), last=True)

    def _begun(self) -> StopMatcher:
        if self._matcher is None:
            self._matcher = StopMatcher(self._tokenizer, self._sampling.stop, min_tokens=self._sampling.min_tokens, keep=self._keep)
        return self._matcher

    def _tell(self, text: str, *, last: bool = False) -> tuple[str, tuple[Piece, ...]]:
        self.text += text
        if self._parser is None:
            return text, ()
        pieces = self._parser.feed(text) if text else ()
        if last:
            pieces += self._parser.finish()
        if self._one_call:
            pieces = tuple(p for p in pieces if not isinstance(p, CallPiece) or p.index == 0)
        self._pieces += pieces
        return text, pieces
