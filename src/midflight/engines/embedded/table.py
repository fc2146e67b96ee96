"""The running sequences as arrays over slots, so that a step costs no Python per request."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midflight.engines.embedded.grammar import Constraint
from midflight.engines.embedded.key_runs import joined, oldest
from midflight.engines.embedded.sampler import Biases, Masks, Penalties, SamplingBatch
from midflight.text.detokenizer import StopMatcher
from midflight.types import Feature, GenerateRequest, KeyRuns, Version
from midflight.types.token_ids import AnyIds

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """A request inside the engine. `handle` is unique in the engine's life and grows. The request's
    tokens go to `outlet`.
    """

    handle: int
    outlet: int
    request: GenerateRequest
    stop_ids: tuple[int, ...]
    matcher: StopMatcher | None
    constraint: Constraint | None = None
    """Present if the request has a grammar. It has accepted all tokens so far."""
    aborted: bool = False
    """True if the request was aborted before it came here, while its grammar was compiled."""


class SlotTable:
    """One row per slot. A row is meaningful while it is `active`. Invariant: 0 <= cached < length
    <= limit for active rows.

    `cached` counts tokens whose keys are stored. A sequence is decoding if one token is missing,
    and prefilling if more are.
    """

    def __init__(self, *, max_running: int, max_context: int) -> None:
        n = max_running
        self.max_context = max_context
        self.active = np.zeros(n, dtype=np.bool_)
        self.blocked = np.zeros(n, dtype=np.bool_)
        """True if the slot waits for another slot to finish the same prompt."""
        self.leading = np.zeros(n, dtype=np.bool_)
        """True if the slot computes a prompt that others may copy."""
        self.handles = np.zeros(n, dtype=np.int64)
        self.outlets = np.zeros(n, dtype=np.int64)
        self.tokens = np.zeros((n, max_context), dtype=np.int64)
        self.length = np.zeros(n, dtype=np.int64)
        self.cached = np.zeros(n, dtype=np.int64)
        self.limit = np.zeros(n, dtype=np.int64)
        """Length at which the sequence ends, because its token budget or the context does."""
        self.least = np.zeros(n, dtype=np.int64)
        """Length below which no stop id may be sampled."""
        self.kv_version = np.zeros(n, dtype=np.int64)
        self.older_keys: list[list[tuple[Version, int]]] = [[] for _ in range(n)]
        """The versions of the first keys of each slot, and where the keys of each end. All later
        keys are of the version that is served. It counts where `kv_version` is older.
        """
        self.begins = np.zeros(n, dtype=np.bool_)
        """True if the slot has sampled nothing with its keys yet."""
        self.seeds = np.zeros(n, dtype=np.int64)
        self.temperature = np.zeros(n)
        self.top_p = np.zeros(n)
        self.min_p = np.zeros(n)
        self.top_k = np.zeros(n, dtype=np.int64)
        self.stop_ids = np.full((n, 2), -1, dtype=np.int64)
        self.has_matcher = np.zeros(n, dtype=np.bool_)
        # Rows of these four need more than the arrays here hold. A step without such a row pays
        # nothing for them.
        self.constrained = np.zeros(n, dtype=np.bool_)
        self.penalised = np.zeros(n, dtype=np.bool_)
        self.biased = np.zeros(n, dtype=np.bool_)
        self.wants_kept = np.zeros(n, dtype=np.bool_)
        self.guesses = np.zeros(n, dtype=np.int64)
        """The number of tokens to guess ahead in the next step, at most."""
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
        sampling = request.sampling
        self.submissions[slot] = submission
        self.handles[slot] = submission.handle
        self.outlets[slot] = submission.outlet
        self.active[slot] = True
        self.blocked[slot] = False
        self.leading[slot] = False
        self.tokens[slot, : len(request.input_ids)] = request.input_ids
        self.length[slot] = len(request.input_ids)
        self.forget_keys(slot)
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

    def forget_keys(self, slot: int) -> None:
        """Says that all keys of the slot must be computed."""
        self.cached[slot] = 0
        self.older_keys[slot] = []
        self.begins[slot] = True

    def know(self, slot: int, made_by: KeyRuns) -> None:
        """Says which versions computed the first keys of the slot, which are there now."""
        end = 0
        ends: list[tuple[Version, int]] = []
        for version, num in made_by:
            end += num
            ends.append((version, end))
        self.cached[slot] = end
        self.kv_version[slot] = oldest(made_by)
        self.older_keys[slot] = ends

    def close_keys(self, slot: int, version: Version) -> None:
        """Says that the keys of the slot from here on are of a newer version than `version`."""
        ends = self.older_keys[slot]
        cached = int(self.cached[slot])
        if ends and ends[-1][0] == version:
            ends.pop()
        if cached > (ends[-1][1] if ends else 0):
            ends.append((version, cached))

    def key_runs(self, slot: int, num_keys: int, *, version: Version) -> KeyRuns:
        """The versions of the first keys of the slot, if `version` is served."""
        runs: list[tuple[Version, int]] = []
        start = 0
        for made_by, end in (*self.older_keys[slot], (version, num_keys)):
            if end > start:
                runs.append((made_by, end - start))
                start = end
        return joined([tuple(runs)])

    def release(self, slot: int) -> Submission:
        submission = self.submissions[slot]
        assert submission is not None
        self.submissions[slot] = None
        self.active[slot] = False
        self.blocked[slot] = False
        self.leading[slot] = False
        heapq.heappush(self._free, slot)
        self.num_active -= 1
        return submission

    def prompt(self, slot: int) -> AnyIds:
        """The tokens that the request in the slot came with."""
        return self._submission(slot).request.input_ids

    def constraint(self, slot: int) -> Constraint:
        """The constraint of a slot that is `constrained`."""
        constraint = self._submission(slot).constraint
        assert constraint is not None
        return constraint

    def sampling(self, slots: Ints, positions: Ints, masks: Masks | None = None) -> SamplingBatch:
        """The parameters to sample the token at each position with, from the tokens before it in
        its slot. If a grammar leaves only ends of turn, it wins over `min_tokens`.
        """
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
        """Writes tokens at positions. Several tokens of one slot come in their order, and the keys
        of all but the last are stored.
        """
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
        requests = [self._submission(slot).request for slot in asking.tolist()]
        params = [request.sampling for request in requests]
        return Penalties(
            rows=rows,
            tokens=self.tokens[asking, : int(length.max())],
            num_prompt=np.array([request.num_prompt_tokens for request in requests]),
            length=length,
            repetition=np.array([p.repetition_penalty for p in params]),
            frequency=np.array([p.frequency_penalty for p in params]),
            presence=np.array([p.presence_penalty for p in params]),
        )

    def _biases(self, slots: Ints) -> Biases:
        rows: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        for row in np.flatnonzero(self.biased[slots]).tolist():
            sampling = self._submission(int(slots[row])).request.sampling
            for token_id, value in sampling.logit_bias:
                rows.append(row)
                token_ids.append(token_id)
                values.append(value)
        return Biases(np.array(rows), np.array(token_ids), np.array(values, dtype=np.float64))

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            more = len(ids) - width
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, more)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
