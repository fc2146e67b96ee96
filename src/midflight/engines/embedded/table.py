"""The running sequences as arrays over slots, so that a step costs no Python per request, and what
was computed of sequences before.

That is a tree of spans of tokens: a request computes only what no other has (I5). A span is a copy
out of the slot of a sequence, and goes into the slot of another in one piece. A tree by single
tokens finds the whole of a conversation again, where blocks of a fixed size would find it up to the
last whole block; and slots stay in one piece, which attention over them needs.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from midflight.engines.embedded.experts import ExpertRecords
from midflight.engines.embedded.grammar import Constraint
from midflight.engines.embedded.sampler import Biases, Masks, Penalties, SamplingBatch
from midflight.text.detokenizer import StopMatcher
from midflight.types import Feature, GenerateRequest, UInt8, Version

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """A request inside the engine. `handle` is unique in the engine's life and grows; `outlet` says
    where its tokens go.
    """

    handle: int
    outlet: int
    request: GenerateRequest
    stop_ids: tuple[int, ...]
    matcher: StopMatcher | None
    constraint: Constraint | None = None
    """Of a request with a grammar; at the end of the tokens so far."""
    aborted: bool = False
    """Before it came here, while its grammar was compiled."""


class SlotTable:
    """One row per slot; a row means something while `active`. Invariant: 0 <= cached < length <=
    limit for active rows.

    `cached` counts tokens whose keys are stored. A sequence is decoding when one token is missing,
    prefilling when more are.
    """

    def __init__(self, *, max_running: int, max_context: int) -> None:
        n = max_running
        self.max_context = max_context
        self.active = np.zeros(n, dtype=np.bool_)
        self.blocked = np.zeros(n, dtype=np.bool_)
        """Waits for another slot to finish the same prompt."""
        self.leading = np.zeros(n, dtype=np.bool_)
        """Computes a prompt that others may copy."""
        self.handles = np.zeros(n, dtype=np.int64)
        self.outlets = np.zeros(n, dtype=np.int64)
        self.tokens = np.zeros((n, max_context), dtype=np.int64)
        self.length = np.zeros(n, dtype=np.int64)
        self.cached = np.zeros(n, dtype=np.int64)
        self.limit = np.zeros(n, dtype=np.int64)
        """Length at which the sequence ends: of its token budget or of the context."""
        self.least = np.zeros(n, dtype=np.int64)
        """Length before which no stop id may be sampled."""
        self.kv_version = np.zeros(n, dtype=np.int64)
        self.seeds = np.zeros(n, dtype=np.int64)
        self.temperature = np.zeros(n)
        self.top_p = np.zeros(n)
        self.min_p = np.zeros(n)
        self.top_k = np.zeros(n, dtype=np.int64)
        self.stop_ids = np.full((n, 2), -1, dtype=np.int64)
        self.has_matcher = np.zeros(n, dtype=np.bool_)
        self.constrained, self.penalised, self.biased, self.wants_kept = (
            np.zeros(n, dtype=np.bool_) for _ in range(4)
        )
        """Rows that need more than the arrays here say; a step in which there is none pays for
        none.
        """
        self.guesses = np.zeros(n, dtype=np.int64)
        """How many tokens to guess ahead in the next step, at most."""
        self.num_top = np.zeros(n, dtype=np.int64)
        self.submissions: list[Submission | None] = [None] * n
        self.num_active = 0
        self._free = list(range(n))

    def has_room(self) -> bool:
        return bool(self._free)

    def admit(self, submission: Submission) -> int:
        """Takes the lowest free slot, so that running slots stay nearly a range."""
        slot = heapq.heappop(self._free)
        self.num_active += 1
        request = submission.request
        sampling = submission.request.sampling
        self.submissions[slot] = submission
        self.handles[slot] = submission.handle
        self.outlets[slot] = submission.outlet
        self.active[slot] = True
        self.blocked[slot] = False
        self.leading[slot] = False
        self.tokens[slot, : len(request.input_ids)] = request.input_ids
        self.length[slot] = len(request.input_ids)
        self.cached[slot] = 0
        self.limit[slot] = min(request.num_prompt_tokens + sampling.max_tokens, self.max_context)
        self.least[slot] = request.num_prompt_tokens + sampling.min_tokens
        self.seeds[slot] = np.uint64(sampling.seed).astype(np.int64)
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.top_k[slot] = sampling.top_k or 0
        self.has_matcher[slot] = submission.matcher is not None
        self.guesses[slot] = 1
        self.constrained[slot] = submission.constraint is not None
        self.num_top[slot] = sampling.top_logprobs
        self.penalised[slot] = Feature.PENALTIES in sampling.features
        self.biased[slot] = bool(sampling.logit_bias)
        self.wants_kept[slot] = request.wants_kept
        self._set_stop_ids(slot, submission.stop_ids)
        return slot

    def release(self, slot: int) -> Submission:
        submission = self.submissions[slot]
        assert submission is not None
        self.submissions[slot] = None
        self.active[slot] = self.blocked[slot] = self.leading[slot] = False
        heapq.heappush(self._free, slot)
        self.num_active -= 1
        return submission

    def prompt(self, slot: int) -> tuple[int, ...]:
        """The tokens that the request in the slot came with."""
        return self._submission(slot).request.input_ids

    def constraint(self, slot: int) -> Constraint:
        """Of a slot that is `constrained`."""
        constraint = self._submission(slot).constraint
        assert constraint is not None
        return constraint

    def sampling(self, slots: Ints, positions: Ints, masks: Masks | None = None) -> SamplingBatch:
        """How to sample the token at each position, from what stands before it in its slot. Where a
        grammar leaves only ends of turn, it wins over `min_tokens`."""
        below = positions < self.least[slots]
        suppressed = np.where(below[:, None], self.stop_ids[slots], -1) if below.any() else None
        if masks is not None and suppressed is not None:
            masks, nothing_else = masks.without(suppressed[masks.rows])
            suppressed[masks.rows[nothing_else]] = -1
        return SamplingBatch(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            min_p=self.min_p[slots],
            seeds=self.seeds[slots],
            positions=positions,
            suppressed=suppressed,
            penalties=self._penalties(slots, positions) if self.penalised[slots].any() else None,
            biases=self._biases(slots) if self.biased[slots].any() else None,
            masks=masks,
            num_top=self.num_top[slots] if self.num_top[slots].any() else None,
            wants_kept=self.wants_kept[slots] if self.wants_kept[slots].any() else None,
        )

    def append(self, slots: Ints, positions: Ints, token_ids: Ints) -> None:
        """Of several tokens of a slot the last comes last; the keys of all before it are stored."""
        self.tokens[slots, positions] = token_ids
        self.length[slots] = positions + 1
        self.cached[slots] = positions

    def _submission(self, slot: int) -> Submission:
        submission = self.submissions[slot]
        assert submission is not None
        return submission

    def _penalties(self, slots: Ints, positions: Ints) -> Penalties:
        rows = np.flatnonzero(self.penalised[slots])
        asking = slots[rows]
        length = positions[rows]
        params = [self._submission(slot).request.sampling for slot in asking.tolist()]
        return Penalties(
            rows=rows,
            tokens=self.tokens[asking, : int(length.max())],
            num_prompt=np.array(
                [self._submission(slot).request.num_prompt_tokens for slot in asking.tolist()]
            ),
            length=length,
            repetition=np.array([p.repetition_penalty for p in params]),
            frequency=np.array([p.frequency_penalty for p in params]),
            presence=np.array([p.presence_penalty for p in params]),
        )

    def _biases(self, slots: Ints) -> Biases:
        rows = np.flatnonzero(self.biased[slots]).tolist()
        triples = [
            (row, *pair)
            for row in rows
            for pair in self._submission(int(slots[row])).request.sampling.logit_bias
        ]
        row, token_id, value = zip(*triples, strict=True)
        return Biases(np.array(row), np.array(token_id), np.array(value, dtype=np.float64))

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            self.stop_ids = np.pad(
                self.stop_ids, ((0, 0), (0, len(ids) - width)), constant_values=-1
            )
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids


# --- What was computed before ---------------------------------------------------------------------


class PrefixRoom(NamedTuple):
    """How much is kept."""

    num_bytes: int = 2**28
    """Of keys, values and states. With 0 nothing is kept, and each request computes its whole
    prompt.
    """
    age: int = 0
    """How many versions older than those served the weights may be that it was computed by."""


class Computed(Protocol):
    """What a runner keeps of a span of tokens, out of its slots."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def has_state(self) -> bool:
        """Whether a sequence can go on behind its last token, where that takes more than the keys
        of each token.
        """
        ...

    def cut(self, start: int, end: int) -> "Computed":
        """Of some of its tokens, in memory of its own."""
        ...


class KeepsSpans(Protocol):
    """A runner."""

    @property
    def keeps_states(self) -> bool: ...
    def take(self, slot: int, *, start: int, end: int, at_end: bool) -> Computed:
        """Of tokens [start, end) of the sequence in the slot. `at_end`: it has no more now, so that
        its state is that behind them.
        """
        ...

    def put(self, slot: int, spans: Sequence[tuple[Any, int]]) -> None:
        """Of what the same runner took: the slot begins with these, one after the other, each up to
        a number of its tokens.
        """
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
    """At most `max_bytes` are kept: what was used longest ago goes first, ends before beginnings.
    With 0 nothing is kept.
    """

    def __init__(
        self, runner: KeepsSpans, *, max_bytes: int, experts: ExpertRecords | None = None
    ) -> None:
        self._runner = runner
        self._max_bytes = max_bytes
        self._experts = experts
        self._roots: dict[int, _Span] = {}
        self._spans = OrderedDict[_Span, None]()
        """The one used longest ago first; a span is used whenever one behind it is."""
        self.num_bytes = 0

    def fill(self, slot: int, tokens: Ints) -> tuple[int, Version]:
        """Puts what is known of a sequence that begins with `tokens` into the slot. Returns of how
        many tokens, always fewer than there are, and of the oldest weights among them."""
        found = self._walk(tokens[:-1])
        if self._runner.keeps_states:
            while found and not (
                found[-1][1] == len(found[-1][0].tokens) and found[-1][0].computed.has_state
            ):
                found.pop()
        if not found:
            return 0, 0
        self._runner.put(slot, [(span.computed, num) for span, num in found])
        if self._experts is not None:
            self._experts.fill(
                slot, [span.experts[:num] for span, num in found if span.experts is not None]
            )
        self._use(found[-1][0])
        return sum(num for _, num in found), min(span.version for span, _ in found)

    def add(self, slot: int, tokens: Ints, *, version: Version) -> None:
        """The slot holds the keys of all `tokens`, the oldest of `version`. What was known of them
        from older weights is replaced.
        """
        if not self._max_bytes or not len(tokens):
            return
        last: _Span | None = None
        end = 0
        for known, num in self._walk(tokens):
            last = known if num == len(known.tokens) else self._split(known, num)
            start = end
            end = end + num
            if last.version < version or (
                self._runner.keeps_states and end == len(tokens) and not last.computed.has_state
            ):
                self._fill(last, slot, start=start, version=version, at_end=end == len(tokens))
        if end < len(tokens):
            last = self._grow(
                last,
                tokens[end:].copy(),
                self._runner.take(slot, start=end, end=len(tokens), at_end=True),
                version,
            )
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
        found = list[tuple[_Span, int]]()
        children = self._roots
        start = 0
        words = tokens.tobytes()
        size = tokens.itemsize
        while start < len(tokens) and (span := children.get(tokens.item(start))) is not None:
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
            start = start + num
        return found

    def _split(self, span: _Span, num: int) -> _Span:
        """Makes two of a span; returns the first, of `num` tokens. The other keeps the place, and
        what stands behind it.
        """
        tokens = span.tokens
        computed = span.computed
        siblings = self._roots if span.parent is None else span.parent.children
        del siblings[int(tokens[0])]
        self.num_bytes -= computed.num_bytes
        first = self._grow(span.parent, tokens[:num], computed.cut(0, num), span.version)
        span.computed = computed.cut(num, len(tokens))
        span.tokens = tokens[num:]
        span.parent = first
        if span.experts is not None:
            first.experts, span.experts = span.experts[:num], span.experts[num:]
        first.children[int(span.tokens[0])] = span
        self.num_bytes += span.computed.num_bytes
        return first

    def _grow(
        self, parent: _Span | None, tokens: Ints, computed: Computed, version: Version
    ) -> _Span:
        span = _Span(tokens, computed, version, None, parent)
        (self._roots if parent is None else parent.children)[int(tokens[0])] = span
        self._spans[span] = None
        self.num_bytes += computed.num_bytes
        return span

    def _fill(self, span: _Span, slot: int, *, start: int, version: Version, at_end: bool) -> None:
        end = start + len(span.tokens)
        self.num_bytes -= span.computed.num_bytes
        span.computed = self._runner.take(slot, start=start, end=end, at_end=at_end)
        span.version = version
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
