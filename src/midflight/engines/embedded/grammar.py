"""Answers of a given form. A grammar decides which tokens are allowed next, and llguidance does the
parsing. This module bounds it and names its errors.

A constraint is a function of the output tokens alone, so a resumed answer goes on under the
constraint it was interrupted with (I5).
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import llguidance
import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.errors import RequestRejected
from midflight.text.tokenizer import Tokenizer
from midflight.types import Grammar, GrammarKind

_MAX_TEXT: Final = 65_536
"""Characters of a grammar. The longest tool lists have a small part of them, and with the limits
below such a grammar compiles in fractions of a second.
"""
_MAX_CACHED: Final = 64
"""Compiled grammars kept: a run has few, one for each environment and each list of tools."""
_MAX_MESSAGE: Final = 300
"""Characters of llguidance's message that are passed on: it quotes the grammar, which may be
long.
"""
_WHITESPACE: Final = r"[ \n\r\t]{0,40}"
"""The blanks that are allowed between JSON tokens. They are enough for indented JSON, and prevent
an endless answer of blanks.
"""


class Constraint:
    """Says which tokens may come next in one answer. Its errors are `RequestRejected`: the request
    ends, and nothing else does.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, *, ends: frozenset[int], vocab_size: int
    ) -> None:
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size
        self.ended = False
        """True if an end of turn has followed a complete answer. Then nothing may come after it,
        even with `ignore_eos`.
        """

    def allowed(self) -> NDArray[np.bool_]:
        """The ids that may come next, as a mask [V]. At least one is allowed. Ends of turn are
        among them if the answer may be over.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(mask, bitorder="little", count=self._vocab_size).astype(np.bool_)
        if not bits.any():
            raise _rejected(
                "no token of the vocabulary continues the answer",
                "Send a grammar whose answers the tokenizer can write.",
            )
        return bits

    def advance(self, token_ids: Sequence[int]) -> None:
        """Goes on by these tokens."""
        for token_id in token_ids:
            if token_id in self._ends and self._matcher.is_accepting():
                self.ended = True
                return
            self._matcher.consume_token(token_id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _rejected(
                self._matcher.get_error(), "Send a simpler grammar, or the answer's own tokens."
            )


class Grammars:
    """Compiles grammars for one tokenizer. One thread at a time may use it, which need not be the
    decode thread.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = frozenset(i for i in tokenizer.eos_token_ids if i < vocab_size)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def constraint(self, grammar: Grammar, output_ids: Sequence[int]) -> Constraint:
        """A constraint that stands after the output tokens so far. Blocking. Raises
        `RequestRejected` if the grammar does not compile, is too large, or forbids these tokens.
        """
        with self._one_at_a_time:
            matcher = self._matcher(grammar).deep_copy()
        constraint = Constraint(matcher, ends=self._ends, vocab_size=self._vocab_size)
        constraint.advance(output_ids)
        return constraint

    def for_server(
        self, grammar: Grammar, output_ids: Sequence[int], *, barred: Sequence[int], least: int
    ) -> str:
        """The text that describes an answer to a server's plugin; see `inside/midflight_shape.py`.
        Blocking. Raises `RequestRejected` in the same cases as `constraint`.
        """
        self.constraint(grammar, output_ids)
        said = {
            "grammar": _source(grammar),
            "after": output_ids,
            "ends": sorted(self._ends),
            "barred": barred,
            "least": least,
        }
        return msgspec.json.encode(said).decode()

    def _matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the beginning of the grammar. The least recently used are forgotten."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        return self._compiled[grammar]

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        if len(grammar.text) > _MAX_TEXT:
            raise _rejected(f"it has {len(grammar.text)} characters", f"Send at most {_MAX_TEXT}.")
        # A state of the lexer takes about 2 kB. The other limits (fuel of the lexer, size of the
        # grammar) are llguidance's own: they bound the time of a compilation and of a mask.
        limits = llguidance.LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
        matcher = llguidance.LLMatcher(
            self._known_tokens(), _source(grammar), log_level=0, limits=limits
        )
        if matcher.is_error():
            raise _rejected(matcher.get_error(), "Correct the grammar, or leave it out.")
        return matcher

    def _known_tokens(self) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance knows it. It is made at the first grammar, because that
        takes a second if the vocabulary is large.
        """
        if self._vocabulary is None:
            if not self._ends:
                raise _rejected(
                    "the model names no end of text, so no answer could end",
                    "Name eos_token_id in its config.json.",
                )
            size = max(self._vocab_size, self._tokenizer.vocab_size)
            try:
                self._vocabulary = llguidance.LLTokenizer(
                    self._tokenizer.backend.to_str(), n_vocab=size, eos_token=sorted(self._ends)
                )
            except ValueError as error:
                raise _rejected(
                    f"the model's tokenizer cannot be constrained ({error})",
                    "Use a byte-level tokenizer.",
                ) from error
        return self._vocabulary


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own notation."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.JSON_SCHEMA:
            return llguidance.LLMatcher.grammar_from_json_schema(
                _schema(grammar.text), defaults={"whitespace_pattern": _WHITESPACE}
            )


def _schema(text: str) -> str:
    try:
        schema: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _rejected(f"the schema is not JSON ({error})", "Send a JSON schema.") from error
    if not isinstance(schema, dict):
        raise _rejected(f"the schema is {text[:40]!r}", "Send a JSON object.")
    return text


def _rejected(why: str, remedy: str) -> RequestRejected:
    return RequestRejected(
        f"constraining the answer: {' '.join(why.split())[:_MAX_MESSAGE]}. {remedy}",
        param="grammar",
    )
