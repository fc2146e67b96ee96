"""Decides which sequences run in a step. A step is three verbs: schedule, run, postprocess. All of
it is synchronous, and only the decode thread calls it.
"""

import time
from collections import deque
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midflight.engines.embedded.experts import ExpertRecords
from midflight.engines.embedded.key_runs import num_keys
from midflight.engines.embedded.prefixes import Prefixes, PrefixRoom
from midflight.engines.embedded.prompt_lookup import guess
from midflight.engines.embedded.runner import StepBatch
from midflight.engines.embedded.sampler import Masks, SampledIds, sample
from midflight.engines.embedded.table import SlotTable, Submission
from midflight.engines.embedded.threads import StepThreads
from midflight.engines.embedded.whole import AnyRunner
from midflight.engines.streams import StepOutput
from midflight.errors import RequestRejected
from midflight.models.routing import Routers
from midflight.types import Finish, FinishReason, KeyRuns, PauseMode, Version
from midflight.types.token_ids import AnyIds

Ints = NDArray[np.int64]
_ABORT = Finish(FinishReason.ABORT)
_LENGTH = Finish(FinishReason.LENGTH)


class Scheduler:
    """Continuous batching: first in, first out; a slot per running request; every step mixes
    decodes and chunks of prefill.
    """

    def __init__(
        self,
        runner: AnyRunner,
        *,
        max_running: int,
        max_batch_tokens: int,
        max_context: int,
        version: Version,
        prefixes: PrefixRoom,
        routers: Routers | None = None,
        guesses: int = 0,
    ) -> None:
        """`prefixes` limits the storage for requests that begin alike. `routers` are the routers of
        the model, if its choices of experts are recorded. At most `guesses` tokens are guessed
        ahead. None are guessed if a sequence cannot go back, or if the experts of its tokens are
        recorded. A runner that keeps nothing of a sequence has no use for prefixes or guesses.
        """
        self._runner = runner
        self._threads = StepThreads()
        self._num_parameters = sum(parameter.numel() for parameter in runner.model.parameters())
        self._experts = None if routers is None else ExpertRecords(routers)
        cannot_guess = runner.keeps_states or runner.recomputes or routers is not None
        self._guesses = 0 if cannot_guess else guesses
        self._table = SlotTable(max_running=max_running, max_context=max_context)
        self._max_batch_tokens = max(max_batch_tokens, max_running)
        self._waiting: deque[Submission] = deque()
        self._room = PrefixRoom(num_bytes=0) if runner.recomputes else prefixes
        self._prefixes = Prefixes(runner, max_bytes=self._room.num_bytes, experts=self._experts)
        self._turn = 0
        self._last_turn = np.zeros(max_running, dtype=np.int64)
        """The step in which each slot ran last, if steps have room for some whole
        sequences only.
        """
        self._leaders: dict[AnyIds, int] = {}
        """The slot that computes each prompt that other requests wait for."""
        self._left = set[int]()
        """Slots whose sequences have ended, and are not among the prefixes yet."""
        self._finishes: list[tuple[int, int, Finish]] = []
        self._failures: list[tuple[int, int, RequestRejected]] = []
        self._records: list[tuple[int, bytes]] = []
        self._drain_before = 0
        """While draining, requests with a smaller handle still run."""
        self._last_handle = 0
        self.version = version
        self.paused: PauseMode | None = None
        self.num_tokens = 0
        self.num_computed = 0
        """Tokens that went through the model."""
        self.num_reused = 0
        """Tokens that did not have to, because they had before."""

    # --- What there is to do ----------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self._table.num_active

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        """True if a step would do anything."""
        if self._finishes:
            return True
        if self.paused is None:
            return bool(self._waiting) or self._table.num_active > 0
        return not self.is_quiet()

    def is_quiet(self) -> bool:
        """True if the engine is paused and will produce no token until `resume`."""
        if self.paused is PauseMode.DRAIN:
            return self._table.num_active == 0 and not self._may_admit()
        return self.paused is not None

    # --- Verbs from outside, between two steps ----------------------------------------------------

    def submit(self, submission: Submission) -> None:
        """Queues a request, or ends it at once if it ends with its tokens so far."""
        self._last_handle = submission.handle
        finish = self._finished_before(submission)
        if finish is not None:
            self._finishes.append((submission.handle, submission.outlet, finish))
        else:
            self._waiting.append(submission)

    def abort(self, handles: frozenset[int] | None) -> None:
        """Ends these requests with `ABORT`, or all requests if it gets `None`. They keep their
        tokens so far.
        """
        kept: deque[Submission] = deque()
        for submission in self._waiting:
            if handles is None or submission.handle in handles:
                self._finishes.append((submission.handle, submission.outlet, _ABORT))
            else:
                kept.append(submission)
        self._waiting = kept
        for slot in np.flatnonzero(self._table.active).tolist():
            if handles is None or int(self._table.handles[slot]) in handles:
                self._end(slot, _ABORT)

    def pause(self, mode: PauseMode) -> None:
        """The last mode counts: an engine that is paused again in another mode treats the requests
        that it holds by the new mode.
        """
        if self.paused is mode:
            return
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort(None)
        if mode is PauseMode.DRAIN:
            self._drain_before = self._last_handle + 1

    def resume(self) -> None:
        if self.paused is PauseMode.RECOMPUTE:
            table = self._table
            for slot in np.flatnonzero(table.active & (table.kv_version < self.version)).tolist():
                table.forget_keys(slot)
        self.paused = None

    def serve(self, version: Version) -> None:
        """Says that the weights have changed. Tokens from now on are of `version`, and keys stored
        before keep their own.
        """
        for slot in {*np.flatnonzero(self._table.active).tolist(), *self._left}:
            self._table.close_keys(slot, self.version)
        self.version = version
        self._leaders.clear()
        self._prefixes.forget(before=self._oldest_usable)

    def forget_keys(self) -> None:
        """Ends all requests with `ABORT`, and drops all keys, values and states, those kept of
        earlier requests too.
        """
        self.abort(None)
        self._leaders.clear()
        self._left.clear()
        self._prefixes.clear()
        self._runner.forget_keys()

    @property
    def _oldest_usable(self) -> Version:
        return self.version - self._room.age

    # --- A step -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Runs one step if there is anything to run. Also gives out the requests that have ended
        since the last step.
        """
        started = time.monotonic()
        batch = None if self.paused is not None and self.is_quiet() else self._schedule()
        if batch is None:
            return self._flush(
                StepOutput(version=self.version, started=started, ended=time.monotonic())
            )
        touched = frozenset(self._table.outlets[batch.slots].tolist())
        running = self._table.num_active
        with self._threads.of(self._num_parameters * len(batch.tokens)):
            if self._experts is None:
                logits = self._runner.forward(batch)
            else:
                logits = self._experts.forward(self._runner, batch)
            self._mark_cached(batch)
            rows = np.flatnonzero(batch.wanted)
            masks = None
            if self._table.constrained[batch.token_slots[rows]].any():
                rows, logits, masks = self._constrained(batch, rows, logits)
            slots = batch.token_slots[rows]
            positions = batch.positions[rows] + 1
            if len(slots):
                sampled = sample(logits, self._table.sampling(slots, positions, masks))
            else:
                sampled = _nothing_sampled()
        if self._guesses and len(slots):
            stand = self._that_stand(slots, sampled.token_ids, guessed=batch.tokens[rows])
            slots = slots[stand]
            positions = positions[stand]
            sampled = sampled.of(stand)
        key_runs = self._begun_with_older_keys(slots)
        kv_versions = self._postprocess(slots, positions, sampled.token_ids)
        return self._flush(
            StepOutput(
                version=self.version,
                handles=self._table.handles[slots],
                token_ids=sampled.token_ids,
                logprobs=sampled.logprobs,
                kv_versions=kv_versions,
                key_runs=key_runs,
                top_ids=sampled.top_ids,
                top_logprobs=sampled.top_logprobs,
                kept=sampled.kept,
                outlets=self._table.outlets[slots],
                touched=touched,
                started=started,
                ended=time.monotonic(),
                num_running=running,
            )
        )

    def _schedule(self) -> StepBatch | None:
        """Admits the requests that fit, then decodes all and prefills in order of arrival, within
        the token budget.
        """
        table = self._table
        if self._waiting or table.blocked.any():
            self._admit()
        ready = np.flatnonzero(table.active & ~table.blocked)
        if not len(ready):
            return None
        if self._runner.recomputes:
            return self._schedule_whole(ready)
        missing = table.length - table.cached
        if self._runner.keeps_states:
            # A prompt that others may copy stops before its last token, because they take it over
            # there.
            missing -= table.leading & (missing > 1)
        left = missing[ready]
        singles = ready[left == 1]
        chunks = ready[left > 1]
        chunks = chunks[np.argsort(table.handles[chunks], kind="stable")]
        wanted = missing[chunks]
        before = np.cumsum(wanted) - wanted
        counts = np.minimum(wanted, self._max_batch_tokens - len(singles) - before)
        chunks = chunks[counts > 0]
        counts = counts[counts > 0]
        order = np.argsort(counts, kind="stable")
        # A prefill whose chunk is one token is attended like a decode, so it comes among them, in
        # order of slots.
        slots = np.concatenate([singles, chunks[order]])
        counts = np.concatenate([np.ones(len(singles), dtype=np.int64), counts[order]])
        num_single = int((counts == 1).sum())
        slots[:num_single].sort()
        if self._guesses and num_single == len(slots):
            most = self._max_batch_tokens // (1 + self._guesses)
            if len(slots) <= most:
                slots, counts = self._guess(slots)
        return self._batch(slots, counts)

    def _schedule_whole(self, ready: Ints) -> StepBatch:
        """Whole sequences, within the token budget, and at least one. The sequences that have
        waited longest for a token come first, so that every answer grows.
        """
        table = self._table
        table.cached[ready] = 0
        waiting = ready[np.argsort(self._last_turn[ready], kind="stable")]
        fits = np.cumsum(table.length[waiting]) <= self._max_batch_tokens
        fits[0] = True
        slots = waiting[fits]
        self._turn += 1
        self._last_turn[slots] = self._turn
        slots = slots[np.lexsort((slots, table.length[slots]))]
        return self._batch(slots, table.length[slots])

    def _guess(self, slots: Ints) -> tuple[Ints, Ints]:
        """Writes guesses of its next tokens behind each sequence. Returns slots and counts of
        tokens, in the order that a batch has.
        """
        table = self._table
        counts = np.ones(len(slots), dtype=np.int64)
        room = np.minimum(table.guesses[slots], table.limit[slots] - table.length[slots] - 1)
        room[table.constrained[slots] | table.has_matcher[slots]] = 0
        for row in np.flatnonzero(room > 0).tolist():
            tokens = table.tokens[slots[row]]
            length = int(table.length[slots[row]])
            found = guess(tokens[:length], most=int(room[row]))
            tokens[length : length + len(found)] = found
            counts[row] += len(found)
        order = np.argsort(counts, kind="stable")
        return slots[order], counts[order]

    def _that_stand(self, slots: Ints, token_ids: Ints, *, guessed: Ints) -> NDArray[np.bool_]:
        """[R] True for each sampled token that is accepted: all guesses before it equal the sampled
        tokens, and none of them ended its sequence. `guessed` [R] is the token behind which each
        row was computed.
        """
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        differs = np.append(guessed[1:], -1) != token_ids
        stops = (self._table.stop_ids[slots] == token_ids[:, None]).any(1)
        wrong = differs | stops
        before = np.cumsum(wrong) - wrong
        counts = np.diff(first, append=len(slots))
        stand = before == np.repeat(before[first], counts)
        num_standing = np.add.reduceat(stand, first, dtype=np.int64)
        self._table.guesses[slots[first]] = np.minimum(self._guesses, 2 * num_standing - 1)
        return stand

    def _batch(self, slots: Ints, counts: Ints) -> StepBatch:
        table = self._table
        starts = table.cached[slots]
        sequence = np.repeat(np.arange(len(slots)), counts)
        before = np.cumsum(counts) - counts
        positions = np.arange(len(sequence)) - (before - starts)[sequence]
        return StepBatch(
            slots=slots,
            starts=starts,
            counts=counts,
            tokens=table.tokens[slots[sequence], positions],
            positions=positions,
            token_slots=slots[sequence],
            wanted=positions >= (table.length[slots] - 1)[sequence],
        )

    def _mark_cached(self, batch: StepBatch) -> None:
        table = self._table
        slots = batch.slots
        length = table.length[slots]
        oldest = np.minimum(table.kv_version[slots], self.version)
        table.kv_version[slots] = np.where(batch.starts == 0, self.version, oldest)
        table.cached[slots] = np.minimum(batch.starts + batch.counts, length)
        self.num_computed += len(batch.tokens)
        copyable = table.cached[slots] == length - self._runner.keeps_states
        for slot in slots[copyable & table.leading[slots]].tolist():
            table.leading[slot] = False
            prompt = table.prompt(slot)
            if self._leaders.get(prompt) == slot:
                del self._leaders[prompt]
                self._add_prefix(slot)

    def _constrained(
        self, batch: StepBatch, wanted: Ints, logits: Tensor
    ) -> tuple[Ints, Tensor, Masks | None]:
        """Asks the grammars for the ids that they allow. A request whose grammar allows nothing
        ends here. Returns the wanted tokens [R] and logits [R, V] of the others, and their masks.
        """
        slots = batch.token_slots[wanted]
        rows = np.flatnonzero(self._table.constrained[slots])
        kept = np.ones(len(slots), dtype=np.bool_)
        allowed = list[NDArray[np.bool_]]()
        for row in rows.tolist():
            try:
                allowed.append(self._table.constraint(int(slots[row])).allowed())
            except RequestRejected as error:
                kept[row] = False
                self._fail(int(slots[row]), error)
        rows = (np.cumsum(kept) - 1)[rows[kept[rows]]]
        masks = Masks(rows, np.stack(allowed)) if allowed else None
        if kept.all():
            return wanted, logits, masks
        return wanted[kept], logits[torch.from_numpy(kept).to(logits.device)], masks

    def _begun_with_older_keys(self, slots: Ints) -> tuple[tuple[int, KeyRuns], ...]:
        """The handles of the slots that sample for the first time, over keys of which some are
        older, and the versions of these keys.
        """
        table = self._table
        first = slots[table.begins[slots]]
        if not len(first):
            return ()
        table.begins[first] = False
        found: list[tuple[int, KeyRuns]] = []
        for slot in np.unique(first[table.kv_version[first] < self.version]).tolist():
            runs = table.key_runs(slot, int(table.length[slot]), version=self.version)
            found.append((int(table.handles[slot]), runs))
        return tuple(found)

    def _postprocess(self, slots: Ints, positions: Ints, token_ids: Ints) -> Ints:
        """Appends the tokens and ends the requests that end with them. Returns the version of the
        oldest key that each token attended to.
        """
        table = self._table
        kv_versions = table.kv_version[slots]
        table.append(slots, positions, token_ids)
        self.num_tokens += len(slots)
        stopped = (table.stop_ids[slots] == token_ids[:, None]).any(1)
        full = positions + 1 >= table.limit[slots]
        may_end = stopped | full | table.has_matcher[slots] | table.constrained[slots]
        for row in np.flatnonzero(may_end).tolist():
            slot = int(slots[row])
            token_id = int(token_ids[row])
            if stopped[row]:
                self._end(slot, Finish(FinishReason.STOP, token_id))
                continue
            try:
                finish = self._finish(slot, token_id)
            except RequestRejected as error:
                self._fail(slot, error)
                continue
            if finish is not None:
                self._end(slot, finish)
            elif full[row]:
                self._end(slot, _LENGTH)
        return kv_versions

    def _finish(self, slot: int, token_id: int) -> Finish | None:
        """Returns how the request ends with a token that is no stop id, or `None` if it goes on.
        Raises `RequestRejected` if the grammar gives up on the token.
        """
        submission = self._table.submissions[slot]
        assert submission is not None
        if submission.constraint is not None:
            submission.constraint.advance((token_id,))
            if submission.constraint.ended:
                return Finish(FinishReason.STOP, token_id)
        if submission.matcher is None:
            return None
        match = submission.matcher.feed((token_id,))
        return Finish(FinishReason.STOP, match.stop) if match else None

    # --- Admission --------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        if not self._waiting:
            return False
        return self.paused is None or self._waiting[0].handle < self._drain_before

    def _admit(self) -> None:
        # This comes before a slot is taken again, and before any prefix is looked up.
        while self._left:
            self._add_prefix(self._left.pop())
        for slot in np.flatnonzero(self._table.blocked).tolist():
            self._place(slot)
        while self._waiting and self._table.has_room() and self._may_admit():
            slot = self._table.admit(self._waiting.popleft())
            if self._experts is not None:
                self._experts.begin(slot, room=int(self._table.limit[slot]))
            self._place(slot)

    def _place(self, slot: int) -> None:
        """Decides where the keys of a new sequence come from. Known keys of its beginning are
        copied, now or when another request has computed the same prompt; its own prefill computes
        the rest. The logits of its last token are always computed anew, for this request to sample
        from.
        """
        table = self._table
        prompt = table.prompt(slot)
        table.blocked[slot] = prompt in self._leaders
        if table.blocked[slot]:
            return
        known = self._prefixes.fill(slot, table.tokens[slot, : len(prompt)])
        if known:
            table.know(slot, known)
        num_known = num_keys(known)
        self.num_reused += num_known
        if self._room.num_bytes and len(prompt) - num_known > 1:
            self._leaders[prompt] = slot
            table.leading[slot] = True

    def _add_prefix(self, slot: int) -> None:
        table = self._table
        if table.kv_version[slot] < self._oldest_usable:
            return
        cached = int(table.cached[slot])
        made_by = table.key_runs(slot, cached, version=self.version)
        self._prefixes.add(slot, table.tokens[slot, :cached], made_by)

    def _finished_before(self, submission: Submission) -> Finish | None:
        """Returns how a request ends with the tokens that it has on arrival, or `None` if it goes
        on.
        """
        request = submission.request
        matcher = submission.matcher
        if submission.aborted:
            return _ABORT
        if submission.constraint is not None and submission.constraint.ended:
            return Finish(FinishReason.STOP, request.input_ids[-1])
        if matcher is not None:
            match = matcher.feed(request.input_ids[request.num_prompt_tokens :])
            if match:
                return Finish(FinishReason.STOP, match.stop)
        if request.remaining <= 0 or len(request.input_ids) >= self._table.max_context:
            return _LENGTH
        return None

    def _end(self, slot: int, finish: Finish) -> None:
        length = int(self._table.length[slot])
        submission = self._release(slot)
        if self._experts is not None:
            self._records.append((submission.handle, self._experts.taken(slot, length=length)))
        self._finishes.append((submission.handle, submission.outlet, finish))

    def _fail(self, slot: int, error: RequestRejected) -> None:
        submission = self._release(slot)
        self._failures.append((submission.handle, submission.outlet, error))

    def _release(self, slot: int) -> Submission:
        submission = self._table.release(slot)
        if self._leaders.get(submission.request.input_ids) == slot:
            del self._leaders[submission.request.input_ids]
        self._left.add(slot)
        return submission

    def _flush(self, output: StepOutput) -> StepOutput:
        """Returns the output with the requests that have ended since the last one."""
        if not (self._finishes or self._failures):
            return output
        finishes = tuple(self._finishes)
        failures = tuple(self._failures)
        experts = tuple(self._records)
        self._finishes.clear()
        self._failures.clear()
        self._records.clear()
        touched = set(output.touched)
        touched.update(outlet for _, outlet, _ in finishes)
        touched.update(outlet for _, outlet, _ in failures)
        return replace(
            output,
            finishes=finishes,
            failures=failures,
            experts=experts,
            touched=frozenset(touched),
        )


def _nothing_sampled() -> SampledIds:
    no_ids = np.empty(0, dtype=np.int64)
    no_logprobs = np.empty(0)
    return SampledIds(no_ids, no_logprobs, no_ids.reshape(0, 0), no_logprobs.reshape(0, 0))
