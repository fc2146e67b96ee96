"""Incremental detokenisation. It never gives out half a character, and finds stop strings across
token borders.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from midflight.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns tokens into text as they arrive, and gives out the text that is certain so far. All
    pieces joined, including that of `finish`, equal `Tokenizer.decode` of all tokens with
    `skip_special`.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep: frozenset[int] = frozenset()) -> None:
        """Special tokens in `keep` are written as text. The others are left out."""
        self._skip = tokenizer.special_token_ids - keep
        table = tokenizer.token_bytes
        self._pieces = _GeneralPieces(tokenizer) if table is None else _BytePieces(table)

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token. Empty while a character is incomplete."""
        return "" if token_id in self._skip else self._pieces.push(token_id)

    def finish(self) -> str:
        """The text that was held back. An incomplete character is written as U+FFFD. No `push` may
        follow.
        """
        return self._pieces.flush()


class _BytePieces:
    """The pieces of byte-level vocabularies. The bytes of each token are known, and the standard
    incremental decoder decodes them. O(1) a token.
    """

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True
        """True if no character is incomplete. Then ASCII letters do not need the incremental
        decoder.
        """

    def push(self, token_id: int) -> str:
        data = self._token_bytes.get(token_id, b"")
        if self._is_whole and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _GeneralPieces:
    """The pieces of any other vocabulary. A short window is decoded twice, with and without the new
    tokens, and the difference is given out.

    The window begins one piece back, because decoders treat the first token differently (a leading
    space, a prefix).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = 0
        """Tokens of the window whose text has been given out."""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return "" if self._incomplete(token_id) else self._emit()

    def flush(self) -> str:
        return self._emit()

    def _incomplete(self, token_id: int) -> bool:
        """True if the text may still change. A run of byte tokens (`<0x..>`) is decoded as one, so
        its validity is known only after its end.
        """
        token = self._tokenizer.backend.id_to_token(token_id) or ""
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return is_byte or self._tokenizer.decode(self._ids).endswith(_REPLACEMENT)

    def _emit(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._emitted])
        text = self._tokenizer.decode(self._ids)[len(before) :]
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string `stop` was completed by output token number `token_index` (from 0). Later
    tokens are overshoot.
    """

    stop: str
    token_index: int


class StopMatcher:
    """Finds stop strings in output tokens. `take` gives text that may be shown. The stop string and
    text after it are never given out.

    The stop string that counts is the first one to be completed in token order. If one token
    completes several, the one that begins earliest counts, and of these the one named first. The
    grouping of tokens into chunks makes no difference (I5).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """A stop string that one of the first `min_tokens` tokens completes does not count. Empty
        stop strings never match. Special tokens are left out of the text, except those in
        `keep`.
        """
        self._stop = tuple(s for s in stop if s)
        self._window = max((len(s) for s in self._stop), default=1) - 1
        self._min_tokens = min_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, keep=keep)
        self._num_tokens = 0
        self._text = ""
        """Text that was not given out yet, after up to `_window` letters that were."""
        self._taken = 0
        """Letters of `_text` that were given out."""
        self.match: StopMatch | None = None

    def feed(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Takes tokens up to the one that completes a stop string. Later ones are ignored."""
        if not self._stop:
            push = self._detokenizer.push
            if len(token_ids) == 1:
                self._text += push(token_ids[0])
            else:
                self._text += "".join(map(push, token_ids))
            return None
        for token_id in token_ids:
            if self.match is not None:
                break
            self._extend(self._detokenizer.push(token_id))
            self._num_tokens += 1
        return self.match

    def take(self) -> str:
        """The text that has become safe to show, because no later token can make it part of a stop
        string.
        """
        if not self._stop:
            text = self._text
            self._text = ""
            return text
        held = 0 if self.match else self._held()
        return self._give(len(self._text) - held)

    def finish(self) -> str:
        """The rest of the text, when the tokens have ended. An incomplete character is written as
        U+FFFD.
        """
        if self.match is None:
            self._text += self._detokenizer.finish()
        return self._give(len(self._text))

    def _extend(self, text: str) -> None:
        if not text:
            return
        before = len(self._text)
        self._text += text
        # A match must hold a new letter. A match that ended earlier did not count then
        # (`min_tokens`), and does not count now.
        found: list[tuple[int, int]] = []
        for order, stop in enumerate(self._stop):
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                found.append((at, order))
        if found and self._num_tokens >= self._min_tokens:
            at, order = min(found)
            self.match = StopMatch(self._stop[order], self._num_tokens)
            self._text = self._text[:at]

    def _held(self) -> int:
        """Letters at the end of the text that may be the beginning of a stop string."""
        longest = min(self._window, len(self._text) - self._taken)
        for length in range(longest, 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0

    def _give(self, end: int) -> str:
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        surplus = max(0, self._taken - self._window)
        self._text = self._text[surplus:]
        self._taken -= surplus
        return piece
