"""Generation without visible interruptions. After an abort, a pause, a dead engine or a senseless
chunk an answer is resumed from its tokens so far (I5).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from midflight.allowance import Allowance, Cut, Expired
from midflight.errors import EngineError, EngineUnavailable, NoEngine, Overloaded, RequestTimeout
from midflight.gateway.answers.answer import Answer
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.fleet.leases import Lease
from midflight.ports import PromptScorer
from midflight.types import Chunk, Finish, FinishReason, Likely

_MAX_FRUITLESS = 16
"""The most attempts in a row without one new token. This is more than the usual deaths and aborts
of a fleet at once. Each attempt is on another engine or after a pause, so reaching the limit means
that the request itself kills engines or that all engines are broken.
"""

_CLOSE_SECONDS = 5.0
"""The time for telling an engine that its answer is no longer read. A dead engine must not delay
the resume for longer.
"""


class Generator:
    """Makes answers: tries engines until each answer is finished, and knows all answers under way.
    Their number is bounded by the requests that the gateway admits.
    """

    def __init__(self, fleet: Fleet, *, request_seconds: float) -> None:
        """`request_seconds` is the time that an answer may make no progress on an engine that
        serves it, holds excluded.
        """
        self.fleet = fleet
        self.request_seconds = request_seconds
        self.forsaken = ""
        """The reason why no engine will ever take requests again. Requests then do not wait for
        one. Empty while an engine may come.
        """
        self._active: dict[_Attempts, None] = {}
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count()

    def generate(
        self,
        answer: Answer,
        *,
        affinity: str,
        may_abort: bool = False,
        told: Callable[[], None] = lambda: None,
    ) -> Coroutine[object, object, None]:
        """Waits until the answer is finished. The wait is ended by that, by the deadline of the
        request, or by cancellation, which aborts the answer at its engine. The call itself, before
        the wait, takes a place in the order of arrival.

        `affinity` names the session whose prefix the engines may hold (empty: none). `told` is
        called after every chunk but the last. With `may_abort` a `cancel` ends the answer with
        `FinishReason.ABORT`, as clients of native `/generate` expect. No other client ever sees an
        abort. Raises `RequestRejected`, `NoEngine` and `RequestTimeout`.
        """
        return _Attempts(self, answer, affinity=affinity, may_abort=may_abort, told=told).run()

    def cancel(self, request_id: str | None) -> int:
        """Aborts one request at its engine, or all requests if it gets `None`. Returns how many it
        found. `generate` describes the result for the caller.
        """
        found = [
            attempts
            for attempts in self._active
            if request_id in (None, attempts.answer.request_id)
        ]
        for attempts in found:
            attempts.cancel()
        return len(found)

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, top: int, affinity: str
    ) -> Sequence[Likely]:
        """Scores a prompt as `ports.PromptScorer` does, on any engine that takes requests. Waits
        for such an engine and for its answer, `request_seconds` at most. If the engine dies,
        another one is asked.
        """
        ticket = self.fleet.ticket()
        allowance = Allowance(self.request_seconds)
        trouble = None
        for _ in range(0 if self.forsaken else _MAX_FRUITLESS):
            lease: Lease | None = None
            try:
                lease = await self.fleet.place(
                    ticket, tokens=len(token_ids), affinity=affinity, allowance=allowance
                )
                async with allowance:
                    return await cast(PromptScorer, lease.engine).prompt_logprobs(
                        token_ids, top=top
                    )
            except Cut:
                trouble = trouble if lease is None else lease.lost
            except Expired:
                break
            except (EngineUnavailable, OSError) as error:
                trouble = error
                if lease is not None:
                    self.fleet.quarantine(lease.engine.name, error, probation=True)
            finally:
                if lease is not None:
                    self.fleet.leave(lease)
        raise NoEngine(
            f"scoring a prompt of {len(token_ids)} tokens: no engine did in {allowance.age:g} s, "
            f"the last trouble was {trouble}: {self.forsaken or self.fleet.describe()}. Restart an "
            "engine or raise gateway.request_seconds."
        ) from trouble

    def forget(self, affinity: str) -> None:
        """Forgets the engine of a session that is over."""
        self.fleet.forget(affinity)

    def forsake(self, why: str) -> None:
        """Fails all requests at once with `NoEngine`, those under way too, until `forsaken` is
        empty again.
        """
        self.forsaken = why
        for attempts in self._active:
            attempts.cut()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def attempt_id(self) -> str:
        """A new id of 32 hex digits that is never used again. Engines match ids by prefix, and an
        old attempt may still be ending.
        """
        return f"{self._prefix}{next(self._numbers):016x}"

    def began(self, attempts: _Attempts) -> None:
        self._active[attempts] = None

    def ended(self, attempts: _Attempts) -> None:
        del self._active[attempts]


class _Growth:
    """Tells whether an answer gets on. It does not know the attempts, so that an answer that is over
    is freed at once, and not by the garbage collector.
    """

    def __init__(self, answer: Answer) -> None:
        self.lease: Lease | None = None
        """The lease of the attempt under way."""
        self._answer = answer
        self._num_seen = 0
        """Tokens of the answer at the last call."""

    def has_moved(self) -> bool:
        """True if the answer has grown since the last call. Also true if it may wait inside a full
        engine, which answers other requests meanwhile.
        """
        before = self._num_seen
        self._num_seen = len(self._answer.output_ids)
        return self._num_seen != before or (self.lease is not None and self.lease.may_be_queued)


class _Attempts:
    """The loop that brings one answer to its end. Each wait is for an engine's next chunk or for an
    engine.
    """

    def __init__(
        self,
        generator: Generator,
        answer: Answer,
        *,
        affinity: str,
        may_abort: bool,
        told: Callable[[], None],
    ) -> None:
        self.answer = answer
        self._generator = generator
        self._fleet = generator.fleet
        self._affinity = affinity
        self._may_abort = may_abort
        self._told = told
        self._ticket = self._fleet.ticket()
        self._growth = _Growth(answer)
        self._allowance = Allowance(generator.request_seconds, moved=self._growth.has_moved)
        self._is_cancelled = False
        self._num_fruitless = 0
        self._rest_seconds: int | None = None
        """The time for which a full engine asked to get no request."""
        self._trouble: BaseException | None = None
        """The error that ended the last attempt."""

    def cancel(self) -> None:
        """Aborts the answer at the engine. It ends with `FinishReason.ABORT` if `may_abort` is set,
        else it is resumed.
        """
        self._is_cancelled = self._may_abort
        self.cut()

    def cut(self) -> None:
        """Ends the attempt under way, or the wait for one. Another attempt may follow."""
        self._allowance.cut()

    async def run(self) -> None:
        """Makes attempts until the answer is finished. When it returns or raises, it has left the
        engine and the generator's list.
        """
        self._generator.began(self)
        try:
            while not self._is_over():
                lease = await self._place()
                if lease is None:
                    continue
                await self._attempt(lease)
                if self.answer.num_gained:
                    self._num_fruitless = 0
                elif not lease.moved and self._rest_seconds is None:
                    self._num_fruitless += 1
                if self._rest_seconds is not None:
                    await self._rest(self._rest_seconds)
        finally:
            self._generator.ended(self)

    def _is_over(self) -> bool:
        """True if no attempt follows because the answer is finished. Raises `NoEngine` after too
        many fruitless attempts, or if no engine will come.
        """
        answer = self.answer
        if answer.finish is None and self._is_cancelled:
            answer.finish = Finish(FinishReason.ABORT)
        elif answer.finish is None:
            answer.end_at_seam()
        if answer.finish is None and self._generator.forsaken:
            raise NoEngine(f"generating: {self._generator.forsaken}") from self._trouble
        if answer.finish is None and self._num_fruitless >= _MAX_FRUITLESS:
            raise NoEngine(
                f"generating: {self._num_fruitless} attempts in a row made no token, the last "
                f"ended by {self._trouble or 'an abort'}: {self._fleet.describe()}. Look at the "
                "engines' logs; if this request kills them, do not send it again."
            ) from self._trouble
        return answer.finish is not None

    async def _place(self) -> Lease | None:
        """Waits for a routable engine; returns `None` when the wait was cut. Raises `NoEngine` when
        the seconds are spent.
        """
        try:
            return await self._fleet.place(
                self._ticket,
                tokens=self.answer.load,
                affinity=self._affinity,
                allowance=self._allowance,
            )
        except Cut:
            return None
        except Expired:
            raise self._not_taken() from self._trouble

    async def _attempt(self, lease: Lease) -> None:
        """Sends one request to one engine and reads until the answer is finished or the attempt is
        over. In every case the engine is told to stop and the lease ends.
        """
        answer = self.answer
        vocab_size = lease.engine.capabilities.vocab_size
        self._growth.lease = lease
        stream: AsyncIterator[Chunk] | None = None
        try:
            async with self._allowance:
                answer.placed.append((lease.engine.name, answer.clock()))
                stream = lease.engine.generate(answer.next_request(self._generator.attempt_id()))
                await _each(stream, partial(self._take, lease, vocab_size))
                if answer.finish is not None:
                    return
                if not answer.ended and lease.lost is None:
                    raise EngineUnavailable(
                        "its stream ended without a finish. Check the engine and its adapter."
                    )
            self._trouble = lease.lost
        except Cut:
            self._trouble = lease.lost
        except Expired:
            raise self._too_slow(lease) from None
        except Overloaded as error:
            self._trouble = error
            self._rest_seconds = error.retry_after_seconds
        except (EngineUnavailable, OSError) as error:
            self._trouble = error
            self._fleet.quarantine(lease.engine.name, error, probation=True)
        finally:
            try:
                if stream is not None and not getattr(stream, "is_closed", False):
                    await _close(stream, ended=answer.ended)
            finally:
                self._growth.lease = None
                self._fleet.leave(lease)

    def _take(self, lease: Lease, vocab_size: int, chunk: Chunk) -> bool:
        """Adds a chunk to the answer. Returns whether the attempt is over."""
        # The chunk came together with the cut. Admission already counts on no token from this
        # engine (I2).
        if lease.lost is not None:
            return True
        answer = self.answer
        if chunk.version < lease.version or chunk.attested:
            _check_version(chunk, lease)
        answer.accept(chunk, vocab_size=vocab_size)
        if answer.finish is not None:
            return True
        self._told()
        return answer.ended

    async def _rest(self, seconds: int) -> None:
        """Waits for as long as a full engine asked. This costs the request none of its seconds. A
        cut ends the wait too.
        """
        self._rest_seconds = None
        if self.answer.finish is None:
            with suppress(Cut), self._allowance.standing():
                async with self._allowance:
                    await asyncio.sleep(seconds)

    def _not_taken(self) -> NoEngine:
        allowance = self._allowance
        return NoEngine(
            f"generating: no engine took the request in {allowance.seconds:g} s (holds excluded, "
            f"{allowance.age:g} s with them): {self._fleet.describe()}. Restart an engine or raise "
            "gateway.request_seconds."
        )

    def _too_slow(self, lease: Lease) -> RequestTimeout:
        answer = self.answer
        return RequestTimeout(
            f"generating on {lease.engine.name}: no token in {self._allowance.seconds:g} s (holds "
            f"excluded), after {len(answer.output_ids)} of {answer.request.sampling.max_tokens}, "
            f"{self._allowance.age:g} s from its start. Look at the engine's log, or raise "
            "gateway.request_seconds."
        )


def _check_version(chunk: Chunk, lease: Lease) -> None:
    """Raises `EngineUnavailable` if the chunk has an older version than its lease. An engine that
    restarted unnoticed samples from its old weights, and its tokens would break admission's count
    (I2).
    """
    versions = [segment.version for segment in chunk.attested]
    versions.append(chunk.version)
    oldest = min(versions)
    if oldest < lease.version:
        raise EngineUnavailable(
            f"it answers with version {oldest} after attesting {lease.version}; it rejoins at the "
            "current version."
        )


async def _each(stream: AsyncIterator[Chunk], take: Callable[[Chunk], bool]) -> None:
    """Waits until `take` has returned true for a chunk, or the stream has ended. A stream with a
    method `each` calls `take` itself, which saves a switch of tasks for each chunk.
    """
    each: Callable[[Callable[[Chunk], bool]], Awaitable[None]] | None = getattr(
        stream, "each", None
    )
    if each is not None:
        await each(take)
        return
    async for chunk in stream:
        if take(chunk):
            return


async def _close(stream: AsyncIterator[Chunk], *, ended: bool) -> None:
    """Tells the engine to stop. Waits for that, `_CLOSE_SECONDS` at most. Errors of the engine are
    ignored.

    If the engine has `ended` the attempt itself, there is nothing to tell it, and no limit is
    needed.
    """
    aclose: Callable[[], Awaitable[None]] | None = getattr(stream, "aclose", None)
    if aclose is None:
        return
    with suppress(EngineError, OSError):  # a timeout is an OSError
        if ended:
            await aclose()
        else:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await aclose()
