"""Stop strings over a token stream, across token borders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from midflight.text.detokenizer import IncrementalDetokenizer
from midflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`stop` was completed by output token number `token_index` (from 0): later tokens are overshoot."""

    stop: str
    token_index: int


class StopMatcher:
    """Feed output tokens; `take` gives text that may be shown. Text from the stop string on is never given out.

    The stop that counts is the first to be completed in token order; of several that one token completes, the one that
    begins earliest, then the one named first. How tokens were grouped into chunks makes no difference (I5).
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, min_tokens: int = 0, keep: frozenset[int] = frozenset()
    ) -> None:
        """A stop string completed by one of the first `min_tokens` tokens does not stop. Empty stop strings never match.
        Special tokens are no text, but for those in `keep`."""
        self._stop = tuple(s for s in stop if s)
        self._window = max((len(s) for s in self._stop), default=1) - 1
        self._min_tokens = min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, keep=keep)
        self._num_tokens = 0
        self._text = ""
        """Text not yet given out, preceded by up to `_window` letters that were."""
        self._taken = 0
        """Letters of `_text` that were given out."""
        self.match: StopMatch | None = None

    def feed(self, token_ids: Iterable[int]) -> StopMatch | None:
        """Takes tokens up to the one that completes a stop string; later ones are ignored."""
        for token_id in token_ids:
            if self.match is not None:
                break
            self._extend(self._detokenizer.push(token_id))
            self._num_tokens += 1
        return self.match

    def take(self) -> str:
        """The text that has become safe to show: no later token can make it part of a stop string."""
        return self._give(len(self._text) if self.match else len(self._text) - self._held())

    def finish(self) -> str:
        """The rest of the text, when the tokens have ended. A character left incomplete is written as U+FFFD."""
        if self.match is None:
            self._text += self._detokenizer.finish()
        return self._give(len(self._text))

    def _extend(self, text: str) -> None:
        if not text:
            return
        before = len(self._text)
        self._text += text
        # A match must hold a new letter: one that ended earlier was not a stop then (`min_tokens`) and is none now.
        found = [(at, order) for order, s in enumerate(self._stop) if (at := self._text.find(s, max(0, before - len(s) + 1))) >= 0]
        if found and self._num_tokens >= self._min_tokens:
            at, order = min(found)
            self.match = StopMatch(self._stop[order], self._num_tokens)
            self._text = self._text[:at]

    def _held(self) -> int:
        """Letters at the end of the text that may be the beginning of a stop string."""
        longest = min(self._window, len(self._text) - self._taken)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._text[-n:]) for s in self._stop)), 0)

    def _give(self, end: int) -> str:
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        surplus = max(0, self._taken - self._window)
        self._text, self._taken = self._text[surplus:], self._taken - surplus
        return piece
