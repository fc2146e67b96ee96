"""Generation that no interruption shows: aborts, pauses, dead engines and nonsense are resumed from
the tokens so far (I5).
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
from midflight.gateway.fleet.fleet import Fleet, Lease
from midflight.ports import PromptScorer
from midflight.types import Chunk, Finish, FinishReason, Likely

_MAX_FRUITLESS = 16
"""Attempts in a row without one new token. More than a fleet's usual deaths and aborts at once;
each is on another engine or after a pause, so reaching it means that the request itself kills
engines or that all of them are sick."""

_CLOSE_SECONDS = 5.0
"""For telling an engine that its answer is not read any more; a dead one must not delay the resume
for longer.
"""


class Generator:
    """Generates answers and finds those under way. Synchronous; bounded by the requests that the
    gateway admits.
    """

    def __init__(self, fleet: Fleet, *, request_seconds: float) -> None:
        """`request_seconds`: how long an answer may stand still on an engine that serves it, holds
        excluded.
        """
        self.fleet = fleet
        self.request_seconds = request_seconds
        self.forsaken = ""
        """Why no engine will take requests any more, so that none waits for one; empty where one
        may come.
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
        """Waits until the answer is finished; ended by that, by the deadline of the request or by
        cancellation, which aborts it at its engine. Its place in the order of arrival is taken by
        the call, before the wait.

        `affinity` names the session whose prefix the engines may hold (empty: none). `told` is
        called after every chunk but the last. `may_abort`: `cancel` ends it with
        `FinishReason.ABORT`, as clients of native `/generate` expect; no other client ever sees an
        abort. Raises `RequestRejected`, `NoEngine` and `RequestTimeout`.
        """
        return _Attempts(self, answer, affinity=affinity, may_abort=may_abort, told=told).run()

    def cancel(self, request_id: str | None) -> int:
        """Aborts one request (all: `None`) at its engine; says how many it found. See `generate`
        for what its caller sees.
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
        """As the port's `PromptScorer`, of an engine that takes requests. Waits for one and for its
        answer, `request_seconds` at most; where it dies another is asked."""
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
        """The session is over: its engine is remembered no longer."""
        self.fleet.forget(affinity)

    def forsake(self, why: str) -> None:
        """From now on, and until `forsaken` is empty again, requests fail at once with `NoEngine`;
        those under way too.
        """
        self.forsaken = why
        for attempts in self._active:
            attempts.cut()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def attempt_id(self) -> str:
        """32 hex digits, never the same again: engines match ids by prefix, and an old attempt may
        still be dying.
        """
        return f"{self._prefix}{next(self._numbers):016x}"

    def began(self, attempts: _Attempts) -> None:
        self._active[attempts] = None

    def ended(self, attempts: _Attempts) -> None:
        del self._active[attempts]


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
        self._allowance = Allowance(generator.request_seconds, moved=self._has_moved)
        self._lease: Lease | None = None
        self._num_seen = 0
        """Tokens at the last look."""
        self._is_cancelled = False
        self._num_fruitless = 0
        self._rest_seconds: int | None = None
        """For which a full engine wants to be left alone."""
        self._trouble: BaseException | None = None
        """What ended the last attempt."""

    def cancel(self) -> None:
        """Aborts it at the engine. It ends with `FinishReason.ABORT` if it may, else it is
        resumed.
        """
        self._is_cancelled = self._may_abort
        self.cut()

    def cut(self) -> None:
        """Ends the attempt under way, or the wait for one; another follows if it may."""
        self._allowance.cut()

    async def run(self) -> None:
        """Attempts until the answer is finished. When it returns or raises, engine and registry
        have been left.
        """
        self._generator.began(self)
        try:
            while not self._is_over():
                lease = await self._place()
                if lease is not None:
                    await self._attempt(lease)
                    in_vain = not lease.moved and self._rest_seconds is None
                    self._num_fruitless = (
                        0 if self.answer.num_gained else self._num_fruitless + in_vain
                    )
                    if self._rest_seconds is not None:
                        await self._rest(self._rest_seconds)
        finally:
            self._generator.ended(self)

    def _is_over(self) -> bool:
        """Whether no attempt follows: the answer is finished, or cannot go on. Raises `NoEngine`
        after too many in vain, or where no engine will come.
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
        """Waits at the gate for a routable engine; `None` when the wait was cut. `NoEngine` when
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
        """One request to one engine, until the answer is finished or the attempt is over. Whatever
        ends it, the engine is told to stop and the place there is left."""
        answer = self.answer
        vocab_size = lease.engine.capabilities.vocab_size
        self._lease = lease
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
                self._lease = None
                self._fleet.leave(lease)

    def _take(self, lease: Lease, vocab_size: int, chunk: Chunk) -> bool:
        """Adds a chunk to the answer. Says whether the attempt is over."""
        # it came with the cut, and admission counts already on no token from there (I2)
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
        """Waits for as long as a full engine asked, which costs the request none of its seconds;
        ended by a cut too.
        """
        self._rest_seconds = None
        if self.answer.finish is None:
            with suppress(Cut), self._allowance.standing():
                async with self._allowance:
                    await asyncio.sleep(seconds)

    def _has_moved(self) -> bool:
        """Whether the answer has grown since the last look, or may wait inside a full engine, which
        answers others meanwhile.
        """
        before = self._num_seen
        self._num_seen = len(self.answer.output_ids)
        return self._num_seen != before or (self._lease is not None and self._lease.may_be_queued)

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
    """An engine that came back from a restart unnoticed samples from its old weights: to take its
    tokens would break admission's count (I2).
    """
    oldest = min((chunk.version, *(segment.version for segment in chunk.attested)))
    if oldest < lease.version:
        raise EngineUnavailable(
            f"it answers with version {oldest} after attesting {lease.version}; it rejoins at the "
            "current version."
        )


async def _each(stream: AsyncIterator[Chunk], take: Callable[[Chunk], bool]) -> None:
    """Waits until `take` has said of a chunk that it is enough, or the stream has ended. One that
    brings its chunks itself spares a switch of tasks for each."""
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
    """Tells the engine to stop. Waits for that, `_CLOSE_SECONDS` at most; an engine that cannot be
    told is no concern here.

    There is nothing to tell it where it has `ended` the attempt itself.
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
