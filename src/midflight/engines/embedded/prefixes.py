"""Keys, values and states of earlier sequences, as a tree of spans of tokens. A request computes
only tokens that no other has computed (I5).

A span is a copy out of the slot of a sequence, and goes into the slot of another in one piece. A
tree by single tokens finds the whole of a conversation again, while blocks of a fixed size would
find it up to the last whole block. Slots stay in one piece, which attention over them needs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from midflight.engines.embedded.experts import ExpertRecords
from midflight.engines.embedded.key_runs import cut, joined, oldest
from midflight.types import KeyRuns, UInt8, Version

Ints = NDArray[np.int64]


class PrefixRoom(NamedTuple):
    """The limits of the stored prefixes."""

    num_bytes: int = 2**28
    """The limit on keys, values and states together. With 0 nothing is kept, and each request
    computes its whole prompt.
    """
    age: int = 0
    """The largest number of versions by which the weights that computed a span may be older than
    the weights served.
    """


class SpanState(Protocol):
    """The data that a runner stores for a span of tokens, outside its slots."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def has_state(self) -> bool:
        """True if a sequence can go on behind the last token of the span. For layers with states
        that takes more than the keys of each token.
        """
        ...

    def cut(self, start: int, end: int) -> "SpanState":
        """The same for tokens [start, end) of the span, in memory of its own."""
        ...


class KeepsSpans(Protocol):
    """A runner whose slots can be copied out and filled."""

    @property
    def keeps_states(self) -> bool: ...
    def take(self, slot: int, *, start: int, end: int, at_end: bool) -> SpanState:
        """Copies the data of tokens [start, end) of the sequence in the slot. With `at_end` the
        sequence has no more tokens now, so that its state is the state behind them.
        """
        ...

    def put(self, slot: int, spans: Sequence[tuple[Any, int]]) -> None:
        """Begins the slot with spans that the same runner took. They come one after the other. Each
        span contributes as many of its tokens as the number beside it says.
        """
        ...


@dataclass(slots=True, eq=False)
class _Span:
    tokens: Ints
    computed: SpanState
    made_by: KeyRuns
    """The versions that computed its keys, over the keys of the spans before."""
    oldest: Version
    """The least of them."""
    experts: UInt8 | None
    """[tokens, bytes of a token], if choices are recorded."""
    parent: "_Span | None"
    children: dict[int, "_Span"] = field(default_factory=dict[int, "_Span"])
    """The spans behind it, by their first tokens."""


class Prefixes:
    """The tree. It keeps at most `max_bytes`: the span that was used longest ago goes first, and
    ends go before beginnings. With 0 nothing is kept.
    """

    def __init__(
        self, runner: KeepsSpans, *, max_bytes: int, experts: ExpertRecords | None = None
    ) -> None:
        self._runner = runner
        self._max_bytes = max_bytes
        self._experts = experts
        self._roots: dict[int, _Span] = {}
        self._spans = OrderedDict[_Span, None]()
        """The span used longest ago comes first. A span is used whenever one behind it is."""
        self.num_bytes = 0

    def fill(self, slot: int, tokens: Ints) -> KeyRuns:
        """Fills the slot with all that is known of a sequence that begins with `tokens`. Returns
        the versions of the known keys. There are always fewer keys than tokens.
        """
        found = self._walk(tokens[:-1])
        if self._runner.keeps_states:
            while found and not _can_go_on_behind(*found[-1]):
                found.pop()
        if not found:
            return ()
        self._runner.put(slot, [(span.computed, num) for span, num in found])
        if self._experts is not None:
            self._experts.fill(
                slot, [span.experts[:num] for span, num in found if span.experts is not None]
            )
        last, _ = found[-1]
        self._use(last)
        return joined([cut(span.made_by, 0, num) for span, num in found])

    def add(self, slot: int, tokens: Ints, made_by: KeyRuns) -> None:
        """Keeps the contents of the slot: the keys of all `tokens`, and the versions that computed
        them. Keys depend on the keys before them. So a span of these tokens that has keys of other
        versions is replaced, with all spans behind it, if it is older. If it is newer, the rest of
        the slot is not kept.
        """
        if not self._max_bytes or not len(tokens):
            return
        last: _Span | None = None
        end = 0
        for known, num in self._walk(tokens):
            there = cut(known.made_by, 0, num)
            made = cut(made_by, end, end + num)
            if there != made:
                if oldest(there) >= oldest(made):
                    return
                self._drop(known)
                break
            last = known if num == len(known.tokens) else self._split(known, num)
            start = end
            end += num
            at_end = end == len(tokens)
            if self._runner.keeps_states and at_end and not last.computed.has_state:
                self._fill(last, slot, start=start, at_end=at_end)
        if end < len(tokens):
            computed = self._runner.take(slot, start=end, end=len(tokens), at_end=True)
            runs = cut(made_by, end, len(tokens))
            last = self._grow(last, tokens[end:].copy(), computed, runs)
            last.experts = self._chosen(slot, end, len(tokens))
        if last is not None:
            self._use(last)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._spans)))

    def clear(self) -> None:
        """Drops all spans."""
        self._roots.clear()
        self._spans.clear()
        self.num_bytes = 0

    def forget(self, *, before: Version) -> None:
        """Drops the spans that weights older than `before` computed, and all spans behind them."""
        for span in [span for span in self._spans if span.oldest < before]:
            self._drop(span)

    def _walk(self, tokens: Ints) -> list[tuple[_Span, int]]:
        """The spans along the tokens, and how many tokens of each agree. All tokens of a span
        agree, except in the last span.
        """
        found = list[tuple[_Span, int]]()
        children = self._roots
        start = 0
        words = tokens.tobytes()
        size = tokens.itemsize
        while start < len(tokens):
            span = children.get(tokens.item(start))
            if span is None:
                break
            width = len(span.tokens)
            if words.startswith(span.tokens.tobytes(), start * size):
                num = width
            else:
                width = min(width, len(tokens) - start)
                differ = np.flatnonzero(span.tokens[:width] != tokens[start : start + width])
                num = int(differ[0]) if len(differ) else width
            found.append((span, num))
            if num < len(span.tokens):
                break
            children = span.children
            start += num
        return found

    def _split(self, span: _Span, num: int) -> _Span:
        """Makes two of a span and returns the first, of `num` tokens. The second is the old object,
        and the spans behind it stay.
        """
        tokens = span.tokens
        computed = span.computed
        del self._siblings(span)[int(tokens[0])]
        self.num_bytes -= computed.num_bytes
        runs = cut(span.made_by, 0, num)
        first = self._grow(span.parent, tokens[:num], computed.cut(0, num), runs)
        span.computed = computed.cut(num, len(tokens))
        span.tokens = tokens[num:]
        span.made_by = cut(span.made_by, num, len(tokens))
        span.oldest = oldest(span.made_by)
        span.parent = first
        if span.experts is not None:
            first.experts = span.experts[:num]
            span.experts = span.experts[num:]
        first.children[int(span.tokens[0])] = span
        self.num_bytes += span.computed.num_bytes
        return first

    def _grow(
        self, parent: _Span | None, tokens: Ints, computed: SpanState, made_by: KeyRuns
    ) -> _Span:
        span = _Span(tokens, computed, made_by, oldest(made_by), None, parent)
        self._siblings(span)[int(tokens[0])] = span
        self._spans[span] = None
        self.num_bytes += computed.num_bytes
        return span

    def _siblings(self, span: _Span) -> dict[int, _Span]:
        """The spans with the same parent, by their first tokens."""
        if span.parent is None:
            return self._roots
        return span.parent.children

    def _fill(self, span: _Span, slot: int, *, start: int, at_end: bool) -> None:
        end = start + len(span.tokens)
        self.num_bytes -= span.computed.num_bytes
        span.computed = self._runner.take(slot, start=start, end=end, at_end=at_end)
        span.experts = self._chosen(slot, start, end)
        self.num_bytes += span.computed.num_bytes

    def _chosen(self, slot: int, start: int, end: int) -> UInt8 | None:
        if self._experts is None:
            return None
        return self._experts.of(slot)[start:end].copy()

    def _use(self, last: _Span) -> None:
        span: _Span | None = last
        while span is not None:
            self._spans.move_to_end(span)
            span = span.parent

    def _drop(self, span: _Span) -> None:
        """Drops a span and all spans behind it."""
        if span not in self._spans:
            return
        del self._siblings(span)[int(span.tokens[0])]
        left = [span]
        while left:
            gone = left.pop()
            left += gone.children.values()
            del self._spans[gone]
            self.num_bytes -= gone.computed.num_bytes


def _can_go_on_behind(span: _Span, num: int) -> bool:
    """True if a sequence whose layers keep states can go on behind the first `num` tokens of the
    span.
    """
    return num == len(span.tokens) and span.computed.has_state
