"""What was computed of sequences before: a tree of spans of tokens, so that a request computes only what no other has computed (I5).

A span is a copy out of the slot of a sequence, and goes into the slot of another in one piece. A tree by single tokens finds the whole of a
conversation again, where blocks of a fixed size would find it up to the last whole block; and slots stay in one piece, which attention over
them needs.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from midflight.engines.embedded.experts import ExpertRecords
from midflight.types import UInt8, Version

Ints = NDArray[np.int64]


class PrefixRoom(NamedTuple):
    """How much is kept."""

    num_bytes: int = 2**28
    """Of keys, values and states. With 0 nothing is kept, and each request computes its whole prompt."""
    age: int = 0
    """How many versions older than those served the weights may be that it was computed by."""


class Computed(Protocol):
    """What a runner keeps of a span of tokens, out of its slots."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def has_state(self) -> bool:
        """Whether a sequence can go on behind its last token, where that takes more than the keys of each token."""
        ...

    def cut(self, start: int, end: int) -> "Computed":
        """Of some of its tokens, in memory of its own."""
        ...


class KeepsSpans(Protocol):
    """A runner."""

    @property
    def keeps_states(self) -> bool: ...
    def take(self, slot: int, *, start: int, end: int, at_end: bool) -> Computed:
        """Of tokens [start, end) of the sequence in the slot. `at_end`: it has no more now, so that its state is that behind them."""
        ...

    def put(self, slot: int, spans: Sequence[tuple[Any, int]]) -> None:
        """Of what the same runner took: the slot begins with these, one after the other, each up to a number of its tokens."""
        ...


@dataclass(slots=True, eq=False)
class _Span:
    tokens: Ints
    computed: Computed
    version: Version
    """Of the oldest weights that any of its keys was made under."""
    experts: UInt8 | None
    """[tokens, bytes of a token], where choices are recorded."""
    parent: "_Span | None"
    children: dict[int, "_Span"] = field(default_factory=dict[int, "_Span"])
    """By their first tokens."""


class Prefixes:
    """At most `max_bytes` are kept: what was used longest ago goes first, ends before beginnings. With 0 nothing is kept."""

    def __init__(self, runner: KeepsSpans, *, max_bytes: int, experts: ExpertRecords | None = None) -> None:
        self._runner, self._max_bytes, self._experts = runner, max_bytes, experts
        self._roots: dict[int, _Span] = {}
        self._spans = OrderedDict[_Span, None]()
        """The one used longest ago first; a span is used whenever one behind it is."""
        self.num_bytes = 0

    def fill(self, slot: int, tokens: Ints) -> tuple[int, Version]:
        """Puts what is known of a sequence that begins with `tokens` into the slot. Returns of how many tokens, always fewer than there are,
        and of the oldest weights among them."""
        found = self._walk(tokens[:-1])
        if self._runner.keeps_states:
            while found and not (found[-1][1] == len(found[-1][0].tokens) and found[-1][0].computed.has_state):
                found.pop()
        if not found:
            return 0, 0
        self._runner.put(slot, [(span.computed, num) for span, num in found])
        if self._experts is not None:
            self._experts.fill(slot, [span.experts[:num] for span, num in found if span.experts is not None])
        self._use(found[-1][0])
        return sum(num for _, num in found), min(span.version for span, _ in found)

    def add(self, slot: int, tokens: Ints, *, version: Version) -> None:
        """The slot holds the keys of all `tokens`, the oldest of `version`. What was known of them from older weights is replaced."""
        if not self._max_bytes or not len(tokens):
            return
        last: _Span | None = None
        end = 0
        for known, num in self._walk(tokens):
            last = known if num == len(known.tokens) else self._split(known, num)
            start, end = end, end + num
            if last.version < version or (self._runner.keeps_states and end == len(tokens) and not last.computed.has_state):
                self._fill(last, slot, start=start, version=version, at_end=end == len(tokens))
        if end < len(tokens):
            last = self._grow(last, tokens[end:].copy(), self._runner.take(slot, start=end, end=len(tokens), at_end=True), version)
            last.experts = self._chosen(slot, end, len(tokens))
        if last is not None:
            self._use(last)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._spans)))

    def forget(self, *, before: Version) -> None:
        """Drops what was computed by weights older than `before`, and what stands behind it."""
        for span in [span for span in self._spans if span.version < before]:
            self._drop(span)

    def _walk(self, tokens: Ints) -> list[tuple[_Span, int]]:
        """The spans along the tokens, and how many of each agree: all, but for the last."""
        found, children, start = list[tuple[_Span, int]](), self._roots, 0
        while start < len(tokens) and (span := children.get(int(tokens[start]))) is not None:
            width = min(len(span.tokens), len(tokens) - start)
            differ = np.flatnonzero(span.tokens[:width] != tokens[start : start + width])
            num = int(differ[0]) if len(differ) else width
            found.append((span, num))
            if num < len(span.tokens):
                break
            children, start = span.children, start + num
        return found

    def _split(self, span: _Span, num: int) -> _Span:
        """Makes two of a span; returns the first, of `num` tokens. The other keeps the place, and what stands behind it."""
        tokens, computed = span.tokens, span.computed
        siblings = self._roots if span.parent is None else span.parent.children
        del siblings[int(tokens[0])]
        self.num_bytes -= computed.num_bytes
        first = self._grow(span.parent, tokens[:num], computed.cut(0, num), span.version)
        span.tokens, span.computed, span.parent = tokens[num:], computed.cut(num, len(tokens)), first
        if span.experts is not None:
            first.experts, span.experts = span.experts[:num], span.experts[num:]
        first.children[int(span.tokens[0])] = span
        self.num_bytes += span.computed.num_bytes
        return first

    def _grow(self, parent: _Span | None, tokens: Ints, computed: Computed, version: Version) -> _Span:
        span = _Span(tokens, computed, version, None, parent)
        (self._roots if parent is None else parent.children)[int(tokens[0])] = span
        self._spans[span] = None
        self.num_bytes += computed.num_bytes
        return span

    def _fill(self, span: _Span, slot: int, *, start: int, version: Version, at_end: bool) -> None:
        end = start + len(span.tokens)
        self.num_bytes -= span.computed.num_bytes
        span.computed, span.version = self._runner.take(slot, start=start, end=end, at_end=at_end), version
        span.experts = self._chosen(slot, start, end)
        self.num_bytes += span.computed.num_bytes

    def _chosen(self, slot: int, start: int, end: int) -> UInt8 | None:
        return None if self._experts is None else self._experts.of(slot)[start:end].copy()

    def _use(self, last: _Span) -> None:
        span: _Span | None = last
        while span is not None:
            self._spans.move_to_end(span)
            span = span.parent

    def _drop(self, span: _Span) -> None:
        """With all behind it."""
        if span not in self._spans:
            return
        del (self._roots if span.parent is None else span.parent.children)[int(span.tokens[0])]
        left = [span]
        while left:
            gone = left.pop()
            left += gone.children.values()
            del self._spans[gone]
            self.num_bytes -= gone.computed.num_bytes
