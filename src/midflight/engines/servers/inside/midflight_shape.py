"""Runs inside servers. It finds the tokens that may come next in one answer, by llguidance, from
any token of the answer on.

A server starts a grammar with the request, and an answer that goes on after an abort is a new
request to the server. So each request has its grammar, the tokens that the answer has already, its
ends, and the number of tokens that must come before an end. The servers' own machinery of grammars
does the rest. The server's interpreter has no Midflight, so this file imports only packages that
are there.
"""

import json
from collections import OrderedDict
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_CACHED = 64
"""Compiled grammars kept: a run has few, one for each environment and each list of tools."""
_LIMITS = {"max_lexer_states": 20_000, "verbose_errors": False}
"""The limits of the embedded engine, which refuses what exceeds them before the server is asked."""


class Shape:
    """Says which tokens may come next in one answer. The answer is over if an end of turn follows a
    complete answer.
    """

    def __init__(self, matcher, *, ends, barred, least):
        """`ends` are ends of turn. Before `least` tokens have come, tokens in `barred` are not
        allowed, unless the grammar leaves nothing else.
        """
        self._matcher = matcher
        self._ends = frozenset(ends)
        self._barred = barred
        self._least = least
        self.num_tokens = 0
        """Counted from the beginning of the answer."""
        self.ended = False

    def accept(self, tokens):
        """Goes on by these tokens. Returns whether the grammar allows them."""
        for token in tokens:
            self.num_tokens += 1
            if token in self._ends and (self.ended or self._matcher.is_accepting()):
                self.ended = True
            elif self.ended or not self._matcher.consume_token(token) or self._matcher.is_error():
                return False
        return True

    def num_allowed(self, tokens):
        """Returns how many of the tokens the grammar allows, one after the other. The answer stays
        where it is.
        """
        return 0 if self.ended else self._matcher.validate_tokens(tokens)

    def back(self, num):
        """Takes the last tokens back. Only the very last of them can be an end."""
        self.num_tokens -= num
        if num and self.ended:
            self.ended = False
            num = num - 1
        if num:
            self._matcher.rollback(num)

    def fill(self, words, fill):
        """Writes the tokens that may come next to one row of bits, int32 [V / 32]. `fill` gets them
        from the matcher.
        """
        fill(self._matcher)
        if self.num_tokens >= self._least:
            return
        kept = words.clone()
        for token in self._barred:
            bit = token % 32
            # The highest bit of a word is its sign.
            words[token // 32] &= ~(1 << bit) if bit < 31 else 0x7FFFFFFF
        if not words.any():  # the answer is complete, and only its end is left
            words.copy_(kept)


class Shapes:
    """Compiles the grammars of requests. Servers call it in threads of their own."""

    def __init__(self, tokenizer, vocab_size):
        """`tokenizer` is one of `transformers`. `vocab_size` is the number of bits of a row."""
        self._source = tokenizer.backend_tokenizer.to_str()
        self._vocab_size = vocab_size
        self._vocabularies = {}
        self._compiled = OrderedDict()
        self._one_at_a_time = Lock()

    def shape(self, said):
        """`said`: JSON of `grammar`, in llguidance's notation, the tokens `after` which it begins,
        and `ends`, `barred` and `least` of `Shape`. Raises `ValueError` if the grammar does not
        compile, or forbids those tokens.
        """
        said = json.loads(said)
        ends = tuple(said["ends"])
        with self._one_at_a_time:
            matcher = self._matcher(said["grammar"], ends).deep_copy()
        shape = Shape(matcher, ends=ends, barred=said["barred"], least=said["least"])
        if not shape.accept(said["after"]):
            raise ValueError(f"the grammar forbids the answer so far: {matcher.get_error()}")
        return shape

    def _matcher(self, grammar, ends):
        key = (grammar, ends)
        if key not in self._compiled:
            self._compiled[key] = self._compile(grammar, ends)
        self._compiled.move_to_end(key)
        while len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        return self._compiled[key]

    def _compile(self, grammar, ends):
        if ends not in self._vocabularies:
            self._vocabularies[ends] = LLTokenizer(
                self._source, n_vocab=self._vocab_size, eos_token=list(ends)
            )
        vocabulary = self._vocabularies[ends]
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher
