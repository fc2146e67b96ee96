"""Generation that no interruption shows: aborts, pauses, dead engines and nonsense are resumed from the tokens so far (I5)."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType

from midflight.errors import EngineError, EngineUnavailable, NoEngine, Overloaded, RequestTimeout
from midflight.gateway.answers.splice import Splice
from midflight.gateway.fleet.deadline import Cut, Deadline, Expired
from midflight.gateway.fleet.fleet import Fleet, Lease
from midflight.text import Tokenizer
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest

_MAX_FRUITLESS = 16
"""Attempts in a row without one new token. More than a fleet's usual deaths and aborts at once; each is on another engine or
after a pause, so reaching it means that the request itself kills engines or that all of them are sick."""

_CLOSE_SECONDS = 5.0
"""For telling an engine that nobody reads its answer any more; a dead one must not delay the resume for longer."""


class Generation:
    """An answer under way: an async iterator of chunks whose last one, and only that, carries `finish`.

    Each wait is for an engine's next chunk or for an engine; it is ended by that, by the request's deadline, by the loss of
    the engine (then the answer is resumed) or by the caller, whose `aclose` aborts the request.
    """

    def __init__(self, generator: Generator, request: GenerateRequest, *, affinity: str, may_abort: bool) -> None:
        self.request = request
        self.num_attempts = 0
        self.finish: Finish | None = None
        self._generator = generator
        self._fleet = generator.fleet
        self._affinity = affinity
        self._may_abort = may_abort
        self._cancelled = False
        self._splice = Splice(request, tokenizer=generator.tokenizer)
        self._ticket = self._fleet.ticket()
        self._deadline = Deadline(generator.request_seconds)
        self._num_fruitless = 0
        self._rest_seconds = 0
        self._trouble: BaseException | None = None
        self._chunks = self._run()

    @property
    def num_overshoot(self) -> int:
        """Tokens received past a stop string or past the budget and cut: dropped(overshoot)."""
        return self._splice.num_overshoot

    @property
    def num_resumes(self) -> int:
        return max(0, self.num_attempts - 1)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        """Ends the request on its engine. Idempotent."""
        await self._chunks.aclose()

    def cancel(self) -> None:
        """Aborts it at the engine. It ends with `FinishReason.ABORT` if it may, else it is resumed."""
        self._cancelled = self._may_abort
        self._deadline.cut()

    async def _run(self) -> AsyncGenerator[Chunk, None]:
        """Attempts until the answer has ended. The last chunk is given when engine and registry have been left, so a caller
        that reads no further leaves nothing behind."""
        self._generator.began(self)
        try:
            final = self._closing_chunk()
            while final is None:
                lease = await self._place()
                if lease is not None:
                    async with _Attempt(self._fleet, lease, self._splice, self._attempt()) as stream:
                        while final is None and (chunk := await self._next(lease, stream)) is not None:
                            if chunk.finish is not None:
                                final = chunk
                            elif chunk.token_ids or chunk.attested:
                                yield chunk
                    self._count_fruitless()
                    await self._rest()
                final = final or self._closing_chunk()
                self._raise_if_fruitless(final)
        finally:
            self._generator.ended(self)
            self._deadline.close()
        self.finish = final.finish
        yield final

    def _attempt(self) -> GenerateRequest:
        self.num_attempts += 1
        return self._splice.attempt(self._generator.attempt_id())

    async def _place(self) -> Lease | None:
        """Waits at the gate for a routable engine; `None` when the wait was cut. `NoEngine` when the deadline passes."""
        try:
            return await self._fleet.place(self._ticket, tokens=self._splice.load, affinity=self._affinity, deadline=self._deadline)
        except Cut:
            return None
        except Expired:
            raise self._not_taken() from self._trouble

    def _not_taken(self) -> NoEngine:
        return NoEngine(
            f"generating: no engine took the request in {self._deadline.seconds:g} s (holds excluded, {self._deadline.age:g} s with them): "
            f"{self._fleet.describe()}. Restart an engine or raise gateway.request_seconds."
        )

    async def _next(self, lease: Lease, stream: AsyncIterator[Chunk]) -> Chunk | None:
        """Waits for the engine's next chunk; `None` when the attempt has ended without finishing the answer."""
        if self._splice.interrupted:
            return None
        try:
            chunk = await self._deadline.bound(lambda: anext(stream))
            if lease.lost is not None:  # it came with the cut, and admission counts already on no token from there (I2)
                self._trouble = lease.lost
                return None
            _check_version(chunk, lease)
            return self._splice.accept(chunk, vocab_size=lease.engine.capabilities.vocab_size)
        except Cut:
            self._trouble = lease.lost
            return None
        except Expired:
            raise self._too_slow(lease) from None
        except Overloaded as error:
            self._trouble, self._rest_seconds = error, error.retry_after_seconds
        except (EngineUnavailable, OSError) as error:
            self._blame(lease, error)
        except StopAsyncIteration:
            self._blame(lease, EngineUnavailable("its stream ended without a finish. Check the engine and its adapter."))
        return None

    async def _rest(self) -> None:
        """Waits for as long as a full engine asked (G8); ended by a cut too, and by the deadline, which raises `NoEngine`."""
        seconds, self._rest_seconds = self._rest_seconds, 0
        if not seconds:
            return
        try:
            await self._deadline.bound(lambda: asyncio.sleep(seconds))
        except Cut:
            return
        except Expired:
            raise self._not_taken() from self._trouble

    def _blame(self, lease: Lease, error: Exception) -> None:
        self._trouble = error
        self._fleet.quarantine(lease.engine.name, error, probation=True)

    def _too_slow(self, lease: Lease) -> RequestTimeout:
        return RequestTimeout(
            f"generating on {lease.engine.name}: {self._splice.num_output} of {self.request.sampling.max_tokens} tokens after "
            f"{self._deadline.seconds:g} s (holds excluded). Raise gateway.request_seconds or ask for fewer tokens."
        )

    def _count_fruitless(self) -> None:
        self._num_fruitless = 0 if self._splice.num_gained else self._num_fruitless + 1

    def _raise_if_fruitless(self, final: Chunk | None) -> None:
        if final is None and self._num_fruitless >= _MAX_FRUITLESS:
            raise NoEngine(
                f"generating: {self._num_fruitless} attempts in a row made no token, the last ended by {self._trouble or 'an abort'}: "
                f"{self._fleet.describe()}. Look at the engines' logs; if this request kills them, do not send it again."
            ) from self._trouble

    def _closing_chunk(self) -> Chunk | None:
        """The empty last chunk of an answer that ends here without an engine's word; `None` while it goes on."""
        finish = Finish(FinishReason.ABORT) if self._cancelled else self._splice.end_at_seam()
        if finish is None:
            return None
        version = self._fleet.served_version() if self._splice.version is None else self._splice.version
        return Chunk((), (), version, version if self._splice.kv_version is None else self._splice.kv_version, finish)


class Generator:
    """Starts generations and finds those under way. Synchronous; bounded by the requests that the gateway admits."""

    def __init__(self, fleet: Fleet, *, tokenizer: Tokenizer, request_seconds: float) -> None:
        """`request_seconds`: deadline of one request, holds excluded."""
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.request_seconds = request_seconds
        self._active: dict[Generation, None] = {}
        self._prefix = secrets.token_hex(8)
        self._attempts = itertools.count()

    def generate(self, request: GenerateRequest, *, affinity: str, may_abort: bool = False) -> Generation:
        """An answer, begun when it is first iterated; its place in the order of arrival is taken now (P1).

        `affinity` names the session whose prefix the engines may hold (empty: none). `may_abort`: `cancel` ends it with
        `FinishReason.ABORT`, as clients of native `/generate` expect; everybody else never sees an abort.
        Raises `RequestRejected`, `NoEngine` and `RequestTimeout` from its iteration.
        """
        return Generation(self, request, affinity=affinity, may_abort=may_abort)

    def cancel(self, request_id: str | None) -> int:
        """Aborts one request (all: `None`) at its engine; says how many it found. See `generate` for what its caller sees."""
        found = [g for g in self._active if request_id in (None, g.request.request_id)]
        for generation in found:
            generation.cancel()
        return len(found)

    def forget(self, affinity: str) -> None:
        """The session is over: its engine is remembered no longer."""
        self.fleet.forget(affinity)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def attempt_id(self) -> str:
        """32 hex digits, never the same again: engines match ids by prefix, and an old attempt may still be dying."""
        return f"{self._prefix}{next(self._attempts):016x}"

    def began(self, generation: Generation) -> None:
        self._active[generation] = None

    def ended(self, generation: Generation) -> None:
        del self._active[generation]


class _Attempt:
    """One request to one engine: whatever ends it, the engine is told to stop and the place there is left."""

    def __init__(self, fleet: Fleet, lease: Lease, splice: Splice, request: GenerateRequest) -> None:
        self._fleet, self._lease, self._splice, self._request = fleet, lease, splice, request

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        try:
            self._stream = self._lease.engine.generate(self._request)
        except BaseException:
            self._fleet.leave(self._lease)
            raise
        return self._stream

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await _close(self._stream, ended=self._splice.ended)
        finally:
            self._fleet.leave(self._lease)


def _check_version(chunk: Chunk, lease: Lease) -> None:
    """An engine that came back from a restart unnoticed samples from its old weights: to take its tokens would break admission's count (I2)."""
    oldest = min((chunk.version, *(segment.version for segment in chunk.attested)))
    if oldest < lease.version:
        raise EngineUnavailable(f"it answers with version {oldest} after attesting {lease.version}; it rejoins at the current version.")


async def _close(stream: AsyncIterator[Chunk], *, ended: bool) -> None:
    """Tells the engine to stop. Waits for that, `_CLOSE_SECONDS` at most; an engine that cannot be told is no concern here.

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
